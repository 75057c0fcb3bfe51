/// @file
/// Rows on their way from global to shared memory, for which nobody waits until they are used.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Copies that the lanes of a warp ask for together, up to `Depth` times before they wait for the
/// first.
///
/// From compute capability 9.0 on a row takes one instruction of one lane, and its bytes are counted
/// by a barrier in shared memory; before that the lanes copy 16 bytes each. Rows that are not
/// aligned to 16 bytes are copied number by number, there and then.
template <int Depth, bool Aligned>
class WarpCopies {
 public:
  struct Barriers {
    std::uint64_t of_slot[Depth];
  };

  __device__ explicit WarpCopies(Barriers& barriers)
      : barriers_(static_cast<unsigned>(__cvta_generic_to_shared(barriers.of_slot))) {
#if __CUDA_ARCH__ >= 900
    if constexpr (Aligned) {
      if (lane() < Depth) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers_ + 8 * lane())
                     : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      __syncwarp();
    }
#endif
  }

  /// Asks for a row each of the first `Rows` lanes; `bytes` 0: none. What the slot held has been
  /// read.
  /// @param all  bytes of all lanes together
  template <class Code, int Rows>
  __device__ void begin(int slot, Code* to, const Code* from, int bytes, int all) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (Aligned) {
      const unsigned barrier = barriers_ + 8 * slot;
      __syncwarp();
      if (lane() == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(all)
                     : "memory");
      }
      if (lane() < Rows && bytes > 0) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
            "l"(from), "r"(bytes), "r"(barrier)
            : "memory");
      }
      return;
    }
#endif
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < Rows; ++row) {
      const auto* const source = reinterpret_cast<const Code*>(
          __shfl_sync(whole_warp, reinterpret_cast<std::uintptr_t>(from), row));
      auto* const target = reinterpret_cast<Code*>(
          __shfl_sync(whole_warp, reinterpret_cast<std::uintptr_t>(to), row));
      const int count = __shfl_sync(whole_warp, bytes, row) / static_cast<int>(sizeof(Code));
      constexpr int step = Aligned ? 16 / static_cast<int>(sizeof(Code)) : 1;
      for (int i = lane() * step; i < count; i += 32 * step) {
        if constexpr (Aligned) {
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                           static_cast<unsigned>(__cvta_generic_to_shared(target + i))),
                       "l"(source + i)
                       : "memory");
        } else {
          target[i] = source[i];
        }
      }
    }
    if constexpr (Aligned) asm volatile("cp.async.commit_group;" ::: "memory");
  }

  /// The rows of a slot are there, for all lanes.
  /// @param round   how often the slot was asked to be filled before
  /// @param behind  how often others were since
  __device__ void wait(int slot, int round, int behind) const {
#if __CUDA_ARCH__ >= 900
    if constexpr (Aligned) {
      unsigned there = 0;
      while (there == 0) {
        asm volatile(
            "{\n"
            ".reg .pred there;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\n"
            "selp.u32 %0, 1, 0, there;\n"
            "}\n"
            : "=r"(there)
            : "r"(barriers_ + 8 * slot), "r"(round & 1)
            : "memory");
      }
      return;
    }
#endif
    if constexpr (Aligned) {
      if (Depth > 1 && behind >= Depth - 1) {
        asm volatile("cp.async.wait_group %0;" ::"n"(Depth - 1) : "memory");
      } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
      }
    }
    __syncwarp();
  }

 private:
  static constexpr unsigned whole_warp = 0xFFFFFFFFu;
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  unsigned barriers_;
};

}  // namespace detail
SINKSTATE_NAMESPACE_END
