/// @file
/// Vectors that the lanes of a warp hold in registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/number_formats.hpp"
#include "../core/stored_rows.hpp"
#include "async_copy.cuh"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

inline constexpr unsigned whole_warp = 0xFFFFFFFFu;

// Device code reads constants of numeric_limits, but calls none of its functions.
inline constexpr float smallest_square =
    std::numeric_limits<float>::min() / std::numeric_limits<float>::epsilon();
inline constexpr float largest_float = std::numeric_limits<float>::max();
inline constexpr float infinite_float = std::numeric_limits<float>::infinity();
inline constexpr float nan_float = std::numeric_limits<float>::quiet_NaN();

/// The number of a code: what `sinkstate::widen` gives, by the device's own instructions.
template <class Number>
__device__ float number_of(typename StoredAs<Number>::Code code) {
  if constexpr (std::is_same_v<Number, Float16>) {
    return __half2float(__ushort_as_half(code));
  } else if constexpr (std::is_same_v<Number, BFloat16>) {
    return __uint_as_float(std::uint32_t{code} << 16);
  } else if constexpr (std::is_same_v<Number, Float8E4M3>) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
  } else {
    return code;
  }
}

/// The nearest code: what `round_to_nearest` gives, by the device's own instructions where they
/// agree for all numbers that are finite.
template <class Number>
__device__ typename StoredAs<Number>::Code code_of(float number) {
  if constexpr (std::is_same_v<Number, Float16>) {
    return __half_as_ushort(__float2half_rn(number));
  } else if constexpr (std::is_same_v<Number, BFloat16>) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(number));
  } else if constexpr (StoredAs<Number>::narrow) {
    return round_to_nearest<Number>(number);
  } else {
    return number;
  }
}

/// Up to 128 `Chunks` numbers of a vector: of each 128 a lane holds four neighbours, channels 4 lane
/// to 4 lane + 3. Those beyond the vector's end are zeros.
template <int Chunks>
struct LaneVector {
  static constexpr int count = 4 * Chunks;
  float x[count];

  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  __device__ static int first_channel(int chunk) { return 128 * chunk + 4 * lane(); }

  __device__ static LaneVector zeros() {
    LaneVector v;
#pragma unroll
    for (int i = 0; i < count; ++i) v.x[i] = 0;
    return v;
  }

  /// @param quads  each four neighbours are aligned to their size, and n is a multiple of four
  template <class Number>
  __device__ static LaneVector load(const typename StoredAs<Number>::Code* row, int n, bool quads) {
    using Code = typename StoredAs<Number>::Code;
    LaneVector v;
#pragma unroll
    for (int chunk = 0; chunk < Chunks; ++chunk) {
      const int first = first_channel(chunk);
      alignas(4 * sizeof(Code)) Code codes[4];
      if (quads) {
        Quad<Code> quad{};
        if (first < n) quad = *reinterpret_cast<const Quad<Code>*>(row + first);
        std::memcpy(codes, &quad, sizeof quad);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = first + i < n ? row[first + i] : Code(0);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) v.x[4 * chunk + i] = number_of<Number>(codes[i]);
    }
    return v;
  }

  /// Begins to copy this lane's numbers of a row to where they are 128 `Chunks` numbers in shared
  /// memory, from which the same lane takes them: zeros beyond n, and if the row is not `there`.
  /// @param row  from `first_channel(0)` on, as `shared`
  template <class Number>
  __device__ static void fetch(typename StoredAs<Number>::Code* shared,
                               const typename StoredAs<Number>::Code* row, int n, bool there,
                               bool quads) {
    using Code = typename StoredAs<Number>::Code;
#pragma unroll
    for (int chunk = 0; chunk < Chunks; ++chunk) {
      const int left = n - first_channel(chunk);
      if (quads) {
        copy_async<4 * sizeof(Code)>(shared + 128 * chunk, row + 128 * chunk, there && left > 0);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          shared[128 * chunk + i] = there && i < left ? row[128 * chunk + i] : Code(0);
        }
      }
    }
  }
  /// What was fetched.
  template <class Number>
  __device__ static LaneVector fetched(const typename StoredAs<Number>::Code* shared) {
    using Code = typename StoredAs<Number>::Code;
    LaneVector v;
#pragma unroll
    for (int chunk = 0; chunk < Chunks; ++chunk) {
      const Quad<Code> quad = *reinterpret_cast<const Quad<Code>*>(shared + 128 * chunk);
      Code codes[4];
      std::memcpy(codes, &quad, sizeof codes);
#pragma unroll
      for (int i = 0; i < 4; ++i) v.x[4 * chunk + i] = number_of<Number>(codes[i]);
    }
    return v;
  }

  template <class Number>
  __device__ void store(typename StoredAs<Number>::Code* row, int n, bool quads) const {
    using Code = typename StoredAs<Number>::Code;
#pragma unroll
    for (int chunk = 0; chunk < Chunks; ++chunk) {
      const int first = first_channel(chunk);
      alignas(4 * sizeof(Code)) Code codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = code_of<Number>(x[4 * chunk + i]);
      if (quads) {
        Quad<Code> quad;
        std::memcpy(&quad, codes, sizeof quad);
        if (first < n) *reinterpret_cast<Quad<Code>*>(row + first) = quad;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first + i < n) row[first + i] = codes[i];
        }
      }
    }
  }

  /// What a format makes of each number.
  template <class Number>
  __device__ LaneVector rounded() const {
    LaneVector v;
#pragma unroll
    for (int i = 0; i < count; ++i) v.x[i] = number_of<Number>(code_of<Number>(x[i]));
    return v;
  }

  /// This lane's part of an inner product.
  __device__ float part_of_dot(const LaneVector& y) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) sum += x[i] * y.x[i];
    return sum;
  }
  /// This lane's numbers.
  __device__ bool finite() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < count; ++i) all = all && isfinite(x[i]);
    return all;
  }
  __device__ void add(float factor, const LaneVector& y) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] += factor * y.x[i];
  }

 private:
  // Four codes in one load.
  template <class Code>
  using Quad = std::conditional_t<sizeof(Code) == 4, uint4,
                                  std::conditional_t<sizeof(Code) == 2, uint2, std::uint32_t>>;
};

