/// @file
/// A checksum that finds damage, not malice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Four lanes of FNV-1a over words of 64 bits, joined by a fifth: every word goes through steps
/// that lose nothing, so that one changed word always shows. Bytes beyond the last whole word count
/// as one padded with zeros.
inline std::uint64_t checksum(const void* data, std::size_t size) {
  constexpr std::uint64_t prime = 0x100000001b3;
  std::uint64_t lanes[4] = {0xcbf29ce484222325, 0x9ae16a3b2f90404f, 0xc3a5c85c97cb3127,
                            0xb492b66fbe98f273};
  const auto* const bytes = static_cast<const unsigned char*>(data);
  const auto mix = [](std::uint64_t sum, std::uint64_t word) {
    sum = (sum ^ word) * prime;
    return sum ^ sum >> 29;
  };
  std::size_t lane = 0;
  for (std::size_t i = 0; i < size; i += 8, lane = (lane + 1) % 4) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, size - i < 8 ? size - i : 8);
    lanes[lane] = mix(lanes[lane], word);
  }
  std::uint64_t sum = size;
  for (const std::uint64_t part : lanes) sum = mix(sum, part);
  return sum;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
