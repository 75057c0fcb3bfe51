// Replaces every form of operator new by one that counts. One source file of a program may include it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace sinkstate::testing {

inline std::atomic<long> allocations{0};

inline void* counted(std::size_t size) noexcept {
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
inline void* counted(std::size_t size, std::align_val_t alignment) noexcept {
  ++allocations;
  const auto unit = static_cast<std::size_t>(alignment);
  const std::size_t whole_units = (size + unit - 1) / unit * unit;
  return std::aligned_alloc(unit, whole_units == 0 ? unit : whole_units);
}
inline void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace sinkstate::testing

// The compiler sees through the replacements and takes free() for a mismatch.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif

using Alignment = std::align_val_t;
using NoThrow = std::nothrow_t;

void* operator new(std::size_t n) {
  return sinkstate::testing::or_throw(sinkstate::testing::counted(n));
}
void* operator new[](std::size_t n) {
  return sinkstate::testing::or_throw(sinkstate::testing::counted(n));
}
void* operator new(std::size_t n, const NoThrow&) noexcept {
  return sinkstate::testing::counted(n);
}
void* operator new[](std::size_t n, const NoThrow&) noexcept {
  return sinkstate::testing::counted(n);
}
void* operator new(std::size_t n, Alignment a) {
  return sinkstate::testing::or_throw(sinkstate::testing::counted(n, a));
}
void* operator new[](std::size_t n, Alignment a) {
  return sinkstate::testing::or_throw(sinkstate::testing::counted(n, a));
}
void* operator new(std::size_t n, Alignment a, const NoThrow&) noexcept {
  return sinkstate::testing::counted(n, a);
}
void* operator new[](std::size_t n, Alignment a, const NoThrow&) noexcept {
  return sinkstate::testing::counted(n, a);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, const NoThrow&) noexcept { std::free(p); }
void operator delete[](void* p, const NoThrow&) noexcept { std::free(p); }
void operator delete(void* p, Alignment) noexcept { std::free(p); }
void operator delete[](void* p, Alignment) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, Alignment) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, Alignment) noexcept { std::free(p); }
void operator delete(void* p, Alignment, const NoThrow&) noexcept { std::free(p); }
void operator delete[](void* p, Alignment, const NoThrow&) noexcept { std::free(p); }
