/// @file
/// Singular value decompositions in fp64, the measure of what a replay keeps.
#pragma once

#include <Eigen/Core>

namespace sinkstate::tools {

/// matrix = left diag(values) right^T, the strongest term first. Terms that are rounding alone are
/// left out: a matrix of rank r has r of them, zeros have none.
struct ExactSvd {
  Eigen::MatrixXd left;
  Eigen::VectorXd values;
  Eigen::MatrixXd right;
};

/// @pre every entry is finite
ExactSvd exact_svd(const Eigen::MatrixXd& matrix);

/// The values alone. `matrix` may be a difference of matrices of norm `scale`, whose rounding is left
/// out as well.
Eigen::VectorXd singular_values(const Eigen::MatrixXd& matrix, double scale);

}  // namespace sinkstate::tools
