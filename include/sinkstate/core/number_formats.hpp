/// @file
/// Narrow floating-point formats as codes: what they stand for, and rounding to them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// IEEE 754 binary16, "fp16".
struct Float16 {
  using Code = std::uint16_t;
  static constexpr int exponent_bits = 5;
  static constexpr int fraction_bits = 10;
  static constexpr bool has_infinity = true;
};

/// The upper half of a float, "bf16".
struct BFloat16 {
  using Code = std::uint16_t;
  static constexpr int exponent_bits = 8;
  static constexpr int fraction_bits = 7;
  static constexpr bool has_infinity = true;
};

/// e4m3 of the OCP 8-bit floating point specification: no infinity, NaN where all bits are set, the
/// largest number is 448.
struct Float8E4M3 {
  using Code = std::uint8_t;
  static constexpr int exponent_bits = 4;
  static constexpr int fraction_bits = 3;
  static constexpr bool has_infinity = false;
};

namespace detail {

SINKSTATE_HOST_DEVICE inline std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
SINKSTATE_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Codes without their sign, which rise with the numbers that they stand for.
template <class Format>
struct Magnitudes {
  static constexpr int bias = (1 << (Format::exponent_bits - 1)) - 1;
  static constexpr std::uint32_t sign = std::uint32_t{1}
                                        << (Format::exponent_bits + Format::fraction_bits);
  static constexpr std::uint32_t fraction = (std::uint32_t{1} << Format::fraction_bits) - 1;
  static constexpr std::uint32_t top_exponent = (sign - 1) & ~fraction;
  /// The first code that is no finite number.
  static constexpr std::uint32_t end = Format::has_infinity ? top_exponent : sign - 1;
};

/// `value` rounded towards zero to the format, and what that left of a unit in the last place, in
/// 2^-32.
template <class Format>
struct Truncated {
  std::uint32_t magnitude;
  std::uint32_t rest;

  /// @param bits  of a finite float without its sign
  SINKSTATE_HOST_DEVICE explicit Truncated(std::uint32_t bits) {
    using M = Magnitudes<Format>;
    const std::uint32_t field = bits >> 23;
    // value = significand 2^(exponent - 23)
    const int exponent = (field == 0 ? 1 : static_cast<int>(field)) - 127;
    const std::uint32_t significand = (bits & 0x7FFFFFu) | (field == 0 ? 0 : 0x800000u);
    constexpr int least = 1 - M::bias;
    const int kept = exponent > least ? exponent : least;  // of the last place, plus fraction_bits
    const int shift = kept - Format::fraction_bits - (exponent - 23);
    const std::uint64_t scaled = shift < 64 ? (std::uint64_t{significand} << 32) >> shift : 0;
    const auto whole = static_cast<std::uint32_t>(scaled >> 32);
    // Significands with a leading bit count it in the exponent, so that carries run through.
    magnitude = (static_cast<std::uint32_t>(kept - least) << Format::fraction_bits) + whole;
    rest = static_cast<std::uint32_t>(scaled);
    // Of what is far below the last place, something is left all the same.
    if (rest == 0 && significand != 0 && shift > 32) rest = 1;
  }
};

template <class Format>
SINKSTATE_HOST_DEVICE typename Format::Code with_sign(std::uint32_t bits, std::uint32_t magnitude) {
  return static_cast<typename Format::Code>((bits >> 31 != 0 ? Magnitudes<Format>::sign : 0) |
                                            magnitude);
}

/// Infinity and NaN; NaN keeps what fits of its payload, and is quiet.
template <class Format>
SINKSTATE_HOST_DEVICE typename Format::Code not_finite(std::uint32_t bits) {
  using M = Magnitudes<Format>;
  const std::uint32_t payload = bits & 0x7FFFFFu;
  if (!Format::has_infinity) return with_sign<Format>(bits, payload == 0 ? M::end - 1 : M::end);
  if (payload == 0) return with_sign<Format>(bits, M::top_exponent);
  const std::uint32_t quiet = std::uint32_t{1} << (Format::fraction_bits - 1);
  return with_sign<Format>(bits,
                           M::top_exponent | quiet | (payload >> (23 - Format::fraction_bits)));
}

}  // namespace detail

/// The number that a code stands for; exact.
template <class Format>
SINKSTATE_HOST_DEVICE float widen(typename Format::Code code) {
  using M = detail::Magnitudes<Format>;
  const std::uint32_t sign = (code & M::sign) != 0 ? 0x80000000u : 0u;
  const std::uint32_t magnitude = code & (M::sign - 1);
  constexpr int shift = 23 - Format::fraction_bits;
  if (magnitude >= M::end) {
    const std::uint32_t payload =
        Format::has_infinity ? (magnitude & M::fraction) << shift : 0x400000u;
    return detail::float_of(sign | 0x7F800000u | payload);
  }
  if constexpr (Format::exponent_bits == 8) return detail::float_of(sign | magnitude << shift);
  if (magnitude <= M::fraction) {  // a multiple of the least number, which float holds as normal
    const float least =
        detail::float_of(static_cast<std::uint32_t>(128 - M::bias - Format::fraction_bits) << 23);
    return detail::float_of(sign | detail::bits_of(static_cast<float>(magnitude) * least));
  }
  return detail::float_of(
      sign | ((magnitude << shift) + (static_cast<std::uint32_t>(127 - M::bias) << 23)));
}

/// The nearest number of a format, ties to even. What is too large becomes infinite, or the largest
/// where there is no infinity; NaN stays NaN.
template <class Format>
SINKSTATE_HOST_DEVICE typename Format::Code round_to_nearest(float value) {
  using M = detail::Magnitudes<Format>;
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x7F800000u) return detail::not_finite<Format>(bits);
  const detail::Truncated<Format> truncated(magnitude);
  const bool odd = (truncated.magnitude & 1) != 0;
  std::uint32_t rounded = truncated.magnitude;
  if (truncated.rest > 0x80000000u || (truncated.rest == 0x80000000u && odd)) ++rounded;
  constexpr std::uint32_t most = Format::has_infinity ? M::end : M::end - 1;
  return detail::with_sign<Format>(bits, rounded < most ? rounded : most);
}

/// One of the two neighbours in a format, the nearer one with the greater probability, so that the
/// mean over all random words is the value (to 2^-32 of the distance). What is too large becomes the
/// largest number; infinity and NaN are as in `round_to_nearest`.
///
/// @param random  a uniform word, such as of `Philox`: the same word, the same result everywhere
template <class Format>
SINKSTATE_HOST_DEVICE typename Format::Code round_stochastically(float value,
                                                                 std::uint32_t random) {
  using M = detail::Magnitudes<Format>;
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x7F800000u) return detail::not_finite<Format>(bits);
  const detail::Truncated<Format> truncated(magnitude);
  const std::uint32_t rounded = truncated.magnitude + (random < truncated.rest ? 1 : 0);
  return detail::with_sign<Format>(bits, rounded < M::end ? rounded : M::end - 1);
}

SINKSTATE_NAMESPACE_END
