// Codes against the formula of their format, rounding against a search among all numbers.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sinkstate/core/number_formats.hpp>
#include <sinkstate/core/random.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class Format>
constexpr int bits = 1 + Format::exponent_bits + Format::fraction_bits;

template <class Format>
typename Format::Code code_of(std::uint32_t code) {
  return static_cast<typename Format::Code>(code);
}

// By the definition of the formats, for codes without a sign.
template <class Format>
double by_formula(std::uint32_t code) {
  const int bias = (1 << (Format::exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> Format::fraction_bits);
  const double fraction = code & ((1u << Format::fraction_bits) - 1);
  const double scale = std::ldexp(1.0, -Format::fraction_bits);
  const int top = (1 << Format::exponent_bits) - 1;
  if (Format::has_infinity && exponent == top) {
    return fraction == 0 ? std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (!Format::has_infinity && code == (1u << (bits<Format> - 1)) - 1) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return exponent == 0 ? std::ldexp(fraction * scale, 1 - bias)
                       : std::ldexp(1 + fraction * scale, exponent - bias);
}

// All finite numbers that are not negative, rising; number i has code i.
template <class Format>
const std::vector<double>& numbers() {
  static const std::vector<double> all = [] {
    std::vector<double> list;
    for (std::uint32_t code = 0; std::isfinite(by_formula<Format>(code)); ++code) {
      list.push_back(by_formula<Format>(code));
    }
    return list;
  }();
  return all;
}

// The code below a value and the share of the way to the next.
template <class Format>
void locate(double value, std::uint32_t& below, double& share) {
  const auto& all = numbers<Format>();
  below =
      static_cast<std::uint32_t>(std::upper_bound(all.begin(), all.end(), value) - all.begin()) - 1;
  const bool last = below + 1 == all.size();
  const double next = last ? 2 * all[below] - all[below - 1] : all[below + 1];
  share = (value - all[below]) / (next - all[below]);
}

// Every number of the format, halfway to the next and to both sides of that; floats of every size.
template <class Format, class Check>
void for_values(const Check& check) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const auto& all = numbers<Format>();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double next = i + 1 < all.size() ? all[i + 1] : 2 * all[i] - all[i - 1];
    const auto tie = static_cast<float>((all[i] + next) / 2);
    check(static_cast<float>(all[i]));
    check(tie);
    check(std::nextafter(tie, 0.0f));
    check(std::nextafter(tie, std::numeric_limits<float>::max()));
  }
  for (int i = 0; i < 20000; ++i) {
    const auto exponent = static_cast<int>((random.uniform() - 0.5) * 250);
    check(static_cast<float>(std::ldexp(0.5 + random.uniform() / 2, exponent)));
  }
  check(std::numeric_limits<float>::denorm_min());
  check(std::numeric_limits<float>::max());
}

}  // namespace

TEMPLATE_TEST_CASE("number formats: every code", "[formats]", Float16, BFloat16, Float8E4M3) {
  for (std::uint32_t code = 0; code < 1u << (bits<TestType> - 1); ++code) {
    const float value = widen<TestType>(code_of<TestType>(code));
    const double wanted = by_formula<TestType>(code);
    const std::uint32_t negative = code | 1u << (bits<TestType> - 1);
    const float opposite = widen<TestType>(code_of<TestType>(negative));
    if (std::isnan(wanted)) {
      REQUIRE(std::isnan(value));
      REQUIRE(std::isnan(widen<TestType>(round_to_nearest<TestType>(value))));
      continue;
    }
    REQUIRE(static_cast<double>(value) == wanted);
    REQUIRE(opposite == -value);
    REQUIRE(std::signbit(opposite));
    // What the format has is not moved, by either rounding.
    REQUIRE(round_to_nearest<TestType>(value) == code);
    REQUIRE(round_to_nearest<TestType>(opposite) == negative);
    for (const std::uint32_t random : {0u, 0x80000000u, 0xFFFFFFFFu}) {
      REQUIRE(round_stochastically<TestType>(value, random) == code);
      REQUIRE(round_stochastically<TestType>(opposite, random) == negative);
    }
  }
}

