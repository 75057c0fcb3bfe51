/// @file
/// What becomes of a decomposition: the terms that a state keeps, and what it loses.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"
#include "recompress.hpp"
#include "storage.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// What a compaction, or an initialisation, did.
struct CompactionReport {
  Index rank_before = 0;  ///< terms of the body and buffered tokens that went in
  Index rank_after = 0;   ///< terms kept; 0 when the body is dense
  Index decomposed = 0;   ///< terms and tokens decomposed together, the others were frozen; 0 when
                          ///< the body was dense or is now
  bool recompressed = false;  ///< all terms were, because they had become too many (LocalSvd)
  Index tail = 0;             ///< frozen terms decomposed among themselves
  Index projected = 0;  ///< directions of the subspace that a fixed rank was taken from; 0: exact
  double dropped = 0;   ///< bound of the Frobenius norm of what was truncated
  double rounded = 0;   ///< and of what rounding to a narrow format changed, unless `dropped` is a
                        ///< computed residual, which has both
  int sweeps = 0;       ///< of the Jacobi iteration, the longer one if there were two
  bool capped = false;  ///< the rank cap dropped terms that epsilon would have kept
  bool dense = false;   ///< the body is dense now
};

namespace detail {

/// Rounding errors of a compaction.
template <class T>
struct CompactionRounding {
  double roundoffs = 0;  ///< in units of u m
  T rotations = 0;       ///< a Frobenius norm
};

/// Terms that no decomposition has touched: unit vectors, falling weights.
template <class T>
struct FrozenTerms {
  MatrixView<T> keys;
  MatrixView<T> values;
  const T* weights = nullptr;
  double epsilon = 0;  ///< those weaker than this share of the strongest of all are dropped

