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

/// A slot whose states are empty. Who reads its bodies has been told (`BodyVersion::change`).
template <class Policy>
SINKSTATE_HOST_DEVICE void empty_slot(const StatePoolView<Policy>& pool, Index slot) {
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    const auto head = pool.head(slot, h);
    hold_rows(pool, head, Policy::Compaction::low_rank ? 0 : pool.dense_rows(pool.config.state));
    reset(pool.state(slot, h));
  }
  SlotRecord& record = pool.slot(slot);
  record.tokens = 0;
  record.in_use = 1;
  record.buffered = 0;
  record.draft = -1;
  record.blocked = Status::ok;
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

/// Makes slot `to` equal to another slot, of the same pool or of one with the same `StateConfig`,
/// head counts and sink directions; slots, quota and reserve may differ. It must be possible. Who
/// reads its bodies has been told (`BodyVersion::change`).
template <class Policy>
SINKSTATE_HOST_DEVICE void copy_slot(const StatePoolView<Policy>& from_pool, Index from,
                                     const StatePoolView<Policy>& to_pool, Index to) {
  using View = StatePoolView<Policy>;
  const PoolConfig& config = to_pool.config;
  const Index width = config.state.d_k + config.state.d_v;
  const Index scales = View::Factors::row_scales(config.state.d_k, config.state.d_v);
  // Rows that the copy has already are given back first: others of its heads may need them.
  for (Index h = 0; h < config.value_heads && to_pool.in_use(to); ++h) {
    hold_rows(to_pool, to_pool.head(to, h), 0);
  }
  const auto keys = static_cast<std::size_t>(config.key_heads) * to_pool.key_bytes;
  // Where the bytes of a head lie in a slot depends on nothing in which the pools may differ.
  const std::size_t slot_bytes = to_pool.slot_bytes;
  const unsigned char* const source =
      from_pool.slot_memory + static_cast<std::size_t>(from) * slot_bytes;
  unsigned char* const target = to_pool.slot_memory + static_cast<std::size_t>(to) * slot_bytes;
  std::memcpy(target, source, keys);
  for (Index h = 0; h < config.value_heads; ++h) {
    const auto original = from_pool.head(from, h);
    const auto copy = to_pool.head(to, h);
    hold_rows(to_pool, copy, rows_in_use(from_pool, original));
    const auto copied = static_cast<std::size_t>(*copy.held);
    const std::size_t offset = keys + static_cast<std::size_t>(h) * to_pool.head_bytes;
    const auto list =
        static_cast<std::size_t>(reinterpret_cast<unsigned char*>(copy.list) - (target + offset));
    // Everything before the list and behind it is equal, the list itself is the copy's own.
    std::memcpy(target + offset, source + offset, list);
    *copy.rank = *original.rank;
    *copy.buffer.count = *original.buffer.count;
    for (std::size_t i = 0; i < copied; ++i) {
      const Index a = original.list[i];
      const Index b = copy.list[i];
      std::memcpy(to_pool.components + b * width, from_pool.components + a * width,
                  static_cast<std::size_t>(width) * sizeof(typename View::Code));
      to_pool.strengths[b] = from_pool.strengths[a];
      for (Index n = 0; n < scales; ++n) {
        to_pool.scales[b * scales + n] = from_pool.scales[a * scales + n];
      }
    }
  }
  const SlotRecord& original = from_pool.slot(from);
  SlotRecord& record = to_pool.slot(to);
  record.tokens = original.tokens;
  record.in_use = 1;
  record.buffered = original.buffered;
  record.draft = -1;
  record.blocked = original.blocked;
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
