/// @file
/// One token, or several, of a batch of requests: from the tensors of an engine into a pool.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../model/pool_slots.hpp"
#include "../model/state_pool.hpp"
#include "advance.hpp"
#include "storage.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Vectors of contiguous numbers, one a token and head, in a tensor of any strides.
template <class T>
struct HeadVectors {
  T* data = nullptr;
  Index token_stride = 0;
  Index head_stride = 0;

  SINKSTATE_HOST_DEVICE T* at(Index token, Index head) const {
    return data + token * token_stride + head * head_stride;
  }
};

/// What a batch of requests writes and asks. Arrays belong to the caller.
///
/// Entry b has `count(b)` consecutive tokens, the rows from `start(b)` on of each tensor: one for
/// each entry as it is; `tokens` for each; up to `tokens`, as `counts` says, in a padded batch; or
/// as the running sum `starts` says in a packed one.
///
/// @tparam T       of log decays and write strengths: the policy's arithmetic type
/// @tparam Number  of the other tensors: T, or on a device also Float16 or BFloat16 (their codes)
template <class T, class Number = T>
struct TokenBatch {
  using Code = typename detail::StoredAs<Number>::Code;

  Index entries = 0;
  const std::int32_t* slots = nullptr;        ///< entries: where each request's states are read
  const std::int32_t* write_slots = nullptr;  ///< entries: and written; null: the same
  Index tokens = 1;
  const std::int32_t* counts = nullptr;  ///< entries, or null
  const std::int32_t* starts = nullptr;  ///< entries + 1, or null; entries suffice beside `counts`

  HeadVectors<const Code> keys;          ///< d_k numbers, for each key head
  HeadVectors<const Code> queries;       ///< d_k numbers, for each key head
  HeadVectors<const Code> values;        ///< d_v numbers, for each value head
  HeadVectors<const T> log_decays;       ///< Rule::log_decays(d_k) numbers, for each value head
  HeadVectors<const T> write_strengths;  ///< one number, for each value head; null data: 1
  /// d_v numbers, for each value head; null data: advance without reading
  HeadVectors<Code> outputs;

  SINKSTATE_HOST_DEVICE Index write_slot(Index b) const {
    return write_slots == nullptr ? slots[b] : write_slots[b];
  }
  SINKSTATE_HOST_DEVICE Index start(Index b) const {
    return starts == nullptr ? b * tokens : starts[b];
  }
  SINKSTATE_HOST_DEVICE Index count(Index b) const {
    if (counts != nullptr) return counts[b];
    return starts == nullptr ? tokens : Index{starts[b + 1]} - starts[b];
  }
};

namespace detail {

/// Token t of a batch, for a value head.
template <class Policy, class T>
SINKSTATE_HOST_DEVICE Token<T> token_at(const PoolConfig& config, const TokenBatch<T>& batch,
                                        Index t, Index head) {
  Token<T> token;
  token.key = batch.keys.at(t, config.key_head(head));
  token.value = batch.values.at(t, head);
  if (Policy::Rule::decay != Decay::none) token.log_decay = batch.log_decays.at(t, head);
  if (batch.write_strengths.data != nullptr) {
    token.write_strength = *batch.write_strengths.at(t, head);
  }
  return token;
}

/// Whether a slot that is in use takes `count` tokens.
SINKSTATE_HOST_DEVICE inline Status check_count(Status blocked, Index count, Index buffered,
                                                Index capacity) {
  if (blocked != Status::ok) return blocked;
  if (count < 0 || count > capacity) return Status::invalid_argument;
  return count > capacity - buffered ? Status::buffer_full : Status::ok;
}

/// What can be said about an entry without looking at its numbers.
template <class Policy, class T, class Number>
SINKSTATE_HOST_DEVICE Status check_entry(const StatePoolView<Policy>& pool,
                                         const TokenBatch<T, Number>& batch, Index b) {
  const Index from = batch.slots[b];
  if (!pool.in_use(from) || !pool.config.is_slot(batch.write_slot(b))) return Status::invalid_slot;
  const SlotRecord& record = pool.slot(from);
  return check_count(record.blocked, batch.count(b), record.buffered,
                     pool.config.state.buffer_capacity());
}

/// The slot that entry b works on, or none when it is padding or was refused.
template <class Policy, class T>
SINKSTATE_HOST_DEVICE SlotRecord* working_slot(const StatePoolView<Policy>& pool,
                                               const TokenBatch<T>& batch, Index b) {
  const Index to = batch.write_slot(b);
  if (pool.config.is_padding(batch.slots[b]) || !pool.config.is_slot(to)) return nullptr;
  SlotRecord& record = pool.slot(to);
  return record.entry == b && record.status == Status::ok ? &record : nullptr;
}

/// Whether all tokens of an entry may be stepped, head by head.
template <class Team, class Policy, class T>
SINKSTATE_HOST_DEVICE Status check_tokens(Team& team, const StatePoolView<Policy>& pool,
                                          const TokenBatch<T>& batch, Index b) {
  const StateConfig& config = pool.config.state;
  const Index end = batch.start(b) + batch.count(b);
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    const Index key_head = pool.config.key_head(h);
    for (Index t = batch.start(b); t < end; ++t) {
      const Token<T> token = token_at<Policy>(pool.config, batch, t, h);
      T log_decay = T(0);
      const Status checked = check_token<Policy>(team, config, token, log_decay);
      if (checked != Status::ok) return checked;
      if (batch.outputs.data != nullptr &&
          !team.finite(config.d_k, batch.queries.at(t, key_head))) {
        return Status::non_finite_input;
      }
      if (!fits<typename Policy::Buffered>(team, config.d_k, token.key)) return Status::overflow;
    }
  }
  return Status::ok;
}

