/// @file
/// Bodies that one thread rewrites and another reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Counts how often the bodies of a slot were rewritten, and keeps who reads them on another thread
/// apart from who rewrites. Buffered tokens are no part of a body: stepping goes on meanwhile.
///
/// A writer announces itself by a new version and then waits for readers; a reader announces itself
/// and then looks at the version. So either the reader sees that it comes too late, or the writer
/// sees the reader.
class BodyVersion {
 public:
  std::uint64_t now() const noexcept { return version_.load(); }

  /// Before bodies are rewritten. Waits for readers, which read one body at a time.
  void change() noexcept {
    version_.fetch_add(1);
    while (readers_.load() != 0) std::this_thread::yield();
  }

#if defined(__CUDACC__)
  /// `change` by one thread of a kernel: who reads bodies of a device does so on the stream.
  __device__ void change_in_kernel() noexcept {
    *reinterpret_cast<volatile std::uint64_t*>(&version_) =
        *reinterpret_cast<const volatile std::uint64_t*>(&version_) + 1;
  }
#endif

  /// Before a body is read; `end_read` follows if the answer is yes.
  /// @returns false when the bodies are no longer of that version
  bool begin_read(std::uint64_t version) noexcept {
    readers_.fetch_add(1);
    if (version_.load() == version) return true;
    readers_.fetch_sub(1);
    return false;
  }
  void end_read() noexcept { readers_.fetch_sub(1); }

 private:
  std::atomic<std::uint64_t> version_{0};
  std::atomic<std::int32_t> readers_{0};
};

SINKSTATE_NAMESPACE_END
