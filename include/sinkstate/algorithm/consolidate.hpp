/// @file
/// The frozen terms of a state decomposed among themselves, in steps that can be apart in time and
/// place: docs/mathematics.md, section 4, and docs/design.md, "Consolidation
/// and staggering".
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "../model/pool_slots.hpp"
#include "../model/sink_state.hpp"
#include "../model/state_pool.hpp"
#include "keep.hpp"
#include "local_svd.hpp"
#include "recompress.hpp"
#include "sink_split.hpp"
#include "storage.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// The frozen terms of one state on their way through a consolidation, over memory of somebody
/// else: downloaded, then decomposed, then in the form in which the state stores them.
template <class Policy>
struct FrozenPart {
  using T = typename Policy::Compute;

  /// What is known of it beside the numbers.
  struct Record {
    Index active = 0;    ///< terms of the state that stay as they are
    Index before = 0;    ///< frozen terms of the state
    Index count = 0;     ///< those that it is to have; as many as before: it stays as it is
    T reference = 0;     ///< the strongest of what stays as it is
    double dropped = 0;  ///< as in `CompactionReport`
    double rounded = 0;
    CompactionRounding<T> rounding;
    std::int64_t event = 0;  ///< of the rounding

    bool changes() const { return count < before; }
  };

  Record* record = nullptr;
  MatrixView<T> keys;  // rank_capacity x d_k
  MatrixView<T> values;
  T* strengths = nullptr;
  LowRankFactorsView<T, typename Policy::Stored> stored;
  std::int32_t* order = nullptr;  // terms of the state, as they are to follow one another

  static FrozenPart carve(Workspace& memory, const StateConfig& config) {
    const Index most = SinkStateView<Policy>::rank_capacity(config);
    FrozenPart part;
    part.record = memory.take<Record>(1);
    part.keys = memory.take_matrix<T>(most, config.d_k);
    part.values = memory.take_matrix<T>(most, config.d_v);
    part.strengths = memory.take<T>(most);
    part.stored = decltype(part.stored)::carve(memory, config.d_k, config.d_v, most);
    part.order = memory.take<std::int32_t>(most);
    return part;
  }
};

/// Copies the frozen terms of a state. Reads its body and sink, and nothing that stepping writes.
template <class Team, class Policy>
void download(Team& team, const SinkStateView<Policy>& state, const FrozenPart<Policy>& part) {
  using T = typename Policy::Compute;
  const StateConfig& config = state.config;
  auto& record = *part.record;
  record = {};
  const Index rank = state.rank();
  const Index active = SinkStateView<Policy>::active(config);
  record.active = rank < active ? rank : active;
  record.before = record.count = rank - record.active;
  // Compactions round with the numbers from 1 on, an initialisation with 0. Between two compactions
  // the rank falls with each consolidation that rounds.
  record.event = -2 - (state.record->compactions * (largest_size + 1) + rank);
  for (Index i = 0; i < record.active; ++i) {
    if (state.factors.strength(i) > record.reference) record.reference = state.factors.strength(i);
  }
  if constexpr (Policy::Sink::present) {
    SinkSplit<T> split;
    split.prepare(team, config.d_v, state.sink_direction);
    Workspace memory = team.workspace();
    T* const widened = memory.take<T>(config.d_k);
    const T sink = split.strength(team, config.d_k, read_row(team, state.sink, 0, widened));
    if (sink > record.reference) record.reference = sink;
  }
  for (Index i = 0; i < record.before; ++i) {
    const Index term = record.active + i;
    T* const key = part.keys.row(i);
    T* const value = part.values.row(i);
    team.copy(config.d_k, read_row(team, state.factors.keys(), term, key), key);
    team.copy(config.d_v, read_row(team, state.factors.values(), term, value), value);
    part.strengths[i] = state.factors.strength(term);
  }
}

