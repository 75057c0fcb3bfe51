/// @file
/// The factored model held against the dense one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model.hpp"

namespace sinkstate::hybrid_lm {

using Progress = std::function<void(std::ptrdiff_t)>;

/// A passage as the dense model reads it: what factored models are held against.
struct DenseReading {
  std::string text;
  std::ptrdiff_t prefill = 0;
  std::ptrdiff_t bytes = 0;         // scored behind the prefill
  std::unique_ptr<Decoder> prompt;  // has read the prefill
  Matrix logits;                    // bytes x vocabulary
  double bits_per_byte = 0;
  double seconds = 0;
  std::vector<StateCosts> costs;  // of each layer, behind the prefill; empty for attention

  std::uint8_t byte(std::ptrdiff_t i) const {
    return static_cast<std::uint8_t>(text[static_cast<std::size_t>(i)]);
  }
};

/// @param text     at least prefill + bytes + 1 bytes: the last step is scored on the byte after it
/// @param progress called with the bytes read since the last call
DenseReading read_dense(const Model& model, std::string text, std::ptrdiff_t prefill,
                        std::ptrdiff_t bytes, const Progress& progress);

struct LayerFigures {
  std::size_t layer = 0;
  std::string mixer;
  StateCosts dense, factored;
};

/// Of the N steps behind a prefill. The factored model reads the same bytes in a closed loop: its
/// own activations make its later keys and values.
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
  double bytes_per_second_dense = 0;  // of processor time, on one thread
  double bytes_per_second = 0;
  std::vector<LayerFigures> layers;
};

/// The states are compressed behind the prefill. From several threads with one reading, if the
/// model they share stays.
Evaluation evaluate(const Model& model, const DenseReading& reading, const Policies& policies,
                    const Progress& progress);

/// Two distributions over the next byte, from logits.
double kl_divergence(const Vector& wanted, const Vector& given);

/// Bytes of all recurrent states of a decoder, dense and as they are.
double dense_state_bytes(const Model& model);
double state_bytes_in_use(const Model& model, const Decoder& decoder);

}  // namespace sinkstate::hybrid_lm
