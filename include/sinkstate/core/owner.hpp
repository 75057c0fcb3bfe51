/// @file
/// Types that own the memory their views look into.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>

#include "../config.hpp"
#include "workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Zeroed bytes aligned to `Workspace::alignment`, a value: a copy holds the same bytes elsewhere.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  explicit AlignedBytes(std::size_t size)
      : data_(size == 0 ? nullptr : ::operator new (size, std::align_val_t{Workspace::alignment})),
        size_(size) {
    if (size_ != 0) std::memset(data_, 0, size_);
  }
  AlignedBytes(const AlignedBytes& other) : AlignedBytes(other.size_) {
    if (size_ != 0) std::memcpy(data_, other.data_, size_);
  }
  AlignedBytes(AlignedBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  AlignedBytes& operator=(AlignedBytes other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~AlignedBytes() { ::operator delete (data_, std::align_val_t{Workspace::alignment}); }

  std::size_t size() const { return size_; }
  const void* data() const { return data_; }
  Workspace workspace() { return Workspace(data_, size_); }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Owner of what `View::carve(Workspace&, sizes...)` lays out: one allocation, zeroed. A copy owns
/// equal numbers.
template <class View, class... Sizes>
class Owner {
 public:
  /// The caller's window, to read and to write, valid while the owner lives and is neither assigned
  /// to nor moved from.
  View view() {
    return std::apply(
        [this](const Sizes&... sizes) {
          Workspace memory = bytes_.workspace();
          return View::carve(memory, sizes...);
        },
        sizes_);
  }

 protected:
  explicit Owner(Sizes... sizes) : sizes_(sizes...) {
    Workspace count;
    View::carve(count, sizes...);
    bytes_ = AlignedBytes(count.used());
  }

 private:
  std::tuple<Sizes...> sizes_;
  AlignedBytes bytes_;
};

SINKSTATE_NAMESPACE_END
