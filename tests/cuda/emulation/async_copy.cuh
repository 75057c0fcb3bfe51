// Copies that are made at once.
#pragma once

#include <cstdint>
#include <cstring>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

template <int Depth, bool Aligned>
class WarpCopies {
 public:
  struct Barriers {};
  explicit WarpCopies(Barriers&) {}

  template <class Code, int Rows>
  void begin(int, Code* to, const Code* from, int bytes, int) const {
    __syncwarp();
    if (emulation::lane() < Rows) std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void wait(int, int, int) const { __syncwarp(); }
};

}  // namespace detail
SINKSTATE_NAMESPACE_END
