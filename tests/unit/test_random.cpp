// Philox against the known answers that Random123 publishes for philox4x32-10.
#include <cmath>
#include <cstdint>
#include <sinkstate/core/random.hpp>

#include "support/catch.hpp"

using sinkstate::Philox;

namespace {

void check_block(Philox philox, std::uint64_t position, std::uint64_t stream,
                 const std::uint32_t (&expected)[4]) {
  const Philox::Block block = philox.block(position, stream);
  for (int i = 0; i < 4; ++i) CHECK(block.word[i] == expected[i]);
}

}  // namespace

TEST_CASE("philox: known answers", "[random]") {
  // Words are little end first: counter (a b c d) is position b:a and stream d:c.
  check_block(Philox{0}, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const std::uint64_t ones = ~std::uint64_t{0};
  check_block(Philox{ones}, ones, ones, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  check_block(Philox{0x299f31d0a4093822}, 0x85a308d3243f6a88, 0x0370734413198a2e,
              {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("philox: a number is a function of seed, stream and position at compile time too",
          "[random]") {
  constexpr float number = Philox{7}.normal(123, 4);
  CHECK(Philox{7}.normal(123, 4) == number);
  CHECK(Philox{8}.normal(123, 4) != number);
  CHECK(Philox{7}.normal(124, 4) != number);
  CHECK(Philox{7}.normal(123, 5) != number);
}

TEST_CASE("philox: normal numbers have mean 0, variance 1 and no correlation", "[random]") {
  constexpr int count = 20000;
  const Philox philox{1};
  double sum = 0, squares = 0, neighbours = 0, fourth = 0;
  double last = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const double x = static_cast<double>(philox.normal(i));
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    neighbours += x * last;
    last = x;
  }
  // Five standard deviations of each estimate.
  const double deviation = 5 / std::sqrt(static_cast<double>(count));
  CHECK(std::abs(sum / count) < deviation);
  CHECK(std::abs(squares / count - 1) < deviation * std::sqrt(2.0));
  CHECK(std::abs(neighbours / count) < deviation);
  // Twelve uniforms have kurtosis 3 - 6 / 5 / 12 = 2.9.
  CHECK(std::abs(fourth / count - 2.9) < deviation * 10);
}
