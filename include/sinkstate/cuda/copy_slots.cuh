/// @file
/// Copies of slots on a device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../config.hpp"
#include "../core/status.hpp"
#include "../model/pool_slots.hpp"
#include "../model/state_pool.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

inline constexpr int copying_threads = 128;

/// A grid of as many blocks as there is work; each takes several where there is more.
inline unsigned blocks_of(Index count) {
  return static_cast<unsigned>(count < 1 ? 1 : count < 0x7FFFFFFF ? count : 0x7FFFFFFF);
}

/// One head of one entry a block: those whose entry is noted in the slot that they are copied to.
/// @param done  the last head of an entry takes the note away
template <class Policy>
__global__ void __launch_bounds__(copying_threads)
    copy_heads(const __grid_constant__ StatePoolView<Policy> from_pool, const std::int32_t* from,
               const __grid_constant__ StatePoolView<Policy> to_pool, const std::int32_t* to,
               Index entries, bool done) {
  const Index heads = to_pool.config.value_heads;
  for (Index i = blockIdx.x; i < entries * heads; i += gridDim.x) {
    const Index b = i / heads;
    if (!from_pool.config.is_slot(from[b]) || !to_pool.config.is_slot(to[b])) continue;
    SlotRecord& record = to_pool.slot(to[b]);
    const bool same = from_pool.slots == to_pool.slots && from[b] == to[b];
    if (record.entry != b || same) continue;
    copy_head(from_pool, from[b], to_pool, to[b], i % heads, static_cast<Index>(threadIdx.x),
              static_cast<Index>(blockDim.x));
    if (!done) continue;
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(&record.arrived, 1) != static_cast<int>(heads) - 1) continue;
    record.arrived = 0;
    record.entry = -1;
  }
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
