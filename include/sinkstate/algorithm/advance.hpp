/// @file
/// One token, or several, into a state: exactly, by one column in the buffer.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"
#include "read_out.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Scratch of `step` and `advance`.
template <class Policy>
struct StepScratch {
  using T = typename Policy::Compute;

  ReadScratch<2, Policy> reading;
  T* correction;
  T* output;
  // Of narrow buffers:
  typename StoredAs<typename Policy::Buffered>::Code* codes = nullptr;
  TermScratch<T> rounded;

  SINKSTATE_HOST_DEVICE StepScratch(const StateConfig& config, Workspace& memory)
      : reading(config, memory),
        correction(memory.take<T>(config.d_v)),
        output(memory.take<T>(config.d_v)) {
    if constexpr (StoredAs<typename Policy::Buffered>::narrow) {
      codes = memory.take<typename Policy::Buffered::Code>(config.d_k > config.d_v ? config.d_k
                                                                                   : config.d_v);
      rounded = TermScratch<T>::carve(memory, config.d_k, config.d_v);
    }
  }
};

/// @param log_decay  becomes that of the channel that decays least; 0 without decay
template <class Policy, class Team, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE Status check_token(Team& team, const StateConfig& config,
                                         const Token<T>& token, T& log_decay) {
  using Rule = typename Policy::Rule;
  log_decay = T(0);
  if constexpr (Rule::decay != Decay::none) {
    log_decay = team.max(Rule::log_decays(config.d_k), token.log_decay);
  }
  if (log_decay > T(0)) return Status::positive_log_decay;
  const bool finite = log_decay <= T(0) && team.finite(config.d_k, token.key) &&
                      team.finite(config.d_v, token.value) && team.finite(1, &token.write_strength);
  return finite ? Status::ok : Status::non_finite_input;
}

/// Certificate and mass after the token that is about to be buffered: docs/numerics.md, (N1)-(N4).
/// @param key, correction  as they are buffered
/// @param rounded          Frobenius norm of what a narrow buffer has changed of their product
template <class Policy, class Team, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void extend_certificate(Team& team, const SinkStateView<Policy>& state,
                                              const Token<T>& token, T log_decay, const T* key,
                                              const T* correction, T rounded) {
  const StateConfig& config = state.config;
  const Index buffered = state.buffered();
  TokenBounds<T> written;
  written.log_decay = log_decay;
  written.write_strength = token.write_strength;
  written.key_norm = team.norm(config.d_k, token.key);
  written.term =
      round_up(bound_product(team.norm(config.d_k, key), team.norm(config.d_v, correction)));
  written.rounded = rounded;
  T certificate = state.buffer.certificates[buffered];
  T mass = state.buffer.masses[buffered];
  const Index terms = (state.dense() ? config.d_k : state.rank()) + buffered + 1;
  include_token<Policy::Rule::corrects>(config.d_k, terms, buffered, written, certificate, mass);
  state.buffer.certificates[buffered + 1] = certificate;
  state.buffer.masses[buffered + 1] = mass;
}

/// Checks, computes and buffers one token; reads the output too when `query` is not null.
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status buffer_token(Team& team, SinkStateView<Policy>& state,
                                          const Token<typename Policy::Compute>& token,
                                          const typename Policy::Compute* query,
                                          typename Policy::Compute* output) {
  using T = typename Policy::Compute;
  using Rule = typename Policy::Rule;
  const StateConfig& config = state.config;
  Workspace memory = team.workspace();
  StepScratch<Policy> scratch(config, memory);
  T* const correction = scratch.correction;
  T* const read = scratch.output;
  if (memory.exhausted()) return Status::workspace_too_small;

  const Index buffered = state.buffered();
  if (buffered == state.buffer.capacity()) return Status::buffer_full;
  T log_decay = T(0);
  const Status checked = check_token<Policy>(team, config, token, log_decay);
  if (checked != Status::ok) return checked;
  if (query != nullptr && !team.finite(config.d_k, query)) return Status::non_finite_input;

  // n = b (v - theta S^T L k), o = S^T L q + n (k . q): docs/mathematics.md, equations (2) and (4).
  const MatrixView<const T> value{token.value, 1, config.d_v, config.d_v};
  if constexpr (Rule::corrects) {
    if (query != nullptr) {
      read_state<2>(team, state, token.log_decay, {token.key, query}, {correction, read},
                    scratch.reading);
    } else {
      read_state<1>(team, state, token.log_decay, {token.key}, {correction}, scratch.reading);
    }
    team.scale(config.d_v, T(-1), correction, correction);
    const T one = T(1);
    team.add_combination(value, &one, correction);
    team.scale(config.d_v, token.write_strength, correction, correction);
  } else {
    if (query != nullptr) {
      read_state<1>(team, state, token.log_decay, {query}, {read}, scratch.reading);
    }
    team.scale(config.d_v, token.write_strength, token.value, correction);
  }
  using Buffered = typename Policy::Buffered;
  if (!team.finite(config.d_v, correction) || !fits<Buffered>(team, config.d_v, correction) ||
      !fits<Buffered>(team, config.d_k, token.key)) {
    return Status::overflow;
  }
  // What is buffered is what the token writes.
  const T* key = token.key;
  const T* written = correction;
  T rounded = T(0);
  if constexpr (StoredAs<Buffered>::narrow) {
    const auto round = [&](Index n, const T* x, T* scratch_row, T* y) {
      const NarrowRows<Buffered> row{{scratch.codes, 1, n, n}, {}};
      return store_row(team, row, 0, n, x, {}, scratch_row, y);
    };
    const auto& rows = scratch.rounded;
    const T key_change = round(config.d_k, key, rows.key, rows.stored_key);
    const T correction_change = round(config.d_v, written, rows.value, rows.stored_value);
    key = rows.stored_key;
    written = rows.stored_value;
    rounded = bound_product(team.norm(config.d_k, token.key), correction_change) +
              bound_product(key_change, team.norm(config.d_v, written));
  }
  if (query != nullptr) {
    const T overlap = team.dot(config.d_k, key, query);
    team.add_combination(MatrixView<const T>{written, 1, config.d_v, config.d_v}, &overlap, read);
    if (!team.finite(config.d_v, read)) return Status::overflow;
  }

  extend_certificate<Policy>(team, state, token, log_decay, key, written, rounded);
  if (!state.buffer.shared_keys) write_row(team, state.buffer.keys, buffered, key, {});
  write_row(team, state.buffer.corrections, buffered, written, {});
  team.copy(Rule::log_decays(config.d_k), token.log_decay, state.buffer.log_decays.row(buffered));
  *state.buffer.count += 1;
  state.record->tokens += 1;
  if (query != nullptr) team.copy(config.d_v, read, output);
  return Status::ok;
}

