/// @file
/// The part of a value along the sink direction: docs/mathematics.md, equation (5).
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "scaling.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Splits values along a direction of any size. Zeros mean that there is nothing to split off.
template <class T>
class SinkSplit {
 public:
  SINKSTATE_HOST_DEVICE SinkSplit(Index d_v, Workspace& scratch)
      : d_v_(d_v), direction_(scratch.take<T>(d_v)) {}

  template <class Team>
  SINKSTATE_HOST_DEVICE void prepare(Team& team, const T* direction) {
    team.copy(d_v_, direction, direction_);
    present_ = normalize_exponent(team, d_v_, direction_, exponent_);
    square_ = team.dot(d_v_, direction_, direction_);
    norm_ = team.norm(d_v_, direction);
  }

  /// value = omega direction + rest.
  /// @returns omega; `value` becomes the rest
  template <class Team>
  SINKSTATE_HOST_DEVICE T split(Team& team, T* value) const {
    if (!present_) return T(0);
    const MatrixView<const T> row{direction_, 1, d_v_, d_v_};
    T omega = T(0);
    // The second pass removes what the rounding of the first has left.
    for (int pass = 0; pass < 2; ++pass) {
      const T part = team.dot(d_v_, value, direction_) / square_;
      const T negative = -part;
      team.add_combination(row, &negative, value);
      omega += part;
    }
    return std::ldexp(omega, -exponent_);
  }

  /// |a| |direction|, the norm of the sink term.
  template <class Team>
  SINKSTATE_HOST_DEVICE T strength(Team& team, Index d_k, const T* coefficients) const {
    return bound_product(team.norm(d_k, coefficients), norm_);
  }

 private:
  Index d_v_;
  T* direction_;
  bool present_ = false;
  int exponent_ = 0;
  T square_ = T(0);
  T norm_ = T(0);
};

}  // namespace detail
SINKSTATE_NAMESPACE_END
