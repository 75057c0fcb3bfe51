/// @file
/// One host thread as a team, with Eigen's fixed-size arrays as its vector unit.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "../config.hpp"
#include "../core/backend.hpp"
#include "../core/matrix_view.hpp"
#include "../core/number_formats.hpp"
#include "../core/owner.hpp"
#include "../core/workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// The operations of core/backend.hpp on one thread. The order of every sum depends on sizes alone,
/// never on the alignment of an address: equal numbers give equal bits wherever they lie.
class HostTeam {
 public:
  /// @param workspace_bytes  `workspace_bytes<Policy>(config)` of the largest state this team will
  ///                         work on
  explicit HostTeam(std::size_t workspace_bytes) : scratch_(workspace_bytes) {}

  /// The scratch, from its beginning.
  Workspace workspace() { return scratch_.workspace(); }

  /// A hint, without effect on any result: a piece of memory that will be read after what this team
  /// reads now, as the factors or the buffer of the next state in line. It is fetched into the
  /// second-level cache line by line, as fast as products read theirs: processors have room for few
  /// misses, and a piece is over before their own prefetcher has begun. The newest piece comes
  /// first; the team remembers four.
  ///
  /// @param reads  times that products read a line: 2 in a `step` of a rule that corrects
  void expect(const void* data, std::size_t bytes, int reads = 1) {
    const auto* const first = static_cast<const char*>(data);
    expect(Piece{first, first + bytes, nullptr, nullptr, nullptr, 0}, reads);
  }
  /// The same for `count` rows of so many bytes, in the order of a list, which is read until `forget`.
  void expect_rows(const void* rows, std::size_t row_bytes, const std::int32_t* list, Index count,
                   int reads = 1) {
    expect(Piece{nullptr, nullptr, list, list + count, static_cast<const char*>(rows), row_bytes},
           reads);
  }
  /// Memory that is needed at once, or is too little to wait.
  void fetch_now(const void* data, std::size_t bytes) const {
    const auto* const first = static_cast<const char*>(data);
    for (std::size_t i = 0; i < bytes; i += line) prefetch(first + i);
  }
  /// Drops what is expected and not fetched yet.
  void forget() { left_ = 0; }

  template <class T>
  T dot(Index n, const T* x, const T* y) const {
    Lanes<T> sum = Lanes<T>::Zero();
    for_lanes(n, [&](Index i, Index count) { sum += load(x + i, count) * load(y + i, count); });
    return sum.sum();
  }

  template <class T>
  T norm(Index n, const T* x) const {
    const T squares = dot(n, x, x);
    constexpr T tiny = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
    if (squares > tiny && squares <= std::numeric_limits<T>::max()) return std::sqrt(squares);
    const T largest = max_abs(n, x);
    if (!(largest > T(0)) || !std::isfinite(largest)) return largest;
    int exponent = 0;
    std::frexp(largest, &exponent);
    // Two steps: 2^-exponent itself may not be a number of this type. The order of the sum is that
    // of `dot`.
    const T half = std::ldexp(T(1), -exponent / 2);
    const T rest = std::ldexp(T(1), -exponent + exponent / 2);
    Lanes<T> sum = Lanes<T>::Zero();
    for_lanes(n, [&](Index i, Index count) { sum += (load(x + i, count) * half * rest).square(); });
    return std::ldexp(std::sqrt(sum.sum()), exponent);
  }

  /// The largest entry, or NaN if there is one.
  template <class T>
  T max(Index n, const T* x) const {
    T largest[width];
    bool unordered = false;
    for (T& lane : largest) lane = -std::numeric_limits<T>::infinity();
    for_lanes(n, [&](Index i, Index count) {
      for (Index lane = 0; lane < count; ++lane) {
        largest[lane] = x[i + lane] > largest[lane] ? x[i + lane] : largest[lane];
        unordered |= x[i + lane] != x[i + lane];
      }
    });
    if (unordered) return std::numeric_limits<T>::quiet_NaN();
    return *std::max_element(largest, largest + width);
  }

  /// The largest magnitude, or NaN if an entry is not finite.
  template <class T>
  T max_abs(Index n, const T* x) const {
    Lanes<T> largest = Lanes<T>::Zero();
    Lanes<T> marks = Lanes<T>::Zero();  // a maximum may lose a NaN, a sum does not
    for_lanes(n, [&](Index i, Index count) {
      const Lanes<T> magnitude = load(x + i, count).abs();
      largest = largest.max(magnitude);
      marks += magnitude * T(0);
    });
    return largest.maxCoeff() + marks.sum();
  }

