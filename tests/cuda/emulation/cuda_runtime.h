// What kernels are written in, on a host. Included before anything else, as nvcc would.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "cuda_runtime_api.h"

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

using std::isfinite;

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulation {

struct Index {
  unsigned x;
};
extern thread_local Index thread, block, block_size, grid_size;

/// What each lane of this thread's warp has brought; returns when all that are left have.
struct Exchange {
  struct Lane {
    bool present = false;
    alignas(16) unsigned char bytes[16] = {};
  };
  Lane lanes[32];
};
const Exchange& exchange(const void* value, std::size_t size);
void wait_for_block();

/// Runs a kernel at once, or when the graph does that the stream is captured into.
void launch(unsigned blocks, unsigned threads, int shared_bytes, cudaStream_t stream,
            const std::function<void()>& kernel);

inline int lane() { return static_cast<int>(thread.x % 32); }
template <class T>
T from_lane(const T& value, int source) {
  static_assert(sizeof(T) <= sizeof(Exchange::Lane::bytes));
  T result;
  std::memcpy(&result, exchange(&value, sizeof value).lanes[source].bytes, sizeof result);
  return result;
}

}  // namespace emulation

#define threadIdx emulation::thread
#define blockIdx emulation::block
#define blockDim emulation::block_size
#define gridDim emulation::grid_size

template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  return emulation::from_lane(value, emulation::lane() ^ distance);
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulation::from_lane(value, source % 32);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const emulation::Exchange& all = emulation::exchange(&vote, sizeof vote);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) {
    if (all.lanes[i].present && all.lanes[i].bytes[0] != 0) votes |= 1u << i;
  }
  return votes;
}
inline int __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }
inline void __syncwarp() { __ballot_sync(0xFFFFFFFFu, false); }
inline void __syncthreads() { emulation::wait_for_block(); }
inline void __threadfence() {}
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Threads take turns, so nobody is between the two accesses.
template <class T, class Combine>
T exchanged(T* place, const Combine& combine) {
  const T before = *place;
  *place = combine(before);
  return before;
}
template <class T>
T atomicAdd(T* place, T value) {
  return exchanged(place, [&](T now) { return static_cast<T>(now + value); });
}
template <class T>
T atomicMax(T* place, T value) {
  return exchanged(place, [&](T now) { return now < value ? value : now; });
}
template <class T>
T atomicMin(T* place, T value) {
  return exchanged(place, [&](T now) { return value < now ? value : now; });
}
template <class T>
T atomicExch(T* place, T value) {
  return exchanged(place, [&](T) { return value; });
}
template <class T>
T atomicCAS(T* place, T wanted, T value) {
  return exchanged(place, [&](T now) { return now == wanted ? value : now; });
}

inline float __uint_as_float(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
