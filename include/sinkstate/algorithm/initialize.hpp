/// @file
/// A state from a dense matrix: at the end of prefill, or after a further prompt.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"
#include "compact.hpp"
#include "randomized_svd.hpp"

SINKSTATE_NAMESPACE_BEGIN

namespace detail {

/// Scratch of `initialize`.
template <class Policy>
struct InitializeScratch {
  using T = typename Policy::Compute;

  DenseSvdScratch<T, typename Policy::Backend::Core> dense;
  SinkSplit<T> split;
  T* sink;

  SINKSTATE_HOST_DEVICE InitializeScratch(const StateConfig& config, const RandomizedSvd& options,
                                          Workspace& memory)
      : InitializeScratch(config, SinkStateView<Policy>::rank_capacity(config) + oversampling,
                          options.block, memory) {}
  SINKSTATE_HOST_DEVICE InitializeScratch(const StateConfig& config, ExactSvd, Workspace& memory)
      : InitializeScratch(config, config.d_k, 0, memory) {}

 private:
  static constexpr bool low_rank = Policy::Compaction::low_rank;

  SINKSTATE_HOST_DEVICE InitializeScratch(const StateConfig& config, Index most, Index block,
                                          Workspace& memory)
      : dense(decltype(dense)::carve(memory, config, low_rank ? most : 0, low_rank ? block : 0)),
        sink(memory.take<T>(Policy::Sink::present ? config.d_k : 0)) {}
};

SINKSTATE_HOST_DEVICE constexpr bool usable(const RandomizedSvd& options) {
  constexpr Index most_block = 4096;
  return options.block >= 1 && options.block <= most_block && options.power_iterations >= 0 &&
         options.power_iterations <= 64;
}
SINKSTATE_HOST_DEVICE constexpr bool usable(ExactSvd) { return true; }

}  // namespace detail

/// Replaces a state by a dense matrix, compressed as the policy says. The buffer is empty
/// afterwards.
///
/// @param dense        d_k x d_v, any strides
/// @param method       RandomizedSvd{block, power_iterations, seed} or ExactSvd{}. DenseBuffered
///                     decomposes nothing and does not look at it.
/// @param certificate  how far `dense` itself may be from the exact state (Frobenius norm), as
///                     `materialize` reports it
/// @param report       if not null, what was done; `dropped` is the computed residual
/// @returns invalid_argument, non_finite_input, overflow, workspace_too_small
/// The result depends on the arguments alone, to the bit. Allocates nothing; O(d_k d_v rank), with
/// ExactSvd O(d_k d_v (d_k + d_v)).
template <class Team, class Policy, class Method = RandomizedSvd>
SINKSTATE_HOST_DEVICE Status initialize(Team& team, SinkStateView<Policy> state,
                                        const StridedMatrix<const typename Policy::Compute>& dense,
                                        const Method& method = {},
                                        typename Policy::Compute certificate = 0,
                                        CompactionReport* report = nullptr) noexcept {
  using T = typename Policy::Compute;
  using Stored = typename Policy::Stored;
  const StateConfig& config = state.config;
  if (dense.rows != config.d_k || dense.cols != config.d_v || !detail::usable(method) ||
      !(certificate >= T(0))) {
    return Status::invalid_argument;
  }
  Workspace memory = team.workspace();
  detail::InitializeScratch<Policy> scratch(config, method, memory);
  if (memory.exhausted()) return Status::workspace_too_small;

  const MatrixView<T>& content = scratch.dense.content;
  if constexpr (Policy::Sink::present)
    scratch.split.prepare(team, config.d_v, state.sink_direction);
  T mass = T(0);
  for (Index i = 0; i < config.d_k; ++i) {
    T* const row = content.row(i);
    for (Index j = 0; j < config.d_v; ++j) row[j] = dense(i, j);
    if (!team.finite(config.d_v, row)) return Status::non_finite_input;
    mass = std::hypot(mass, team.norm(config.d_v, row));
    if constexpr (Policy::Sink::present) {
      scratch.sink[i] = scratch.split.split(team, row);
      if (!team.finite(config.d_v, row)) return Status::overflow;
    }
  }
  T sink = T(0);
  if constexpr (Policy::Sink::present) {
    sink = scratch.split.strength(team, config.d_k, scratch.sink);
    if (!std::isfinite(sink) || !detail::fits<Stored>(team, config.d_k, scratch.sink)) {
      return Status::overflow;
    }
  }

  CompactionReport done;
  const detail::StorageRounding storage(config, 0);
  const auto& formed = scratch.dense.list.formed;
  bool low_rank = false;
  if constexpr (Policy::Compaction::low_rank) {
    const T scale = detail::normalize_matrix(team, content);
    low_rank =
        detail::compress_dense(team, state, method, storage, scale, sink, state.factors.capacity,
                               state.may_turn_dense(), scratch.dense, done);
    if (!low_rank) {
      if (!state.may_turn_dense()) return Status::overflow;
      // Once more from the input: scaled back, the smallest entries would have lost bits.
      for (Index i = 0; i < config.d_k; ++i) {
        for (Index j = 0; j < config.d_v; ++j) content(i, j) = dense(i, j);
        if constexpr (Policy::Sink::present) scratch.split.split(team, content.row(i));
      }
    }
  }
  for (Index i = 0; !low_rank && i < config.d_k; ++i) {
    if (!detail::fits<Stored>(team, config.d_v, content.row(i))) return Status::overflow;
  }
  const T body = low_rank ? detail::strengths_sum(state)
                          : detail::keep_dense(team, state, content, storage, formed, done);

  *state.record = StateRecord{0, 0, state.record->dense, 0, done.rank_after};
  if constexpr (Policy::Sink::present) {
    done.rounded += static_cast<double>(
        scratch.split.length() * detail::keep_sink(team, state, scratch.sink, storage, formed));
  }
  // Splitting the sink off and computing the residual round too.
  const bool exact = !low_rank && !Policy::Sink::present;
  const T roundoffs = exact ? T(0) : T(16) + static_cast<T>(done.rank_after);
  detail::commit(
      state,
      certificate + static_cast<T>(done.dropped + done.rounded) +
          detail::bound_product(roundoffs * detail::unit_roundoff<T>, mass + body + sink),
      body + sink);
  if (report != nullptr) *report = done;
  return Status::ok;
}

SINKSTATE_NAMESPACE_END