  template <class T>
  bool finite(Index n, const T* x) const {
    Lanes<T> sum = Lanes<T>::Zero();  // 0 * x is NaN for NaN and infinities, else 0
    for_lanes(n, [&](Index i, Index count) { sum += load(x + i, count) * T(0); });
    return sum.sum() == T(0);
  }

  /// z_i = row_i . x
  template <class Rows, class T>
  void project(const Rows& rows, const T* x, T* z) const {
    Index r = 0;
    for (; r + 4 <= rows.rows; r += 4) project_rows<4>(rows, r, x, z);
    for (; r < rows.rows; ++r) project_rows<1>(rows, r, x, z);
  }

  /// y += sum_i z_i row_i
  template <class Rows, class T>
  void add_combination(const Rows& rows, const T* z, T* y) const {
    const Index n = rows.cols;
    Index j = 0;
    for (; j + 4 * width <= n; j += 4 * width) combine_columns<4>(rows, z, y, j);
    for (; j + width <= n; j += width) combine_columns<1>(rows, z, y, j);
    if (j == n) return;
    Lanes<T> sum = load(y + j, n - j);
    for (Index i = 0; i < rows.rows; ++i) sum += z[i] * load(rows.row(i) + j, n - j);
    store(sum, y + j, n - j);
  }

