/// @file
/// Decays as sums of log decays, from the newest token back: docs/mathematics.md, equation (3).
#pragma once

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"
#include "../model/update_rules.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// The decay that has been applied since some token, while one walks backwards over the tokens
/// after it.
///
/// Only sums of non-positive numbers occur: no inverse decay, no difference of two running sums.
/// -inf works.
template <class Rule, class T>
class DecayWalk {
 public:
  static constexpr bool per_channel = Rule::decay == Decay::per_channel;

  SINKSTATE_HOST_DEVICE DecayWalk(Index d_k, Workspace& scratch) : d_k_(d_k) {
    if constexpr (per_channel) {
      sums_ = scratch.take<T>(d_k);
      weights_ = scratch.take<T>(d_k);
    }
  }

  /// Nothing has been applied.
  template <class Team>
  SINKSTATE_HOST_DEVICE void start(Team& team) {
    sum_ = T(0);
    weight_ = T(1);
    if constexpr (per_channel) {
      team.fill(d_k_, T(0), sums_);
      team.fill(d_k_, T(1), weights_);
    }
  }

  /// One token more has been applied.
  template <class Team>
  SINKSTATE_HOST_DEVICE void include(Team& team, const T* log_decay) {
    if constexpr (Rule::decay == Decay::scalar) {
      sum_ += *log_decay;
      weight_ = team.exp_decay(sum_);
    } else if constexpr (per_channel) {
      team.add(d_k_, log_decay, sums_);
      team.exp_decay(d_k_, sums_, weights_);
    }
  }

  /// The decay of every channel; 1 where channels differ.
  SINKSTATE_HOST_DEVICE T weight() const { return weight_; }
  /// y = decay o x
  template <class Team>
  SINKSTATE_HOST_DEVICE void apply(Team& team, const T* x, T* y) const {
    if constexpr (per_channel) {
      team.multiply(d_k_, x, weights_, y);
    } else {
      team.scale(d_k_, weight_, x, y);
    }
  }
  /// The decay of one channel.
  SINKSTATE_HOST_DEVICE T channel(Index i) const {
    if constexpr (per_channel) return weights_[i];
    return weight_;
  }

 private:
  Index d_k_;
  T sum_ = T(0);
  T weight_ = T(1);
  T* sums_ = nullptr;
  T* weights_ = nullptr;
};

}  // namespace detail
SINKSTATE_NAMESPACE_END
