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
Index beyond_quota(const StatePoolView<Policy>& pool, Index held) {
  const Index quota = pool.quota(pool.config);
  return held > quota ? held - quota : 0;
}

/// Component rows that a state with `held` of them could have.
template <class Policy>
Index may_hold(const StatePoolView<Policy>& pool, Index held) {
  const Index quota = pool.quota(pool.config);
  return (held > quota ? held : quota) + *pool.reserve;
}

/// Takes or gives rows back until a state has `rows`; it keeps its first ones.
/// @param rows  at most what it may hold
template <class Policy>
void hold_rows(const StatePoolView<Policy>& pool, const typename StatePoolView<Policy>::Head& head,
               Index rows) {
  *pool.reserve += beyond_quota(pool, *head.held) - beyond_quota(pool, rows);
  while (*head.held > rows) pool.store.give(head.list[--*head.held]);
  while (*head.held < rows) head.list[(*head.held)++] = pool.store.take();
}

/// Component rows in which a state keeps its body.
template <class Policy>
Index rows_in_use(const StatePoolView<Policy>& pool,
                  const typename StatePoolView<Policy>::Head& head) {
  return head.record->dense != 0 ? pool.dense_rows(pool.config.state) : Index{*head.rank};
}

/// Gives all rows back that no body is in.
template <class Policy>
void trim_rows(const StatePoolView<Policy>& pool,
               const typename StatePoolView<Policy>::Head& head) {
  hold_rows(pool, head, rows_in_use(pool, head));
}

/// A slot whose states are empty.
template <class Policy>
void empty_slot(const StatePoolView<Policy>& pool, Index slot) {
  pool.slot(slot).bodies.change();
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

/// Whether slot `to` could have what slot `from` has.
template <class Policy>
bool may_copy_slot(const StatePoolView<Policy>& pool, Index from, Index to) {
  Index wanted = 0;
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    wanted += beyond_quota(pool, rows_in_use(pool, pool.head(from, h)));
    if (pool.in_use(to)) wanted -= beyond_quota(pool, *pool.head(to, h).held);
  }
  return wanted <= *pool.reserve;
}

/// Makes slot `to` equal to slot `from`. It must be possible.
template <class Policy>
void copy_slot(const StatePoolView<Policy>& pool, Index from, Index to) {
  using View = StatePoolView<Policy>;
  const StateConfig& config = pool.config.state;
  const Index width = config.d_k + config.d_v;
  const Index scales = View::Factors::row_scales(config.d_k, config.d_v);
  pool.slot(to).bodies.change();
  // Rows that the copy has already are given back first: others of its heads may need them.
  for (Index h = 0; h < pool.config.value_heads && pool.in_use(to); ++h) {
    hold_rows(pool, pool.head(to, h), 0);
  }
  const auto keys = static_cast<std::size_t>(pool.config.key_heads) * pool.key_bytes;
  unsigned char* const source = pool.slot_memory + static_cast<std::size_t>(from) * pool.slot_bytes;
  unsigned char* const target = pool.slot_memory + static_cast<std::size_t>(to) * pool.slot_bytes;
  std::memcpy(target, source, keys);
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    const auto original = pool.head(from, h);
    const auto copy = pool.head(to, h);
    hold_rows(pool, copy, rows_in_use(pool, original));
    const auto copied = static_cast<std::size_t>(*copy.held);
    const std::size_t offset = keys + static_cast<std::size_t>(h) * pool.head_bytes;
    const auto list =
        static_cast<std::size_t>(reinterpret_cast<unsigned char*>(copy.list) - (target + offset));
    // Everything before the list and behind it is equal, the list itself is the copy's own.
    std::memcpy(target + offset, source + offset, list);
    *copy.rank = *original.rank;
    *copy.buffer.count = *original.buffer.count;
    for (std::size_t i = 0; i < copied; ++i) {
      const Index a = original.list[i];
      const Index b = copy.list[i];
      std::memcpy(pool.components + b * width, pool.components + a * width,
                  static_cast<std::size_t>(width) * sizeof(typename View::Code));
      pool.strengths[b] = pool.strengths[a];
      for (Index n = 0; n < scales; ++n) pool.scales[b * scales + n] = pool.scales[a * scales + n];
    }
  }
  SlotRecord& record = pool.slot(to);
  record.tokens = pool.slot(from).tokens;
  record.in_use = 1;
  record.buffered = pool.slot(from).buffered;
  record.draft = -1;
  record.blocked = pool.slot(from).blocked;
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
  detail::empty_slot(pool, slot);
  return Status::ok;
}

/// Empties the states of a request, which keeps its slot. @returns invalid_slot
template <class Policy>
Status reset(StatePoolView<Policy> pool, Index slot) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
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
  if (!detail::may_copy_slot(pool, from, to)) return Status::pool_exhausted;
  detail::copy_slot(pool, from, to);
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