/// Buffers the keys of an entry behind those of the slot, where nobody reads before the cursors
/// move.
template <class Team, class Policy, class T>
SINKSTATE_HOST_DEVICE void write_keys(Team& team, const StatePoolView<Policy>& pool,
                                      const TokenBatch<T>& batch, Index b) {
  const Index slot = batch.write_slot(b);
  for (Index k = 0; k < pool.config.key_heads; ++k) {
    const auto keys = pool.keys(slot, k);
    for (Index t = 0; t < batch.count(b); ++t) {
      write_row(team, keys, pool.slot(slot).buffered + t, batch.keys.at(batch.start(b) + t, k), {});
    }
  }
}

/// All tokens of an entry into one of its states.
template <class Team, class Policy, class T>
SINKSTATE_HOST_DEVICE Status step_head(Team& team, const StatePoolView<Policy>& pool,
                                       const TokenBatch<T>& batch, Index b, Index head) {
  auto state = pool.state(batch.write_slot(b), head);
  const Index key_head = pool.config.key_head(head);
  for (Index t = batch.start(b); t < batch.start(b) + batch.count(b); ++t) {
    const bool read = batch.outputs.data != nullptr;
    const Status status = buffer_token(team, state, token_at<Policy>(pool.config, batch, t, head),
                                       read ? batch.queries.at(t, key_head) : nullptr,
                                       read ? batch.outputs.at(t, head) : nullptr);
    if (status != Status::ok) return status;
  }
  return Status::ok;
}

/// Announces to a team what it will read when it steps the state after the one at hand, and of the
/// one after that the few lines that must be there by then to do the same for it.
template <class Team, class Policy, class T>
void expect_heads(Team& team, const StatePoolView<Policy>& pool, const TokenBatch<T>& batch,
                  Index i) {
  using View = StatePoolView<Policy>;
  const Index heads = pool.config.value_heads;
  const auto with_head = [&](Index n, const auto& visit) {
    if (n >= batch.entries * heads || working_slot(pool, batch, n / heads) == nullptr) return;
    visit(batch.write_slot(n / heads), n % heads);
  };
  with_head(i + 2, [&](Index slot, Index h) {
    const auto head = pool.head(slot, h);
    const auto* const first = reinterpret_cast<const unsigned char*>(head.buffer.log_decays.data);
    const auto* const last = reinterpret_cast<const unsigned char*>(head.status + 1);
    team.fetch_now(first, static_cast<std::size_t>(last - first));
  });
  with_head(i + 1, [&](Index slot, Index h) {
    const auto state = pool.state(slot, h);
    const StateConfig& config = state.config;
    constexpr int reads = Policy::Rule::corrects ? 2 : 1;
    const Index rows = rows_in_use(pool, pool.head(slot, h));
    for (Index r = 0; r < state.rank(); ++r) team.fetch_now(&state.factors.strength(r), 1);
    team.expect_rows(
        state.factors.components,
        static_cast<std::size_t>(config.d_k + config.d_v) * sizeof(typename View::Code),
        state.factors.list, rows, reads);
    // Keys are read first, so they come last.
    // As they were before this call: another thread may be stepping that state by now.
    const auto buffered = static_cast<std::size_t>(pool.slot(slot).buffered);
    constexpr std::size_t number = sizeof(typename View::BufferedCode);
    team.expect(codes_of(state.buffer.corrections).data,
                buffered * static_cast<std::size_t>(config.d_v) * number, reads);
    team.expect(codes_of(state.buffer.keys).data,
                buffered * static_cast<std::size_t>(config.d_k) * number, reads);
  });
}

/// The first status of a batch that is not ok, as entries report theirs.
class BatchStatus {
 public:
  explicit BatchStatus(Status* statuses) : statuses_(statuses) {}

  void set(Index b, Status status) {
    if (statuses_ != nullptr) statuses_[b] = status;
    if (first_ == Status::ok) first_ = status;
  }
  Status first() const { return first_; }

 private:
  Status* statuses_;
  Status first_ = Status::ok;
};

}  // namespace detail

