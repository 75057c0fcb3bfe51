/// @file
/// The thing that a user holds: one recurrent state.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/owner.hpp"
#include "../core/policy.hpp"
#include "../core/status.hpp"
#include "../core/stored_rows.hpp"
#include "../core/workspace.hpp"
#include "low_rank_factors.hpp"
#include "state_config.hpp"
#include "update_buffer.hpp"
#include "update_rules.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// The few numbers of a state that are neither factors nor buffer.
struct StateRecord {
  std::int64_t tokens = 0;       ///< seen since the state was empty or initialised
  std::int64_t compactions = 0;  ///< since then
  std::int32_t dense = 0;        ///< the body is the dense matrix, not the factors
  std::int32_t dense_age =
      0;  ///< compactions since it became so, or was last tried in low-rank form
  std::int64_t settled_rank = 0;  ///< that the last decomposition of all terms left, or less since
};

/// What a state needs to go on, in bytes, part by part. A single state's memory (`state_bytes`) is
/// larger: it keeps room for any rank up to the dense form.
struct StateBytes {
  std::size_t factors = 0;  ///< at the present rank
  std::size_t strengths = 0;
  std::size_t dense = 0;  ///< the matrix, in the place of factors and strengths
  std::size_t sink =
      0;  ///< its d_k coefficients; the direction is shared by all requests and not counted
  std::size_t scales = 0;  ///< of all vectors above, where the format has them
  std::size_t buffer_keys = 0;
  std::size_t buffer_corrections = 0;
  std::size_t log_decays = 0;
  std::size_t bookkeeping = 0;  ///< certificates, masses, counters

  constexpr std::size_t total() const {
    return factors + strengths + dense + sink + scales + buffer_keys + buffer_corrections +
           log_decays + bookkeeping;
  }
};

/// A state over memory of somebody else, docs/mathematics.md, equation (2):
///
///     S = sink direction^T + body + sum_j (decay since j) key_j correction_j^T
///
/// where the body is low-rank factors or, when `record->dense`, a matrix in the same memory. Copied
/// freely; verbs take it by value and work on what it points to. One state is used by one thread at
/// a time.
template <class PolicyType>
struct SinkStateView {
  using Policy = PolicyType;
  using Compute = typename Policy::Compute;
  using Stored = typename Policy::Stored;
  using Buffered = typename Policy::Buffered;

  StateConfig config;
  LowRankFactorsView<Compute, Stored> factors;
  /// d_k x d_v in the memory of the factors; no rows if the state cannot go dense
  StoredListedRows<Stored> matrix;
  UpdateBufferView<Compute, Buffered> buffer;
  StoredRows<Stored> sink;                  ///< one row of d_k numbers, as of the last compaction
  const Compute* sink_direction = nullptr;  ///< d_v numbers
  StateRecord* record = nullptr;

  SINKSTATE_HOST_DEVICE bool dense() const { return record->dense != 0; }
  /// Terms of the body; 0 while it is dense.
  SINKSTATE_HOST_DEVICE Index rank() const { return dense() ? 0 : *factors.rank; }
  SINKSTATE_HOST_DEVICE Index buffered() const { return *buffer.count; }
  /// There is room for a dense body.
  SINKSTATE_HOST_DEVICE bool may_turn_dense() const { return detail::codes_of(matrix).rows != 0; }
  /// The buffer holds the tokens of one period: time to compact.
  SINKSTATE_HOST_DEVICE bool due() const { return buffered() >= config.buffer; }
  /// Upper bound of the Frobenius norm of what this state is away from the exact recurrence over
  /// the same tokens.
  SINKSTATE_HOST_DEVICE Compute certificate() const { return buffer.certificates[buffered()]; }

