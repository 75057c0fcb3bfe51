/// @file
/// Compaction to a fixed rank: docs/mathematics.md, section 4.
#pragma once

#include <cmath>
#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/random.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"
#include "compress_dense.hpp"
#include "keep.hpp"
#include "randomized_svd.hpp"
#include "recompress.hpp"
#include "terms.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Scratch of `reduce_to_subspace`.
template <class T>
struct SubspaceScratch {
  MatrixView<T> sketch;       // width x d_k
  MatrixView<T> basis;        // width x most values
  MatrixView<T> value_basis;  // width x d_v

  SINKSTATE_HOST_DEVICE static SubspaceScratch carve(Workspace& memory, const StateConfig& config,
                                                     Index rank, Index most) {
    const Index width = rank + oversampling;
    return {memory.take_matrix<T>(width, config.d_k), memory.take_matrix<T>(width, most),
            memory.take_matrix<T>(width, config.d_v)};
  }
};

/// Rounding errors of replacing `terms` terms by their projection onto `width` directions, in units
/// of u m: docs/numerics.md, (N13).
SINKSTATE_HOST_DEVICE inline double subspace_roundoffs(Index d_k, Index terms, Index width) {
  const double c = static_cast<double>(terms);
  const double p = static_cast<double>(width);
  return std::sqrt(p) * (c + std::sqrt(c)) + 4.0 * p + 2.0 * dot_roundoffs(d_k) + c;
}

/// Replaces terms M^T Q_v by their projection onto the strongest directions of M, found by subspace
/// iteration.
///
/// @param start   fewer rows than the sketch has, which span nearly that space; random rows fill up
/// @param random  position in the sequence of random numbers
/// @returns the Frobenius norm of what the projection leaves over, computed, without the exponent
template <class Team, class T>
SINKSTATE_HOST_DEVICE T reduce_to_subspace(Team& team, MixedTerms<T>& terms,
                                           const MatrixView<T>& start, const Philox& philox,
                                           std::uint64_t random, const SubspaceScratch<T>& scratch,
                                           T* z) {
  constexpr int power_iterations = 1;
  const Index d_k = terms.keys.cols;
  const auto& sketch = scratch.sketch;
  for (Index b = 0; b < start.rows; ++b) team.copy(d_k, start.row(b), sketch.row(b));
  // Decays of channels can make the start dependent: what is missing is random too.
  const Index warm = orthogonalize(team, sketch.middle_rows(0, start.rows), 0, MatrixView<T>{}, z);
  for (Index b = warm; b < sketch.rows; ++b) {
    for (Index i = 0; i < d_k; ++i) sketch(b, i) = static_cast<T>(philox.normal(random++));
  }
  MatrixView<T> basis = scratch.basis;
  basis.cols = terms.keys.rows;
  basis.rows =
      refine_block(team, MatrixView<const T>(terms.keys), power_iterations, sketch, basis, 0, z);
  const auto projected = sketch.middle_rows(0, basis.rows);
  for (Index b = 0; b < basis.rows; ++b) {
    team.fill(d_k, T(0), projected.row(b));
    team.add_combination(terms.keys, basis.row(b), projected.row(b));
    T* const value = scratch.value_basis.row(b);
    team.fill(terms.value_basis.cols, T(0), value);
    team.add_combination(terms.value_basis, basis.row(b), value);
  }
  T left_over = T(0);
  for (Index l = 0; l < terms.keys.rows; ++l) {
    for (Index b = 0; b < basis.rows; ++b) z[b] = -basis(b, l);
    team.add_combination(projected, z, terms.keys.row(l));
    left_over = std::hypot(left_over, team.norm(d_k, terms.keys.row(l)));
  }
  for (Index b = 0; b < basis.rows; ++b) team.copy(d_k, projected.row(b), terms.keys.row(b));
  terms.keys = terms.keys.middle_rows(0, basis.rows);
  terms.value_basis = scratch.value_basis.middle_rows(0, basis.rows);
  return left_over;
}

/// Compacts to a fixed rank: by subspace iteration where that is less than all directions.
/// @param terms  as `gather_terms` left them, the terms of the body first; consumed
/// @returns false, and nothing is written, when the strongest term overflows
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE bool keep_fixed_rank(Team& team, const SinkStateView<Policy>& state,
                                           CurrentTerms<Policy>& terms,
                                           const SubspaceScratch<T>& scratch,
                                           const StorageRounding& storage, T sink,
                                           CompactionReport& report,
                                           CompactionRounding<T>& rounding) {
  const StateConfig& config = state.config;
  auto& list = terms.list;
  const Index rank = SinkStateView<Policy>::rank_capacity(config);
  const Index count = list.count;
  report.decomposed = count;
  MixedTerms<T> mixed = mix_terms(team, list);
  const Index width = scratch.sketch.rows;
  T left_over = T(0);
  if (width < mixed.keys.rows && width < config.d_k) {
    const Index warm = rank < list.count ? rank : list.count;
    const Philox philox{config.seed};
    const auto random = static_cast<std::uint64_t>(state.record->compactions) *
                        static_cast<std::uint64_t>(width * config.d_k);
    left_over = reduce_to_subspace(team, mixed, list.keys.middle_rows(0, warm), philox, random,
                                   scratch, list.coefficients);
    report.projected = mixed.keys.rows;
    rounding.roundoffs += subspace_roundoffs(config.d_k, count, report.projected);
  }
  auto decomposition = decompose(team, mixed, list);
  decomposition.orthogonalized = count;
  if (!keep_strongest(team, state, decomposition, {}, storage, epsilon_of<Policy>(config), sink,
                      rank, false, report)) {
    return false;
  }
  if (left_over > T(0)) {
    // What the projection has left over is orthogonal to what it kept.
    report.dropped = std::hypot(
        report.dropped, std::ldexp(static_cast<double>(left_over), mixed.exponent) *
                            (1.0 + unit_roundoff<T> * tail_roundoffs(config.d_k, config.d_v, count,
                                                                     decomposition.sweeps)));
  }
  rounding.roundoffs += recompress_roundoffs(config.d_k, config.d_v, count);
  rounding.rotations += decomposition.rotation_error;
  return true;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
