// Copies that are made at once.
#pragma once

#include <cstring>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

template <int Bytes>
inline void copy_async(void* to, const void* from, bool there) {
  if (there) {
    std::memcpy(to, from, Bytes);
  } else {
    std::memset(to, 0, Bytes);
  }
}
inline void end_copies() {}
template <int Count>
void wait_for_copies() {}

}  // namespace detail
SINKSTATE_NAMESPACE_END
