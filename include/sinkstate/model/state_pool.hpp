/// @file
/// Many states of ranks that differ and change, in one stretch of memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/owner.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "body_version.hpp"
#include "pool_config.hpp"
#include "reserve_rows.hpp"
#include "sink_state.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// What the heads of one slot share.
struct alignas(64) SlotRecord {
  std::int64_t tokens = 0;    ///< of the request, those it was initialised with included
  std::int32_t in_use = 0;    ///< holds a request
  std::int32_t buffered = 0;  ///< tokens, in each head
  std::int32_t draft = -1;    ///< tokens buffered when a draft was opened; -1: none is open
  /// Of a compaction or initialisation that some of the heads could do and others not: they are out
  /// of step, and the slot goes no further.
  Status blocked = Status::ok;
  BodyVersion bodies;  ///< of all heads

  // Of the call under way:
  std::int32_t entry = -1;              ///< of the batch, that works on this slot
  std::int32_t readers = 0;             ///< entries that read it
  std::int32_t arrived = 0;             ///< heads that are done (on a device)
  Status status = Status::ok;           ///< of that entry
  std::atomic<std::int32_t> failed{0};  ///< the largest status among the heads
};

/// Where a pool's bytes go. All are pure functions of its configuration.
struct PoolBytes {
  std::size_t total = 0;  ///< of the memory to give
  std::size_t slot = 0;   ///< of each slot, all of its heads, without component rows
  std::size_t row = 0;    ///< of each component row, with its strength and scales
  std::size_t fixed = 0;  ///< whatever else
  Index quota = 0;        ///< rows guaranteed to each state
  Index rows = 0;         ///< of the whole pool: quotas and reserve
  Index most_rows = 0;    ///< that a state can need: with a quota of as many, none ever lacks one
  std::size_t worst = 0;  ///< `total` with that quota

  /// What is in use by `slots` requests that together have `rows` component rows.
  constexpr std::size_t in_use(Index slots, Index used_rows) const {
    return fixed + static_cast<std::size_t>(slots) * slot +
           static_cast<std::size_t>(used_rows) * row;
  }
};

/// A pool at work.
struct PoolReport {
  Index slots = 0;         ///< in use
  Index rows = 0;          ///< held by their states
  Index reserve = 0;       ///< of the reserve, still free
  Index dense_states = 0;  ///< that are in dense form
  std::size_t bytes = 0;   ///< `PoolBytes::in_use`
  double certificate = 0;  ///< the largest
};

/// The states of `slots` requests x `value_heads`, over memory of somebody else. Copied freely;
/// verbs take it by value and work on what it points to. One thread at a time calls a verb on a
/// pool; the verb itself spreads over threads.
///
/// A state of a pool is a `SinkStateView` like any other, and equal to the bit to one that stands
/// alone and has seen the same. Three things differ in where they lie: terms are in component rows
/// that a list names, keys are buffered once for all heads that share them, and counters lie side
/// by side.
template <class PolicyType>
struct StatePoolView {
  using Policy = PolicyType;
  using Compute = typename Policy::Compute;
  using Stored = typename Policy::Stored;
  using Buffered = typename Policy::Buffered;
  using Factors = LowRankFactorsView<Compute, Stored>;
  using Code = typename detail::StoredAs<Stored>::Code;
  using BufferedCode = typename detail::StoredAs<Buffered>::Code;

  /// All of a state but its component rows and buffered keys.
  struct Head {
    UpdateBufferView<Compute, Buffered> buffer;
    StoredRows<Stored> sink;
    StateRecord* record = nullptr;
    /// The component rows of its quota: they begin here, and lie one behind the other, so that they
    /// need nobody to hand them out.
    Index first_row = 0;
    std::int32_t* list = nullptr;  ///< of component rows, those of the quota first
    std::int32_t* held = nullptr;  ///< how many of them it has
    std::int32_t* rank = nullptr;
    Status* status = nullptr;  ///< of the last verb

