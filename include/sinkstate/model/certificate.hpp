/// @file
/// The arithmetic of the error certificate: docs/numerics.md, equations (N1)-(N6).
///
/// A certificate e bounds ||S~ - S||_F, where S~ is the state as stored and S is the exact
/// recurrence over the same tokens. The mass m bounds the sum of the norms of the stored terms; it
/// scales every rounding error. Both are kept per buffered token, so that a rollback restores them.
#pragma once

#include <cmath>
#include <limits>

#include "../config.hpp"
#include "../core/matrix_view.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

template <class T>
inline constexpr T unit_roundoff = std::numeric_limits<T>::epsilon() / 2;

/// A product of bounds: nothing times anything is nothing, even if the other bound has overflowed.
template <class T>
SINKSTATE_HOST_DEVICE T bound_product(T a, T b) {
  return a == T(0) || b == T(0) ? T(0) : a * b;
}

/// Rounded upwards past the few operations that made it.
template <class T>
SINKSTATE_HOST_DEVICE T round_up(T bound) {
  return bound * (T(1) + 32 * unit_roundoff<T>);
}

/// Rounding errors of one inner product over n numbers, in units of u |x| |y|: sixteen lanes, then
/// a tree of four.
SINKSTATE_HOST_DEVICE constexpr double dot_roundoffs(Index n) {
  const Index lane = (n + 15) / 16;
  return static_cast<double>(lane) + 4.0;
}

/// (N3) Rounding errors of reading S^T L x, in units of u m |x|: the inner product, the decay (a
/// sum of `buffered` + 1 log decays and its exponential) and the sum over `terms`.
SINKSTATE_HOST_DEVICE constexpr double read_roundoffs(Index d_k, Index terms, Index buffered) {
  return dot_roundoffs(d_k) + 0.74 * static_cast<double>(buffered + 1) +
         static_cast<double>(terms) + 8.0;
}

/// What the certificate has to know of a token.
template <class T>
struct TokenBounds {
  T log_decay = T(0);  ///< of the channel that decays least
  T write_strength = T(1);
  T key_norm = T(0);
  T term = T(0);     ///< norm of what is buffered, key times correction
  T rounded = T(0);  ///< norm of what a narrow buffer has changed of it
};

/// (N1)-(N4) Certificate and mass after one token more.
/// @param terms     that were read to correct it, itself included
/// @param buffered  tokens before it
template <bool Corrects, class T>
SINKSTATE_HOST_DEVICE void include_token(Index d_k, Index terms, Index buffered,
                                         const TokenBounds<T>& token, T& certificate, T& mass) {
  const T decay = std::exp(token.log_decay);  // a bound is not cut off at small decays
  // The mass decays at half the rate, which covers the error of the decays themselves: g exp(-g) <
  // 0.74 exp(-g / 2).
  const T kept = bound_product(std::exp(token.log_decay / 2), mass);
  T growth = decay;
  T rounding = 2 * unit_roundoff<T> * token.term;
  if constexpr (Corrects) {
    const T square = token.key_norm * token.key_norm;
    // Cancellation doubles the rounding error of |k|^2.
    const T product = bound_product(token.write_strength, square);
    const T reflection = std::abs(T(1) - product) + static_cast<T>(dot_roundoffs(d_k) + 6.0) *
                                                        unit_roundoff<T> * std::abs(product);
    if (reflection > T(1)) growth = bound_product(decay, reflection);
    const T roundoffs = static_cast<T>(read_roundoffs(d_k, terms, buffered));
    rounding += bound_product(bound_product(std::abs(token.write_strength), square),
                              unit_roundoff<T> * roundoffs * kept);
  }
  certificate = round_up(bound_product(growth, certificate) + rounding + token.rounded);
  mass = round_up(kept + token.term);
}

/// (N5) Rounding errors of folding `buffered` decays into terms and of splitting the sink off, in
/// units of u m.
SINKSTATE_HOST_DEVICE constexpr double fold_roundoffs(Index buffered) {
  return 1.74 * static_cast<double>(buffered + 1) + 13.0;
}

/// (N6) Rounding errors of recompressing `terms` terms, in units of u m: 7 c + 6 sqrt(c) + 30 are
/// counted, which this bounds. Those of the rotations are counted as they happen.
SINKSTATE_HOST_DEVICE constexpr double recompress_roundoffs(Index d_k, Index d_v, Index terms) {
  return 8.0 * static_cast<double>(terms) + 2.0 * (dot_roundoffs(d_k) + dot_roundoffs(d_v)) + 20.0;
}

/// (N6) What bases that are orthonormal up to rounding can add to the norm of a tail, in units of u
/// times that norm.
SINKSTATE_HOST_DEVICE inline double tail_roundoffs(Index d_k, Index d_v, Index terms, int sweeps) {
  const double c = static_cast<double>(terms);
  return c * (2.0 * (dot_roundoffs(d_k) + dot_roundoffs(d_v)) + 4.0 * std::sqrt(c) + 8.0 +
              6.0 * static_cast<double>(sweeps));
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
