/// @file
/// The strongest terms of a dense matrix by a randomized block range finder.
#pragma once

#include <cmath>
#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/random.hpp"
#include "../core/workspace.hpp"
#include "orthogonalize.hpp"
#include "recompress.hpp"
#include "small_svd.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Parameters of the randomized block SVD; the defaults are measured in docs/numerics.md,
/// section 4.
struct RandomizedSvd {
  Index block = 16;
  int power_iterations = 2;
  std::uint64_t seed = 0;
};

/// The whole singular value decomposition, by Jacobi sweeps.
struct ExactSvd {};

namespace detail {

/// Columns of a random sketch past the rank that is kept: worth more than iterations
/// (docs/numerics.md, section 9).
inline constexpr Index oversampling = 4;

/// A basis of the strongest left vectors of a dense matrix, found block by block.
template <class T>
struct RangeFinderScratch {
  MatrixView<T> sketch;  // block x d_v
  T* strengths = nullptr;

  SINKSTATE_HOST_DEVICE static RangeFinderScratch carve(Workspace& memory, Index block, Index d_v) {
    return {memory.take_matrix<T>(block, d_v), memory.take<T>(block)};
  }
};

/// Refines a block by power iterations, orthogonalised at every half-step: docs/numerics.md, (N8).
///
/// @param sketch  rows of dense.cols numbers to start from; overwritten
/// @param left    its first `found` rows are orthonormal, rows of dense.rows numbers; the refined
///                block comes behind them, orthogonal to them
/// @param z       as many numbers of scratch as `left` has rows in the end
/// @returns the rows of `left` that are orthonormal now
template <class Team, class T>
SINKSTATE_HOST_DEVICE Index refine_block(Team& team, const MatrixView<const T>& dense,
                                         int power_iterations, const MatrixView<T>& sketch,
                                         const MatrixView<T>& left, Index found, T* z) {
  Index block = sketch.rows;
  Index basis = found;
  for (int iteration = 0; iteration <= power_iterations; ++iteration) {
    if (iteration > 0) {
      const Index fresh = basis - found;
      for (Index b = 0; b < fresh; ++b) {
        team.fill(dense.cols, T(0), sketch.row(b));
        team.add_combination(dense, left.row(found + b), sketch.row(b));
      }
      block = orthogonalize(team, sketch.middle_rows(0, fresh), 0, MatrixView<T>{}, z);
    }
    for (Index b = 0; b < block; ++b) team.project(dense, sketch.row(b), left.row(found + b));
    basis = orthogonalize(team, left.middle_rows(0, found + block), found, MatrixView<T>{}, z);
  }
  return basis;
}

/// Fills `list` with terms q_i (D^T q_i)^T whose sum is D up to what is weaker than `epsilon` times
/// the strongest: docs/numerics.md, (N8).
///
/// @param dense  d_k x d_v, scaled to a largest magnitude near 1
/// @param least  a strength from elsewhere that epsilon is relative to as well (the sink's)
/// @param most   terms at which to stop; the last block may go past it: `list` has room for most +
///               block
/// @returns false when the search stopped at `most` with strong terms possibly left
///
/// Each block is D^T-refined `power_iterations` times, orthogonalised at every half-step and
/// against the basis. It stops when the weakest singular value of a block is below epsilon / 2 of
/// the strongest seen, or the range is exhausted.
template <class Team, class T, class Core>
SINKSTATE_HOST_DEVICE bool find_range(Team& team, const MatrixView<const T>& dense,
                                      const RandomizedSvd& options, T epsilon, T least, Index most,
                                      RangeFinderScratch<T>& scratch, TermList<T, Core>& list) {
  const Philox philox{options.seed};
  const Index full = dense.rows < dense.cols ? dense.rows : dense.cols;
  T strongest = least;
  Index found = 0;
  list.count = 0;
  std::uint64_t random = 0;
  while (found < full && found < most) {
    const Index wanted = options.block < full - found ? options.block : full - found;
    const auto sketch = scratch.sketch.middle_rows(0, wanted);
    for (Index b = 0; b < wanted; ++b) {
      for (Index j = 0; j < dense.cols; ++j) sketch(b, j) = static_cast<T>(philox.normal(random++));
    }
    const Index basis = refine_block(team, dense, options.power_iterations, sketch, list.keys,
                                     found, list.coefficients);
    const Index fresh = basis - found;
    for (Index b = 0; b < fresh; ++b) {
      T* const row = list.values.row(found + b);
      team.fill(dense.cols, T(0), row);
      team.add_combination(dense, list.keys.row(found + b), row);
      list.weights[found + b] = T(1);
      team.copy(dense.cols, row, sketch.row(b));
    }
    found = basis;
    list.count = found;
    if (fresh < wanted) return true;  // the range is exhausted
    one_sided_jacobi(team, sketch.middle_rows(0, fresh), MatrixView<T>{}, scratch.strengths);
    T weakest = scratch.strengths[0];
    for (Index b = 0; b < fresh; ++b) {
      if (scratch.strengths[b] > strongest) strongest = scratch.strengths[b];
      if (scratch.strengths[b] < weakest) weakest = scratch.strengths[b];
    }
    if (weakest < epsilon / 2 * strongest) return true;
  }
  return found == full;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