    SINKSTATE_HOST_DEVICE static Head carve(Workspace& memory, const StateConfig& config) {
      using Body = detail::StoredAs<Stored>;
      using Rows = detail::StoredAs<Buffered>;
      const Index slots = config.buffer_capacity();
      constexpr Index sinks = Policy::Sink::present ? 1 : 0;
      const Index decays = Policy::Rule::log_decays(config.d_k);
      Head head;
      head.buffer.corrections = Rows::rows(
          {memory.pack<BufferedCode>(slots * config.d_v), slots, config.d_v, config.d_v}, nullptr);
      Code* const sink = memory.pack<Code>(sinks * config.d_k);
      head.buffer.log_decays = {memory.pack<Compute>(slots * decays), slots, decays, decays};
      head.buffer.certificates = memory.pack<Compute>(slots + 1);
      head.buffer.masses = memory.pack<Compute>(slots + 1);
      head.record = memory.pack<StateRecord>(1);
      float* const scale = Body::scaled ? memory.pack<float>(sinks) : nullptr;
      head.sink = Body::rows({sink, sinks, config.d_k, config.d_k}, scale);
      head.list = memory.pack<std::int32_t>(most_rows(config));
      head.held = memory.pack<std::int32_t>(1);
      head.rank = memory.pack<std::int32_t>(1);
      head.buffer.count = memory.pack<std::int32_t>(1);
      head.status = memory.pack<Status>(1);
      memory.align(Workspace::alignment);
      return head;
    }
  };

  PoolConfig config;
  MatrixView<const Compute> sink_directions;  ///< value_heads x d_v
  SlotRecord* slots = nullptr;
  ReserveRowsView reserve;  ///< component rows above the quotas; they come behind all quotas
  Compute* strengths = nullptr;
  float* scales = nullptr;
  Code* components = nullptr;
  unsigned char* slot_memory = nullptr;
  std::size_t slot_bytes = 0;  ///< keys of the key heads, then the heads
  std::size_t key_bytes = 0;
  std::size_t head_bytes = 0;

  /// Component rows that a dense body takes: as many as hold its d_k rows whole.
  SINKSTATE_HOST_DEVICE static constexpr Index dense_rows(const StateConfig& config) {
    const Index per_row = Factors::matrix_rows_per_row(config.d_k, config.d_v);
    return (config.d_k + per_row - 1) / per_row;
  }
  /// Component rows that a state can need.
  SINKSTATE_HOST_DEVICE static constexpr Index most_rows(const StateConfig& config) {
    const Index terms = SinkStateView<Policy>::rank_capacity(config);
    const Index dense = SinkStateView<Policy>::may_be_dense(config) ? dense_rows(config) : 0;
    return terms > dense ? terms : dense;
  }
  /// Component rows guaranteed to each state.
  SINKSTATE_HOST_DEVICE static constexpr Index quota(const PoolConfig& config) {
    return config.quota == 0 ? most_rows(config.state) : config.quota;
  }

  SINKSTATE_HOST_DEVICE SlotRecord& slot(Index s) const { return slots[s]; }
  SINKSTATE_HOST_DEVICE bool in_use(Index s) const {
    return config.is_slot(s) && slots[s].in_use != 0;
  }
  /// The buffers of the slot hold the tokens of one period, and no draft is open: time to compact.
  SINKSTATE_HOST_DEVICE bool due(Index s) const {
    return slots[s].buffered >= config.state.buffer && slots[s].draft < 0;
  }

  SINKSTATE_HOST_DEVICE Head head(Index s, Index value_head) const {
    const std::size_t keys = static_cast<std::size_t>(config.key_heads) * key_bytes;
    unsigned char* const bytes = slot_memory + static_cast<std::size_t>(s) * slot_bytes + keys +
                                 static_cast<std::size_t>(value_head) * head_bytes;
    Workspace memory(bytes, head_bytes);
    Head head = Head::carve(memory, config.state);
    head.first_row = (s * config.value_heads + value_head) * quota(config);
    return head;
  }
  /// buffer_capacity x d_k, shared by the value heads of a key head.
  SINKSTATE_HOST_DEVICE StoredRows<Buffered> keys(Index s, Index key_head) const {
    unsigned char* const bytes = slot_memory + static_cast<std::size_t>(s) * slot_bytes +
                                 static_cast<std::size_t>(key_head) * key_bytes;
    const Index d_k = config.state.d_k;
    return detail::StoredAs<Buffered>::rows(
        {reinterpret_cast<BufferedCode*>(bytes), config.state.buffer_capacity(), d_k, d_k},
        nullptr);
  }

  /// A state, to read it with `read_out`, `materialize` or field by field. What writes goes through
  /// the pool, which keeps the heads of a slot in step.
  SINKSTATE_HOST_DEVICE SinkStateView<Policy> state(Index s, Index value_head) const {
    const Head h = head(s, value_head);
    const Index d_k = config.state.d_k;
    const Index d_v = config.state.d_v;
    const Index capacity = SinkStateView<Policy>::rank_capacity(config.state);
    SinkStateView<Policy> view;
    view.config = config.state_of(value_head);
    view.factors.components = components;
    view.factors.scales = scales;
    view.factors.strengths = strengths;
    view.factors.list = h.list;
    view.factors.rank = h.rank;
    view.factors.d_k = d_k;
    view.factors.d_v = d_v;
    view.factors.capacity = *h.held < capacity ? Index{*h.held} : capacity;
    const bool room =
        SinkStateView<Policy>::may_be_dense(config.state) && *h.held >= dense_rows(config.state);
    view.matrix = view.factors.matrix(room ? d_k : 0);
    view.buffer = h.buffer;
    view.buffer.keys = keys(s, config.key_head(value_head));
    view.buffer.shared_keys = true;
    view.sink = h.sink;
    view.sink_direction = Policy::Sink::present ? sink_directions.row(value_head) : nullptr;
    view.record = h.record;
    return view;
  }

