/// @file
/// Rows of numbers as they lie in memory: in the arithmetic type, or in a narrow format.
#pragma once

#include <type_traits>

#include "../config.hpp"
#include "listed_rows.hpp"
#include "matrix_view.hpp"
#include "number_formats.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Rows of codes of a narrow format. It owns nothing and is copied freely.
template <class Format>
struct NarrowRows {
  ListedRows<typename Format::Code> codes;
  ListedRows<float> scales;  ///< a power of two a row, where `Format::scaled`

  SINKSTATE_HOST_DEVICE float scale(Index i) const { return Format::scaled ? scales(i, 0) : 1.0f; }
  /// The number at (i, j).
  SINKSTATE_HOST_DEVICE float operator()(Index i, Index j) const {
    return scale(i) * widen<Format>(codes(i, j));
  }
  SINKSTATE_HOST_DEVICE NarrowRows middle_rows(Index first, Index count) const {
    return {codes.middle_rows(first, count), scales.middle_rows(first, count)};
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
  using Listed = ListedRows<Stored>;

  SINKSTATE_HOST_DEVICE static Rows rows(const MatrixView<Code>& numbers, float*) {
    return numbers;
  }
  SINKSTATE_HOST_DEVICE static Listed listed(const ListedRows<Code>& numbers,
                                             const ListedRows<float>&) {
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
  using Listed = Rows;

  SINKSTATE_HOST_DEVICE static Rows rows(const MatrixView<Code>& codes, float* scales) {
    return {codes, {scales, codes.rows, 1, 1}};
  }
  SINKSTATE_HOST_DEVICE static Listed listed(const ListedRows<Code>& codes,
                                             const ListedRows<float>& scales) {
    return {codes, scales};
  }
};

template <class T>
SINKSTATE_HOST_DEVICE void clear(const ListedRows<T>& rows) {
  for (Index i = 0; i < rows.rows; ++i) {
    for (Index j = 0; j < rows.cols; ++j) rows(i, j) = T(0);
  }
}
template <class T>
SINKSTATE_HOST_DEVICE void clear(const MatrixView<T>& rows) {
  clear(ListedRows<T>(rows));
}
/// The rows as they lie in memory.
template <class Rows>
SINKSTATE_HOST_DEVICE const Rows& codes_of(const Rows& rows) {
  return rows;
}
template <class Format>
SINKSTATE_HOST_DEVICE const auto& codes_of(const NarrowRows<Format>& rows) {
  return rows.codes;
}

template <class Format>
SINKSTATE_HOST_DEVICE void clear(const NarrowRows<Format>& rows) {
  clear(rows.codes);
  for (Index i = 0; Format::scaled && i < rows.codes.rows; ++i) rows.scales(i, 0) = 1.0f;
}

}  // namespace detail

/// Rows as `Stored` says: `MatrixView` of float or double, `NarrowRows` of a narrow format.
template <class Stored>
using StoredRows = typename detail::StoredAs<Stored>::Rows;

/// The same over pieces of memory that a list may name: `ListedRows`, or `NarrowRows`.
template <class Stored>
using StoredListedRows = typename detail::StoredAs<Stored>::Listed;

SINKSTATE_NAMESPACE_END
