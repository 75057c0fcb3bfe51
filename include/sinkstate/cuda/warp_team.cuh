/// @file
/// One warp as a team.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>

#include "../config.hpp"
#include "../core/backend.hpp"
#include "../core/matrix_view.hpp"
#include "../core/number_formats.hpp"
#include "../core/workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// The operations of core/backend.hpp on the 32 lanes of a warp, which call them together.
///
/// Numbers of a vector are dealt out to the lanes in turn, sums end in a tree: their order depends
/// on sizes alone, and every lane gets the result. The scalar code of an algorithm between two
/// operations is run by all lanes, each with the same numbers, and stores the same to the same
/// place; each operation that writes ends with a barrier of the warp, behind which all see it.
class WarpTeam {
 public:
  static constexpr int lanes = 32;

  /// @param scratch  `workspace_bytes<Policy>(config)` bytes of device memory, aligned to 64, of
  ///                 this warp alone
  __device__ WarpTeam(void* scratch, std::size_t size) : scratch_(scratch), size_(size) {}

  /// The scratch, from its beginning.
  __device__ Workspace workspace() const { return Workspace(scratch_, size_); }

  template <class T>
  __device__ T dot(Index n, const T* x, const T* y) const {
    T sum = T(0);
    for (Index i = lane(); i < n; i += lanes) sum += x[i] * y[i];
    return total(sum);
  }

  template <class T>
  __device__ T norm(Index n, const T* x) const {
    const T squares = dot(n, x, x);
    if (squares > tiny<T> && squares <= most<T>) return std::sqrt(squares);
    const T largest = max_abs(n, x);
    if (!(largest > T(0)) || !std::isfinite(largest)) return largest;
    int exponent = 0;
    std::frexp(largest, &exponent);
    // Two steps: 2^-exponent itself may not be a number of this type.
    const T half = std::ldexp(T(1), -exponent / 2);
    const T rest = std::ldexp(T(1), -exponent + exponent / 2);
    T sum = T(0);
    for (Index i = lane(); i < n; i += lanes) {
      const T scaled = x[i] * half * rest;
      sum += scaled * scaled;
    }
    return std::ldexp(std::sqrt(total(sum)), exponent);
  }

  /// The largest entry, or NaN if there is one.
  template <class T>
  __device__ T max(Index n, const T* x) const {
    T largest = -infinity<T>;
    bool unordered = false;
    for (Index i = lane(); i < n; i += lanes) {
      largest = x[i] > largest ? x[i] : largest;
      unordered |= x[i] != x[i];
    }
    largest = largest_of(largest);
    return __any_sync(all, unordered) ? nan<T> : largest;
  }

  /// The largest magnitude, or NaN if an entry is not finite.
  template <class T>
  __device__ T max_abs(Index n, const T* x) const {
    T largest = T(0);
    bool finite = true;
    for (Index i = lane(); i < n; i += lanes) {
      const T magnitude = std::abs(x[i]);
      largest = magnitude > largest ? magnitude : largest;
      finite &= std::isfinite(magnitude);
    }
    largest = largest_of(largest);
    return __all_sync(all, finite) ? largest : nan<T>;
  }

  template <class T>
  __device__ bool finite(Index n, const T* x) const {
    bool finite = true;
    for (Index i = lane(); i < n; i += lanes) finite &= std::isfinite(x[i]);
    return __all_sync(all, finite) != 0;
  }

  /// z_i = row_i . x
  template <class Rows, class T>
  __device__ void project(const Rows& rows, const T* x, T* z) const {
    for (Index i = 0; i < rows.rows; ++i) {
      const T sum = dot<T>(rows.cols, rows.row(i), x);
      if (lane() == 0) z[i] = sum;
    }
    __syncwarp();
  }

