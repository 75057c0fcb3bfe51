/// @file
/// Narrow floating-point formats as codes: what they stand for, and rounding to them.
#pragma once

#include <cstdint>
#include <cstring>

#include "../config.hpp"
#include "random.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// IEEE 754 binary16, "fp16".
struct Float16 {
  using Code = std::uint16_t;
  static constexpr int exponent_bits = 5;
  static constexpr int fraction_bits = 10;
  static constexpr bool has_infinity = true;
  static constexpr bool scaled = false;
};

/// The upper half of a float, "bf16".
struct BFloat16 {
  using Code = std::uint16_t;
  static constexpr int exponent_bits = 8;
  static constexpr int fraction_bits = 7;
  static constexpr bool has_infinity = true;
  static constexpr bool scaled = false;
};

/// e4m3 of the OCP 8-bit floating point specification: no infinity, NaN where all bits are set, the
/// largest number is 448.
struct Float8E4M3 {
  using Code = std::uint8_t;
  static constexpr int exponent_bits = 4;
  static constexpr int fraction_bits = 3;
  static constexpr bool has_infinity = false;
  /// Its range is that of a few bits: vectors are stored with a scale.
  static constexpr bool scaled = true;
};

/// To the nearest number of a format, or to one of the two neighbours at random.
enum class Rounding { nearest, stochastic };

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

/// What makes NaN of infinity, or of the largest number where there is none, if `magnitude` is that
/// of a NaN: what fits of its payload, quiet.
template <class Format>
SINKSTATE_HOST_DEVICE std::uint32_t nan_bits(std::uint32_t magnitude) {
  constexpr std::uint32_t quiet = std::uint32_t{1} << (Format::fraction_bits - 1);
  const std::uint32_t payload =
      Format::has_infinity ? quiet | ((magnitude & 0x7FFFFFu) >> (23 - Format::fraction_bits)) : 1;
  return magnitude > 0x7F800000u ? payload : 0;
}

}  // namespace detail

/// The number that a code stands for; exact. Without branches, so that loops become vector code.
template <class Format>
SINKSTATE_HOST_DEVICE float widen(typename Format::Code code) {
  using M = detail::Magnitudes<Format>;
  constexpr int shift = 23 - Format::fraction_bits;
  constexpr std::uint32_t rebias = 127 - M::bias;
  const std::uint32_t sign = (code & M::sign) != 0 ? 0x80000000u : 0u;
  const std::uint32_t magnitude = code & (M::sign - 1);
  // An exponent field that is full stays full.
  const std::uint32_t beyond = magnitude >= M::end ? (rebias << 23) : 0u;
  std::uint32_t bits = (magnitude << shift) + (rebias << 23) + beyond;
  if constexpr (rebias > 0) {
    // An empty field: the leading bit that is not there is put in, and subtracted.
    const std::uint32_t empty = magnitude <= M::fraction ? 0xFFFFFFFFu : 0u;
    const float leading = detail::float_of(((rebias + 1) << 23) & empty);
    bits = detail::bits_of(detail::float_of(bits + ((1u << 23) & empty)) - leading);
  }
  return detail::float_of(sign | bits);
}

/// The largest finite number of a format.
template <class Format>
SINKSTATE_HOST_DEVICE float largest_number() {
  return widen<Format>(static_cast<typename Format::Code>(detail::Magnitudes<Format>::end - 1));
}

/// The nearest number of a format, ties to even. What is too large becomes infinite, or the largest
/// where there is no infinity; NaN stays NaN. Without branches, as `widen`.
template <class Format>
SINKSTATE_HOST_DEVICE typename Format::Code round_to_nearest(float value) {
  using M = detail::Magnitudes<Format>;
  constexpr int shift = 23 - Format::fraction_bits;
  constexpr std::uint32_t rebias = 127 - M::bias;
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t rounded = 0;
  if constexpr (rebias == 0) {
    const std::uint32_t odd = (magnitude >> shift) & 1;
    rounded = (magnitude + odd + ((1u << (shift - 1)) - 1)) >> shift;
  } else {
    // An addend whose last place is that of the result does the rounding.
    constexpr std::uint32_t least = (rebias + 1) << 23;
    constexpr std::uint32_t top = least + (M::top_exponent << shift);
    std::uint32_t exponent = magnitude & 0x7F800000u;
    exponent = exponent > least ? exponent : least;
    exponent = exponent < top ? exponent : top;
    const std::uint32_t addend = exponent + (static_cast<std::uint32_t>(shift) << 23);
    const float sum = detail::float_of(magnitude) + detail::float_of(addend);
    rounded = ((exponent - least) >> shift) + (detail::bits_of(sum) - addend);
  }
  constexpr std::uint32_t most = Format::has_infinity ? M::end : M::end - 1;
  rounded = rounded < most ? rounded : most;
  return detail::with_sign<Format>(bits, rounded | detail::nan_bits<Format>(magnitude));
}

/// One of the two neighbours in a format, the nearer one with the greater probability, so that the
/// mean over all random words is the value (to 2^-32 of the distance). What is too large becomes
/// the largest number; infinity and NaN are as in `round_to_nearest`.
///
/// @param random  a uniform word, such as of `Philox`: the same word, the same result everywhere
template <class Format>
SINKSTATE_HOST_DEVICE typename Format::Code round_stochastically(float value,
                                                                 std::uint32_t random) {
  using M = detail::Magnitudes<Format>;
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude >= 0x7F800000u) return round_to_nearest<Format>(value);
  const detail::Truncated<Format> truncated(magnitude);
  const std::uint32_t rounded = truncated.magnitude + (random < truncated.rest ? 1 : 0);
  return detail::with_sign<Format>(bits, rounded < M::end ? rounded : M::end - 1);
}

namespace detail {

/// How one row of numbers is rounded: stochastically by the words of Philox from a place on that
/// belongs to this row alone.
struct RowRounding {
  Rounding rounding = Rounding::nearest;
  Philox philox{};
  std::uint64_t stream = 0;
  std::uint64_t first_block = 0;

  /// Codes of factor x_i. Blocks of four, since that is what Philox gives; `first` is one of them.
  /// @param first, last  part of the row
  template <class Format>
  SINKSTATE_HOST_DEVICE void operator()(Format, std::int64_t first, std::int64_t last, float factor,
                                        const float* x, typename Format::Code* codes) const {
    if (rounding == Rounding::nearest) {
      for (std::int64_t i = first; i < last; ++i) {
        codes[i] = round_to_nearest<Format>(factor * x[i]);
      }
      return;
    }
    for (std::int64_t i = first; i < last; i += 4) {
      const Philox::Block random =
          philox.block(first_block + static_cast<std::uint64_t>(i / 4), stream);
      for (std::int64_t lane = 0; lane < 4 && i + lane < last; ++lane) {
        codes[i + lane] = round_stochastically<Format>(factor * x[i + lane], random.word[lane]);
      }
    }
  }
};

}  // namespace detail
SINKSTATE_NAMESPACE_END