/// Replaces the terms by those of their singular value decomposition that are at least epsilon
/// times the strongest of the state, if those are fewer.
/// @returns workspace_too_small
template <class Team, class Policy>
Status decompose_part(Team& team, const StateConfig& config, const FrozenPart<Policy>& part) {
  using T = typename Policy::Compute;
  auto& record = *part.record;
  if (record.before < 2) return Status::ok;
  Workspace memory = team.workspace();
  auto list = TermList<T, typename Policy::Backend::Core>::carve(
      memory, SinkStateView<Policy>::rank_capacity(config), config.d_k, config.d_v);
  if (memory.exhausted()) return Status::workspace_too_small;
  list.count = record.before;
  for (Index i = 0; i < record.before; ++i) {
    team.copy(config.d_k, static_cast<const T*>(part.keys.row(i)), list.keys.row(i));
    team.copy(config.d_v, static_cast<const T*>(part.values.row(i)), list.values.row(i));
    list.weights[i] = part.strengths[i];
  }
  const auto terms = decompose(team, list);
  const T strongest = terms.count > 0 ? terms.strength(0) : T(0);
  if (!std::isfinite(strongest)) return Status::ok;  // the terms stay apart
  const T reference = strongest > record.reference ? strongest : record.reference;
  const Index kept = terms.above(static_cast<T>(config.epsilon) * reference);
  if (kept >= record.before) return Status::ok;

  record.count = kept;
  for (Index i = 0; i < kept; ++i) {
    terms.form(team, i, part.keys.row(i), part.values.row(i));
    part.strengths[i] = terms.strength(i);
  }
  const double roundoffs =
      tail_roundoffs(config.d_k, config.d_v, terms.orthogonalized, terms.sweeps);
  record.dropped =
      static_cast<double>(terms.norm_from(kept)) * (1.0 + unit_roundoff<T> * roundoffs);
  record.rounding.roundoffs = recompress_roundoffs(config.d_k, config.d_v, record.before);
  if (StoredAs<typename Policy::Stored>::narrow) record.rounding.roundoffs += 8.0;  // (N15)
  record.rounding.rotations = terms.rotation_error;
  return Status::ok;
}

/// Rounds the terms to the format in which the state stores them.
/// @returns workspace_too_small
template <class Team, class Policy>
Status store_part(Team& team, const StateConfig& config, const FrozenPart<Policy>& part) {
  using T = typename Policy::Compute;
  auto& record = *part.record;
  if (!record.changes()) return Status::ok;
  Workspace memory = team.workspace();
  const auto scratch = TermScratch<T>::carve(memory, config.d_k, config.d_v);
  if (memory.exhausted()) return Status::workspace_too_small;
  *part.stored.rank = static_cast<std::int32_t>(record.count);
  SinkStateView<Policy> target;
  target.config = config;
  target.factors = part.stored;
  const StorageRounding storage(config, record.event);
  TermWriter<Policy> writer(target, storage, scratch);
  for (Index i = 0; i < record.count; ++i) {
    writer.write(team, i, part.keys.row(i), part.values.row(i), part.strengths[i], true);
  }
  record.rounded = static_cast<double>(writer.change());
  return Status::ok;
}

/// Puts the terms into the rows of those that they replace, and all terms in falling order. The
/// terms move, the list does not: its first rows are the state's own (`Head::first_row`). Rows that
/// are left over are `trim_rows`' business. Whoever calls has made sure that the state still is the
/// one that was downloaded.
template <class Policy>
void swap_part(const StatePoolView<Policy>& pool, Index slot, Index head_index,
               const FrozenPart<Policy>& part) {
  using T = typename Policy::Compute;
  using View = StatePoolView<Policy>;
  const auto& record = *part.record;
  if (!record.changes()) return;
  const auto head = pool.head(slot, head_index);
  const StateConfig& config = pool.config.state;
  const T before = strengths_sum(pool.state(slot, head_index));
  const Index width = config.d_k + config.d_v;
  const auto width_bytes = static_cast<std::size_t>(width) * sizeof(typename View::Code);
  const Index scales = View::Factors::row_scales(config.d_k, config.d_v);
  const Index rank = record.active + record.count;

  // The active terms are sorted in front of those of the part: equal ones keep their order.
  const auto strength_of = [&](Index term) {
    return term < record.active ? pool.strengths[head.list[term]]
                                : part.stored.strengths[term - record.active];
  };
  for (Index i = 0; i < rank; ++i) {
    Index place = i;
    for (; place > 0 && strength_of(part.order[place - 1]) < strength_of(i); --place) {
      part.order[place] = part.order[place - 1];
    }
    part.order[place] = static_cast<std::int32_t>(i);
  }
  Index stay = 0;
  while (stay < record.active && part.order[stay] == stay) ++stay;
  // Active terms that move are first copied behind those of the part, where there is room for all
  // terms of a state.
  for (Index i = stay; i < record.active; ++i) {
    const Index row = head.list[i];
    const Index copy = record.count + i;
    std::memcpy(part.stored.components + copy * width, pool.components + row * width, width_bytes);
    for (Index n = 0; n < 2 && scales > 0; ++n) {
      part.stored.scales[2 * copy + n] = pool.scales[row * scales + n];
    }
    part.stored.strengths[copy] = pool.strengths[row];
  }
  for (Index i = stay; i < rank; ++i) {
    const Index term = part.order[i];
    const Index copy = term < record.active ? record.count + term : term - record.active;
    const Index row = head.list[i];
    std::memcpy(pool.components + row * width, part.stored.components + copy * width, width_bytes);
    for (Index n = 0; n < 2 && scales > 0; ++n) {
      pool.scales[row * scales + n] = part.stored.scales[2 * copy + n];
    }
    pool.strengths[row] = part.stored.strengths[copy];
  }
  *head.rank = static_cast<std::int32_t>(rank);
  if (rank < head.record->settled_rank) head.record->settled_rank = rank;

  // docs/mathematics.md, (16).
  const auto& buffer = head.buffer;
  const T rounding =
      unit_roundoff<T> * bound_product(static_cast<T>(record.rounding.roundoffs), buffer.masses[0]);
  const T error =
      static_cast<T>(record.dropped + record.rounded) + record.rounding.rotations + rounding;
  // Sums of so many numbers, each a little wrong.
  const T wrong = unit_roundoff<T> * static_cast<T>(2 * (record.active + record.before));
  const T heavier =
      strengths_sum(pool.state(slot, head_index)) * (T(1) + wrong) - before * (T(1) - wrong);
  for (Index j = 0; j <= *buffer.count; ++j) {
    buffer.certificates[j] = round_up(buffer.certificates[j] + error);
    if (heavier > T(0)) buffer.masses[j] = round_up(buffer.masses[j] + heavier);
  }
}

