/// @file
/// The factored model beside the dense one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model.hpp"

namespace sinkstate::hybrid_lm {

struct LayerFigures {
  std::size_t layer = 0;
  std::string mixer;
  StateCosts dense, factored;
};

/// Of the N steps behind a prefill; both models read the same bytes, each with its own states.
struct Evaluation {
  std::ptrdiff_t bytes = 0;  // N
  std::ptrdiff_t prefill = 0;
  double bits_per_byte_dense = 0;
  double bits_per_byte = 0;
  double kl_mean = 0;  // KL(dense || factored), nats per byte
  double kl_worst = 0;
  std::vector<double> kl_per_1024;
  double top1_agreement = 0;
  double logit_error = 0;       // largest difference of two logits
  double state_ratio_mean = 0;  // factored bytes, everything counted, over dense
  double state_ratio_peak = 0;
  double bytes_per_second_dense = 0;
  double bytes_per_second = 0;
  std::vector<LayerFigures> layers;
};

/// @param text     at least prefill + bytes + 1 bytes: the last step is scored on the byte after it
/// @param prefill  bytes after which the states are compressed
/// @param progress called with the bytes read since the last call
Evaluation evaluate(const Model& model, const std::string& text, std::ptrdiff_t prefill,
                    std::ptrdiff_t bytes, const Policies& policies,
                    const std::function<void(std::ptrdiff_t)>& progress);

/// Differences to golden data: what is in the file is compared, what is not is left out.
struct GoldenCheck {
  std::ptrdiff_t bytes = 0;
  double logits = 0;     // largest, absolute
  double states = 0;     // largest of the layers, relative
  double sequences = 0;  // of head 0, largest, relative to the largest number of a sequence
};
GoldenCheck check_golden(const Model& model, const std::filesystem::path& golden);

}  // namespace sinkstate::hybrid_lm
