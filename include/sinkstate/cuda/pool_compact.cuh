/// @file
/// Compaction of a pool on a device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../algorithm/compact.hpp"
#include "../algorithm/pool_compact.hpp"
#include "../config.hpp"
#include "../core/status.hpp"
#include "rewrite_bodies.cuh"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

struct MayCompact {
  bool only_due = false;

  template <class Policy>
  __device__ Permission operator()(const StatePoolView<Policy>& pool, Index slot) const {
    const SlotRecord& record = pool.slot(slot);
    if (only_due && !pool.due(slot)) return {};
    if (record.blocked != Status::ok) return {false, record.blocked};
    if (record.draft >= 0) return {false, Status::draft_open};
    return {true, Status::ok};
  }
};

struct RowsToCompact {
  template <class View>
  __device__ Index operator()(const View& view) const {
    return rows_to_compact(view);
  }
};

struct CompactBody {
  template <class View>
  __device__ Status operator()(WarpTeam& team, Index, Index, const View& view) const {
    CompactionReport done;
    const Status status = compact(team, view, &done);
    return status == Status::ok && lacked_rows(view, done) ? Status::truncated : status;
  }
};

struct SettleSlot {
  template <class Policy>
  __device__ Status operator()(const StatePoolView<Policy>& pool, Index slot, Index) const {
    return settle_slot(pool, slot);
  }
};

template <class Policy>
cudaError_t compact_slots(const CudaTeams& teams, const StatePoolView<Policy>& pool,
                          const std::int32_t* slots, Index entries, bool only_due,
                          Status* statuses) {
  return rewrite_pool(teams, pool, {slots, entries}, workspace_bytes<Policy>(pool.config.state),
                      MayCompact{only_due}, RowsToCompact{}, CompactBody{}, SettleSlot{}, statuses,
                      [] {});
}

}  // namespace detail

/// `compact` of host pools, equal up to rounding; a warp a state.
///
/// Rows of the reserve are granted in the order of the batch before any state is compacted, and what
/// is left of them is given back afterwards: where the reserve is short, a state may get fewer than
/// on a host, which serves states one after another.
///
/// @param slots     entries numbers in device memory; padding is skipped
/// @param statuses  if not null, one for each entry, in device memory
/// @returns an error of the launch; cudaErrorInvalidValue for scratch below `cuda_scratch_bytes` of
///          one team
/// Nothing waits, nothing is allocated.
template <class Policy>
[[nodiscard]] cudaError_t compact(CudaTeams teams, StatePoolView<Policy> pool,
                                  const std::int32_t* slots, Index entries,
                                  Status* statuses = nullptr) {
  return detail::compact_slots(teams, pool, slots, entries, false, statuses);
}

/// `compact` for those of the requests that are due; which these are is known on the device alone,
/// so that a captured graph may hold it.
template <class Policy>
[[nodiscard]] cudaError_t compact_due(CudaTeams teams, StatePoolView<Policy> pool,
                                      const std::int32_t* slots, Index entries,
                                      Status* statuses = nullptr) {
  return detail::compact_slots(teams, pool, slots, entries, true, statuses);
}

SINKSTATE_NAMESPACE_END
