/// @file
/// The dense step that an engine runs today, as the yardstick for time: fp32, in place, vectorised
/// by the compiler.
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

namespace sinkstate::tools {

/// A hint: the line at this address will be read soon, and fits the second-level cache until then.
inline void fetch(const void* line) {
#if defined(__GNUC__)
  __builtin_prefetch(line, 0, 2);
  asm volatile("");  // g++ 12 drops calls of a function that does nothing but prefetch
#else
  (void)line;
#endif
}

/// S <- L S + k (b (v - theta S^T L k))^T and output = S^T q, two passes over S when the rule
/// corrects, else one. The second finds S in the cache.
template <class Rule>
class DenseStep {
 public:
  DenseStep(std::ptrdiff_t d_k, std::ptrdiff_t d_v)
      : d_k_(d_k),
        d_v_(d_v),
        state_(static_cast<std::size_t>(d_k * d_v)),
        decay_(static_cast<std::size_t>(d_k), 1.0f),
        scratch_(static_cast<std::size_t>(2 * padded(d_v) + line)) {}

  std::vector<float>& state() { return state_; }

  void operator()(const float* key, const float* value, const float* log_decay,
                  float write_strength, const float* query, float* output) {
    step(state_.data(), nullptr, key, value, log_decay, write_strength, query, output);
  }

  /// The same for a state of somebody else.
  /// @param next  the state whose turn comes next, or null. The second of two passes leaves the
  ///              memory idle, so both fetch a half of it; a single pass has no use for it.
  void step(float* state, const float* next, const float* key, const float* value,
            const float* log_decay, float write_strength, const float* query, float* output) {
    // As an engine's kernels, compiled for the usual sizes of a head, twice as fast in the cache.
    const auto sized = [&](auto d_v) {
      step_sized(d_v, state, next, key, value, log_decay, write_strength, query, output);
    };
    switch (d_v_) {
      case 64:
        return sized(Size<64>{});
      case 80:
        return sized(Size<80>{});
      case 128:
        return sized(Size<128>{});
      default:
        return sized(d_v_);
    }
  }

 private:
  template <std::ptrdiff_t Number>
  using Size = std::integral_constant<std::ptrdiff_t, Number>;

  template <class Width>
  void step_sized(Width width, float* state, const float* next, const float* key,
                  const float* value, const float* log_decay, float write_strength,
                  const float* query, float* output) {
    const std::ptrdiff_t d_v = width;
    const auto decays = static_cast<std::ptrdiff_t>(Rule::log_decays(d_k_));
    for (std::ptrdiff_t i = 0; i < d_k_ && decays > 0; ++i) {
      decay_[static_cast<std::size_t>(i)] =
          i == 0 || decays > 1 ? std::exp(log_decay[i]) : decay_[0];
    }
    float* const __restrict correction = aligned(scratch_);
    float* const __restrict result = correction + padded(d_v);
    for (std::ptrdiff_t j = 0; j < d_v; ++j) correction[j] = value[j];
    if constexpr (Rule::corrects) {
      std::ptrdiff_t i = 0;
      // In the cache four rows at a time, for the same reason as below.
      for (; next == nullptr && i + 4 <= d_k_; i += 4) {
        const float* const __restrict row = state + i * d_v;
        float weight[4];
        for (std::ptrdiff_t r = 0; r < 4; ++r) {
          weight[r] = decay_[static_cast<std::size_t>(i + r)] * key[i + r];
        }
        for (std::ptrdiff_t j = 0; j < d_v; ++j) {
          correction[j] -= weight[0] * row[j] + weight[1] * row[d_v + j] +
                           weight[2] * row[2 * d_v + j] + weight[3] * row[3 * d_v + j];
        }
      }
      for (; i < d_k_; ++i) {
        const float* const __restrict row = state + i * d_v;
        if (next != nullptr) fetch(next, i * d_v / 2, (i + 1) * d_v / 2);
        const float weight = decay_[static_cast<std::size_t>(i)] * key[i];
        for (std::ptrdiff_t j = 0; j < d_v; ++j) correction[j] -= weight * row[j];
      }
    }
    for (std::ptrdiff_t j = 0; j < d_v; ++j) {
      correction[j] *= write_strength;
      result[j] = 0.0f;
    }
    // Two rows at a time load and store the output half as often. But the processor's prefetcher
    // follows one row at a time best, so that a single pass stays with that.
    std::ptrdiff_t i = 0;
    for (; Rule::corrects && i + 2 <= d_k_; i += 2) {
      if (next != nullptr) fetch(next, (d_k_ + i) * d_v / 2, (d_k_ + i + 2) * d_v / 2);
      float* const __restrict row = state + i * d_v;
      float* const __restrict other = row + d_v;
      const float decay[] = {decay_[static_cast<std::size_t>(i)],
                             decay_[static_cast<std::size_t>(i + 1)]};
      const float written[] = {key[i], key[i + 1]};
      const float read[] = {query[i], query[i + 1]};
      for (std::ptrdiff_t j = 0; j < d_v; ++j) {
        const float first = decay[0] * row[j] + written[0] * correction[j];
        const float second = decay[1] * other[j] + written[1] * correction[j];
        row[j] = first;
        other[j] = second;
        result[j] += read[0] * first + read[1] * second;
      }
    }
    for (; i < d_k_; ++i) {
      float* const __restrict row = state + i * d_v;
      const float decay = decay_[static_cast<std::size_t>(i)];
      const float written = key[i];
      const float read = query[i];
      for (std::ptrdiff_t j = 0; j < d_v; ++j) {
        row[j] = decay * row[j] + written * correction[j];
        result[j] += read * row[j];
      }
    }
    for (std::ptrdiff_t j = 0; j < d_v; ++j) output[j] = result[j];
  }

  static constexpr std::ptrdiff_t line = 16;
  static constexpr std::ptrdiff_t padded(std::ptrdiff_t count) {
    return (count + line - 1) / line * line;
  }
  /// The first whole line: vectors that straddle two cost a step from the cache a third.
  static float* aligned(std::vector<float>& numbers) {
    void* data = numbers.data();
    std::size_t size = numbers.size() * sizeof(float);
    return static_cast<float*>(std::align(line * sizeof(float), 1, data, size));
  }

  /// The lines that begin between two numbers of the next state.
  static void fetch(const float* state, std::ptrdiff_t begin, std::ptrdiff_t end) {
    for (std::ptrdiff_t i = (begin + 15) / 16 * 16; i < end; i += 16) tools::fetch(state + i);
  }

  std::ptrdiff_t d_k_;
  std::ptrdiff_t d_v_;
  std::vector<float> state_;
  std::vector<float> decay_;
  std::vector<float> scratch_;
};

}  // namespace sinkstate::tools
