// The specification: the dense recurrence of one head, slow, sequential and obviously right.
//
//   S <- L S                      decay first
//   u  = b (v - theta S^T k)      then the correction, against the decayed state
//   S <- S + k u^T
//   o  = S^T q                    the read sees the token's own write
//
// DenseRecurrence<double> is the oracle; DenseRecurrence<float> is the plain fp32 recurrence that
// serves as a yardstick for rounding. Depends on nothing but the standard library.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace sinkstate::oracle {

struct RuleTraits {
  enum class Decay { none, scalar, per_channel };

  bool delta;  // theta: subtract what the state already predicts for this key
  Decay decay;

  // How many log decays a token carries.
  constexpr int log_decay_count(int d_k) const {
    return decay == Decay::none ? 0 : decay == Decay::scalar ? 1 : d_k;
  }
};

inline constexpr RuleTraits linear_attention{false, RuleTraits::Decay::none};
inline constexpr RuleTraits mamba2{false, RuleTraits::Decay::scalar};
inline constexpr RuleTraits gated_linear_attention{false, RuleTraits::Decay::per_channel};
inline constexpr RuleTraits delta_net{true, RuleTraits::Decay::none};
inline constexpr RuleTraits gated_delta{true, RuleTraits::Decay::scalar};
inline constexpr RuleTraits kimi_delta{true, RuleTraits::Decay::per_channel};

inline constexpr RuleTraits all_rules[] = {linear_attention, mamba2,      gated_linear_attention,
                                           delta_net,        gated_delta, kimi_delta};

inline const char* rule_name(RuleTraits rule) {
  switch (rule.decay) {
    case RuleTraits::Decay::none:
      return rule.delta ? "delta_net" : "linear_attention";
    case RuleTraits::Decay::scalar:
      return rule.delta ? "gated_delta" : "mamba2";
    case RuleTraits::Decay::per_channel:
      return rule.delta ? "kimi_delta" : "gated_linear_attention";
  }
  return "unknown";
}

// Which key head serves a value head when value heads outnumber key heads.
enum class HeadMap { interleaved, tiled };

constexpr int key_head(HeadMap map, int value_head, int key_heads, int value_heads) {
  return map == HeadMap::interleaved ? value_head / (value_heads / key_heads)
                                     : value_head % key_heads;
}

// U itself, but left out of deduction, so that a null log decay or a literal may be passed.
template <class U>
struct SameAs {
  using type = U;
};
template <class U>
using Same = typename SameAs<U>::type;

template <class T>
class DenseRecurrence {
 public:
  DenseRecurrence(RuleTraits rule, int d_k, int d_v)
      : rule_(rule),
        d_k_(static_cast<std::size_t>(d_k)),
        d_v_(static_cast<std::size_t>(d_v)),
        state_(d_k_ * d_v_, T(0)) {}

  // Row-major [d_k][d_v]; write to it to start from a given state.
  std::vector<T>& state() { return state_; }
  const std::vector<T>& state() const { return state_; }

  // Inputs are of type T or of a narrower one, which converts exactly: float tokens feed the double
  // oracle as they are. log_decay holds rule.log_decay_count(d_k) numbers in [-inf, 0] and is not
  // looked at when that is none.
  template <class U>
  void step(const U* key, const U* value, const Same<U>* log_decay, Same<U> write_strength) {
    require_exact_conversion<U>();
    decay(log_decay);

    std::vector<T> correction(d_v_);
    for (std::size_t j = 0; j < d_v_; ++j) {
      const T predicted = rule_.delta ? read_column(key, j) : T(0);
      correction[j] = static_cast<T>(write_strength) * (static_cast<T>(value[j]) - predicted);
    }
    for (std::size_t i = 0; i < d_k_; ++i) {
      for (std::size_t j = 0; j < d_v_; ++j) {
        state_[i * d_v_ + j] += static_cast<T>(key[i]) * correction[j];
      }
    }
  }

  // output[j] = sum_i S[i][j] query[i]
  template <class U>
  void read(const U* query, T* output) const {
    require_exact_conversion<U>();
    for (std::size_t j = 0; j < d_v_; ++j) output[j] = read_column(query, j);
  }

  template <class U>
  void step_read(const U* key, const U* value, const Same<U>* log_decay, Same<U> write_strength,
                 const U* query, T* output) {
    step(key, value, log_decay, write_strength);
    read(query, output);
  }

 private:
  template <class U>
  static void require_exact_conversion() {
    static_assert(std::numeric_limits<U>::digits <= std::numeric_limits<T>::digits,
                  "a token wider than the state would be rounded on the way in");
  }

  template <class U>
  void decay(const U* log_decay) {
    if (rule_.decay == RuleTraits::Decay::none) return;
    for (std::size_t i = 0; i < d_k_; ++i) {
      const std::size_t channel = rule_.decay == RuleTraits::Decay::per_channel ? i : 0;
      const T factor = std::exp(static_cast<T>(log_decay[channel]));  // exp(-inf) is exactly 0
      for (std::size_t j = 0; j < d_v_; ++j) state_[i * d_v_ + j] *= factor;
    }
  }

  template <class U>
  T read_column(const U* query, std::size_t j) const {
    T sum = T(0);
    for (std::size_t i = 0; i < d_k_; ++i) sum += state_[i * d_v_ + j] * static_cast<T>(query[i]);
    return sum;
  }

  RuleTraits rule_;
  std::size_t d_k_;
  std::size_t d_v_;
  std::vector<T> state_;
};

}  // namespace sinkstate::oracle
