/// @file
/// Every macro of the library, and the inline namespace that keeps two versions apart in one
/// program.
#pragma once

// A NaN test, a signed zero and -inf as a log decay are part of the contracts; -ffast-math removes
// all three.
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "sinkstate relies on NaN, infinities and IEEE rounding: do not compile it with -ffast-math"
#endif

#if defined(__CUDACC__)
#define SINKSTATE_HOST_DEVICE __host__ __device__
#else
#define SINKSTATE_HOST_DEVICE
#endif

#define SINKSTATE_NAMESPACE_BEGIN \
  namespace sinkstate {           \
  inline namespace abi_0 {
#define SINKSTATE_NAMESPACE_END \
  }                             \
  }
