/// @file
/// A pool on a device, and the life of its requests.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/policy.hpp"
#include "../core/status.hpp"
#include "../model/pool_slots.hpp"
#include "../model/state_pool.hpp"
#include "copy_slots.cuh"
#include "cuda_teams.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Most channels of a key or a value: what a lane can hold in registers.
inline constexpr Index most_channels = 256;

/// Every slot is free, every row of the reserve.
template <class Policy>
__global__ void format_pool(const __grid_constant__ StatePoolView<Policy> pool) {
  const Index thread = Index{blockIdx.x} * blockDim.x + threadIdx.x;
  const Index threads = Index{gridDim.x} * blockDim.x;
  for (Index s = thread; s < pool.config.slots; s += threads) {
    pool.slot(s).entry = -1;
    pool.slot(s).draft = -1;
  }
  const Index first = pool.quota_rows(pool.config);
  const Index count = pool.reserve.capacity;
  for (Index i = thread; i < count; i += threads) {
    pool.reserve.rows[i] = static_cast<std::int32_t>(first + count - 1 - i);
  }
  if (thread == 0) *pool.reserve.free = count;
}

/// Gives back, in the order of the heads, the rows that states have beyond `rows_of(head)`; a warp.
template <class Policy, class RowsOf>
__device__ void shrink_heads(const StatePoolView<Policy>& pool, Index slot, const RowsOf& rows_of) {
  const Index quota = pool.quota(pool.config);
  const Index lane = threadIdx.x % 32;
  for (Index first = 0; first < pool.config.value_heads; first += 32) {
    const Index h = first + lane;
    bool orderly = false;
    if (h < pool.config.value_heads) {
      const auto head = pool.head(slot, h);
      const Index rows = rows_of(head);
      if (*head.held > quota && *head.held > rows) {
        orderly = true;
      } else if (*head.held > rows) {
        *head.held = static_cast<std::int32_t>(rows);
      }
    }
    unsigned left = __ballot_sync(0xFFFFFFFFu, orderly);
    while (lane == 0 && left != 0) {
      const auto head = pool.head(slot, first + __ffs(static_cast<int>(left)) - 1);
      hold_rows(pool, head, rows_of(head));
      left &= left - 1;
    }
    __syncwarp();
  }
}

/// Ends requests (`keep` false) or takes the rows from them that empty states do not need; one warp.
template <class Policy>
__global__ void free_rows(const __grid_constant__ StatePoolView<Policy> pool,
                          const std::int32_t* slots, Index entries, bool keep, Status* statuses) {
  for (Index b = 0; b < entries; ++b) {
    const bool valid = pool.in_use(slots[b]);
    if (threadIdx.x == 0 && statuses != nullptr) {
      statuses[b] = valid ? Status::ok : Status::invalid_slot;
    }
    if (!valid) continue;
    shrink_heads(pool, slots[b], [](const auto&) { return Index{0}; });
    if (threadIdx.x == 0) {
      pool.slot(slots[b]).bodies.change_in_kernel();
      if (!keep) pool.slot(slots[b]).in_use = 0;
    }
    __syncwarp();
  }
}

/// Empty states for new requests, or for those that have their slot; a block an entry.
template <class Policy>
__global__ void empty_slots(const __grid_constant__ StatePoolView<Policy> pool,
                            const std::int32_t* slots, Index entries, bool fresh,
                            Status* statuses) {
  __shared__ Status status;
  for (Index b = blockIdx.x; b < entries; b += gridDim.x) {
    const Index slot = slots[b];
    if (threadIdx.x == 0) {
      status = pool.config.is_slot(slot) ? Status::ok : Status::invalid_slot;
      if (status == Status::ok && fresh && atomicCAS(&pool.slot(slot).in_use, 0, 1) != 0) {
        status = Status::slot_in_use;
      }
      if (!fresh && status == Status::ok && !pool.in_use(slot)) status = Status::invalid_slot;
      if (statuses != nullptr) statuses[b] = status;
    }
    __syncthreads();
    if (status == Status::ok) {
      for (Index h = threadIdx.x; h < pool.config.value_heads; h += blockDim.x) {
        empty_head(pool, slot, h);
      }
      if (threadIdx.x == 0) {
        pool.slot(slot).bodies.change_in_kernel();
        start_request(pool.slot(slot));
      }
    }
    __syncthreads();
  }
}