/// Which of `Count` numbers a lane has after `sum_in_lanes`.
template <int Count>
__device__ int number_of_lane() {
  return static_cast<int>(threadIdx.x % 32) / (32 / Count);
}
/// Sums over a warp, of several numbers at once, each for 32 / `Count` lanes. The order of the
/// additions is that of a tree whose first level adds lanes 16 apart, whatever `Count` is: after each
/// level half of the lanes go on with half of the numbers.
template <int Count>
__device__ float sum_in_lanes(float (&x)[Count]) {
  static_assert(Count == 1 || Count == 2 || Count == 4 || Count == 8 || Count == 16);
  const int lane = static_cast<int>(threadIdx.x % 32);
  int distance = 16;
#pragma unroll
  for (int left = Count; left > 1; left /= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < left / 2; ++i) {
      const float given = upper ? x[i] : x[i + left / 2];
      const float kept = upper ? x[i + left / 2] : x[i];
      x[i] = kept + __shfl_xor_sync(whole_warp, given, distance);
    }
    distance /= 2;
  }
#pragma unroll
  for (; distance > 0; distance /= 2) x[0] += __shfl_xor_sync(whole_warp, x[0], distance);
  return x[0];
}
/// The numbers of `sum_in_lanes`, all to all lanes.
template <int Count>
__device__ void give_to_lanes(float mine, float (&x)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    x[i] = Count == 1 ? mine : __shfl_sync(whole_warp, mine, i * (32 / Count));
  }
}
template <int Count>
__device__ void sum_over_warp(float (&x)[Count]) {
  give_to_lanes(sum_in_lanes(x), x);
}

template <int Chunks>
__device__ float dot(const LaneVector<Chunks>& x, const LaneVector<Chunks>& y) {
  float sum[1] = {x.part_of_dot(y)};
  sum_over_warp(sum);
  return sum[0];
}

__device__ inline bool all_lanes(bool condition) { return __all_sync(whole_warp, condition) != 0; }

/// Euclidean norm of finite numbers; it neither over- nor underflows.
/// @param squares  their sum, as it comes out
template <int Chunks>
__device__ float norm(const LaneVector<Chunks>& v, float squares) {
  if (squares > smallest_square && squares <= largest_float) return sqrtf(squares);
  float largest = 0;
#pragma unroll
  for (int i = 0; i < LaneVector<Chunks>::count; ++i) largest = fmaxf(largest, fabsf(v.x[i]));
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(whole_warp, largest, distance));
  }
  if (!(largest > 0)) return 0;
  int exponent = 0;
  frexpf(largest, &exponent);
  // Two steps: 2^-exponent itself may not be a number of this type.
  const float half = ldexpf(1.0f, -exponent / 2);
  const float rest = ldexpf(1.0f, -exponent + exponent / 2);
  LaneVector<Chunks> scaled;
#pragma unroll
  for (int i = 0; i < LaneVector<Chunks>::count; ++i) scaled.x[i] = v.x[i] * half * rest;
  return ldexpf(sqrtf(dot(scaled, scaled)), exponent);
}

template <int Chunks>
__device__ float norm(const LaneVector<Chunks>& v) {
  return norm(v, dot(v, v));
}

/// Decays as `HostTeam::exp_decay`: 0 before numbers turn subnormal.
__device__ inline float exp_decay(float log_decay) {
  const float decay = expf(log_decay);
  return log_decay < -71.394f ? 0.0f : decay;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
