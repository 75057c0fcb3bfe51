/// @file
/// A state with its pending decays applied: what compaction and materialisation start from.
#pragma once

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"
#include "../model/sink_state.hpp"
#include "decay_walk.hpp"
#include "recompress.hpp"
#include "sink_split.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// S = sink direction^T + diag(body_decay) matrix + terms; the matrix only for a dense body.
template <class Policy>
struct CurrentTerms {
  using T = typename Policy::Compute;

  DecayWalk<typename Policy::Rule, T> walk;
  SinkSplit<T> split;
  TermList<T, typename Policy::Backend::Core> list;
  T* sink;        // d_k, if there is a sink
  T* body_decay;  // d_k

  SINKSTATE_HOST_DEVICE CurrentTerms(const StateConfig& config, Workspace& memory)
      : walk(config.d_k, memory),
        list(decltype(list)::carve(
            memory, SinkStateView<Policy>::rank_capacity(config) + config.buffer_capacity(),
            config.d_k, config.d_v)),
        sink(memory.take<T>(config.d_k)),
        body_decay(memory.take<T>(config.d_k)) {}
};

/// The current state as fresh terms; the state itself is only read.
/// @returns false when splitting the sink off overflowed
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE bool gather_terms(Team& team, const SinkStateView<Policy>& state,
                                        CurrentTerms<Policy>& terms) {
  using T = typename Policy::Compute;
  const StateConfig& config = state.config;
  auto& list = terms.list;
  auto& walk = terms.walk;
  bool finite = true;
  walk.start(team);

  // Buffered tokens go behind the terms of the body, whose order (strongest first) helps the Jacobi
  // sweeps.
  const Index rank = state.rank();
  list.count = rank + state.buffered();
  if constexpr (Policy::Sink::present) {
    terms.split.prepare(team, config.d_v, state.sink_direction);
    team.fill(config.d_k, T(0), terms.sink);
  }
  for (Index j = state.buffered() - 1; j >= 0; --j) {
    const Index i = rank + j;
    walk.apply(team, state.buffer.keys.row(j), list.keys.row(i));
    team.copy(config.d_v, state.buffer.corrections.row(j), list.values.row(i));
    list.weights[i] = T(1);
    if constexpr (Policy::Sink::present) {
      const T omega = terms.split.split(team, list.values.row(i));
      team.add_combination(list.keys.middle_rows(i, 1), &omega, terms.sink);
      finite = finite && team.finite(config.d_v, list.values.row(i));
    }
    walk.include(team, state.buffer.log_decays.row(j));
  }
  for (Index i = 0; i < config.d_k; ++i) terms.body_decay[i] = walk.channel(i);
  for (Index i = 0; i < rank; ++i) {
    walk.apply(team, state.factors.keys().row(i), list.keys.row(i));
    team.copy(config.d_v, state.factors.values().row(i), list.values.row(i));
    list.weights[i] = state.factors.strengths[i];
  }
  if constexpr (Policy::Sink::present) {
    for (Index i = 0; i < config.d_k; ++i) terms.sink[i] += terms.body_decay[i] * state.sink[i];
  }
  return finite;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
