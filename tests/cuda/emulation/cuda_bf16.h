// bf16 as CUDA names it.
#pragma once

#include <cstdint>
#include <sinkstate/core/number_formats.hpp>

struct __nv_bfloat16 {
  std::uint16_t code;
};
inline __nv_bfloat16 __float2bfloat16_rn(float number) {
  return {sinkstate::round_to_nearest<sinkstate::BFloat16>(number)};
}
inline std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 number) { return number.code; }
