/// @file
/// The next byte from its logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "weights.hpp"

namespace sinkstate::hybrid_lm {

struct SamplingOptions {
  double temperature = 0.8;  // 0: the likeliest byte
  double top_p = 0.95;       // of the likeliest bytes that together have this probability
  std::uint64_t seed = 1;
};

/// The same bytes for the same seed on every machine, as far as logits are the same.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) {}

  std::uint8_t operator()(const Vector& logits) {
    Eigen::Index best = 0;
    const float largest = logits.maxCoeff(&best);
    if (options_.temperature == 0) return static_cast<std::uint8_t>(best);
    std::vector<double> weight(static_cast<std::size_t>(logits.size()));
    for (std::size_t i = 0; i < weight.size(); ++i) {
      weight[i] = std::exp((logits[static_cast<Eigen::Index>(i)] - largest) / options_.temperature);
    }
    std::vector<std::size_t> order(weight.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return weight[a] > weight[b]; });
    const double all = std::accumulate(weight.begin(), weight.end(), 0.0);
    double kept = 0;
    std::size_t count = 0;
    while (count < order.size() && kept < options_.top_p * all) kept += weight[order[count++]];
    // The standard fixes the numbers of this generator, not those of its distributions.
    double left = kept * static_cast<double>(random_() >> 11) * 0x1p-53;
    for (std::size_t i = 0; i < count; ++i) {
      left -= weight[order[i]];
      if (left < 0) return static_cast<std::uint8_t>(order[i]);
    }
    return static_cast<std::uint8_t>(order[count - 1]);
  }

 private:
  SamplingOptions options_;
  std::mt19937_64 random_;
};

}  // namespace sinkstate::hybrid_lm
