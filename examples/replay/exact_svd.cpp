// The only file that pays for compiling Eigen's SVD.
#include "exact_svd.hpp"

#include <Eigen/SVD>
#include <algorithm>
#include <limits>
#include <utility>

#include "atomic_file.hpp"

namespace sinkstate::tools {
namespace {

/// Of a matrix that is at least as tall as wide: what BDCSVD does for the others inside, but also
/// where it hands few columns on to JacobiSVD.
Eigen::BDCSVD<Eigen::MatrixXd> decompose(const Eigen::MatrixXd& tall, unsigned options) {
  Eigen::BDCSVD<Eigen::MatrixXd> svd(tall, options);
  if (svd.info() != Eigen::Success || !svd.singularValues().allFinite()) {
    throw ToolError("the singular value decomposition of a state failed");
  }
  return svd;
}

/// How many values stand above the rounding of `scale`.
Eigen::Index rank_of(const Eigen::MatrixXd& tall, const Eigen::VectorXd& values, double scale) {
  const double rounding =
      std::numeric_limits<double>::epsilon() * static_cast<double>(tall.rows()) * scale;
  Eigen::Index rank = 0;
  while (rank < values.size() && values(rank) > rounding) ++rank;
  return rank;
}

}  // namespace

ExactSvd exact_svd(const Eigen::MatrixXd& matrix) {
  if (matrix.rows() < matrix.cols()) {
    ExactSvd swapped = exact_svd(matrix.transpose());
    std::swap(swapped.left, swapped.right);
    return swapped;
  }
  const auto svd = decompose(matrix, Eigen::ComputeThinU | Eigen::ComputeThinV);
  const Eigen::Index rank = rank_of(matrix, svd.singularValues(), svd.singularValues()(0));
  return {svd.matrixU().leftCols(rank), svd.singularValues().head(rank),
          svd.matrixV().leftCols(rank)};
}

Eigen::VectorXd singular_values(const Eigen::MatrixXd& matrix, double scale) {
  if (matrix.rows() < matrix.cols()) return singular_values(matrix.transpose(), scale);
  const Eigen::VectorXd values = decompose(matrix, 0).singularValues();
  return values.head(rank_of(matrix, values, std::max(scale, values(0))));
}

}  // namespace sinkstate::tools
