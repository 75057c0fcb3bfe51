/// @file
/// What is chosen at run time about a pool of states.
#pragma once

#include <cstdint>
#include <string>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "state_config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Which key head a value head reads and writes with.
enum class HeadMap {
  interleaved,  ///< h / (value_heads / key_heads): neighbours share a key
  tiled,        ///< h % key_heads
};

/// Which slot index in a batch means nobody, as in the rows that fill a captured graph up.
enum class Padding {
  negative,   ///< -1, and any other below 0
  slot_zero,  ///< 0: that slot is never admitted
};

/// Sizes and limits of a pool: the states of one layer, for `slots` requests at once.
///
/// Bodies are kept in component rows, one for each term (docs/design.md, "Pools"). Every state of
/// an admitted slot is guaranteed `quota` rows; above that it takes rows from a `reserve` that all
/// share.
struct PoolConfig {
  /// Of every state. Head h has the seed `state.seed + (first_head + h) seed_stride`.
  StateConfig state;
  Index slots = 0;
  Index key_heads = 1;
  Index value_heads = 1;
  HeadMap head_map = HeadMap::interleaved;
  /// Number of value head 0 in the whole layer, when a pool has a range of it (tensor parallel).
  Index first_head = 0;
  /// 1: heads round and sketch independently; 0: all have the same seed.
  std::uint64_t seed_stride = 1;
  /// Component rows guaranteed to each state; 0: as many as it can need, so that none ever lacks
  /// one. (LocalSvd, FullSvd; the other policies need all from the start)
  Index quota = 0;
  /// Component rows beyond the quotas. (LocalSvd, FullSvd)
  Index reserve = 0;
  Padding padding = Padding::negative;

  SINKSTATE_HOST_DEVICE constexpr Index key_head(Index value_head) const {
    return head_map == HeadMap::tiled ? value_head % key_heads
                                      : value_head / (value_heads / key_heads);
  }
  /// Of a value head.
  SINKSTATE_HOST_DEVICE constexpr StateConfig state_of(Index value_head) const {
    StateConfig config = state;
    config.seed += static_cast<std::uint64_t>(first_head + value_head) * seed_stride;
    return config;
  }
  SINKSTATE_HOST_DEVICE constexpr bool is_padding(Index slot) const {
    return padding == Padding::slot_zero ? slot == 0 : slot < 0;
  }
  /// A number that may be admitted.
  SINKSTATE_HOST_DEVICE constexpr bool is_slot(Index slot) const {
    return slot >= (padding == Padding::slot_zero ? 1 : 0) && slot < slots;
  }

  /// @returns *this
  /// @throws Error naming the first field that cannot be used
  const PoolConfig& checked() const {
    state.checked();
    const Index first_slot = padding == Padding::slot_zero ? 1 : 0;
    detail::in_range(1 + first_slot, detail::largest_size, "PoolConfig::slots", slots);
    detail::in_range(1, detail::largest_size, "PoolConfig::key_heads", key_heads);
    detail::in_range(1, detail::largest_size, "PoolConfig::value_heads", value_heads);
    detail::in_range(0, detail::largest_size, "PoolConfig::first_head", first_head);
    detail::in_range(0, detail::largest_size, "PoolConfig::quota", quota);
    detail::in_range(0, largest_rows, "PoolConfig::reserve", reserve);
    if (value_heads % key_heads != 0) {
      detail::refuse("PoolConfig::value_heads",
                     "a multiple of key_heads = " + std::to_string(key_heads),
                     std::to_string(value_heads));
    }
    return *this;
  }

  /// Component rows are numbered in 32 bits.
  static constexpr Index largest_rows = (Index{1} << 31) - 1;
};

SINKSTATE_NAMESPACE_END
