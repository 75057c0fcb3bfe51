/// @file
/// Kernels in which a warp at a time rewrites the body of a state: compaction and initialisation.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "../algorithm/pool_compact.hpp"
#include "../algorithm/workspace_bytes.hpp"
#include "../config.hpp"
#include "../core/status.hpp"
#include "../model/pool_slots.hpp"
#include "../model/state_pool.hpp"
#include "claim_slots.cuh"
#include "cuda_teams.hpp"
#include "pool_slots.cuh"
#include "warp_team.cuh"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Scratch begins with the number of the next state that nobody has taken.
inline constexpr std::size_t counter_bytes = 256;

inline constexpr std::size_t padded_team(std::size_t bytes) {
  return (bytes + counter_bytes - 1) / counter_bytes * counter_bytes;
}

/// The entries of a call and the slots that they name.
struct SlotList {
  const std::int32_t* slots = nullptr;
  Index entries = 0;

  /// Whether entry b works on its slot.
  template <class Policy>
  __device__ bool works(const StatePoolView<Policy>& pool, Index b) const {
    return pool.config.is_slot(slots[b]) && pool.slot(slots[b]).entry == b;
  }
};

/// Whether an entry works on its slot, and what it hears before it does.
struct Permission {
  bool works = false;
  Status status = Status::ok;
};

/// Which entries work, in the order of the batch; one block.
/// @param may_work  may_work(pool, slot): of a slot that is in use
template <class Policy, class MayWork>
__global__ void __launch_bounds__(claiming_threads)
    claim_bodies(const __grid_constant__ StatePoolView<Policy> pool, SlotList list,
                 MayWork may_work, unsigned long long* counter, Status* statuses) {
  const auto permission = [&](Index b) -> Permission {
    if (pool.config.is_padding(list.slots[b])) return {};
    if (!pool.in_use(list.slots[b])) return {false, Status::invalid_slot};
    return may_work(pool, list.slots[b]);
  };
  if (threadIdx.x == 0) *counter = 0;
  for (Index b = threadIdx.x; b < list.entries; b += blockDim.x) {
    const Permission given = permission(b);
    if (given.works) claim(pool.slot(list.slots[b]), b);
    if (statuses != nullptr) statuses[b] = given.status;
  }
  __syncthreads();
  for (Index b = threadIdx.x; b < list.entries; b += blockDim.x) {
    if (!permission(b).works) continue;
    SlotRecord& record = pool.slot(list.slots[b]);
    if (record.entry == b) {
      record.bodies.change_in_kernel();
    } else if (statuses != nullptr) {
      statuses[b] = Status::invalid_slot;
    }
  }
}

/// Rows of the reserve, as many as states may need beyond their quotas, in the order of the batch as
/// far as there are any; one block. What a state does not need it gives back in `settle_bodies`.
template <class Policy, class Need>
__global__ void __launch_bounds__(claiming_threads)
    grant_rows(const __grid_constant__ StatePoolView<Policy> pool, SlotList list, Need need) {
  using Scan = cub::BlockScan<Index, claiming_threads>;
  __shared__ typename Scan::TempStorage scratch;
  const Index heads = pool.config.value_heads;
  const Index quota = pool.quota(pool.config);
  const Index each = (list.entries * heads + claiming_threads - 1) / claiming_threads;
  const auto visit = [&](const auto& with) {
    for (Index i = threadIdx.x * each; i < (threadIdx.x + 1) * each; ++i) {
      if (i >= list.entries * heads || !list.works(pool, i / heads)) continue;
      const Index slot = list.slots[i / heads];
      const auto head = pool.head(slot, i % heads);
      const Index held = *head.held;
      const Index wanted = need(pool.state(slot, i % heads));
      with(head, beyond_quota(pool, wanted) - beyond_quota(pool, held));
    }
  };
  Index wanted = 0;
  visit([&](const auto&, Index rows) { wanted += rows > 0 ? rows : 0; });
  Index before = 0;
  Index all = 0;
  Scan(scratch).ExclusiveSum(wanted, before, all);
  const Index free = *pool.reserve.free;
  __syncthreads();
  visit([&](const auto& head, Index rows) {
    for (; rows > 0 && before < free; --rows, ++before) {
      while (*head.held < quota) {
        head.list[*head.held] = static_cast<std::int32_t>(head.first_row + *head.held);
        *head.held += 1;
      }
      head.list[*head.held] = pool.reserve.rows[free - 1 - before];
      *head.held += 1;
    }
  });
  if (threadIdx.x == 0) *pool.reserve.free = free - (all < free ? all : free);
}

