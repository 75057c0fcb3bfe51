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
inline __half __float2half_rn(float number) {
  return {sinkstate::round_to_nearest<sinkstate::Float16>(number)};
}
inline std::uint16_t __half_as_ushort(__half number) { return number.code; }
