/// @file
/// The language model: weights that are shared, and a decoder that remembers a text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "states.hpp"
#include "weights.hpp"

namespace sinkstate::hybrid_lm {

/// A causal depthwise convolution over the last four inputs, then SiLU.
struct ShortConvolution {
  Matrix taps;  // channels x 4, newest last
  Vector bias;  // channels

  /// @param past  the last three inputs, oldest first, 3 x channels; moved on by one
  void operator()(Vector& u, Matrix& past) const;
};

/// log(1 + exp(x)); of large x, whose exponential overflows, x itself.
float softplus(float x);

struct LayerWeights {
  Mixer mixer = Mixer::attention;
  Vector norm1, norm2;
  Matrix gate, up, down;  // MLP

  // Every mixer; of Mamba-2 `q` is empty and `v` makes x, B and C.
  Matrix q, k, v, out;
  ShortConvolution q_conv, k_conv, v_conv;
  Matrix z;            // output gate; of Kimi Delta Attention the second of two steps
  Matrix z_first;      // and the first
  Matrix decay;        // a_proj, dt_proj; of Kimi Delta Attention the second of two steps
  Matrix decay_first;  // and the first
  Matrix strength;     // b_proj
  Vector decay_scale;  // exp(A_log)
  Vector decay_bias;   // dt_bias
  Vector skip;         // D
  Vector out_norm;
  Matrix value_mean;  // v_mean, heads x d_v
};

struct Model {
  Config config;
  Matrix embedding;  // vocabulary x width, the output head too
  Vector final_norm;
  std::vector<LayerWeights> layers;
};

/// @param folder  holds config.json and model.safetensors
/// @throws tools::ToolError
Model load_model(const std::filesystem::path& folder);

/// What a layer remembers.
struct LayerMemory {
  Matrix q_past, k_past, v_past;  // of the convolutions
  Matrix keys, values;            // attention: positions x width, more rows than there are
  std::unique_ptr<LayerStates> states;
};

/// One policy a kind of recurrent layer.
struct Policies {
  tools::ReplayOptions gated_delta, kimi_delta, mamba2;

  const tools::ReplayOptions& of(Mixer mixer) const {
    return mixer == Mixer::gated_delta  ? gated_delta
           : mixer == Mixer::kimi_delta ? kimi_delta
                                        : mamba2;
  }
};

/// Reads a text byte by byte. Dense at first.
class Decoder {
 public:
  explicit Decoder(const Model& model);
  /// The same text so far, dense.
  explicit Decoder(Decoder& other) : Decoder(other, nullptr) {}
  /// The same text so far, with the recurrent states compressed under a policy for each mixer.
  Decoder(Decoder& other, const Policies& policies) : Decoder(other, &policies) {}

  /// Logits of the byte after this one.
  /// @throws tools::ToolError when numbers overflow
  const Vector& read(std::uint8_t byte);

  LayerStates& states(std::size_t layer) { return *memories_[layer].states; }
  /// Tokens of the recurrence of the layer that was read last, for whoever wants to look.
  const std::vector<HeadToken>& tokens(std::size_t layer) const { return tokens_[layer]; }

 private:
  Decoder(Decoder& other, const Policies* policies);
  void mix(std::size_t layer, const Vector& x);
  void delta_rule(std::size_t layer, const Vector& x);
  void mamba2(std::size_t layer, const Vector& x);
  void attention(std::size_t layer, const Vector& x);

  const Model& model_;
  std::vector<LayerMemory> memories_;
  std::int64_t position_ = 0;
  Vector residual_, mixed_, logits_;
  // Inputs and outputs of the heads of every layer.
  std::vector<std::vector<HeadToken>> tokens_;
  std::vector<Vector> q_, k_, v_, decay_, strength_, output_;
};

}  // namespace sinkstate::hybrid_lm
