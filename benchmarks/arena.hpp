// Memory for many states in one stretch, as a pool has them, on huge pages where the system gives
// them: the same for dense states, for factored ones and for the copy that both are held against.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sinkstate::bench {

class Arena {
 public:
  static constexpr std::size_t page = std::size_t{2} << 20;

  explicit Arena(std::size_t bytes)
      : size_((bytes + page - 1) / page * page), data_(std::aligned_alloc(page, size_)) {
    if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    madvise(data_.get(), size_, MADV_HUGEPAGE);  // a wish
#endif
  }

  std::size_t size() const { return size_; }
  template <class T = unsigned char>
  T* at(std::size_t bytes) {
    return reinterpret_cast<T*>(static_cast<unsigned char*>(data_.get()) + bytes);
  }

 private:
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::size_t size_;
  std::unique_ptr<void, Free> data_;
};

}  // namespace sinkstate::bench
