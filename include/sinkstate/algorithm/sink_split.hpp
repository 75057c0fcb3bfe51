/// @file
/// The part of a value along the sink direction: docs/mathematics.md, equation (5).
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../model/certificate.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Splits values along a direction. Zeros mean that there is nothing to split off.
template <class T>
class SinkSplit {
 public:
  template <class Team>
  SINKSTATE_HOST_DEVICE void prepare(Team& team, Index d_v, const T* direction) {
    direction_ = {direction, 1, d_v, d_v};
    square_ = team.dot(d_v, direction, direction);
  }

  /// value = omega direction + rest.
  /// @returns omega; `value` becomes the rest
  template <class Team>
  SINKSTATE_HOST_DEVICE T split(Team& team, T* value) const {
    if (!(square_ > T(0))) return T(0);
    T omega = T(0);
    // The second pass removes what the rounding of the first has left.
    for (int pass = 0; pass < 2; ++pass) {
      const T part = team.dot(direction_.cols, value, direction_.data) / square_;
      const T negative = -part;
      team.add_combination(direction_, &negative, value);
      omega += part;
    }
    return omega;
  }

  /// |direction|
  SINKSTATE_HOST_DEVICE T length() const { return std::sqrt(square_); }

  /// |a| |direction|, the norm of the sink term.
  template <class Team>
  SINKSTATE_HOST_DEVICE T strength(Team& team, Index d_k, const T* coefficients) const {
    return bound_product(team.norm(d_k, coefficients), length());
  }

 private:
  MatrixView<const T> direction_;
  T square_ = T(0);
};

}  // namespace detail
SINKSTATE_NAMESPACE_END