  /// Most terms of the body.
  SINKSTATE_HOST_DEVICE static constexpr Index rank_capacity(const StateConfig& config) {
    if constexpr (Policy::Compaction::adaptive) {
      return config.rank_capacity();
    } else if constexpr (Policy::Compaction::low_rank) {
      // Paper 2 needs twice the rank where every channel decays on its own.
      const Index usual = Policy::Rule::decay == Decay::per_channel ? 32 : 16;
      const Index wanted = config.rank_cap == 0 ? usual : config.rank_cap;
      return wanted < config.full_rank() ? wanted : config.full_rank();
    } else {
      return 0;
    }
  }
  /// The strongest terms of the body, which LocalSvd decomposes together with the buffer.
  SINKSTATE_HOST_DEVICE static constexpr Index active(const StateConfig& config) {
    // Per-channel decays turn the terms that are left out: docs/numerics.md, section 8.
    const Index usual = Policy::Rule::decay == Decay::per_channel ? 16 : 8;
    return config.active == 0 ? usual : config.active;
  }
  /// Whether the body can take the dense form.
  SINKSTATE_HOST_DEVICE static constexpr bool may_be_dense(const StateConfig& config) {
    return !Policy::Compaction::low_rank || (Policy::Compaction::adaptive && config.dense_fallback);
  }

  StateBytes bytes() const { return bytes_at(config, rank(), dense()); }

  /// What a state of this configuration occupies at a given rank or in dense form. The buffer
  /// counts at its capacity, since that is what has to be kept ready.
  static constexpr StateBytes bytes_at(const StateConfig& config, Index rank, bool dense) {
    constexpr auto times = [](Index count, std::size_t size) {
      return static_cast<std::size_t>(count) * size;
    };
    using Body = detail::StoredAs<Stored>;
    constexpr std::size_t stored = sizeof(typename Body::Code);
    constexpr std::size_t buffered = sizeof(typename detail::StoredAs<Buffered>::Code);
    constexpr std::size_t number = sizeof(Compute);
    constexpr Index sinks = Policy::Sink::present ? 1 : 0;
    const Index slots = config.buffer_capacity();
    StateBytes bytes;
    bytes.factors = times(dense ? 0 : rank * (config.d_k + config.d_v), stored);
    bytes.strengths = times(dense ? 0 : rank, number);
    bytes.dense = times(dense ? config.d_k * config.d_v : 0, stored);
    bytes.sink = times(sinks * config.d_k, stored);
    const Index vectors = (dense ? config.d_k : 2 * rank) + sinks;
    bytes.scales = times(Body::scaled ? vectors : 0, sizeof(float));
    bytes.buffer_keys = times(slots * config.d_k, buffered);
    bytes.buffer_corrections = times(slots * config.d_v, buffered);
    bytes.log_decays = times(slots * Policy::Rule::log_decays(config.d_k), number);
    bytes.bookkeeping =
        times(2 * (slots + 1), number) + sizeof(StateRecord) + 2 * sizeof(std::int32_t);
    return bytes;
  }

  static SinkStateView carve(Workspace& memory, const StateConfig& config,
                             const Compute* sink_direction) {
    SinkStateView view;
    view.config = config;
    const Index dense_rows = may_be_dense(config) ? config.d_k : 0;
    view.factors = decltype(view.factors)::carve(memory, config.d_k, config.d_v,
                                                 rank_capacity(config), dense_rows);
    view.matrix = view.factors.matrix(dense_rows);
    view.buffer = decltype(view.buffer)::carve(memory, config.d_k, config.d_v,
                                               Policy::Rule::log_decays(config.d_k),
                                               config.buffer_capacity());
    using Body = detail::StoredAs<Stored>;
    constexpr Index sinks = Policy::Sink::present ? 1 : 0;
    typename Body::Code* const sink = memory.take<typename Body::Code>(sinks * config.d_k);
    float* const sink_scale = Body::scaled ? memory.take<float>(sinks) : nullptr;
    view.sink = Body::rows({sink, sinks, config.d_k, config.d_k}, sink_scale);
    view.sink_direction = sink_direction;
    view.record = memory.take<StateRecord>(1);
    return view;
  }
};

