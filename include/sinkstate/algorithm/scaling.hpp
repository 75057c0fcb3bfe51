/// @file
/// Powers of two taken out, so that squares neither over- nor underflow. Exact.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// x scaled by a power of two so that its largest magnitude is in [1/2, 1): exact, and squares then
/// neither over- nor underflow.
/// @returns false, with exponent 0, for a zero vector; else the exponent taken out is in `exponent`
template <class Team, class T>
SINKSTATE_HOST_DEVICE bool normalize_exponent(Team& team, Index n, T* x, int& exponent) {
  exponent = 0;
  const T largest = team.max_abs(n, x);
  if (!(largest > T(0))) return false;
  std::frexp(largest, &exponent);
  // Two steps: 2^-exponent itself may not be a number of this type.
  team.scale(n, std::ldexp(T(1), -exponent / 2), x, x);
  team.scale(n, std::ldexp(T(1), -exponent + exponent / 2), x, x);
  return true;
}

/// Scales a matrix by a power of two to a largest magnitude in [1, 2).
/// @returns the scale that undoes it, 1 for a zero matrix
template <class Team, class T>
SINKSTATE_HOST_DEVICE T normalize_matrix(Team& team, const MatrixView<T>& matrix) {
  T largest = T(0);
  for (Index i = 0; i < matrix.rows; ++i) {
    const T magnitude = team.max_abs(matrix.cols, matrix.row(i));
    if (magnitude > largest) largest = magnitude;
  }
  if (!(largest > T(0))) return T(1);
  int exponent = 0;
  std::frexp(largest, &exponent);
  --exponent;
  for (Index i = 0; i < matrix.rows; ++i) {
    T* const row = matrix.row(i);
    team.scale(matrix.cols, std::ldexp(T(1), -exponent / 2), row, row);
    team.scale(matrix.cols, std::ldexp(T(1), -exponent + exponent / 2), row, row);
  }
  return std::ldexp(T(1), exponent);
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