  static StatePoolView carve(Workspace& memory, const PoolConfig& config,
                             const MatrixView<const Compute>& sink_directions) {
    const StateConfig& state = config.state;
    const Index rows = row_count(config);
    StatePoolView view;
    view.config = config;
    view.sink_directions = sink_directions;
    Workspace keys;
    keys.take<BufferedCode>(state.buffer_capacity() * state.d_k);
    view.key_bytes = keys.used();
    Workspace head;
    Head::carve(head, state);
    view.head_bytes = head.used();
    view.slot_bytes = static_cast<std::size_t>(config.key_heads) * view.key_bytes +
                      static_cast<std::size_t>(config.value_heads) * view.head_bytes;

    view.slots = memory.take<SlotRecord>(config.slots);
    view.reserve = ReserveRowsView::carve(memory, config.reserve);
    view.strengths = memory.take<Compute>(rows);
    view.scales = memory.take<float>(rows * Factors::row_scales(state.d_k, state.d_v));
    view.components = memory.take<Code>(rows * (state.d_k + state.d_v));
    view.slot_memory =
        memory.take<unsigned char>(config.slots * static_cast<Index>(view.slot_bytes));
    return view;
  }

  /// Component rows of all quotas: those of the reserve come behind them.
  SINKSTATE_HOST_DEVICE static constexpr Index quota_rows(const PoolConfig& config) {
    return config.slots * config.value_heads * quota(config);
  }
  /// Component rows of the pool.
  static constexpr Index row_count(const PoolConfig& config) {
    return quota_rows(config) + config.reserve;
  }
};

namespace detail {

/// Notes the status of a head, of which the largest counts; no two of them are put in order by
/// time.
inline void raise(std::atomic<std::int32_t>& largest, Status status) {
  const auto value = static_cast<std::int32_t>(status);
  std::int32_t known = largest.load(std::memory_order_relaxed);
  while (known < value && !largest.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
  }
}
/// What was noted, and forgets it.
inline Status take_failure(std::atomic<std::int32_t>& largest) {
  return static_cast<Status>(largest.exchange(0, std::memory_order_relaxed));
}

/// The configuration, or an `Error` when the policy cannot use it.
template <class Policy>
const PoolConfig& check_pool(const PoolConfig& config) {
  using View = StatePoolView<Policy>;
  const Index most = View::most_rows(config.checked().state);
  if (!Policy::Compaction::adaptive && (config.quota != 0 || config.reserve != 0)) {
    refuse("PoolConfig::quota and reserve", "0 (this policy's states all need the same rows)",
           std::to_string(config.quota) + " and " + std::to_string(config.reserve));
  }
  if (config.quota > most) {
    refuse("PoolConfig::quota", "at most " + std::to_string(most) + ", which a state can need",
           std::to_string(config.quota));
  }
  const Index states = config.slots * config.value_heads;  // at most 2^40
  if (states > PoolConfig::largest_rows || View::row_count(config) > PoolConfig::largest_rows) {
    refuse("component rows of a pool", "at most " + std::to_string(PoolConfig::largest_rows),
           "slots x value_heads x quota + reserve above that");
  }
  return config;
}

template <class Policy>
const MatrixView<const typename Policy::Compute>& check_sink_directions(
    const PoolConfig& config, const MatrixView<const typename Policy::Compute>& directions) {
  if (Policy::Sink::present && directions.data != nullptr &&
      (directions.rows != config.value_heads || directions.cols != config.state.d_v)) {
    refuse("sink directions",
           std::to_string(config.value_heads) + " x " + std::to_string(config.state.d_v),
           std::to_string(directions.rows) + " x " + std::to_string(directions.cols));
  }
  const Index heads = directions.data == nullptr ? 1 : config.value_heads;
  for (Index h = 0; h < heads; ++h) {
    check_sink_direction<Policy>(config.state,
                                 directions.data == nullptr ? nullptr : directions.row(h));
  }
  return directions;
}

}  // namespace detail

