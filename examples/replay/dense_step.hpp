/// @file
/// The dense step that an engine runs today, as the yardstick for time: fp32, in place, vectorised
/// by the compiler.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace sinkstate::tools {

/// S <- L S + k (b (v - theta S^T L k))^T and output = S^T q, two passes over S when the rule
/// corrects, else one.
template <class Rule>
class DenseStep {
 public:
  DenseStep(std::ptrdiff_t d_k, std::ptrdiff_t d_v)
      : d_k_(d_k),
        d_v_(d_v),
        state_(static_cast<std::size_t>(d_k * d_v)),
        decay_(static_cast<std::size_t>(d_k), 1.0f),
        correction_(static_cast<std::size_t>(d_v)) {}

  std::vector<float>& state() { return state_; }

  void operator()(const float* key, const float* value, const float* log_decay,
                  float write_strength, const float* query, float* output) {
    const auto decays = static_cast<std::ptrdiff_t>(Rule::log_decays(d_k_));
    for (std::ptrdiff_t i = 0; i < d_k_ && decays > 0; ++i) {
      decay_[static_cast<std::size_t>(i)] =
          i == 0 || decays > 1 ? std::exp(log_decay[i]) : decay_[0];
    }
    float* const __restrict correction = correction_.data();
    float* const __restrict result = output;
    for (std::ptrdiff_t j = 0; j < d_v_; ++j) correction[j] = value[j];
    if constexpr (Rule::corrects) {
      for (std::ptrdiff_t i = 0; i < d_k_; ++i) {
        const float* const __restrict row = state_.data() + i * d_v_;
        const float weight = decay_[static_cast<std::size_t>(i)] * key[i];
        for (std::ptrdiff_t j = 0; j < d_v_; ++j) correction[j] -= weight * row[j];
      }
    }
    for (std::ptrdiff_t j = 0; j < d_v_; ++j) {
      correction[j] *= write_strength;
      result[j] = 0.0f;
    }
    for (std::ptrdiff_t i = 0; i < d_k_; ++i) {
      float* const __restrict row = state_.data() + i * d_v_;
      const float decay = decay_[static_cast<std::size_t>(i)];
      const float written = key[i];
      const float read = query[i];
      for (std::ptrdiff_t j = 0; j < d_v_; ++j) {
        row[j] = decay * row[j] + written * correction[j];
        result[j] += read * row[j];
      }
    }
  }

 private:
  std::ptrdiff_t d_k_;
  std::ptrdiff_t d_v_;
  std::vector<float> state_;
  std::vector<float> decay_;
  std::vector<float> correction_;
};

}  // namespace sinkstate::tools
