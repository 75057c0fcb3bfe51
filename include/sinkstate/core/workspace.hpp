/// @file
/// Memory that one walk first counts and then carves.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../config.hpp"
#include "matrix_view.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// A stretch of bytes from which pieces are taken in order, each aligned to 64 bytes.
///
/// A default-constructed workspace only counts: `take` returns null and `used()` grows. Whoever
/// lays something out writes the walk once; run on a counting workspace it is the size, run on real
/// bytes it is the layout.
class Workspace {
 public:
  static constexpr std::size_t alignment = 64;

  Workspace() = default;
  /// @param bytes aligned to `alignment`
  SINKSTATE_HOST_DEVICE Workspace(void* bytes, std::size_t size)
      : base_(static_cast<unsigned char*>(bytes)), size_(size) {}

  /// `count` numbers, uninitialised. Null while counting and when the bytes do not suffice (see
  /// `exhausted`).
  template <class T>
  SINKSTATE_HOST_DEVICE T* take(Index count) {
    T* const piece = pack<T>(count);
    align(alignment);
    return exhausted() ? nullptr : piece;
  }

  /// As `take`, but aligned only as far as T needs it: for small pieces side by side.
  template <class T>
  SINKSTATE_HOST_DEVICE T* pack(Index count) {
    align(alignof(T));
    const std::size_t start = used_;
    used_ += static_cast<std::size_t>(count) * sizeof(T);
    return exhausted() ? nullptr : reinterpret_cast<T*>(base_ + start);
  }
  /// Skips to a multiple of `bytes`.
  SINKSTATE_HOST_DEVICE void align(std::size_t bytes) {
    used_ = (used_ + bytes - 1) / bytes * bytes;
  }

  /// `rows` rows of `cols` numbers, each row aligned and padded to whole sixteens.
  template <class T>
  SINKSTATE_HOST_DEVICE MatrixView<T> take_matrix(Index rows, Index cols) {
    const Index stride = (cols + 15) / 16 * 16;
    return MatrixView<T>{take<T>(rows * stride), rows, cols, stride};
  }

  SINKSTATE_HOST_DEVICE std::size_t used() const { return used_; }
  /// More was taken than there is: the pieces must not be used.
  SINKSTATE_HOST_DEVICE bool exhausted() const { return base_ == nullptr || used_ > size_; }

 private:
  unsigned char* base_ = nullptr;
  std::size_t size_ = 0;
  std::size_t used_ = 0;
};

SINKSTATE_NAMESPACE_END