TEMPLATE_TEST_CASE("number formats: to nearest, ties to even", "[formats]", Float16, BFloat16,
                   Float8E4M3) {
  for_values<TestType>([](float value) {
    std::uint32_t below = 0;
    double share = 0;
    locate<TestType>(value, below, share);
    const bool up = share > 0.5 || (share == 0.5 && below % 2 == 1);
    std::uint32_t wanted = below + (up ? 1 : 0);
    const auto largest = static_cast<std::uint32_t>(numbers<TestType>().size()) - 1;
    if (!TestType::has_infinity) wanted = std::min(wanted, largest);
    CAPTURE(value, below, share);
    REQUIRE(round_to_nearest<TestType>(value) == wanted);
    REQUIRE(round_to_nearest<TestType>(-value) == (wanted | 1u << (bits<TestType> - 1)));
  });
}

TEMPLATE_TEST_CASE("number formats: stochastically, to either neighbour", "[formats]", Float16,
                   BFloat16, Float8E4M3) {
  for_values<TestType>([](float value) {
    std::uint32_t below = 0;
    double share = 0;
    locate<TestType>(value, below, share);
    const auto largest = static_cast<std::uint32_t>(numbers<TestType>().size()) - 1;
    CAPTURE(value, below, share);
    if (share >= 1 || below == largest) {
      REQUIRE(round_stochastically<TestType>(value, 0) == largest);
      return;
    }
    // Up for just that share of the words.
    const auto words = static_cast<std::uint64_t>(share * 0x1p32);
    if (words > 1)
      REQUIRE(round_stochastically<TestType>(value, static_cast<std::uint32_t>(words - 2)) ==
              below + 1);
    REQUIRE(round_stochastically<TestType>(value, 0xFFFFFFFFu) == below);
    if (words + 1 < 0x100000000u) {
      REQUIRE(round_stochastically<TestType>(value, static_cast<std::uint32_t>(words + 1)) ==
              below);
    }
  });
}

TEMPLATE_TEST_CASE("number formats: infinity and NaN", "[formats]", Float16, BFloat16, Float8E4M3) {
  const float infinite = std::numeric_limits<float>::infinity();
  const auto widened = [](float value) {
    return widen<TestType>(round_to_nearest<TestType>(value));
  };
  CHECK(widened(infinite) == (TestType::has_infinity ? infinite : 448.0f));
  CHECK(widened(-infinite) == (TestType::has_infinity ? -infinite : -448.0f));
  CHECK(round_stochastically<TestType>(infinite, 7) == round_to_nearest<TestType>(infinite));
  for (const std::uint32_t payload : {0x7F800001u, 0x7FC00000u, 0xFFFFFFFFu}) {
    const float value = sinkstate::detail::float_of(payload);
    CHECK(std::isnan(widened(value)));
    CHECK(std::isnan(widen<TestType>(round_stochastically<TestType>(value, 7))));
  }
}

TEST_CASE("number formats: by hand", "[formats]") {
  CHECK(widen<Float16>(0x3C00) == 1.0f);
  CHECK(widen<Float16>(0x7BFF) == 65504.0f);
  CHECK(widen<Float16>(0x0001) == 0x1p-24f);
  CHECK(widen<BFloat16>(0x4049) == 3.140625f);
  CHECK(widen<Float8E4M3>(0x38) == 1.0f);
  CHECK(widen<Float8E4M3>(0x7E) == 448.0f);
  CHECK(widen<Float8E4M3>(0x01) == 0x1p-9f);
  CHECK(round_to_nearest<Float16>(65520.0f) == 0x7C00);
  CHECK(round_to_nearest<Float8E4M3>(1e9f) == 0x7E);
  // A quarter of the way from 1 to the next: up for a quarter of the words.
  const float quarter = 1.0f + 0x1p-12f;
  CHECK(round_stochastically<Float16>(quarter, 0x3FFFFFFFu) == 0x3C01);
  CHECK(round_stochastically<Float16>(quarter, 0x40000000u) == 0x3C00);
}
