/// @file
/// Matrices that belong to somebody else.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Every size, count and offset: signed and 64 bits wide, so that no product of shapes wraps.
using Index = std::int64_t;

/// Rows of contiguous numbers, `stride` apart. It owns nothing and is copied freely.
///
/// A dense state [K,V] (row = key channel) and a list of vectors, one a row, are both of this form.
template <class T>
struct MatrixView {
  T* data = nullptr;
  Index rows = 0;
  Index cols = 0;
  Index stride = 0;

  SINKSTATE_HOST_DEVICE T* row(Index i) const { return data + i * stride; }
  SINKSTATE_HOST_DEVICE T& operator()(Index i, Index j) const { return data[i * stride + j]; }

  /// The same rows, of which only `count` beginning with `first` are seen.
  SINKSTATE_HOST_DEVICE MatrixView middle_rows(Index first, Index count) const {
    return MatrixView{row(first), count, cols, stride};
  }

  /// Numbers that may be written may be read.
  template <class Read, class = std::enable_if_t<std::is_same_v<Read, const T>>>
  SINKSTATE_HOST_DEVICE operator MatrixView<Read>() const {
    return {data, rows, cols, stride};
  }
};

/// A matrix whose rows and columns are any number of entries apart: [K,V] or [V,K], or a part of
/// either.
template <class T>
struct StridedMatrix {
  T* data = nullptr;
  Index rows = 0;
  Index cols = 0;
  Index row_stride = 0;
  Index col_stride = 1;

  StridedMatrix() = default;
  SINKSTATE_HOST_DEVICE StridedMatrix(T* entries, Index row_count, Index col_count,
                                      Index row_distance, Index col_distance = 1)
      : data(entries),
        rows(row_count),
        cols(col_count),
        row_stride(row_distance),
        col_stride(col_distance) {}
  template <class Entry, class = std::enable_if_t<std::is_convertible_v<Entry*, T*>>>
  SINKSTATE_HOST_DEVICE StridedMatrix(const MatrixView<Entry>& matrix)
      : StridedMatrix(matrix.data, matrix.rows, matrix.cols, matrix.stride, 1) {}

  SINKSTATE_HOST_DEVICE T& operator()(Index i, Index j) const {
    return data[i * row_stride + j * col_stride];
  }
};

SINKSTATE_NAMESPACE_END