/// Advances the states of a batch of requests and reads them: `step` on every head, to the bit,
/// whatever else is in the batch and however many threads there are.
///
/// An entry is applied with all its tokens and heads or, unless its status is ok, not at all.
/// Padding is skipped. Only outputs of tokens that are applied are written (when a result
/// overflows, some of that entry's may have been). An entry that writes another slot than it reads
/// forks first, of what that was before the call; what the slot written held is released, and if a
/// result overflows then, it stays a copy. Several entries may read one slot; none may write one
/// that another writes, nor replace one by a fork that another forks.
///
/// @param teams     `HostTeams`, or what else has its `for_each`; `workspace_bytes<Policy>` each
/// @param batch     inputs and outputs lie apart from each other and from the pool
/// @param statuses  if not null, one for each entry; padding is ok. invalid_slot, invalid_argument
///                  (a count below 0 or more than an empty buffer holds), buffer_full,
///                  non_finite_input, positive_log_decay, overflow, workspace_too_small,
///                  pool_exhausted (of a fork), or the status of a compaction or initialisation
///                  that has failed
/// @returns a status that is not ok, if an entry has one
/// Allocates nothing. The work of `step` on single states.
template <class Teams, class Policy>
Status step(Teams& teams, StatePoolView<Policy> pool,
            const TokenBatch<typename Policy::Compute>& batch,
            Status* statuses = nullptr) noexcept {
  using detail::working_slot;
  detail::BatchStatus outcome(statuses);
  const PoolConfig& config = pool.config;
  const auto is_padding = [&](Index b) { return config.is_padding(batch.slots[b]); };

  for (Index b = 0; b < batch.entries; ++b) {
    Status status = Status::ok;
    if (!is_padding(b)) {
      status = detail::check_entry(pool, batch, b);
      if (status == Status::ok) {
        SlotRecord& record = pool.slot(batch.write_slot(b));
        if (record.entry >= 0) {
          status = Status::invalid_slot;
        } else {
          record.entry = static_cast<std::int32_t>(b);
          record.status = Status::ok;
          pool.slot(batch.slots[b]).readers += batch.slots[b] != batch.write_slot(b) ? 1 : 0;
        }
      }
    }
    outcome.set(b, status);
  }
  bool forks = false;
  for (Index b = 0; b < batch.entries; ++b) {
    SlotRecord* const record = working_slot(pool, batch, b);
    if (record == nullptr || batch.slots[b] == batch.write_slot(b)) continue;
    // What another entry is to fork must not be replaced before.
    if (record->readers > 0) {
      record->status = Status::invalid_slot;
    } else {
      forks = true;
    }
  }

  teams.for_each(batch.entries, [&](auto& team, Index b) {
    SlotRecord* const record = working_slot(pool, batch, b);
    if (record == nullptr) return;
    record->status = detail::check_tokens(team, pool, batch, b);
    if (record->status == Status::ok && batch.slots[b] == batch.write_slot(b)) {
      detail::write_keys(team, pool, batch, b);
    }
  });
  for (Index b = 0; forks && b < batch.entries; ++b) {
    SlotRecord* const record = working_slot(pool, batch, b);
    if (record == nullptr || batch.slots[b] == batch.write_slot(b)) continue;
    const Index to = batch.write_slot(b);
    if (detail::may_copy_slot(pool, batch.slots[b], pool, to)) {
      pool.slot(to).bodies.change();
      detail::copy_slot(pool, batch.slots[b], pool, to);
    } else {
      record->status = Status::pool_exhausted;
    }
  }
  if (forks) {
    teams.for_each(batch.entries, [&](auto& team, Index b) {
      if (working_slot(pool, batch, b) == nullptr || batch.slots[b] == batch.write_slot(b)) return;
      detail::write_keys(team, pool, batch, b);
    });
  }

  teams.for_each(batch.entries * config.value_heads, [&](auto& team, Index i) {
    const Index b = i / config.value_heads;
    SlotRecord* const record = working_slot(pool, batch, b);
    if (record == nullptr) return;
    detail::expect_heads(team, pool, batch, i);
    const Status status = detail::step_head(team, pool, batch, b, i % config.value_heads);
    // Lists of rows do not outlive the call; and what is not fetched by now is read next.
    team.forget();
    if (status != Status::ok) detail::raise(record->failed, status);
  });

  for (Index b = 0; b < batch.entries; ++b) {
    if (is_padding(b) || !config.is_slot(batch.write_slot(b))) continue;
    const Index slot = batch.write_slot(b);
    SlotRecord& record = pool.slot(slot);
    if (config.is_slot(batch.slots[b])) pool.slot(batch.slots[b]).readers = 0;
    if (record.entry != b) continue;
    record.entry = -1;
    if (record.status == Status::ok) record.status = detail::take_failure(record.failed);
    if (record.status == Status::ok) {
      record.buffered += static_cast<std::int32_t>(batch.count(b));
      record.tokens += batch.count(b);
      continue;
    }
    outcome.set(b, record.status);
    for (Index h = 0; pool.in_use(slot) && h < config.value_heads; ++h) {
      const auto state = pool.state(slot, h);
      const Index applied = state.buffered() - record.buffered;
      if (applied > 0) (void)roll_back(state, applied);
    }
  }
  return outcome.first();
}

SINKSTATE_NAMESPACE_END
