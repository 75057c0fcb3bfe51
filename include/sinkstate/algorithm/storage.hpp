/// @file
/// Between the numbers that are stored and those that are computed with: docs/numerics.md, section
/// 11.
#pragma once

#include <cmath>
#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/number_formats.hpp"
#include "../core/random.hpp"
#include "../core/stored_rows.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Row i as numbers to compute with: where it lies, or widened into `scratch`.
template <class Team, class T>
SINKSTATE_HOST_DEVICE const T* read_row(Team&, const MatrixView<T>& rows, Index i, T*) {
  return rows.row(i);
}
template <class Team, class T>
SINKSTATE_HOST_DEVICE const T* read_row(Team&, const ListedRows<T>& rows, Index i, T*) {
  return rows.row(i);
}
template <class Team, class Format, class T>
SINKSTATE_HOST_DEVICE const T* read_row(Team& team, const NarrowRows<Format>& rows, Index i,
                                        T* scratch) {
  team.widen(Format{}, rows.codes.cols, rows.scale(i), rows.codes.row(i), scratch);
  return scratch;
}

/// All rows.
/// @param scratch  as many rows, or none where numbers are not narrow
template <class Team, class T>
SINKSTATE_HOST_DEVICE MatrixView<const T> read_rows(Team&, const MatrixView<T>& rows,
                                                    const MatrixView<T>&) {
  return rows;
}
template <class Team, class T>
SINKSTATE_HOST_DEVICE ListedRows<T> read_rows(Team&, const ListedRows<T>& rows,
                                              const MatrixView<T>&) {
  return rows;
}
template <class Team, class Format, class T>
SINKSTATE_HOST_DEVICE MatrixView<const T> read_rows(Team& team, const NarrowRows<Format>& rows,
                                                    const MatrixView<T>& scratch) {
  for (Index i = 0; i < rows.codes.rows; ++i) read_row(team, rows, i, scratch.row(i));
  return {scratch.data, rows.codes.rows, rows.codes.cols, scratch.stride};
}

/// Whether finite numbers fit a format, with a scale where it has one.
template <class Stored, class Team, class T>
SINKSTATE_HOST_DEVICE bool fits(Team& team, Index n, const T* x) {
  if constexpr (!StoredAs<Stored>::narrow) {
    return true;
  } else {
    const float largest = largest_number<Stored>();
    int exponent = 0;
    const float fraction = std::frexp(largest, &exponent);
    // With a scale: up to the float of the same fraction and the highest exponent.
    return team.max_abs(n, x) <= (Stored::scaled ? std::ldexp(fraction, 128) : largest);
  }
}

/// The scale of a vector: the least power of two with which its largest entry fits. What is stored
/// with it and read again gets the same numbers once more, though maybe with half the scale.
template <class Format>
SINKSTATE_HOST_DEVICE float scale_of(float largest) {
  if (!(largest > 0.0f)) return 1.0f;
  int exponent = 0;
  int format_exponent = 0;
  const float fraction = std::frexp(largest, &exponent);
  const float format_fraction = std::frexp(largest_number<Format>(), &format_exponent);
  return std::ldexp(1.0f, exponent - format_exponent + (fraction > format_fraction ? 1 : 0));
}

/// Stores row i, rounded if the format is narrow. The numbers must fit.
template <class Team, class T>
SINKSTATE_HOST_DEVICE void write_row(Team& team, const MatrixView<T>& rows, Index i, const T* x,
                                     const RowRounding&) {
  team.copy(rows.cols, x, rows.row(i));
}
template <class Team, class T>
SINKSTATE_HOST_DEVICE void write_row(Team& team, const ListedRows<T>& rows, Index i, const T* x,
                                     const RowRounding&) {
  team.copy(rows.cols, x, rows.row(i));
}
template <class Team, class Format>
SINKSTATE_HOST_DEVICE void write_row(Team& team, const NarrowRows<Format>& rows, Index i,
                                     const float* x, const RowRounding& rounding) {
  float factor = 1.0f;
  if constexpr (Format::scaled) {
    const float scale = scale_of<Format>(team.max_abs(rows.codes.cols, x));
    rows.scales(i, 0) = scale;
    factor = 1.0f / scale;
  }
  team.narrow(Format{}, rows.codes.cols, factor, x, rounding, rows.codes.row(i));
}

/// The random words of one compaction: each vector of a state has a place of its own.
struct StorageRounding {
  Rounding rounding = Rounding::nearest;
  Philox philox{};
  std::uint64_t stream = 0;
  Index blocks = 0;  // of four words, for the longest vector

  /// @param event  a number that no other rounding of this state has; 0 is initialisation
  SINKSTATE_HOST_DEVICE StorageRounding(const StateConfig& config, std::int64_t event)
      : rounding(config.rounding),
        philox{config.seed},
        // Stream 0 is that of the random sketches.
        stream(static_cast<std::uint64_t>(event) + 1),
        blocks(((config.d_k > config.d_v ? config.d_k : config.d_v) + 3) / 4) {}

  SINKSTATE_HOST_DEVICE RowRounding vector(Index place) const {
    return {rounding, philox, stream, static_cast<std::uint64_t>(place * blocks)};
  }
  SINKSTATE_HOST_DEVICE RowRounding sink() const { return vector(0); }
  SINKSTATE_HOST_DEVICE RowRounding dense_row(Index i) const { return vector(1 + i); }
  SINKSTATE_HOST_DEVICE RowRounding key(Index i) const { return vector(1 + 2 * i); }
  SINKSTATE_HOST_DEVICE RowRounding value(Index i) const { return vector(2 + 2 * i); }
};