/// All of the tokens or none.
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status buffer_tokens(
    Team& team, SinkStateView<Policy>& state, const Tokens<typename Policy::Compute>& tokens,
    const MatrixView<const typename Policy::Compute>* queries,
    const MatrixView<typename Policy::Compute>* outputs) {
  using T = typename Policy::Compute;
  const StateConfig& config = state.config;
  const Index count = tokens.count();
  const Index decays = Policy::Rule::log_decays(config.d_k);
  const auto is = [count](const auto& rows, Index cols) {
    return rows.rows == count && rows.cols == cols;
  };
  const bool shapes = count >= 0 && is(tokens.keys, config.d_k) && is(tokens.values, config.d_v) &&
                      (decays == 0 || is(tokens.log_decays, decays)) &&
                      (queries == nullptr || is(*queries, config.d_k)) &&
                      (outputs == nullptr || is(*outputs, config.d_v));
  // More than fits into an empty buffer will not fit after a compaction either.
  if (!shapes || count > state.buffer.capacity()) return Status::invalid_argument;
  if (count > state.buffer.capacity() - state.buffered()) return Status::buffer_full;
  // Outputs are written token by token, so every input is checked before the first.
  for (Index t = 0; t < count; ++t) {
    T log_decay = T(0);
    const Status checked = check_token<Policy>(team, state.config, tokens[t], log_decay);
    if (checked != Status::ok) return checked;
    if (queries != nullptr && !team.finite(state.config.d_k, queries->row(t))) {
      return Status::non_finite_input;
    }
  }
  for (Index t = 0; t < count; ++t) {
    const Status status =
        buffer_token(team, state, tokens[t], queries == nullptr ? nullptr : queries->row(t),
                     outputs == nullptr ? nullptr : outputs->row(t));
    if (status != Status::ok) {
      const Status undone = roll_back(state, t);
      return undone == Status::ok ? status : undone;
    }
  }
  return Status::ok;
}

}  // namespace detail

/// Advances the state by one token and reads it, in one pass: S <- L S + k n^T, output = S^T query.
///
/// @param query   d_k numbers
/// @param output  d_v numbers; may be any of the inputs; written only when the result is ok
/// @returns buffer_full, non_finite_input, positive_log_decay, overflow, workspace_too_small;
///          invalid_argument for a null query or output
/// Exact up to rounding (docs/mathematics.md, equation (2)). Allocates nothing; O((d_k + d_v) (rank
/// + buffered)), dense O(d_k d_v). The result depends on the state and the arguments alone, to the
/// bit.
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status step(Team& team, SinkStateView<Policy> state,
                                  const Token<typename Policy::Compute>& token,
                                  const typename Policy::Compute* query,
                                  typename Policy::Compute* output) noexcept {
  if (query == nullptr || output == nullptr) return Status::invalid_argument;
  return detail::buffer_token(team, state, token, query, output);
}

/// `step` without the read-out. Rules that do not correct then touch nothing but the buffer.
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status advance(Team& team, SinkStateView<Policy> state,
                                     const Token<typename Policy::Compute>& token) noexcept {
  return detail::buffer_token(team, state, token, nullptr, nullptr);
}

/// `step` for consecutive tokens, bit-equal to one at a time. All are applied or, unless the result
/// is ok, none.
///
/// @param queries  count x d_k
/// @param outputs  count x d_v; apart from the inputs. When a result overflows, the rows before it
///                 have been written.
/// @returns as `step`; buffer_full when not all of them fit; invalid_argument when shapes disagree
///          or an empty buffer would not hold them
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status step(Team& team, SinkStateView<Policy> state,
                                  const Tokens<typename Policy::Compute>& tokens,
                                  const MatrixView<const typename Policy::Compute>& queries,
                                  const MatrixView<typename Policy::Compute>& outputs) noexcept {
  return detail::buffer_tokens(team, state, tokens, &queries, &outputs);
}

/// `advance` for consecutive tokens: all or none.
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status advance(Team& team, SinkStateView<Policy> state,
                                     const Tokens<typename Policy::Compute>& tokens) noexcept {
  return detail::buffer_tokens(team, state, tokens, nullptr, nullptr);
}

SINKSTATE_NAMESPACE_END
