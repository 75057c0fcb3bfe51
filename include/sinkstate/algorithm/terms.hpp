/// @file
/// A state with its pending decays applied: what compaction and materialisation start from.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"
#include "../model/sink_state.hpp"
#include "decay_walk.hpp"
#include "recompress.hpp"
#include "scaling.hpp"
#include "sink_split.hpp"
#include "storage.hpp"

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

/// Writes term i of the body, decayed, to a row of the list. A decay that is one number goes into
/// the weight and leaves the vectors as they are; where channels differ the key is normalised
/// again.
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void gather_body_term(Team& team, const SinkStateView<Policy>& state,
                                            CurrentTerms<Policy>& terms, Index i, Index row) {
  const Index d_k = state.config.d_k;
  auto& list = terms.list;
  T* const key = list.keys.row(row);
  T weight = state.factors.strength(i);
  if constexpr (Policy::Rule::decay == Decay::per_channel) {
    terms.walk.apply(team, read_row(team, state.factors.keys(), i, key), key);
    int exponent = 0;
    if (normalize_exponent(team, d_k, key, exponent)) {
      const T norm = team.norm(d_k, key);
      team.scale(d_k, T(1) / norm, key, key);
      weight = std::ldexp(weight * norm, exponent);
    } else {
      weight = T(0);
    }
  } else {
    team.copy(d_k, read_row(team, state.factors.keys(), i, key), key);
    weight *= terms.walk.weight();
  }
  T* const value = list.values.row(row);
  team.copy(state.config.d_v, read_row(team, state.factors.values(), i, value), value);
  list.weights[row] = weight;
}

/// The terms of the body by their decayed strength, strongest first.
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void order_body(Team& team, const SinkStateView<Policy>& state,
                                      CurrentTerms<Policy>& terms) {
  auto& list = terms.list;
  constexpr bool per_channel = Policy::Rule::decay == Decay::per_channel;
  const auto strength = [&](Index i) {
    return per_channel ? list.weights[i] : state.factors.strength(i);
  };
  for (Index i = 0; i < state.rank(); ++i) {
    if constexpr (per_channel) gather_body_term(team, state, terms, i, i);
    Index place = i;
    // One decay for all channels leaves the order as it is, which rounding may have changed.
    if constexpr (per_channel || StoredAs<typename Policy::Stored>::narrow) {
      for (; place > 0 && strength(list.order[place - 1]) < strength(i); --place) {
        list.order[place] = list.order[place - 1];
      }
    }
    list.order[place] = i;
  }
}

/// The current state as fresh terms; the state itself is only read.
///
/// @param active  terms of the body, the strongest, that come behind the others and next to the
///                buffered tokens; both groups fall in strength
/// @returns false when splitting the sink off overflowed
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE bool gather_terms(Team& team, const SinkStateView<Policy>& state,
                                        CurrentTerms<Policy>& terms, Index active) {
  using T = typename Policy::Compute;
  const StateConfig& config = state.config;
  auto& list = terms.list;
  auto& walk = terms.walk;
  bool finite = true;
  walk.start(team);

  const Index rank = state.rank();
  list.count = rank + state.buffered();
  if constexpr (Policy::Sink::present) {
    terms.split.prepare(team, config.d_v, state.sink_direction);
    team.fill(config.d_k, T(0), terms.sink);
  }
  for (Index j = state.buffered() - 1; j >= 0; --j) {
    const Index i = rank + j;
    T* const key = list.keys.row(i);
    T* const value = list.values.row(i);
    walk.apply(team, read_row(team, state.buffer.keys, j, key), key);
    team.copy(config.d_v, read_row(team, state.buffer.corrections, j, value), value);
    list.weights[i] = T(1);
    if constexpr (Policy::Sink::present) {
      const T omega = terms.split.split(team, value);
      team.add_combination(list.keys.middle_rows(i, 1), &omega, terms.sink);
      finite = finite && team.finite(config.d_v, value);
    }
    walk.include(team, state.buffer.log_decays.row(j));
  }
  for (Index i = 0; i < config.d_k; ++i) terms.body_decay[i] = walk.channel(i);
  order_body(team, state, terms);
  for (Index place = 0; place < rank; ++place) {
    const Index row = place < active ? rank - active + place : place - active;
    gather_body_term(team, state, terms, list.order[place], row);
  }
  if constexpr (Policy::Sink::present) {
    for (Index i = 0; i < config.d_k; ++i) {
      terms.sink[i] += terms.body_decay[i] * state.sink(0, i);
    }
  }
  return finite;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
