/// @file
/// The component rows of a pool that no quota holds, as far as they are free.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// A stack of the numbers of free rows, over memory of somebody else: taking one and giving it back
/// is a number moved, without a search.
struct ReserveRowsView {
  std::int32_t* rows = nullptr;  ///< the free ones; the last is the next to be taken
  Index* free = nullptr;         ///< how many they are
  Index capacity = 0;            ///< rows of the reserve, free or not

  static ReserveRowsView carve(Workspace& memory, Index capacity) {
    ReserveRowsView view;
    view.rows = memory.take<std::int32_t>(capacity);
    view.free = memory.take<Index>(1);
    view.capacity = capacity;
    return view;
  }

  /// All rows are free, and are taken in the order of their numbers, which begin with `first_row`.
  SINKSTATE_HOST_DEVICE void reset(Index first_row) const {
    for (Index i = 0; i < capacity; ++i) {
      rows[i] = static_cast<std::int32_t>(first_row + capacity - 1 - i);
    }
    *free = capacity;
  }

  /// A row that is free no longer. There must be one.
  SINKSTATE_HOST_DEVICE std::int32_t take() const { return rows[--*free]; }

  /// The row is free again.
  SINKSTATE_HOST_DEVICE void give(std::int32_t row) const { rows[(*free)++] = row; }
};

SINKSTATE_NAMESPACE_END
