/// @file
/// S^T q without forming S.
#pragma once

#include "../config.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/sink_state.hpp"
#include "decay_walk.hpp"
#include "storage.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Terms read at a time, keys and values, so that a state's memory is walked through once and in
/// order.
inline constexpr Index term_block = 16;

/// Scratch of `read_state` for up to `Room` vectors.
template <int Room, class Policy>
struct ReadScratch {
  using T = typename Policy::Compute;

  DecayWalk<typename Policy::Rule, T> walk;
  T* decayed[Room];      // d_k: L x
  T* weights[Room];      // one coefficient a buffered token, or a term of a block
  MatrixView<T> keys;    // a block of narrow terms, widened
  MatrixView<T> values;  // or rows of a matrix

  SINKSTATE_HOST_DEVICE ReadScratch(const StateConfig& config, Workspace& scratch)
      : walk(config.d_k, scratch) {
    const Index terms =
        config.buffer_capacity() > term_block ? config.buffer_capacity() : term_block;
    for (int n = 0; n < Room; ++n) {
      decayed[n] = scratch.template take<T>(config.d_k);
      weights[n] = scratch.template take<T>(terms);
    }
    constexpr bool narrow =
        StoredAs<typename Policy::Stored>::narrow || StoredAs<typename Policy::Buffered>::narrow;
    keys = scratch.template take_matrix<T>(narrow ? term_block : 0, config.d_k);
    values = scratch.template take_matrix<T>(narrow ? term_block : 0, config.d_v);
  }
};

/// y_n = S^T L x_n for `Count` vectors in one pass over the state; L is the decay of a token that
/// is not buffered yet, or the identity when `log_decay` is null. docs/mathematics.md, equation
/// (4).
template <int Count, int Room, class Policy, class Team, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void read_state(Team& team, const SinkStateView<Policy>& state,
                                      const T* log_decay, const T* const (&x)[Count],
                                      T* const (&y)[Count], ReadScratch<Room, Policy>& s) {
  static_assert(Count <= Room);
  using Walk = decltype(s.walk);
  const Index d_k = state.config.d_k;
  const Index buffered = state.buffered();
  s.walk.start(team);
  if (log_decay != nullptr) s.walk.include(team, log_decay);

  const auto block_from = [](Index first, Index count) {
    return count - first < term_block ? count - first : term_block;
  };
  for (Index first = 0; !Walk::per_channel && first < buffered; first += term_block) {
    const Index count = block_from(first, buffered);
    const auto keys = read_rows(team, state.buffer.keys.middle_rows(first, count), s.keys);
    for (int n = 0; n < Count; ++n) team.project(keys, x[n], s.weights[n] + first);
  }
  for (Index j = buffered - 1; j >= 0; --j) {
    const T* key = nullptr;
    if constexpr (Walk::per_channel) key = read_row(team, state.buffer.keys, j, s.keys.data);
    for (int n = 0; n < Count; ++n) {
      if constexpr (Walk::per_channel) {
        s.walk.apply(team, x[n], s.decayed[n]);
        s.weights[n][j] = team.dot(d_k, key, s.decayed[n]);
      } else {
        s.weights[n][j] *= s.walk.weight();
      }
    }
    s.walk.include(team, state.buffer.log_decays.row(j));
  }

  for (int n = 0; n < Count; ++n) {
    s.walk.apply(team, x[n], s.decayed[n]);
    team.fill(state.config.d_v, T(0), y[n]);
  }
  for (Index first = 0; first < buffered; first += term_block) {
    const auto corrections = read_rows(
        team, state.buffer.corrections.middle_rows(first, block_from(first, buffered)), s.values);
    for (int n = 0; n < Count; ++n) {
      team.add_combination(corrections, s.weights[n] + first, y[n]);
    }
  }
  if constexpr (Policy::Sink::present) {
    const T* const sink = read_row(team, state.sink, 0, s.keys.data);
    const MatrixView<const T> direction{state.sink_direction, 1, state.config.d_v,
                                        state.config.d_v};
    for (int n = 0; n < Count; ++n) {
      const T coefficient = team.dot(d_k, sink, s.decayed[n]);
      team.add_combination(direction, &coefficient, y[n]);
    }
  }
  for (Index first = 0; first < state.rank(); first += term_block) {
    const Index count = block_from(first, state.rank());
    const auto keys = read_rows(team, state.factors.keys().middle_rows(first, count), s.keys);
    const auto values = read_rows(team, state.factors.values().middle_rows(first, count), s.values);
    for (int n = 0; n < Count; ++n) {
      team.project(keys, s.decayed[n], s.weights[n]);
      for (Index i = 0; i < count; ++i) s.weights[n][i] *= state.factors.strength(first + i);
      team.add_combination(values, s.weights[n], y[n]);
    }
  }
  for (Index first = 0; state.dense() && first < d_k; first += term_block) {
    const auto rows =
        read_rows(team, state.matrix.middle_rows(first, block_from(first, d_k)), s.values);
    for (int n = 0; n < Count; ++n) team.add_combination(rows, s.decayed[n] + first, y[n]);
  }
}

}  // namespace detail

/// output = S^T query, the state unchanged: docs/mathematics.md, equation (4).
///
/// @param query   d_k numbers
/// @param output  d_v numbers; may be `query`; written only when the result is ok
/// @returns non_finite_input, overflow, workspace_too_small
/// Allocates nothing; O((d_k + d_v) (rank + buffered)), dense O(d_k d_v).
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status read_out(Team& team, SinkStateView<Policy> state,
                                      const typename Policy::Compute* query,
                                      typename Policy::Compute* output) noexcept {
  using T = typename Policy::Compute;
  const Index d_v = state.config.d_v;
  Workspace memory = team.workspace();
  detail::ReadScratch<1, Policy> scratch(state.config, memory);
  T* const y = memory.take<T>(d_v);
  if (memory.exhausted()) return Status::workspace_too_small;

  if (!team.finite(state.config.d_k, query)) return Status::non_finite_input;
  detail::read_state<1>(team, state, static_cast<const T*>(nullptr), {query}, {y}, scratch);
  if (!team.finite(d_v, y)) return Status::overflow;
  team.copy(d_v, y, output);
  return Status::ok;
}

SINKSTATE_NAMESPACE_END
