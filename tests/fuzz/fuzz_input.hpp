// What the fuzzers of this folder share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace sinkstate::testing {

// In any build, unlike assert.
inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// The bytes that libFuzzer gives, then zeros.
class FuzzBytes {
 public:
  FuzzBytes(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  bool empty() const { return place_ >= size_; }
  std::uint8_t byte() { return empty() ? 0 : data_[place_++]; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t place_ = 0;
};

}  // namespace sinkstate::testing
