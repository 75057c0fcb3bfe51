// 16-bit numbers as CUDA names them, by the library's own conversions.
#pragma once

#include <cstdint>
#include <sinkstate/core/number_formats.hpp>

struct __half {
  std::uint16_t code;
};
inline __half __ushort_as_half(std::uint16_t code) { return {code}; }
inline float __half2float(__half number) {
  return sinkstate::widen<sinkstate::Float16>(number.code);
}
