// Small matrices for tests of the algorithms: built, handed over as views, and judged by Eigen.
#pragma once

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <Eigen/SVD>
#include <algorithm>
#include <cmath>
#include <limits>
#include <sinkstate/core/listed_rows.hpp>
#include <sinkstate/core/matrix_view.hpp>
#include <type_traits>
#include <vector>

#include "support/streams.hpp"

namespace sinkstate::testing {

template <class T>
using Rows = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Matrix = Rows<double>;

// What terms that are kept may differ from orthonormal: |Q Q^T - I| as a spectral norm.
template <class T>
inline constexpr double orthogonality_bound = std::is_same_v<T, float> ? 5e-6 : 1e-14;

template <class T>
MatrixView<T> view_of(Rows<T>& matrix) {
  return {matrix.data(), matrix.rows(), matrix.cols(), matrix.cols()};
}

// Of a MatrixView or of ListedRows.
template <class View>
Matrix wide(const View& view) {
  Matrix copy(view.rows, view.cols);
  for (Index i = 0; i < view.rows; ++i) {
    for (Index j = 0; j < view.cols; ++j) copy(i, j) = static_cast<double>(view(i, j));
  }
  return copy;
}

inline Matrix random_rows(Random& random, Index rows, Index cols) {
  Matrix matrix(rows, cols);
  for (Index i = 0; i < rows; ++i) {
    for (Index j = 0; j < cols; ++j) matrix(i, j) = random.normal();
  }
  return matrix;
}

// At most `cols` of them.
inline Matrix orthonormal_rows(Random& random, Index rows, Index cols) {
  Matrix q = random_rows(random, rows, cols);
  for (Index i = 0; i < rows; ++i) {
    for (int pass = 0; pass < 2; ++pass) {
      for (Index j = 0; j < i; ++j) q.row(i) -= q.row(i).dot(q.row(j)) * q.row(j);
    }
    q.row(i).normalize();
  }
  return q;
}

inline Matrix with_singular_values(Random& random, Index rows, Index cols,
                                   const std::vector<double>& values) {
  const auto count = static_cast<Index>(values.size());
  const Eigen::Map<const Eigen::VectorXd> strengths(values.data(), count);
  return orthonormal_rows(random, count, rows).transpose() * strengths.asDiagonal() *
         orthonormal_rows(random, count, cols);
}

// `count` numbers from 1 to `last`, each by the same factor below the one before.
inline std::vector<double> geometric(Index count, double last) {
  std::vector<double> values;
  for (Index i = 0; i < count; ++i) {
    values.push_back(std::pow(last, static_cast<double>(i) / static_cast<double>(count - 1)));
  }
  return values;
}

// The largest singular value; NaN if there is one in the matrix.
inline double spectral_norm(const Matrix& matrix) {
  if (matrix.size() == 0) return 0;
  if (!matrix.allFinite()) return std::numeric_limits<double>::quiet_NaN();
  const Eigen::MatrixXd square = matrix.transpose() * matrix;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(square, Eigen::EigenvaluesOnly);
  return std::sqrt(std::abs(solver.eigenvalues().tail(1)(0)));
}

inline double orthogonality_error(const Matrix& q) {
  return spectral_norm(q * q.transpose() - Matrix::Identity(q.rows(), q.rows()));
}
template <class T>
double orthogonality_error(const ListedRows<T>& q) {
  return orthogonality_error(wide(q));
}

// Falling. Long double, because Eigen's fp64 values are off by more than what is to be judged;
// padded to a square, which needs no preconditioner and so compiles faster.
inline Eigen::VectorXd singular_values(const Matrix& matrix) {
  using Wide = Eigen::Matrix<long double, Eigen::Dynamic, Eigen::Dynamic>;
  const Index n = std::max(matrix.rows(), matrix.cols());
  Wide square = Wide::Zero(n, n);
  square.topLeftCorner(matrix.rows(), matrix.cols()) = matrix.cast<long double>();
  const Eigen::JacobiSVD<Wide, Eigen::NoQRPreconditioner> svd(square);
  return svd.singularValues().head(std::min(matrix.rows(), matrix.cols())).cast<double>();
}

}  // namespace sinkstate::testing
