/// @file
/// One-sided Jacobi: the singular value decomposition of a small core.
#pragma once

#include <cmath>
#include <limits>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../model/certificate.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Rows below this share of the largest are rounding noise, in units of the roundoff: they are not
/// rotated, and nobody keeps them.
inline constexpr int negligible = 2;

/// The sweep cap: 3 to 8 are usual.
inline constexpr int most_sweeps = 30;

/// Terms and rows below this are dropped: multiplied by anything down to u they would become
/// subnormal numbers, which take a processor a hundred times longer.
template <class T>
inline constexpr T smallest_kept =
    std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon();

template <class T>
struct JacobiOutcome {
  int sweeps = 0;
  bool converged = false;
  T roundoffs = 0;  ///< (N6) of the product of rotations and rows, in units of u
};

/// Rotates the rows of G until they are orthogonal, so that G = Y^T diag(s) X^T with s_i = |g_i|
/// and x_i = g_i / s_i: the Hestenes form, docs/numerics.md, section 3.
///
/// @param g     n vectors of length m, scaled so that the largest magnitude is near 1
/// @param y     n rows at least n wide, becomes the product of the rotations (rows orthonormal),
///              the rest 0; no data: not wanted
/// @param s     n numbers, the norms of the rotated rows, in no order
/// @param unit  roundoff of the numbers that the result is for; T may be wider
/// @param cap   of the sweeps: it ends the loop whatever the input (NaN included). Rotations keep
///              Y^T G whatever sweep they stop at.
template <class Team, class T>
SINKSTATE_HOST_DEVICE JacobiOutcome<T> one_sided_jacobi(Team& team, MatrixView<T> g,
                                                        MatrixView<T> y, T* s,
                                                        T unit = unit_roundoff<T>,
                                                        int cap = most_sweeps) {
  const Index n = g.rows;
  const Index m = g.cols;
  // The relative test of Demmel and Veselic. A product of length m is not known better than this;
  // where T is wider than `unit` it is, and few roundoffs are left, since cosines add up over
  // pairs.
  const T known = unit_roundoff<T> * std::sqrt(static_cast<T>(m < 4 ? 4 : m));
  const T tolerance = 2 * unit > known ? 2 * unit : known;
  if (y.data != nullptr) {
    for (Index i = 0; i < n; ++i) {
      team.fill(y.cols, T(0), y.row(i));
      y(i, i) = T(1);
    }
  }

  JacobiOutcome<T> outcome;
  while (!outcome.converged && outcome.sweeps < cap) {
    ++outcome.sweeps;
    outcome.converged = true;
    T largest = T(0);
    for (Index i = 0; i < n; ++i) {
      s[i] = team.dot(m, g.row(i), g.row(i));
      if (s[i] > largest) largest = s[i];
    }
    const T floor = (negligible * unit) * (negligible * unit) * largest;
    for (Index p = 0; p + 1 < n; ++p) {
      for (Index q = p + 1; q < n; ++q) {
        if (!(s[p] > floor && s[q] > floor)) continue;
        const T product = team.dot(m, g.row(p), g.row(q));
        if (!(std::abs(product) > tolerance * std::sqrt(s[p]) * std::sqrt(s[q]))) continue;
        outcome.converged = false;
        const T zeta = (s[q] - s[p]) / (2 * product);
        const T t = (zeta < T(0) ? T(-1) : T(1)) / (std::abs(zeta) + std::sqrt(T(1) + zeta * zeta));
        const T cosine = T(1) / std::sqrt(T(1) + t * t);
        const T sine = cosine * t;
        const T tau = sine / (T(1) + cosine);
        outcome.roundoffs += (T(2) + T(9) * std::abs(sine)) * std::sqrt(s[p] + s[q]);
        team.rotate(m, sine, tau, g.row(p), g.row(q));
        if (y.data != nullptr) team.rotate(y.cols, sine, tau, y.row(p), y.row(q));
        // The update of the norm cancels when most of a row is rotated away.
        const T kept_p = s[p] - t * product;
        const T kept_q = s[q] + t * product;
        s[p] = kept_p > s[p] / 8 ? kept_p : team.dot(m, g.row(p), g.row(p));
        s[q] = kept_q > s[q] / 8 ? kept_q : team.dot(m, g.row(q), g.row(q));
      }
    }
  }
  for (Index i = 0; i < n; ++i) s[i] = team.norm(m, g.row(i));
  return outcome;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