/// What a pool of this configuration takes, before anything is allocated. A pure function.
/// @throws Error for a configuration that cannot be used
template <class Policy>
PoolBytes pool_bytes(const PoolConfig& config) {
  using View = StatePoolView<Policy>;
  Workspace count;
  const View view = View::carve(count, detail::check_pool<Policy>(config), {});
  const StateConfig& state = config.state;
  PoolBytes bytes;
  bytes.total = count.used();
  bytes.slot = sizeof(SlotRecord) + view.slot_bytes;
  bytes.row =
      static_cast<std::size_t>(state.d_k + state.d_v) * sizeof(typename View::Code) +
      static_cast<std::size_t>(View::Factors::row_scales(state.d_k, state.d_v)) * sizeof(float) +
      sizeof(typename View::Compute);
  bytes.quota = View::quota(config);
  bytes.rows = View::row_count(config);
  bytes.most_rows = View::most_rows(state);
  bytes.fixed = bytes.total - static_cast<std::size_t>(config.slots) * bytes.slot -
                static_cast<std::size_t>(bytes.rows) * bytes.row;
  PoolConfig generous = config;
  generous.quota = generous.reserve = 0;
  Workspace worst;
  View::carve(worst, detail::check_pool<Policy>(generous), {});
  bytes.worst = worst.used();
  return bytes;
}

/// What is in use now; O(slots value_heads).
template <class Policy>
PoolReport report(StatePoolView<Policy> pool) {
  const PoolBytes bytes = pool_bytes<Policy>(pool.config);
  PoolReport now;
  now.reserve = *pool.reserve.free;
  for (Index s = 0; s < pool.config.slots; ++s) {
    if (!pool.in_use(s)) continue;
    now.slots += 1;
    for (Index h = 0; h < pool.config.value_heads; ++h) {
      const auto state = pool.state(s, h);
      now.rows += *pool.head(s, h).held;
      now.dense_states += state.dense() ? 1 : 0;
      const auto certificate = static_cast<double>(state.certificate());
      if (!(certificate <= now.certificate)) now.certificate = certificate;
    }
  }
  now.bytes = bytes.in_use(now.slots, now.rows);
  return now;
}

/// A pool that lies in memory already, as when all bytes of one were copied there.
/// @param memory, sink_directions  as `make_pool`
/// @throws Error as `make_pool`
template <class Policy>
StatePoolView<Policy> view_pool(
    void* memory, std::size_t size, const PoolConfig& config,
    const MatrixView<const typename Policy::Compute>& sink_directions = {}) {
  detail::check_memory("memory of a pool", pool_bytes<Policy>(config).total, memory, size);
  detail::check_sink_directions<Policy>(config, sink_directions);
  Workspace workspace(memory, size);
  return StatePoolView<Policy>::carve(workspace, config, sink_directions);
}

/// A pool in the caller's own memory, without requests.
/// @param memory           `pool_bytes<Policy>(config).total` bytes, aligned to 64
/// @param sink_directions  value_heads x d_v finite numbers, any row stride, that outlive the view;
///                         null without a sink. A row of zeros means no sink for that head.
/// @throws Error for an unusable configuration, memory too small or misaligned, or directions
///         missing or too many
template <class Policy>
StatePoolView<Policy> make_pool(
    void* memory, std::size_t size, const PoolConfig& config,
    const MatrixView<const typename Policy::Compute>& sink_directions = {}) {
  const auto pool = view_pool<Policy>(memory, size, config, sink_directions);
  for (Index s = 0; s < config.slots; ++s) {
    ::new (&pool.slots[s]) SlotRecord;
    for (Index h = 0; h < config.value_heads; ++h) *pool.head(s, h).held = 0;
  }
  pool.reserve.reset(pool.quota_rows(config));
  return pool;
}

/// Owner of a pool, without requests at first.
template <class Policy>
class StatePool {
 public:
  /// @param sink_directions  as in `make_pool`; not copied
  /// @throws Error as `make_pool`
  explicit StatePool(const PoolConfig& config,
                     const MatrixView<const typename Policy::Compute>& sink_directions = {})
      : bytes_(pool_bytes<Policy>(config).total) {
    Workspace memory = bytes_.workspace();
    view_ = make_pool<Policy>(memory.take<unsigned char>(static_cast<Index>(bytes_.size())),
                              bytes_.size(), config, sink_directions);
  }
  StatePool(const StatePool&) = delete;
  StatePool& operator=(const StatePool&) = delete;

  StatePoolView<Policy> view() const { return view_; }

 private:
  AlignedBytes bytes_;
  StatePoolView<Policy> view_;
};

SINKSTATE_NAMESPACE_END