/// Vectors to compare what was to be stored with what was.
template <class T>
struct TermScratch {
  T* key = nullptr;    // d_k
  T* value = nullptr;  // d_v
  T* stored_key = nullptr;
  T* stored_value = nullptr;

  SINKSTATE_HOST_DEVICE static TermScratch carve(Workspace& memory, Index d_k, Index d_v) {
    return {memory.take<T>(d_k), memory.take<T>(d_v), memory.take<T>(d_k), memory.take<T>(d_v)};
  }
};

/// x <- x - share y for the share of y that leaves least of x.
/// @returns the share; 1, and zeros are left, for equal vectors
template <class Team, class T>
SINKSTATE_HOST_DEVICE T subtract_share(Team& team, Index n, const T* y, T* x) {
  const T square = team.dot(n, y, y);
  const T share = square > T(0) ? team.dot(n, x, y) / square : T(0);
  const T negative = -share;
  team.add_combination(MatrixView<const T>{y, 1, n, n}, &negative, x);
  return share;
}

/// Writes terms into a body, and bounds what rounding them changes: docs/numerics.md, (N14).
template <class Policy, class T = typename Policy::Compute>
class TermWriter {
 public:
  SINKSTATE_HOST_DEVICE TermWriter(const SinkStateView<Policy>& state,
                                   const StorageRounding& rounding, const TermScratch<T>& scratch)
      : state_(state), rounding_(rounding), scratch_(scratch) {}

  /// Term i of the body.
  /// @param key, value   consumed where they are rounded
  /// @param orthonormal  one of a set of terms with orthonormal keys and values, all of which are
  ///                     written here
  template <class Team>
  SINKSTATE_HOST_DEVICE void write(Team& team, Index i, T* key, T* value, T strength,
                                   bool orthonormal) {
    const auto keys = state_.factors.keys();
    const auto values = state_.factors.values();
    write_row(team, keys, i, static_cast<const T*>(key), rounding_.key(i));
    write_row(team, values, i, static_cast<const T*>(value), rounding_.value(i));
    if constexpr (StoredAs<typename Policy::Stored>::narrow) {
      // (N14) The strength that fits the rounded vectors best: the norms that rounding has changed
      // would otherwise grow from compaction to compaction.
      const Index d_k = state_.config.d_k;
      const Index d_v = state_.config.d_v;
      const T* const stored_key = read_row(team, keys, i, scratch_.stored_key);
      const T* const stored_value = read_row(team, values, i, scratch_.stored_value);
      const T value_norm = orthonormal ? T(1) : team.norm(d_v, value);
      const T key_share = subtract_share(team, d_k, stored_key, key);
      const T value_share = subtract_share(team, d_v, stored_value, value);
      const T key_change = team.norm(d_k, key);
      const T value_change = team.norm(d_v, value);
      if (orthonormal) {
        keys_change_ = std::hypot(keys_change_, key_change);
        key_part_ = std::hypot(key_part_, strength * key_change);
        value_part_ = std::hypot(value_part_, strength * value_change);
      } else if (key_change > T(0) || value_change > T(0)) {
        const T key_norm = key_share * team.norm(d_k, stored_key);
        apart_ += strength * (key_change * value_norm + key_norm * value_change);
      }
      strength *= key_share * value_share;
    }
    state_.factors.strength(i) = strength;
  }

  /// Bound of the Frobenius norm of what all this has changed.
  SINKSTATE_HOST_DEVICE T change() const {
    const double roundoffs = dot_roundoffs(state_.config.d_k) + dot_roundoffs(state_.config.d_v);
    const T growth = T(1) + static_cast<T>(roundoffs + 32.0) * unit_roundoff<T>;
    return growth * (key_part_ + (growth + keys_change_) * value_part_ + apart_);
  }

 private:
  SinkStateView<Policy> state_;
  StorageRounding rounding_;
  TermScratch<T> scratch_;
  T keys_change_ = T(0);
  T key_part_ = T(0);
  T value_part_ = T(0);
  T apart_ = T(0);
};

/// Stores one row that stands alone: of a dense body, or the sink.
/// @param scratch, stored  as long as the row
/// @returns the Frobenius norm of what rounding changes
template <class Team, class Rows, class T>
SINKSTATE_HOST_DEVICE T store_row(Team& team, const Rows& rows, Index i, Index n, const T* x,
                                  const RowRounding& rounding, T* scratch, T* stored) {
  write_row(team, rows, i, x, rounding);
  const T* const y = read_row(team, rows, i, stored);
  if (y != stored) return T(0);  // not narrow
  const T minus_one = T(-1);
  team.copy(n, x, scratch);
  team.add_combination(MatrixView<const T>{y, 1, n, n}, &minus_one, scratch);
  return team.norm(n, scratch);
}

/// A bound of how much longer than one a unit vector becomes by rounding, twice over for the two
/// vectors of a term.
template <class Stored, class T>
SINKSTATE_HOST_DEVICE T longest_term() {
  if constexpr (StoredAs<Stored>::narrow) {
    const T longest = T(1) + T(2) / static_cast<T>(1 << Stored::fraction_bits);
    return longest * longest;
  } else {
    return T(1);
  }
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
