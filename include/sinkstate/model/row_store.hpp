/// @file
/// Which component rows of a pool are free.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// One bit a row, over memory of somebody else. Rows are taken from where the last one was found
/// on, so that a search is short as long as rows are free at all.
struct RowStoreView {
  /// What changes beside the bits.
  struct Record {
    Index free = 0;
    Index next_word = 0;
  };

  std::uint64_t* words = nullptr;  ///< a bit that is set is a free row
  Record* record = nullptr;
  Index rows = 0;

  static RowStoreView carve(Workspace& memory, Index rows) {
    RowStoreView view;
    view.words = memory.take<std::uint64_t>(word_count(rows));
    view.record = memory.take<Record>(1);
    view.rows = rows;
    return view;
  }

  /// All rows are free.
  SINKSTATE_HOST_DEVICE void reset() const {
    const Index count = word_count(rows);
    for (Index w = 0; w < count; ++w) words[w] = ~std::uint64_t{0};
    if (rows % 64 != 0) words[count - 1] = (std::uint64_t{1} << (rows % 64)) - 1;
    *record = Record{rows, 0};
  }

  /// A row that is free no longer. There must be one.
  SINKSTATE_HOST_DEVICE std::int32_t take() const {
    const Index count = word_count(rows);
    Index word = record->next_word;
    while (words[word] == 0) word = word + 1 < count ? word + 1 : 0;
    int bit = 0;
    while ((words[word] >> bit & 1) == 0) ++bit;
    words[word] &= words[word] - 1;
    record->next_word = word;
    record->free -= 1;
    return static_cast<std::int32_t>(64 * word + bit);
  }

  /// The row is free again.
  SINKSTATE_HOST_DEVICE void give(std::int32_t row) const {
    words[row / 64] |= std::uint64_t{1} << (row % 64);
    record->free += 1;
  }

  SINKSTATE_HOST_DEVICE bool is_free(std::int32_t row) const {
    return (words[row / 64] >> (row % 64) & 1) != 0;
  }

 private:
  SINKSTATE_HOST_DEVICE static constexpr Index word_count(Index rows) { return (rows + 63) / 64; }
};

SINKSTATE_NAMESPACE_END
