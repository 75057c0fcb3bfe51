// 8-bit numbers as CUDA names them; every one of them is a 16-bit number too.
#pragma once

#include "cuda_fp16.h"

enum __nv_fp8_interpretation_t { __NV_E4M3 };
inline __half __nv_cvt_fp8_to_halfraw(std::uint8_t code, __nv_fp8_interpretation_t) {
  return {sinkstate::round_to_nearest<sinkstate::Float16>(
      sinkstate::widen<sinkstate::Float8E4M3>(code))};
}
