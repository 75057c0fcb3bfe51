/// @file
/// Rows of numbers as they lie in memory: in the arithmetic type, or in a narrow format.
#pragma once

#include <type_traits>

#include "../config.hpp"
#include "matrix_view.hpp"
#include "number_formats.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Rows of codes of a narrow format. It owns nothing and is copied freely.
template <class Format>
struct NarrowRows {
  MatrixView<typename Format::Code> codes;
  float* scales = nullptr;  ///< a power of two a row, where `Format::scaled`

  SINKSTATE_HOST_DEVICE float scale(Index i) const { return Format::scaled ? scales[i] : 1.0f; }
  /// The number at (i, j).
  SINKSTATE_HOST_DEVICE float operator()(Index i, Index j) const {
    return scale(i) * widen<Format>(codes(i, j));
  }
  SINKSTATE_HOST_DEVICE NarrowRows middle_rows(Index first, Index count) const {
    return {codes.middle_rows(first, count), Format::scaled ? scales + first : nullptr};
  }
};

namespace detail {

/// What follows from the word in which numbers are stored: float, double ...
template <class Stored, class = void>
struct StoredAs {
  static_assert(std::is_floating_point_v<Stored>, "wanted float, double or a narrow format");
  static constexpr bool narrow = false;
  static constexpr bool scaled = false;
  using Code = Stored;
  using Rows = MatrixView<Stored>;

  SINKSTATE_HOST_DEVICE static Rows rows(const MatrixView<Code>& numbers, float*) {
    return numbers;
  }
};
/// ... or a narrow format.
template <class Format>
struct StoredAs<Format, std::void_t<typename Format::Code>> {
  static constexpr bool narrow = true;
  static constexpr bool scaled = Format::scaled;
  using Code = typename Format::Code;
  using Rows = NarrowRows<Format>;

  SINKSTATE_HOST_DEVICE static Rows rows(const MatrixView<Code>& codes, float* scales) {
    return {codes, scales};
  }
};

template <class T>
SINKSTATE_HOST_DEVICE void clear(const MatrixView<T>& rows) {
  for (Index i = 0; i < rows.rows; ++i) {
    for (Index j = 0; j < rows.cols; ++j) rows(i, j) = T(0);
  }
}
template <class Format>
SINKSTATE_HOST_DEVICE void clear(const NarrowRows<Format>& rows) {
  clear(rows.codes);
  for (Index i = 0; Format::scaled && i < rows.codes.rows; ++i) rows.scales[i] = 1.0f;
}

}  // namespace detail

/// Rows as `Stored` says: `MatrixView` of float or double, `NarrowRows` of a narrow format.
template <class Stored>
using StoredRows = typename detail::StoredAs<Stored>::Rows;

SINKSTATE_NAMESPACE_END