  /// y += sum_i z_i row_i
  template <class Rows, class T>
  __device__ void add_combination(const Rows& rows, const T* z, T* y) const {
    for (Index j = lane(); j < rows.cols; j += lanes) {
      T sum = y[j];
      for (Index i = 0; i < rows.rows; ++i) sum += z[i] * rows.row(i)[j];
      y[j] = sum;
    }
    __syncwarp();
  }

  template <class T>
  __device__ void fill(Index n, T value, T* y) const {
    each(n, [&](Index i) { y[i] = value; });
  }
  template <class T>
  __device__ void copy(Index n, const T* x, T* y) const {
    each(n, [&](Index i) { y[i] = x[i]; });
  }
  /// y = a x; y may be x
  template <class T>
  __device__ void scale(Index n, T a, const T* x, T* y) const {
    each(n, [&](Index i) { y[i] = a * x[i]; });
  }
  /// y = x o w; y may be x
  template <class T>
  __device__ void multiply(Index n, const T* x, const T* w, T* y) const {
    each(n, [&](Index i) { y[i] = x[i] * w[i]; });
  }
  /// y += x
  template <class T>
  __device__ void add(Index n, const T* x, T* y) const {
    each(n, [&](Index i) { y[i] += x[i]; });
  }
  /// As `HostTeam::rotate`.
  template <class T>
  __device__ void rotate(Index n, T s, T tau, T* x, T* y) const {
    each(n, [&](Index i) {
      const T a = x[i];
      const T b = y[i];
      x[i] = a - s * (b + tau * a);
      y[i] = b + s * (a - tau * b);
    });
  }

  /// y_i = scale times the number of code x_i
  template <class Format>
  __device__ void widen(Format, Index n, float scale, const typename Format::Code* x,
                        float* y) const {
    each(n, [&](Index i) { y[i] = scale * sinkstate::widen<Format>(x[i]); });
  }
  /// y_i = the code of factor x_i, rounded
  template <class Format>
  __device__ void narrow(Format format, Index n, float factor, const float* x,
                         const detail::RowRounding& rounding, typename Format::Code* y) const {
    // Random words come in blocks of four numbers.
    for (Index i = 4 * lane(); i < n; i += 4 * lanes) {
      rounding(format, i, i + 4 < n ? i + 4 : n, factor, x, y);
    }
    __syncwarp();
  }

  /// 0 below the logarithm of min / epsilon, as on a host.
  template <class T>
  __device__ T exp_decay(T log_decay) const {
    constexpr T smallest = sizeof(T) == sizeof(float) ? T(-71.394) : T(-672.3527);
    return log_decay < smallest ? T(0) : std::exp(log_decay);
  }
  /// y_i = exp(x_i)
  template <class T>
  __device__ void exp_decay(Index n, const T* x, T* y) const {
    each(n, [&](Index i) { y[i] = exp_decay(x[i]); });
  }

 private:
  static constexpr unsigned all = 0xFFFFFFFFu;

  // Device code reads constants of numeric_limits, but calls none of its functions.
  template <class T>
  static constexpr T tiny = std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();
  template <class T>
  static constexpr T most = std::numeric_limits<T>::max();
  template <class T>
  static constexpr T infinity = std::numeric_limits<T>::infinity();
  template <class T>
  static constexpr T nan = std::numeric_limits<T>::quiet_NaN();

  __device__ static Index lane() { return static_cast<Index>(threadIdx.x % lanes); }

  template <class Body>
  __device__ static void each(Index n, const Body& body) {
    for (Index i = lane(); i < n; i += lanes) body(i);
    __syncwarp();
  }
  /// Over all lanes, the same bits in each: every addition has the same two operands in both of its
  /// lanes.
  template <class T>
  __device__ static T total(T sum) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(all, sum, distance);
    }
    return sum;
  }
  template <class T>
  __device__ static T largest_of(T largest) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      const T other = __shfl_xor_sync(all, largest, distance);
      largest = other > largest ? other : largest;
    }
    return largest;
  }

  void* scratch_;
  std::size_t size_;
};

SINKSTATE_NAMESPACE_END
