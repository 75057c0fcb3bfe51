/// @file
/// Device memory, a stream, and errors of CUDA as a tool reports them.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include "replay/atomic_file.hpp"

namespace sinkstate::tools {

/// @throws ToolError
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw ToolError(std::string("CUDA: ") + what + ": " + cudaGetErrorString(error));
}

/// A stream that does not wait for others, and copies on it.
class DeviceStream {
 public:
  DeviceStream() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
  }
  ~DeviceStream() { cudaStreamDestroy(stream_); }
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  cudaStream_t get() const { return stream_; }
  /// What the host has may change once the copy returns or, where it is pinned, after `wait`.
  template <class T>
  void upload(const T* from, T* to, std::size_t count) const {
    check_cuda(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, stream_),
               "a copy to the device");
  }
  /// Done after `wait`.
  template <class T>
  void download(const T* from, T* to, std::size_t count) const {
    check_cuda(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToHost, stream_),
               "a copy from the device");
  }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "a kernel"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Numbers in device memory, uninitialised.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) {
    check_cuda(cudaMalloc(&data_, count * sizeof(T)), "device memory");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace sinkstate::tools
