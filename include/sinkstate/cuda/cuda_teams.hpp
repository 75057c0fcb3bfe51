/// @file
/// Where pools on a device are worked on.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// A stream, and scratch in device memory: what a verb on a pool of a `Cuda` policy is given in the
/// place of threads.
///
/// Such a verb puts kernels on the stream and returns what `cudaGetLastError` says of the launch. It
/// neither waits nor allocates, so that it can be captured into a graph; statuses come to device
/// memory. Two verbs that may run at the same time need scratch of their own.
struct CudaTeams {
  cudaStream_t stream = nullptr;
  /// Aligned to 256, as `cudaMalloc` gives it. For compaction and initialisation; `step` needs none.
  void* scratch = nullptr;
  std::size_t scratch_bytes = 0;  ///< `cuda_scratch_bytes`

  explicit CudaTeams(cudaStream_t on, void* memory = nullptr, std::size_t size = 0)
      : stream(on), scratch(memory), scratch_bytes(size) {}
};

SINKSTATE_NAMESPACE_END
