/// @file
/// Copies from global to shared memory that nobody waits for until they are used.
#pragma once

#include <cuda_runtime.h>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Begins to copy `Bytes`, of 4, 8 or 16, which both are aligned to; zeros if they are not `there`.
template <int Bytes>
__device__ inline void copy_async(void* to_shared, const void* from, bool there) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
  const int read = there ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(read)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(read),
                 "n"(Bytes)
                 : "memory");
  }
}

/// Ends a group: the copies of this thread since the last.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until of this thread's groups at most the last `Count` are on their way.
template <int Count>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Count) : "memory");
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