  template <class T>
  void fill(Index n, T value, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] = value;
  }
  template <class T>
  void copy(Index n, const T* x, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] = x[i];
  }
  /// y = a x; y may be x
  template <class T>
  void scale(Index n, T a, const T* x, T* y) const {
    for_lanes(n,
              [&](Index i, Index count) { store(Lanes<T>(a * load(x + i, count)), y + i, count); });
  }
  /// y = x o w; y may be x
  template <class T>
  void multiply(Index n, const T* x, const T* w, T* y) const {
    for_lanes(n, [&](Index i, Index count) {
      store(Lanes<T>(load(x + i, count) * load(w + i, count)), y + i, count);
    });
  }
  /// y += x
  template <class T>
  void add(Index n, const T* x, T* y) const {
    for_lanes(n, [&](Index i, Index count) {
      store(Lanes<T>(load(y + i, count) + load(x + i, count)), y + i, count);
    });
  }
  /// (x, y) <- (c x - s y, s x + c y) with tau = s / (1 + c), in Rutishauser's form: its rounding
  /// error is a share of the change, not of the vectors, so that many small rotations do not add up
  /// to a loss of orthogonality.
  template <class T>
  void rotate(Index n, T s, T tau, T* x, T* y) const {
    for_lanes(n, [&](Index i, Index count) {
      const Lanes<T> a = load(x + i, count);
      const Lanes<T> b = load(y + i, count);
      store(Lanes<T>(a - s * (b + tau * a)), x + i, count);
      store(Lanes<T>(b + s * (a - tau * b)), y + i, count);
    });
  }

  /// y_i = scale times the number of code x_i
  template <class Format>
  void widen(Format, Index n, float scale, const typename Format::Code* x, float* y) const {
    for (Index i = 0; i < n; ++i) y[i] = scale * sinkstate::widen<Format>(x[i]);
  }
  /// y_i = the code of factor x_i, rounded
  template <class Format>
  void narrow(Format format, Index n, float factor, const float* x,
              const detail::RowRounding& rounding, typename Format::Code* y) const {
    rounding(format, 0, n, factor, x, y);
  }

  template <class T>
  T exp_decay(T log_decay) const {
    return log_decay < smallest_log<T>() ? T(0) : std::exp(log_decay);
  }
  /// y_i = exp(x_i)
  template <class T>
  void exp_decay(Index n, const T* x, T* y) const {
    for_lanes(n, [&](Index i, Index count) {
      const Lanes<T> log_decay = load(x + i, count);
      Lanes<T> decay = log_decay.exp();
      // Eigen's select would take the exponential out of the vector unit.
      for (Index lane = 0; lane < width; ++lane) {
        decay[lane] = log_decay[lane] < smallest_log<T>() ? T(0) : decay[lane];
      }
      store(decay, y + i, count);
    });
  }

 private:
  static constexpr Index width = 16;
  template <class T>
  using Lanes = Eigen::Array<T, 16, 1>;

  /// Memory that is expected and not fetched yet: to the end, and then row by row.
  struct Piece {
    const char* next = nullptr;
    const char* end = nullptr;
    const std::int32_t* row = nullptr;
    const std::int32_t* last = nullptr;
    const char* rows = nullptr;
    std::size_t row_bytes = 0;
  };
  static constexpr unsigned pieces = 4;
  static constexpr std::size_t line = 64;

  void expect(const Piece& piece, int reads) {
    newest_ = (newest_ + 1) % pieces;
    expected_[newest_] = piece;
    if (left_ < pieces) ++left_;
    reads_ = reads;
  }

  static void prefetch([[maybe_unused]] const char* address) {
#if defined(__GNUC__)
    __builtin_prefetch(address, 0, 2);
    asm volatile("");  // g++ 12 drops calls of a function that does nothing but prefetch
#endif
  }

  /// Called where products read as many lines. Mostly there is nothing to do.
  void fetch(int lines) const {
    if (left_ == 0) return;
    Piece& piece = expected_[newest_];
    for (int n = 0; n < lines; n += reads_) {
      if (piece.next >= piece.end) {
        if (piece.row == piece.last) break;
        piece.next = piece.rows + static_cast<std::size_t>(*piece.row++) * piece.row_bytes;
        piece.end = piece.next + piece.row_bytes;
      }
      prefetch(piece.next);
      piece.next += line;
    }
    if (piece.next < piece.end || piece.row != piece.last) return;
    newest_ = (newest_ + pieces - 1) % pieces;
    --left_;
  }

  /// The logarithm of min / epsilon. Below it a query, once decayed, would be subnormal in part;
  /// further down Eigen's vector form clamps the exponential above zero. What is cut is far below
  /// the rounding of a term (N3).
  template <class T>
  static constexpr T smallest_log() {
    return std::is_same_v<T, float> ? T(-71.394) : T(-672.3527);
  }

  template <class T>
  static Lanes<T> load(const T* x) {
    return Eigen::Map<const Lanes<T>>(x);
  }
  template <class T>
  static Lanes<T> load(const T* x, Index count) {
    if (count == width) return load(x);
    Lanes<T> lanes = Lanes<T>::Zero();
    for (Index i = 0; i < count; ++i) lanes[i] = x[i];
    return lanes;
  }
  template <class T>
  static void store(const Lanes<T>& lanes, T* y, Index count) {
    if (count == width) {
      Eigen::Map<Lanes<T>>{y} = lanes;
    } else {
      for (Index i = 0; i < count; ++i) y[i] = lanes[i];
    }
  }
  template <class Body>
  static void for_lanes(Index n, const Body& body) {
    Index i = 0;
    for (; i + width <= n; i += width) body(i, width);
    if (i < n) body(i, n - i);
  }

  template <int Count, class Rows, class T>
  void project_rows(const Rows& rows, Index first, const T* x, T* z) const {
    const Index n = rows.cols;
    Lanes<T> sum[Count];
    const T* row[Count];
    for (int r = 0; r < Count; ++r) {
      sum[r].setZero();
      row[r] = rows.row(first + r);
    }
    for_lanes(n, [&](Index i, Index count) {
      fetch(Count);
      const Lanes<T> shared = load(x + i, count);
      for (int r = 0; r < Count; ++r) sum[r] += load(row[r] + i, count) * shared;
    });
    for (int r = 0; r < Count; ++r) z[first + r] = sum[r].sum();
  }

  template <int Blocks, class Rows, class T>
  void combine_columns(const Rows& rows, const T* z, T* y, Index first) const {
    Lanes<T> sum[Blocks];
    for (int b = 0; b < Blocks; ++b) sum[b] = load(y + first + b * width);
    for (Index i = 0; i < rows.rows; ++i) {
      fetch(Blocks);
      const T* row = rows.row(i) + first;
      for (int b = 0; b < Blocks; ++b) sum[b] += z[i] * load(row + b * width);
    }
    for (int b = 0; b < Blocks; ++b) store(sum[b], y + first + b * width, width);
  }

  AlignedBytes scratch_;
  mutable Piece expected_[pieces];  // a stack in a ring
  mutable unsigned newest_ = 0;
  mutable unsigned left_ = 0;
  int reads_ = 1;
};

SINKSTATE_NAMESPACE_END
