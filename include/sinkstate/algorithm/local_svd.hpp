/// @file
/// Which terms a compaction decomposes, and which stay frozen: docs/mathematics.md, section 4.
#pragma once

#include <type_traits>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/policy.hpp"
#include "../model/sink_state.hpp"
#include "keep.hpp"
#include "recompress.hpp"
#include "terms.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Whether a compaction may leave terms out.
template <class Policy>
inline constexpr bool freezes = std::is_same_v<typename Policy::Compaction, LocalSvd>;

/// Terms of the body beyond those at which all are decomposed: 0, no more than that.
template <class Policy>
SINKSTATE_HOST_DEVICE Index overgrowth(const SinkStateView<Policy>& state) {
  if constexpr (freezes<Policy>) {
    const StateConfig& config = state.config;
    const double limit =
        config.recompress_growth * static_cast<double>(state.record->settled_rank) +
        static_cast<double>(config.recompress_slack);
    const Index rank = state.rank();
    const bool frozen = rank > SinkStateView<Policy>::active(config);
    if (frozen && config.recompress_growth > 0 && static_cast<double>(rank) > limit) {
      return rank - static_cast<Index>(limit);
    }
  }
  return 0;
}

/// Terms of the body that the next compaction decomposes: all of them, or LocalSvd's active ones
/// unless the rank has grown too far.
template <class Policy>
SINKSTATE_HOST_DEVICE Index active_terms(const SinkStateView<Policy>& state, bool may_recompress) {
  const Index rank = state.rank();
  if constexpr (freezes<Policy>) {
    const Index usual = SinkStateView<Policy>::active(state.config);
    if (usual < rank && !(may_recompress && overgrowth(state) > 0)) return usual;
  }
  return rank;
}

/// Decomposes the active terms and the buffer, and merges the result with the frozen terms.
/// @param terms  as `gather_terms` left them, with the same `active`; consumed
/// @returns as `keep_strongest`, which may refuse if there are frozen terms that have not been
///          decomposed yet or the body may become dense
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE bool merge_active(Team& team, const SinkStateView<Policy>& state,
                                        CurrentTerms<Policy>& terms, const StorageRounding& storage,
                                        Index active, T sink, CompactionReport& report,
                                        CompactionRounding<T>& rounding) {
  const StateConfig& config = state.config;
  const Index frozen = state.rank() - active;
  auto part = terms.list.from(frozen);
  report.decomposed = part.count;
  const auto decomposition = decompose(team, part);
  const FrozenTerms<T> rest{terms.list.keys.middle_rows(0, frozen),
                            terms.list.values.middle_rows(0, frozen), terms.list.weights,
                            config.tail_share * config.epsilon};
  const bool may_refuse = frozen > 0 || state.may_turn_dense();
  const double epsilon = frozen > 0 ? rest.epsilon : config.epsilon;
  if (!keep_strongest(team, state, decomposition, rest, storage, epsilon, sink,
                      state.factors.capacity, may_refuse, report)) {
    return false;
  }
  auto& settled = state.record->settled_rank;
  if (frozen == 0 || state.rank() < settled) settled = state.rank();
  rounding.roundoffs += recompress_roundoffs(config.d_k, config.d_v, report.decomposed);
  rounding.rotations += decomposition.rotation_error;
  return true;
}

/// Decomposes the terms of a compacted body behind the active ones among themselves, which merges
/// what has been added to the same directions at different times (paper 1, section 4.3).
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void recompress_tail(Team& team, const SinkStateView<Policy>& state,
                                           CurrentTerms<Policy>& terms,
                                           const StorageRounding& storage, T sink,
                                           CompactionReport& report,
                                           CompactionRounding<T>& rounding) {
  const StateConfig& config = state.config;
  const Index active = SinkStateView<Policy>::active(config);
  auto& list = terms.list;
  list.count = state.rank();
  if (list.count <= active + 1) return;
  for (Index i = 0; i < list.count; ++i) {
    T* const key = list.keys.row(i);
    T* const value = list.values.row(i);
    team.copy(config.d_k, read_row(team, state.factors.keys(), i, key), key);
    team.copy(config.d_v, read_row(team, state.factors.values(), i, value), value);
    list.weights[i] = state.factors.strength(i);
  }
  auto part = list.from(active);
  const Index tail = part.count;
  const auto decomposition = decompose(team, part);
  const FrozenTerms<T> rest{list.keys.middle_rows(0, active), list.values.middle_rows(0, active),
                            list.weights, config.tail_share * config.epsilon};
  CompactionReport done = report;
  if (!keep_strongest(team, state, decomposition, rest, storage, config.epsilon, sink,
                      state.factors.capacity, true, done)) {
    return;  // a strength would overflow: the terms stay apart
  }
  auto& settled = state.record->settled_rank;
  if (state.rank() < settled) settled = state.rank();
  report.tail = tail;
  report.rank_after = done.rank_after;
  if (done.sweeps > report.sweeps) report.sweeps = done.sweeps;
  report.dropped += done.dropped;
  report.rounded += done.rounded;
  rounding.roundoffs += recompress_roundoffs(config.d_k, config.d_v, tail);
  rounding.rotations += decomposition.rotation_error;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
