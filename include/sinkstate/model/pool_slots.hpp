/// @file
/// The life of a request in a pool: admit, fork, take tokens back, release.
#pragma once

#include <cstdint>
#include <cstring>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "sink_state.hpp"
#include "state_pool.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Rows of the reserve that a state with `held` rows occupies.
template <class Policy>
SINKSTATE_HOST_DEVICE Index beyond_quota(const StatePoolView<Policy>& pool, Index held) {
  const Index quota = pool.quota(pool.config);
  return held > quota ? held - quota : 0;
}

/// Component rows that a state with `held` of them could have.
template <class Policy>
SINKSTATE_HOST_DEVICE Index may_hold(const StatePoolView<Policy>& pool, Index held) {
  const Index quota = pool.quota(pool.config);
  return (held > quota ? held : quota) + *pool.reserve.free;
}

/// Takes or gives rows back until a state has `rows`; it keeps its first ones. Those of its quota
/// are always the same, and nobody else's.
/// @param rows  at most what it may hold
template <class Policy>
SINKSTATE_HOST_DEVICE void hold_rows(const StatePoolView<Policy>& pool,
                                     const typename StatePoolView<Policy>::Head& head, Index rows) {
  const Index quota = pool.quota(pool.config);
  std::int32_t& held = *head.held;
  for (; held > rows; --held) {
    if (held > quota) pool.reserve.give(head.list[held - 1]);
  }
  for (; held < rows; ++held) {
    head.list[held] =
        held < quota ? static_cast<std::int32_t>(head.first_row + held) : pool.reserve.take();
  }
}

/// Component rows in which a state keeps its body.
template <class Policy>
SINKSTATE_HOST_DEVICE Index rows_in_use(const StatePoolView<Policy>& pool,
                                        const typename StatePoolView<Policy>::Head& head) {
  return head.record->dense != 0 ? pool.dense_rows(pool.config.state) : Index{*head.rank};
}

/// Gives all rows back that no body is in.
template <class Policy>
SINKSTATE_HOST_DEVICE void trim_rows(const StatePoolView<Policy>& pool,
                                     const typename StatePoolView<Policy>::Head& head) {
  hold_rows(pool, head, rows_in_use(pool, head));
}

/// An empty state.
template <class Policy>
SINKSTATE_HOST_DEVICE void empty_head(const StatePoolView<Policy>& pool, Index slot, Index h) {
  hold_rows(pool, pool.head(slot, h),
            Policy::Compaction::low_rank ? 0 : pool.dense_rows(pool.config.state));
  reset(pool.state(slot, h));
}

/// A request that has seen nothing.
SINKSTATE_HOST_DEVICE inline void start_request(SlotRecord& record) {
  record.tokens = 0;
  record.in_use = 1;
  record.buffered = 0;
  record.draft = -1;
  record.blocked = Status::ok;
}

/// A slot whose states are empty. Who reads its bodies has been told (`BodyVersion::change`).
template <class Policy>
SINKSTATE_HOST_DEVICE void empty_slot(const StatePoolView<Policy>& pool, Index slot) {
  for (Index h = 0; h < pool.config.value_heads; ++h) empty_head(pool, slot, h);
  start_request(pool.slot(slot));
}

/// Whether slot `to` could have what slot `from` has, of the same pool or of another (`copy_slot`).
template <class Policy>
SINKSTATE_HOST_DEVICE bool may_copy_slot(const StatePoolView<Policy>& from_pool, Index from,
                                         const StatePoolView<Policy>& to_pool, Index to) {
  Index wanted = 0;
  for (Index h = 0; h < to_pool.config.value_heads; ++h) {
    wanted += beyond_quota(to_pool, rows_in_use(from_pool, from_pool.head(from, h)));
    if (to_pool.in_use(to)) wanted -= beyond_quota(to_pool, *to_pool.head(to, h).held);
  }
  return wanted <= *to_pool.reserve.free;
}