template <class Policy>
cudaError_t empty_slots(const CudaTeams& teams, const StatePoolView<Policy>& pool,
                        const std::int32_t* slots, Index entries, bool fresh, Status* statuses) {
  if (entries == 0) return cudaSuccess;
  empty_slots<<<blocks_of(entries), copying_threads, 0, teams.stream>>>(pool, slots, entries, fresh,
                                                                        statuses);
  return cudaGetLastError();
}

/// Which copies can be made, in order, and rows for them; one thread.
template <class Policy>
__global__ void claim_copies(const __grid_constant__ StatePoolView<Policy> from_pool,
                             const std::int32_t* from,
                             const __grid_constant__ StatePoolView<Policy> to_pool,
                             const std::int32_t* to, Index entries, Status* statuses) {
  for (Index b = 0; b < entries; ++b) {
    Status status = Status::ok;
    if (!from_pool.in_use(from[b]) || !to_pool.config.is_slot(to[b])) {
      status = Status::invalid_slot;
    } else if (to_pool.in_use(to[b])) {
      status = Status::slot_in_use;
    } else if (from_pool.slots == to_pool.slots && from_pool.slot(from[b]).entry >= 0) {
      status = Status::invalid_slot;  // a copy that is yet to be made is copied
    } else if (!may_copy_slot(from_pool, from[b], to_pool, to[b])) {
      status = Status::pool_exhausted;
    } else {
      to_pool.slot(to[b]).bodies.change_in_kernel();
      hold_copy(from_pool, from[b], to_pool, to[b]);
      to_pool.slot(to[b]).entry = static_cast<std::int32_t>(b);
    }
    if (statuses != nullptr) statuses[b] = status;
  }
}

enum class CursorMove { roll_back, open_draft, close_draft };

/// The verbs of host pools that move cursors; a block an entry.
/// @param tokens  one number an entry; null: 0
template <class Policy>
__global__ void move_cursors(const __grid_constant__ StatePoolView<Policy> pool,
                             const std::int32_t* slots, const std::int32_t* tokens, Index entries,
                             CursorMove move, Status* statuses) {
  __shared__ Status status;
  for (Index b = blockIdx.x; b < entries; b += gridDim.x) {
    const Index count = tokens == nullptr ? 0 : tokens[b];
    if (threadIdx.x == 0) {
      status = Status::invalid_slot;
      if (pool.in_use(slots[b])) {
        SlotRecord& record = pool.slot(slots[b]);
        if (move == CursorMove::open_draft) {
          status = record.draft >= 0 ? Status::draft_open : Status::ok;
          if (status == Status::ok) record.draft = record.buffered;
        } else if (move == CursorMove::close_draft && record.draft < 0) {
          status = Status::draft_open;
        } else {
          const Index drafted = record.buffered - (record.draft > 0 ? record.draft : 0);
          const Index most = move == CursorMove::close_draft ? drafted : Index{record.buffered};
          const bool possible = count >= 0 && count <= most && record.blocked == Status::ok;
          status = possible ? Status::ok : Status::nothing_to_roll_back;
        }
      }
      if (statuses != nullptr) statuses[b] = status;
    }
    __syncthreads();
    if (status == Status::ok && move != CursorMove::open_draft) {
      for (Index h = threadIdx.x; h < pool.config.value_heads; h += blockDim.x) {
        const Status each = roll_back(pool.state(slots[b], h), count);
        static_cast<void>(each);  // the heads have as many as the slot
      }
      if (threadIdx.x == 0) {
        SlotRecord& record = pool.slot(slots[b]);
        record.buffered -= static_cast<std::int32_t>(count);
        record.tokens -= count;
        if (record.draft > record.buffered) record.draft = record.buffered;
        if (move == CursorMove::close_draft) record.draft = -1;
      }
    }
    __syncthreads();
  }
}