namespace detail {

/// @throws Error for memory that is too small or misaligned
inline void check_memory(const char* what, std::size_t wanted, const void* memory,
                         std::size_t size) {
  if (size < wanted) refuse(what, std::to_string(wanted) + " bytes", std::to_string(size));
  const auto misalignment = reinterpret_cast<std::uintptr_t>(memory) % Workspace::alignment;
  if (memory == nullptr || misalignment != 0) {
    refuse(what, "an address aligned to 64 bytes",
           memory == nullptr ? "null" : "one off by " + std::to_string(misalignment));
  }
}

/// The direction, or an `Error` when the policy's sink and the pointer do not fit together.
template <class Policy>
const typename Policy::Compute* check_sink_direction(const StateConfig& config,
                                                     const typename Policy::Compute* direction) {
  if (Policy::Sink::present != (direction != nullptr)) {
    refuse("sink direction",
           Policy::Sink::present ? "d_v numbers (MeanValueSink)" : "none (NoSink)",
           direction == nullptr ? "null" : "a pointer");
  }
  using T = typename Policy::Compute;
  T largest = T(0);
  for (Index j = 0; Policy::Sink::present && j < config.d_v; ++j) {
    const T magnitude = std::abs(direction[j]);
    if (!std::isfinite(magnitude)) {
      refuse("sink direction", "finite numbers",
             std::to_string(direction[j]) + " at " + std::to_string(j));
    }
    if (magnitude > largest) largest = magnitude;
  }
  // Only the direction matters: its length goes into the coefficients, and both must fit.
  if (largest != T(0) && !(largest >= T(1e-6) && largest <= T(1e6))) {
    refuse("sink direction", "a largest magnitude in [1e-6, 1e6], or zeros",
           std::to_string(largest));
  }
  return direction;
}

}  // namespace detail

/// Empties a state: what follows is bit-equal to a new one, whatever its memory held.
template <class Policy>
SINKSTATE_HOST_DEVICE void reset(SinkStateView<Policy> view) noexcept {
  using T = typename Policy::Compute;
  *view.record = StateRecord{};
  *view.factors.rank = 0;
  *view.buffer.count = 0;
  view.buffer.certificates[0] = T(0);
  view.buffer.masses[0] = T(0);
  detail::clear(view.sink);
  if constexpr (!Policy::Compaction::low_rank) {
    view.record->dense = 1;
    detail::clear(view.matrix);
  }
}

/// Takes the last `tokens` buffered tokens back, in O(1). State, certificate and outputs are
/// bit-equal to those before them. Tokens that a compaction has folded in stay.
/// @returns nothing_to_roll_back for a negative number or more than are buffered
template <class Policy>
SINKSTATE_HOST_DEVICE Status roll_back(SinkStateView<Policy> view, Index tokens) noexcept {
  if (tokens < 0 || tokens > view.buffered()) return Status::nothing_to_roll_back;
  *view.buffer.count -= static_cast<std::int32_t>(tokens);
  view.record->tokens -= tokens;
  return Status::ok;
}

/// Bytes of a state's memory, for `make_view`: its capacity, not what `bytes()` says it uses.
/// @throws Error for a configuration that cannot be used
template <class Policy>
std::size_t state_bytes(const StateConfig& config) {
  Workspace count;
  SinkStateView<Policy>::carve(count, config.checked(), nullptr);
  return count.used();
}

/// A state in the caller's own memory, emptied. To fork it, copy its `state_bytes` into those of
/// another view of the same configuration.
/// @param memory          `state_bytes<Policy>(config)` bytes, aligned to 64
/// @param sink_direction  d_v finite numbers that outlive the view; null without a sink. Zeros mean
///                        no sink.
/// @throws Error for an unusable configuration, memory too small or misaligned, or a direction
///         missing or too many
template <class Policy>
SinkStateView<Policy> make_view(void* memory, std::size_t size, const StateConfig& config,
                                const typename Policy::Compute* sink_direction = nullptr) {
  detail::check_memory("memory of a state", state_bytes<Policy>(config), memory, size);
  detail::check_sink_direction<Policy>(config, sink_direction);
  Workspace workspace(memory, size);
  const auto view = SinkStateView<Policy>::carve(workspace, config, sink_direction);
  reset(view);
  return view;
}

/// Owner of one state, empty at first. A copy is a snapshot: an equal state of its own.
template <class Policy>
class SinkState
    : public Owner<SinkStateView<Policy>, StateConfig, const typename Policy::Compute*> {
  using Base = Owner<SinkStateView<Policy>, StateConfig, const typename Policy::Compute*>;

 public:
  /// @param sink_direction  the head's mean value, d_v finite numbers, shared by all requests and
  ///                        therefore not copied: it outlives the state. Null without a sink.
  /// @throws Error for a configuration that cannot be used, or a direction that is missing, not
  ///         finite, or not wanted
  explicit SinkState(const StateConfig& config,
                     const typename Policy::Compute* sink_direction = nullptr)
      : Base(config.checked(), detail::check_sink_direction<Policy>(config, sink_direction)) {
    reset(this->view());
  }
};

SINKSTATE_NAMESPACE_END
