/// @file
/// Thin QR by Gram-Schmidt, repeated, with a rule for dependent vectors.
#pragma once

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../model/certificate.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// A = R Q with orthonormal rows q: a_j = sum_i r(j, i) q_i. docs/numerics.md, section 2.
///
/// @param a            vectors, one a row; their first `return value` rows become q, the others are
///                     undefined
/// @param orthonormal  rows at the beginning of `a` that are orthonormal already and stay as they
///                     are
/// @param r            one row of coefficients per row of `a`, at least min(a.rows, a.cols) wide,
///                     zero-filled here; its first `orthonormal` rows are not touched. No data:
///                     coefficients are not wanted.
/// @param z            min(a.rows, a.cols) numbers of scratch
/// @returns the number of independent rows, at most min(a.rows, a.cols)
///
/// A row whose rest is at most 10 u of its norm is dependent: it gets no q. Rows scaled to a
/// largest magnitude near 1 neither over- nor underflow. One Gram-Schmidt pass loses orthogonality;
/// passes are repeated until one takes less than half of what was left.
template <class Team, class T>
SINKSTATE_HOST_DEVICE Index orthogonalize(Team& team, MatrixView<T> a, Index orthonormal,
                                          MatrixView<T> r, T* z) {
  const Index most = a.rows < a.cols ? a.rows : a.cols;
  Index count = orthonormal;
  for (Index j = orthonormal; j < a.rows; ++j) {
    T* const row = a.row(j);
    if (r.data != nullptr) team.fill(r.cols, T(0), r.row(j));
    const T original = team.norm(a.cols, row);
    const T dependent = 10 * unit_roundoff<T> * original;
    T rest = original;
    for (int pass = 0; pass < 4 && rest > dependent; ++pass) {
      const auto basis = a.middle_rows(0, count);
      team.project(basis, row, z);
      if (r.data != nullptr) team.add(count, z, r.row(j));
      team.scale(count, T(-1), z, z);
      team.add_combination(basis, z, row);
      const T before = rest;
      rest = team.norm(a.cols, row);
      if (pass > 0 && rest > before / 2) break;
    }
    if (!(rest > dependent) || count == most) continue;
    team.scale(a.cols, T(1) / rest, row, a.row(count));
    if (r.data != nullptr) r(j, count) = rest;
    ++count;
  }
  return count;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
