/// @file
/// Rows that lie one behind the other, or where a list says.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "matrix_view.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Rows of contiguous numbers over pieces of equal length, `stride` apart; a piece holds one row or
/// several. It owns nothing and is copied freely.
///
/// Without a list the pieces follow one another, as in a `MatrixView`. With one, row i lies in
/// piece `list[i / rows_per_piece]`: that is how states of a pool share one store.
template <class T>
struct ListedRows {
  T* data = nullptr;
  Index rows = 0;
  Index cols = 0;
  Index stride = 0;
  const std::int32_t* list = nullptr;
  Index rows_per_piece = 1;
  Index first = 0;  ///< number of row 0 in the list

  ListedRows() = default;
  SINKSTATE_HOST_DEVICE ListedRows(T* pieces, Index count, Index width, Index distance,
                                   const std::int32_t* listed = nullptr, Index per_piece = 1)
      : data(pieces),
        rows(count),
        cols(width),
        stride(distance),
        list(listed),
        rows_per_piece(per_piece) {}
  SINKSTATE_HOST_DEVICE ListedRows(const MatrixView<T>& matrix)
      : ListedRows(matrix.data, matrix.rows, matrix.cols, matrix.stride) {}

  SINKSTATE_HOST_DEVICE T* row(Index i) const {
    const Index place = first + i;
    if (list == nullptr) return data + place * stride;
    if (rows_per_piece == 1) return data + Index{list[place]} * stride;
    return data + Index{list[place / rows_per_piece]} * stride + place % rows_per_piece * cols;
  }
  SINKSTATE_HOST_DEVICE T& operator()(Index i, Index j) const { return row(i)[j]; }

  /// The same rows, of which only `count` beginning with `from` are seen.
  SINKSTATE_HOST_DEVICE ListedRows middle_rows(Index from, Index count) const {
    ListedRows some = *this;
    some.first += from;
    some.rows = count;
    return some;
  }
};

SINKSTATE_NAMESPACE_END
