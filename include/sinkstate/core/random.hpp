/// @file
/// Philox 4x32-10: random numbers as a pure function of (seed, position).
#pragma once

#include <cstdint>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
/// 1, 2, 3" (SC11).
///
/// A value without state: number i of a seed is the same on every machine, backend and thread
/// count, in any order of asking.
struct Philox {
  struct Block {
    std::uint32_t word[4];
  };

  std::uint64_t seed = 0;

  /// The four words of counter (position, stream).
  SINKSTATE_HOST_DEVICE constexpr Block block(std::uint64_t position,
                                              std::uint64_t stream = 0) const {
    Block x{{low(position), high(position), low(stream), high(stream)}};
    std::uint32_t key0 = low(seed);
    std::uint32_t key1 = high(seed);
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * x.word[0];
      const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * x.word[2];
      x = Block{{high(product1) ^ x.word[1] ^ key0, low(product1),
                 high(product0) ^ x.word[3] ^ key1, low(product0)}};
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    return x;
  }

  /// Number `index` of an approximately normal sequence with variance 1.
  ///
  /// The sum of twelve 16-bit uniforms: integer arithmetic and one exact scaling, so the bits do
  /// not depend on a mathematics library. A sketch needs isotropy to second order, which this has.
  SINKSTATE_HOST_DEVICE constexpr float normal(std::uint64_t index,
                                               std::uint64_t stream = 0) const {
    std::int32_t sum = 0;
    for (std::uint64_t part = 0; part < 2; ++part) {
      const Block words = block(index * 2 + part, stream);
      for (int i = 0; i < 3; ++i) {
        sum += static_cast<std::int32_t>(words.word[i] & 0xFFFFu);
        sum += static_cast<std::int32_t>(words.word[i] >> 16);
      }
    }
    // Twelve uniforms on {0, ..., 65535} have mean 6 * 65535 and variance 2^32 (1 - 2^-32).
    return static_cast<float>(sum - 6 * 65535) / 65536.0f;
  }

 private:
  SINKSTATE_HOST_DEVICE static constexpr std::uint32_t low(std::uint64_t x) {
    return static_cast<std::uint32_t>(x & 0xFFFFFFFFu);
  }
  SINKSTATE_HOST_DEVICE static constexpr std::uint32_t high(std::uint64_t x) {
    return static_cast<std::uint32_t>(x >> 32);
  }
};

SINKSTATE_NAMESPACE_END