/// A warp takes one state after another.
/// @param rewrite  rewrite(team, entry, head, view): its status
template <class Policy, class Rewrite>
__global__ void __launch_bounds__(32)
    rewrite_bodies(const __grid_constant__ StatePoolView<Policy> pool, SlotList list,
                   const __grid_constant__ Rewrite rewrite, unsigned char* scratch,
                   std::size_t team_bytes) {
  auto* const counter = reinterpret_cast<unsigned long long*>(scratch);
  const Index heads = pool.config.value_heads;
  WarpTeam team(scratch + counter_bytes + blockIdx.x * team_bytes, team_bytes);
  while (true) {
    unsigned long long taken = 0;
    if (threadIdx.x == 0) taken = atomicAdd(counter, 1ull);
    const auto i = static_cast<Index>(__shfl_sync(0xFFFFFFFFu, taken, 0));
    if (i >= list.entries * heads) return;
    const Index b = i / heads;
    if (!list.works(pool, b)) continue;
    const Index slot = list.slots[b];
    const auto head = pool.head(slot, i % heads);
    const Index held = *head.held;
    const Index quota = pool.quota(pool.config);
    __syncwarp();
    // A state has its quota for nothing.
    for (Index r = held + threadIdx.x; r < quota; r += 32) {
      head.list[r] = static_cast<std::int32_t>(head.first_row + r);
    }
    if (threadIdx.x == 0 && held < quota) *head.held = static_cast<std::int32_t>(quota);
    __syncwarp();
    const Status status = rewrite(team, b, i % heads, pool.state(slot, i % heads));
    __syncwarp();
    if (threadIdx.x == 0) *head.status = status;
  }
}

/// Rows that are not needed go back, and every entry hears what became of it; one warp, or where
/// there is no reserve one an entry.
/// @param settle  settle(slot, entry, status): what follows for the slot
template <class Policy, class Settle>
__global__ void __launch_bounds__(32)
    settle_bodies(const __grid_constant__ StatePoolView<Policy> pool, SlotList list,
                  const __grid_constant__ Settle settle, Status* statuses) {
  for (Index b = blockIdx.x; b < list.entries; b += gridDim.x) {
    if (!list.works(pool, b)) continue;
    const Index slot = list.slots[b];
    shrink_heads(pool, slot, [&](const auto& head) { return rows_in_use(pool, head); });
    if (threadIdx.x == 0) {
      const Status status = settle(pool, slot, b);
      if (statuses != nullptr) statuses[b] = status;
      pool.slot(slot).entry = -1;
    }
    __syncwarp();
  }
}

/// @param check  check(): what is launched between the claim and the work
/// @returns cudaErrorInvalidValue for scratch that has no room for a team
template <class Policy, class MayWork, class Need, class Rewrite, class Settle, class Check>
cudaError_t rewrite_pool(const CudaTeams& teams, const StatePoolView<Policy>& pool, SlotList list,
                         std::size_t team_bytes, const MayWork& may_work, const Need& need,
                         const Rewrite& rewrite, const Settle& settle, Status* statuses,
                         const Check& check) {
  if (list.entries == 0) return cudaSuccess;
  const std::size_t each = padded_team(team_bytes);
  if (teams.scratch == nullptr || teams.scratch_bytes < counter_bytes + each) {
    return cudaErrorInvalidValue;
  }
  const auto room = static_cast<Index>((teams.scratch_bytes - counter_bytes) / each);
  const Index states = list.entries * pool.config.value_heads;
  auto* const scratch = static_cast<unsigned char*>(teams.scratch);
  claim_bodies<<<1, claiming_threads, 0, teams.stream>>>(
      pool, list, may_work, reinterpret_cast<unsigned long long*>(scratch), statuses);
  check();
  const bool shares = pool.config.reserve > 0;
  if (shares) grant_rows<<<1, claiming_threads, 0, teams.stream>>>(pool, list, need);
  rewrite_bodies<<<blocks_of(states < room ? states : room), 32, 0, teams.stream>>>(
      pool, list, rewrite, scratch, each);
  settle_bodies<<<shares ? 1u : blocks_of(list.entries), 32, 0, teams.stream>>>(pool, list, settle,
                                                                                statuses);
  return cudaGetLastError();
}

}  // namespace detail

/// Bytes of scratch for up to `teams` warps at once, for every verb on pools of this policy.
/// @throws Error as `workspace_bytes`
template <class Policy, class Method = RandomizedSvd>
std::size_t cuda_scratch_bytes(const StateConfig& config, Index teams = 1024,
                               const Method& method = {}) {
  return detail::counter_bytes +
         static_cast<std::size_t>(detail::in_range(1, Index{1} << 20, "teams", teams)) *
             detail::padded_team(workspace_bytes<Policy>(config, method));
}

SINKSTATE_NAMESPACE_END