/// The first step of `copy_slot`: rows for the copy, and its request.
template <class Policy>
SINKSTATE_HOST_DEVICE void hold_copy(const StatePoolView<Policy>& from_pool, Index from,
                                     const StatePoolView<Policy>& to_pool, Index to) {
  const Index heads = to_pool.config.value_heads;
  // Rows that the copy has already are given back first: others of its heads may need them.
  for (Index h = 0; h < heads && to_pool.in_use(to); ++h) {
    hold_rows(to_pool, to_pool.head(to, h), 0);
  }
  for (Index h = 0; h < heads; ++h) {
    hold_rows(to_pool, to_pool.head(to, h), rows_in_use(from_pool, from_pool.head(from, h)));
  }
  const SlotRecord& original = from_pool.slot(from);
  SlotRecord& record = to_pool.slot(to);
  start_request(record);
  record.tokens = original.tokens;
  record.buffered = original.buffered;
  record.blocked = original.blocked;
}

/// Every `workers`-th number from `worker` on.
template <class T>
SINKSTATE_HOST_DEVICE void copy_share(Index count, const T* from, T* to, Index worker,
                                      Index workers) {
  if (workers == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(T));
  } else {
    for (Index i = worker; i < count; i += workers) to[i] = from[i];
  }
}

/// The second step: one of the states, which several workers may share. With the first ones go the
/// keys that heads share.
template <class Policy>
SINKSTATE_HOST_DEVICE void copy_head(const StatePoolView<Policy>& from_pool, Index from,
                                     const StatePoolView<Policy>& to_pool, Index to, Index h,
                                     Index worker = 0, Index workers = 1) {
  using View = StatePoolView<Policy>;
  using Word = std::uint32_t;
  const PoolConfig& config = to_pool.config;
  const Index width = config.state.d_k + config.state.d_v;
  const Index scales = View::Factors::row_scales(config.state.d_k, config.state.d_v);
  const auto share = [&](Index count, const auto* source, auto* target) {
    copy_share(count, source, target, worker, workers);
  };
  // Where the bytes of a head lie in a slot depends on nothing in which the pools may differ.
  const auto words = [&](std::size_t offset, std::size_t bytes) {
    const std::size_t slot_bytes = to_pool.slot_bytes;
    const unsigned char* const source =
        from_pool.slot_memory + static_cast<std::size_t>(from) * slot_bytes + offset;
    unsigned char* const target =
        to_pool.slot_memory + static_cast<std::size_t>(to) * slot_bytes + offset;
    share(static_cast<Index>(bytes / sizeof(Word)), reinterpret_cast<const Word*>(source),
          reinterpret_cast<Word*>(target));
  };
  if (h < config.key_heads)
    words(static_cast<std::size_t>(h) * to_pool.key_bytes, to_pool.key_bytes);
  const auto original = from_pool.head(from, h);
  const auto copy = to_pool.head(to, h);
  const std::size_t offset = static_cast<std::size_t>(config.key_heads) * to_pool.key_bytes +
                             static_cast<std::size_t>(h) * to_pool.head_bytes;
  const auto* const begin =
      to_pool.slot_memory + static_cast<std::size_t>(to) * to_pool.slot_bytes + offset;
  // Everything before the list and behind it is equal, the list itself is the copy's own.
  words(offset, static_cast<std::size_t>(reinterpret_cast<unsigned char*>(copy.list) - begin));
  if (worker == 0) {
    *copy.rank = *original.rank;
    *copy.buffer.count = *original.buffer.count;
  }
  for (Index i = 0; i < *copy.held; ++i) {
    const Index a = original.list[i];
    const Index b = copy.list[i];
    share(width, from_pool.components + a * width, to_pool.components + b * width);
    share(scales, from_pool.scales + a * scales, to_pool.scales + b * scales);
    if (worker == 0) to_pool.strengths[b] = from_pool.strengths[a];
  }
}

/// Makes slot `to` equal to another slot, of the same pool or of one with the same `StateConfig`,
/// head counts and sink directions; slots, quota and reserve may differ. It must be possible. Who
/// reads its bodies has been told (`BodyVersion::change`).
template <class Policy>
SINKSTATE_HOST_DEVICE void copy_slot(const StatePoolView<Policy>& from_pool, Index from,
                                     const StatePoolView<Policy>& to_pool, Index to) {
  hold_copy(from_pool, from, to_pool, to);
  for (Index h = 0; h < to_pool.config.value_heads; ++h) {
    copy_head(from_pool, from, to_pool, to, h);
  }
}

}  // namespace detail

