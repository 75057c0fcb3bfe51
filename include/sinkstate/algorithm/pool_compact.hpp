/// @file
/// Compaction of many states at once, and who gets component rows when they run short.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../model/pool_slots.hpp"
#include "../model/state_pool.hpp"
#include "compact.hpp"
#include "keep.hpp"
#include "pool_step.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Component rows that a state may need to be compacted. A state whose strengths overflow needs
/// more, and is tried again.
template <class Policy>
SINKSTATE_HOST_DEVICE Index rows_to_compact(const SinkStateView<Policy>& state) {
  using View = StatePoolView<Policy>;
  const Index terms = state.rank() + state.buffered();
  const bool fits = !state.dense() && terms <= SinkStateView<Policy>::rank_capacity(state.config);
  return fits ? terms : View::most_rows(state.config);
}

/// Rewrites the bodies of many states, each with the component rows that it may need:
/// docs/design.md, "Pools".
///
/// In order, as many states as can have all that they may need are promised it; those work at once,
/// and give back what is left over, before the next are served. One that cannot have it, and is
/// first, gets what there is. So who lacks rows depends on the order alone, and nobody within its
/// quota.
///
/// @param count    of states
/// @param slot_of  slot_of(i): of state i, or -1 when it is to be left out; head is i % value_heads
/// @param need     need(view): rows that a state may need
/// @param rewrite  rewrite(team, i, view): its status
template <class Teams, class Policy, class SlotOf, class Need, class Rewrite>
void rewrite_bodies(Teams& teams, const StatePoolView<Policy>& pool, Index count,
                    const SlotOf& slot_of, const Need& need, const Rewrite& rewrite) {
  const Index heads = pool.config.value_heads;
  const auto work = [&](auto& team, Index i) {
    const Index slot = slot_of(i);
    if (slot < 0) return;
    const auto view = pool.state(slot, i % heads);
    const Status status = rewrite(team, i, view);
    *pool.head(slot, i % heads).status = status;
  };
  Index next = 0;
  while (next < count) {
    const Index begin = next;
    for (bool first = true; next < count; ++next) {
      const Index slot = slot_of(next);
      if (slot < 0) continue;
      const auto head = pool.head(slot, next % heads);
      const Index needed = need(pool.state(slot, next % heads));
      const Index most = may_hold(pool, *head.held);
      if (needed > most && !first) break;
      if (needed > *head.held) hold_rows(pool, head, needed < most ? needed : most);
      first = false;
    }
    teams.for_each(next - begin, [&](auto& team, Index i) { work(team, begin + i); });
    for (Index i = begin; i < next; ++i) {
      const Index slot = slot_of(i);
      if (slot < 0) continue;
      const auto head = pool.head(slot, i % heads);
      const Index most = may_hold(pool, *head.held);
      if (*head.status == Status::overflow && *head.held < pool.most_rows(pool.config.state) &&
          *head.held < most) {
        const Index all = pool.most_rows(pool.config.state);
        hold_rows(pool, head, all < most ? all : most);
        teams.for_each(1, [&](auto& team, Index) { work(team, i); });
      }
      trim_rows(pool, head);
    }
  }
}

/// Whether the rank of a state was cut for want of component rows, and not by its own
/// configuration.
template <class Policy>
SINKSTATE_HOST_DEVICE bool lacked_rows(const SinkStateView<Policy>& state,
                                       const CompactionReport& done) {
  using State = SinkStateView<Policy>;
  return done.capped && (state.factors.capacity < State::rank_capacity(state.config) ||
                         (State::may_be_dense(state.config) && !state.may_turn_dense()));
}

/// What became of a slot's heads: the largest failure, else whether one was truncated. If all have
/// failed, nothing has changed; if only some have, the slot is blocked.
template <class Policy>
SINKSTATE_HOST_DEVICE Status settle_slot(const StatePoolView<Policy>& pool, Index slot) {
  Status worst = Status::ok;
  Index failures = 0;
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    const Status status = *pool.head(slot, h).status;
    if (status == Status::ok) continue;
    if (status == Status::truncated) {
      if (failures == 0) worst = status;
    } else if (++failures == 1 || status > worst) {
      worst = status;
    }
  }
  SlotRecord& record = pool.slot(slot);
  if (failures == 0) {
    record.blocked = Status::ok;
    record.buffered = 0;
  } else if (failures < pool.config.value_heads) {
    record.blocked = worst;
  }
  return worst;
}

/// Which of many states may be recompressed for their rank.
struct RecompressionGrant {
  Index overgrowth = 0;  ///< states with more do
  Index last = -1;       ///< and those with as much, up to this one
  bool includes(Index i, Index grown) const {
    return grown > overgrowth || (grown == overgrowth && i <= last);
  }
};