  SINKSTATE_HOST_DEVICE Index count() const { return keys.rows; }
};

/// A Frobenius norm that was joined from those of rows, rounded upwards.
template <class T>
SINKSTATE_HOST_DEVICE T bound_of_rows(const MatrixView<T>& rows, T norm) {
  const double roundoffs = 2.0 * static_cast<double>(rows.rows) + dot_roundoffs(rows.cols);
  return norm * (T(1) + unit_roundoff<T> * static_cast<T>(roundoffs));
}

/// Empties the buffer behind a body and sink that are new.
/// @param error  certificate of the new state
template <class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void commit(const SinkStateView<Policy>& state, T error, T mass) {
  state.buffer.certificates[0] = round_up(error);
  state.buffer.masses[0] = round_up(mass);
  *state.buffer.count = 0;
}

/// The epsilon of a decomposition of all terms; a fixed rank drops by number alone.
template <class Policy>
SINKSTATE_HOST_DEVICE double epsilon_of(const StateConfig& config) {
  return Policy::Compaction::adaptive ? config.epsilon : 0.0;
}

/// Writes the strongest of new and frozen terms as the body, in falling order, at most `most`.
/// @param epsilon   new terms weaker than this share of the strongest of all are dropped
/// @param sink      strength of the sink, to which epsilon is relative as well
/// @param frozen    consumed where numbers are rounded
/// @returns false, and nothing is written, when the strongest term overflows, or more than `most`
///          terms are wanted and `may_refuse`
template <class Team, class Policy, class Core, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE bool keep_strongest(Team& team, const SinkStateView<Policy>& state,
                                          const Decomposition<T, Core>& terms,
                                          const FrozenTerms<T>& frozen,
                                          const StorageRounding& storage, double epsilon, T sink,
                                          Index most, bool may_refuse, CompactionReport& report) {
  const StateConfig& config = state.config;
  report.sweeps = terms.sweeps;
  T reference = terms.count > 0 ? terms.strength(0) : T(0);
  if (!std::isfinite(reference)) return false;
  if (sink > reference) reference = sink;
  if (frozen.count() > 0 && frozen.weights[0] > reference) reference = frozen.weights[0];
  const Index wanted_new = terms.above(static_cast<T>(epsilon) * reference);
  T least = static_cast<T>(frozen.epsilon) * reference;
  if (least < smallest_kept<T>) least = smallest_kept<T>;
  Index wanted_frozen = frozen.count();
  while (wanted_frozen > 0 && !(frozen.weights[wanted_frozen - 1] >= least)) --wanted_frozen;
  const Index wanted = wanted_new + wanted_frozen;
  if (wanted > most && may_refuse) return false;

  const Index rank = wanted < most ? wanted : most;
  *state.factors.rank = static_cast<std::int32_t>(rank);
  TermWriter<Policy> writer(state, storage, terms.formed);
  Index next = 0;    // of the new terms
  Index thawed = 0;  // of the frozen ones
  for (Index i = 0; i < rank; ++i) {
    const T strength = next < wanted_new ? terms.strength(next) : T(0);
    if (thawed < wanted_frozen && frozen.weights[thawed] > strength) {
      writer.write(team, i, frozen.keys.row(thawed), frozen.values.row(thawed),
                   frozen.weights[thawed], false);
      ++thawed;
    } else {
      terms.form(team, next++, terms.formed.key, terms.formed.value);
      writer.write(team, i, terms.formed.key, terms.formed.value, strength, true);
    }
  }
  state.record->dense = 0;

  // Frozen terms are orthogonal to nothing: their norms add up. They were formed by decompositions
  // that are forgotten, hence the largest count of sweeps.
  double lost = 0;
  for (Index i = thawed; i < frozen.count(); ++i) lost += static_cast<double>(frozen.weights[i]);
  lost *= longest_term<typename Policy::Stored, double>();
  const Index largest = SinkStateView<Policy>::rank_capacity(config) + config.buffer_capacity();
  const double frozen_roundoffs = tail_roundoffs(config.d_k, config.d_v, largest, most_sweeps);
  const double new_roundoffs =
      tail_roundoffs(config.d_k, config.d_v, terms.orthogonalized, terms.sweeps);
  report.rank_after = rank;
  report.dropped =
      static_cast<double>(terms.norm_from(next)) * (1.0 + unit_roundoff<T> * new_roundoffs) +
      lost * (1.0 + unit_roundoff<T> * frozen_roundoffs);
  report.rounded = static_cast<double>(writer.change());
  report.capped = wanted > rank;
  report.dense = false;
  return true;
}

/// Writes a dense body, which must fit. Rows that are about to become subnormal are dropped.
/// @returns a bound of its Frobenius norm
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE T keep_dense(Team& team, const SinkStateView<Policy>& state,
                                   const MatrixView<T>& content, const StorageRounding& storage,
                                   const TermScratch<T>& scratch, CompactionReport& report) {
  T norm = T(0);
  T rounded = T(0);
  report.dropped = 0;
  for (Index i = 0; i < content.rows; ++i) {
    const T row = team.norm(content.cols, content.row(i));
    if (row < smallest_kept<T>) {
      team.fill(content.cols, T(0), content.row(i));
      report.dropped += static_cast<double>(row);
    } else {
      norm = std::hypot(norm, row);
    }
    const T change =
        store_row(team, state.matrix, i, content.cols, static_cast<const T*>(content.row(i)),
                  storage.dense_row(i), scratch.value, scratch.stored_value);
    rounded = std::hypot(rounded, change);
  }
  if (state.record->dense == 0) state.record->dense_age = 0;
  state.record->dense = 1;
  *state.factors.rank = 0;
  report.rank_after = 0;
  report.rounded = static_cast<double>(bound_of_rows(content, rounded));
  report.dense = true;
  return norm + static_cast<T>(report.rounded);
}

/// Writes the sink, which must fit.
/// @param coefficients  consumed where numbers are rounded
/// @returns a bound of the norm of what rounding changes of them
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE T keep_sink(Team& team, const SinkStateView<Policy>& state,
                                  const T* coefficients, const StorageRounding& storage,
                                  const TermScratch<T>& scratch) {
  return store_row(team, state.sink, 0, state.config.d_k, coefficients, storage.sink(), scratch.key,
                   scratch.stored_key);
}

/// Drops a sink that is about to become subnormal.
/// @returns the norm of what was dropped
template <class Team, class T>
SINKSTATE_HOST_DEVICE T drop_faded_sink(Team& team, Index d_k, T* coefficients, T& strength) {
  if (!(strength < smallest_kept<T>)) return T(0);
  const T dropped = strength;
  team.fill(d_k, T(0), coefficients);
  strength = T(0);
  return dropped;
}

/// What the terms of a body add to the mass at most.
template <class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE T strengths_sum(const SinkStateView<Policy>& state) {
  T sum = T(0);
  for (Index i = 0; i < state.rank(); ++i) sum += state.factors.strength(i);
  return sum * longest_term<typename Policy::Stored, T>();
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