/// A free slot, or -1; O(slots). Engines that number their requests themselves need not ask.
template <class Policy>
Index free_slot(StatePoolView<Policy> pool) noexcept {
  for (Index s = 0; s < pool.config.slots; ++s) {
    if (pool.config.is_slot(s) && !pool.in_use(s)) return s;
  }
  return -1;
}

/// Gives a slot to a new request, with empty states, whatever its memory held.
/// @returns invalid_slot, slot_in_use
template <class Policy>
Status admit(StatePoolView<Policy> pool, Index slot) noexcept {
  if (!pool.config.is_slot(slot)) return Status::invalid_slot;
  if (pool.in_use(slot)) return Status::slot_in_use;
  pool.slot(slot).bodies.change();
  detail::empty_slot(pool, slot);
  return Status::ok;
}

/// Empties the states of a request, which keeps its slot. @returns invalid_slot
template <class Policy>
Status reset(StatePoolView<Policy> pool, Index slot) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
  pool.slot(slot).bodies.change();
  detail::empty_slot(pool, slot);
  return Status::ok;
}

/// Ends a request: its slot and its component rows are free. @returns invalid_slot
template <class Policy>
Status release(StatePoolView<Policy> pool, Index slot) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
  pool.slot(slot).bodies.change();
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    detail::hold_rows(pool, pool.head(slot, h), 0);
  }
  pool.slot(slot).in_use = 0;
  return Status::ok;
}

/// Gives a free slot an equal copy of a request, pending tokens included; no draft is open in it.
/// @returns invalid_slot, slot_in_use; pool_exhausted when the reserve has not as many component
///          rows as the copy needs beyond its quotas
/// O(value_heads (d_k + d_v) (rank + buffered)).
template <class Policy>
Status fork(StatePoolView<Policy> pool, Index from, Index to) noexcept {
  if (!pool.in_use(from) || !pool.config.is_slot(to)) return Status::invalid_slot;
  if (pool.in_use(to)) return Status::slot_in_use;
  if (!detail::may_copy_slot(pool, from, pool, to)) return Status::pool_exhausted;
  pool.slot(to).bodies.change();
  detail::copy_slot(pool, from, pool, to);
  return Status::ok;
}

/// Takes the last `tokens` buffered tokens of a request back, as the verb on single states does: a
/// few counters a head. Tokens that a compaction has folded in stay.
/// @returns invalid_slot, nothing_to_roll_back
template <class Policy>
Status roll_back(StatePoolView<Policy> pool, Index slot, Index tokens) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
  SlotRecord& record = pool.slot(slot);
  // Where a compaction has failed in part, some heads have nothing left to take back.
  if (tokens < 0 || tokens > record.buffered || record.blocked != Status::ok) {
    return Status::nothing_to_roll_back;
  }
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    const Status status = roll_back(pool.state(slot, h), tokens);
    if (status != Status::ok) return status;
  }
  record.buffered -= static_cast<std::int32_t>(tokens);
  record.tokens -= tokens;
  if (record.draft > record.buffered) record.draft = record.buffered;
  return Status::ok;
}

/// From here on tokens may be taken back: the request is not compacted until the draft is closed.
/// There is room for `StateConfig::draft` tokens at least when it was not due.
/// @returns invalid_slot; draft_open when one is open already
template <class Policy>
Status open_draft(StatePoolView<Policy> pool, Index slot) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
  SlotRecord& record = pool.slot(slot);
  if (record.draft >= 0) return Status::draft_open;
  record.draft = record.buffered;
  return Status::ok;
}

/// Ends a draft, of which the last `rejected` tokens are taken back.
/// @returns invalid_slot; draft_open when none is; nothing_to_roll_back for more tokens than the
///          draft has
template <class Policy>
Status close_draft(StatePoolView<Policy> pool, Index slot, Index rejected) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
  SlotRecord& record = pool.slot(slot);
  if (record.draft < 0) return Status::draft_open;
  if (rejected > record.buffered - record.draft) return Status::nothing_to_roll_back;
  const Status status = roll_back(pool, slot, rejected);
  if (status == Status::ok) record.draft = -1;
  return status;
}

SINKSTATE_NAMESPACE_END