template <class Policy>
cudaError_t move_cursors(const CudaTeams& teams, const StatePoolView<Policy>& pool,
                         const std::int32_t* slots, const std::int32_t* tokens, Index entries,
                         CursorMove move, Status* statuses) {
  if (entries == 0) return cudaSuccess;
  move_cursors<<<blocks_of(entries), copying_threads, 0, teams.stream>>>(pool, slots, tokens,
                                                                         entries, move, statuses);
  return cudaGetLastError();
}

}  // namespace detail

/// A pool in the caller's own device memory, without requests, as soon as the stream has come so
/// far. Its bytes are laid out as those of a host pool of the same policy but for the backend: a
/// copy of all of them is that pool, either way (`view_pool`).
///
/// @param memory           `pool_bytes<Policy>(config).total` bytes, aligned to 64, on the device
/// @param sink_directions  value_heads x d_v numbers in device memory that outlive the view; null
///                         data without a sink. They must be as `make_pool` of a host pool wants
///                         them; what cannot be looked at here is not checked.
/// @throws Error for a configuration that cannot be used, also for more than 256 channels of a key
///         or value; for memory too small or misaligned; for a launch that fails
template <class Policy>
StatePoolView<Policy> make_pool(
    CudaTeams teams, void* memory, std::size_t size, const PoolConfig& config,
    const MatrixView<const typename Policy::Compute>& sink_directions = {}) {
  static_assert(std::is_same_v<typename Policy::Compute, float>,
                "make_pool: pools on a device compute in fp32; take another Precision than Fp64");
  const std::size_t wanted = pool_bytes<Policy>(config).total;
  detail::in_range(1, detail::most_channels, "d_k of a pool on a device", config.state.d_k);
  detail::in_range(1, detail::most_channels, "d_v of a pool on a device", config.state.d_v);
  detail::check_memory("memory of a pool", wanted, memory, size);
  if (Policy::Sink::present != (sink_directions.data != nullptr) ||
      (Policy::Sink::present &&
       (sink_directions.rows != config.value_heads || sink_directions.cols != config.state.d_v))) {
    detail::refuse(
        "sink directions",
        Policy::Sink::present
            ? std::to_string(config.value_heads) + " x " + std::to_string(config.state.d_v)
            : "none (NoSink)",
        std::to_string(sink_directions.rows) + " x " + std::to_string(sink_directions.cols));
  }
  Workspace workspace(memory, size);
  const auto pool = StatePoolView<Policy>::carve(workspace, config, sink_directions);
  cudaError_t error = cudaMemsetAsync(memory, 0, wanted, teams.stream);
  if (error == cudaSuccess) {
    detail::format_pool<<<256, 256, 0, teams.stream>>>(pool);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) {
    detail::refuse("make_pool", "a device that works", cudaGetErrorString(error));
  }
  return pool;
}

/// `admit` of host pools for several requests. All arrays are in device memory. Of entries that name
/// the same slot one gets it, whichever comes first on the device.
/// @param statuses  if not null, one for each entry: invalid_slot, slot_in_use
template <class Policy>
[[nodiscard]] cudaError_t admit(CudaTeams teams, StatePoolView<Policy> pool,
                                const std::int32_t* slots, Index entries,
                                Status* statuses = nullptr) {
  return detail::empty_slots(teams, pool, slots, entries, true, statuses);
}