/// Shares out the recompressions of a step: states that may not fit otherwise first, then those
/// that have grown most, then in order. What is left of them is in `recompressions`; null: all may.
/// @param grown_of  grown_of(i): overgrowth of state i, at most `most`
template <class GrownOf>
RecompressionGrant share_out(Index count, Index most, const GrownOf& grown_of,
                             Index* recompressions) {
  if (recompressions == nullptr) return {};
  const Index cap = *recompressions < 0 ? 0 : *recompressions;
  const auto above = [&](Index overgrowth) {
    Index states = 0;
    for (Index i = 0; i < count; ++i) states += grown_of(i) > overgrowth ? 1 : 0;
    return states;
  };
  RecompressionGrant grant;
  const Index wanted = above(0);
  if (wanted <= cap) {
    *recompressions = cap - wanted;
    return grant;
  }
  // The least overgrowth that no more states than the cap exceed is in (low, high].
  Index low = 0;
  Index high = most;
  while (high - low > 1) {
    const Index middle = low + (high - low) / 2;
    (above(middle) > cap ? low : high) = middle;
  }
  grant.overgrowth = high;
  Index left = cap - above(high);
  for (Index i = 0; i < count && left > 0; ++i) {
    if (grown_of(i) != high) continue;
    grant.last = i;
    --left;
  }
  *recompressions = 0;
  return grant;
}

template <class Teams, class Policy>
Status compact_slots(Teams& teams, const StatePoolView<Policy>& pool, const std::int32_t* slots,
                     Index entries, bool only_due, Status* statuses, CompactionReport* reports,
                     Index* recompressions) {
  BatchStatus outcome(statuses);
  const Index heads = pool.config.value_heads;
  const auto works = [&](Index b) {
    return pool.config.is_slot(slots[b]) && pool.slot(slots[b]).entry == b;
  };
  for (Index b = 0; b < entries; ++b) {
    Status status = Status::ok;
    if (!pool.config.is_padding(slots[b])) {
      if (!pool.in_use(slots[b]) || pool.slot(slots[b]).entry >= 0) {
        status = Status::invalid_slot;
      } else if (pool.due(slots[b]) || !only_due) {
        SlotRecord& record = pool.slot(slots[b]);
        if (record.blocked != Status::ok) {
          // Some of its heads may be what they were before the failure, and others not.
          status = record.blocked;
        } else if (record.draft >= 0) {
          status = Status::draft_open;
        } else {
          record.entry = static_cast<std::int32_t>(b);
          if (record.buffered > 0) record.bodies.change();
        }
      }
    }
    outcome.set(b, status);
  }
  const auto grown = [&](const SinkStateView<Policy>& state) {
    const Index capacity = SinkStateView<Policy>::rank_capacity(state.config);
    const Index more = state.buffered() > 0 ? overgrowth(state) : 0;
    return more > 0 && state.rank() + state.buffered() > capacity ? capacity : more;
  };
  const auto grown_of = [&](Index i) {
    return works(i / heads) ? grown(pool.state(slots[i / heads], i % heads)) : 0;
  };
  const RecompressionGrant grant =
      share_out(entries * heads, SinkStateView<Policy>::rank_capacity(pool.config.state), grown_of,
                recompressions);
  rewrite_bodies(
      teams, pool, entries * heads,
      [&](Index i) { return works(i / heads) ? Index{slots[i / heads]} : Index{-1}; },
      [](const auto& view) { return rows_to_compact(view); },
      [&](auto& team, Index i, const auto& view) {
        CompactionReport done;
        const Status status = compact(team, view, &done, grant.includes(i, grown(view)));
        if (status == Status::ok && reports != nullptr) reports[i] = done;
        return status == Status::ok && lacked_rows(view, done) ? Status::truncated : status;
      });
  for (Index b = 0; b < entries; ++b) {
    if (!works(b)) continue;
    pool.slot(slots[b]).entry = -1;
    outcome.set(b, settle_slot(pool, slots[b]));
  }
  return outcome.first();
}

}  // namespace detail

/// Folds the buffers of requests into their bodies: `compact` on every head, to the bit, as long as
/// a state has the component rows that it needs. One that lacks them drops its weakest terms
/// (truncated); within the quota none does.
///
/// @param slots     entries; padding is skipped
/// @param statuses  if not null, one for each entry: invalid_slot (also for a slot named twice),
///                  draft_open, truncated, overflow, workspace_too_small. A slot of which some
///                  heads overflow and others have been compacted goes no further until it is
///                  released or reset: `step` and `compact` answer with the same status.
/// @param reports   if not null, entries x value_heads; of entries that are left out or refused,
///                  and of heads that failed, nothing is written
/// @param recompressions  how many states may yet be decomposed whole in this step because their
///                  rank has grown too far (LocalSvd), less those of this call on return; null: all
///                  that have. The others are compacted like any and come to their turn at a later
///                  compaction, of one call first those whose rank has grown furthest; layers that
///                  share a number should take turns at being first. States whose terms may not fit
///                  otherwise come before those, and if they do not, are decomposed in any case.
/// @returns a status that is not ok, if an entry has one
/// Allocates nothing. The work of `compact` on single states.
template <class Teams, class Policy>
Status compact(Teams& teams, StatePoolView<Policy> pool, const std::int32_t* slots, Index entries,
               Status* statuses = nullptr, CompactionReport* reports = nullptr,
               Index* recompressions = nullptr) noexcept {
  return detail::compact_slots(teams, pool, slots, entries, false, statuses, reports,
                               recompressions);
}

/// `compact` for those of the requests that are due (`StatePoolView::due`); others, and open drafts,
/// are left as they are, and ok.
template <class Teams, class Policy>
Status compact_due(Teams& teams, StatePoolView<Policy> pool, const std::int32_t* slots,
                   Index entries, Status* statuses = nullptr, CompactionReport* reports = nullptr,
                   Index* recompressions = nullptr) noexcept {
  return detail::compact_slots(teams, pool, slots, entries, true, statuses, reports,
                               recompressions);
}

SINKSTATE_NAMESPACE_END