/// Gives the rows back that no body of a slot is in any longer. @returns how many
template <class Policy>
Index trim_slot(const StatePoolView<Policy>& pool, Index slot) {
  Index rows = 0;
  for (Index h = 0; h < pool.config.value_heads; ++h) {
    const auto head = pool.head(slot, h);
    rows += *head.held - rows_in_use(pool, head);
    trim_rows(pool, head);
  }
  return rows;
}

/// Scratch of `consolidate`: the part on its way comes behind what decomposes it.
template <class Policy>
FrozenPart<Policy> consolidation_scratch(const StateConfig& config, Workspace& memory) {
  using T = typename Policy::Compute;
  TermList<T, typename Policy::Backend::Core>::carve(
      memory, SinkStateView<Policy>::rank_capacity(config), config.d_k, config.d_v);
  return FrozenPart<Policy>::carve(memory, config);
}

}  // namespace detail

/// Decomposes the frozen terms of a request among themselves, here and now, which merges what has
/// been added to the same directions at different times (paper 1, section 4.3); what `Consolidator`
/// does on other threads, to the bit. Terms that a compaction would decompose, buffered tokens and
/// counters stay as they are. A state changes only if its rank falls; what it loses, each by at most
/// epsilon times its strongest term, its certificate holds: docs/mathematics.md, (16).
///
/// @param rank_removed  if not null, terms fewer in all heads
/// @returns invalid_slot, workspace_too_small, or the status of a compaction or initialisation that
///          has failed; ok without effect on dense bodies
/// Allocates nothing. O((d_k + d_v) f^2 + f^3) for f frozen terms, each head.
template <class Teams, class Policy>
Status consolidate(Teams& teams, StatePoolView<Policy> pool, Index slot,
                   Index* rank_removed = nullptr) noexcept {
  static_assert(detail::freezes<Policy>, "consolidate: only LocalSvd has frozen terms");
  if (!pool.in_use(slot)) return Status::invalid_slot;
  SlotRecord& record = pool.slot(slot);
  if (record.blocked != Status::ok) return record.blocked;
  record.bodies.change();
  const Index heads = pool.config.value_heads;
  teams.for_each(heads, [&](auto& team, Index h) {
    Workspace memory = team.workspace();
    const auto part = detail::consolidation_scratch<Policy>(pool.config.state, memory);
    if (memory.exhausted()) {
      detail::raise(record.failed, Status::workspace_too_small);
      return;
    }
    const auto state = pool.state(slot, h);
    detail::download(team, state, part);
    (void)detail::decompose_part(team, state.config, part);
    (void)detail::store_part(team, state.config, part);
    detail::swap_part(pool, slot, h, part);
  });
  const Index removed = detail::trim_slot(pool, slot);
  if (rank_removed != nullptr) *rank_removed = removed;
  return detail::take_failure(record.failed);
}

SINKSTATE_NAMESPACE_END