/// `reset` of host pools for several requests, no slot twice. @param statuses  as above: invalid_slot
template <class Policy>
[[nodiscard]] cudaError_t reset(CudaTeams teams, StatePoolView<Policy> pool,
                                const std::int32_t* slots, Index entries,
                                Status* statuses = nullptr) {
  if (entries == 0) return cudaSuccess;
  detail::free_rows<<<1, 32, 0, teams.stream>>>(pool, slots, entries, true, statuses);
  return detail::empty_slots(teams, pool, slots, entries, false, statuses);
}

/// `release` of host pools for several requests. @param statuses  as above: invalid_slot
template <class Policy>
[[nodiscard]] cudaError_t release(CudaTeams teams, StatePoolView<Policy> pool,
                                  const std::int32_t* slots, Index entries,
                                  Status* statuses = nullptr) {
  if (entries == 0) return cudaSuccess;
  detail::free_rows<<<1, 32, 0, teams.stream>>>(pool, slots, entries, false, statuses);
  return cudaGetLastError();
}

/// Gives free slots equal copies of requests, pending tokens included, in the same pool or in one of
/// the same state and heads. So a request leaves the device: into a pool of one slot, whose bytes
/// are copied.
///
/// @param statuses  as above: invalid_slot (also to copy a copy of the same call), slot_in_use,
///                  pool_exhausted
template <class Policy>
[[nodiscard]] cudaError_t copy(CudaTeams teams, StatePoolView<Policy> from_pool,
                               const std::int32_t* from, StatePoolView<Policy> to_pool,
                               const std::int32_t* to, Index entries, Status* statuses = nullptr) {
  if (entries == 0) return cudaSuccess;
  detail::claim_copies<<<1, 1, 0, teams.stream>>>(from_pool, from, to_pool, to, entries, statuses);
  const Index blocks = entries * to_pool.config.value_heads;
  detail::copy_heads<<<detail::blocks_of(blocks), detail::copying_threads, 0, teams.stream>>>(
      from_pool, from, to_pool, to, entries, true);
  return cudaGetLastError();
}

/// `fork` of host pools for several requests. @param statuses  as `copy`
template <class Policy>
[[nodiscard]] cudaError_t fork(CudaTeams teams, StatePoolView<Policy> pool,
                               const std::int32_t* from, const std::int32_t* to, Index entries,
                               Status* statuses = nullptr) {
  return copy(teams, pool, from, pool, to, entries, statuses);
}

/// `roll_back` of host pools for several requests, no slot twice.
/// @param tokens    one number an entry, in device memory
/// @param statuses  as above: invalid_slot, nothing_to_roll_back
template <class Policy>
[[nodiscard]] cudaError_t roll_back(CudaTeams teams, StatePoolView<Policy> pool,
                                    const std::int32_t* slots, const std::int32_t* tokens,
                                    Index entries, Status* statuses = nullptr) {
  return detail::move_cursors(teams, pool, slots, tokens, entries, detail::CursorMove::roll_back,
                              statuses);
}

/// `open_draft` of host pools for several requests, no slot twice.
/// @param statuses  as above: invalid_slot, draft_open
template <class Policy>
[[nodiscard]] cudaError_t open_draft(CudaTeams teams, StatePoolView<Policy> pool,
                                     const std::int32_t* slots, Index entries,
                                     Status* statuses = nullptr) {
  return detail::move_cursors(teams, pool, slots, nullptr, entries, detail::CursorMove::open_draft,
                              statuses);
}

/// `close_draft` of host pools for several requests, no slot twice.
/// @param rejected  one number an entry, in device memory
/// @param statuses  as above: invalid_slot, draft_open, nothing_to_roll_back
template <class Policy>
[[nodiscard]] cudaError_t close_draft(CudaTeams teams, StatePoolView<Policy> pool,
                                      const std::int32_t* slots, const std::int32_t* rejected,
                                      Index entries, Status* statuses = nullptr) {
  return detail::move_cursors(teams, pool, slots, rejected, entries,
                              detail::CursorMove::close_draft, statuses);
}

SINKSTATE_NAMESPACE_END
