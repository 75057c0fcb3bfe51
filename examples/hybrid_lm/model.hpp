/// @file
/// The language model: weights that are shared, and a decoder that remembers a text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "replay/replay.hpp"
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

/// What a layer remembers of a text beside its recurrent states.
struct LayerMemory {
  Matrix q_past, k_past, v_past;  // of the convolutions
  Matrix keys, values;            // attention: positions x width, more rows than there are
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

/// Reads a text byte by byte. Its recurrent states have a slot in some that it may share with other
/// decoders; those can then read together.
class Decoder {
 public:
  /// Alone, dense.
  explicit Decoder(const Model& model) : Decoder(model, make_states(model, 1, 1)) {}
  Decoder(const Model& model, std::shared_ptr<ModelStates> states);
  /// The same text so far, alone, dense.
  explicit Decoder(Decoder& other) : Decoder(other, make_states(other.model_, 1, 1)) {}
  /// The same text so far, alone, with the recurrent states compressed under a policy for each mixer.
  Decoder(Decoder& other, const Policies& policies)
      : Decoder(other, make_states(other.model_, 1, 1, &policies)) {}
  /// The same text so far, as `ModelStates::admit` takes it over.
  Decoder(Decoder& other, std::shared_ptr<ModelStates> states);
  /// The same text so far, among the same states. `Suspended`: without a slot.
  enum class Suspended { yes };
  Decoder(const Decoder& other, Suspended);
  Decoder& operator=(const Decoder&) = delete;
  ~Decoder() {
    if (slot_ >= 0) states_->release(slot_);
  }

  /// Gives its slot away; its recurrent states wait as bytes. Nothing but `resume` is possible then.
  void suspend();
  /// Takes a slot again and goes on, as if nothing had been, to the bit.
  void resume();
  /// Bytes read from here on may be taken back.
  void open_draft();
  /// Ends a draft, of which the last `rejected` bytes are forgotten.
  void close_draft(int rejected);

  /// Logits of the byte after this one.
  /// @throws tools::ToolError when numbers overflow
  const Vector& read(std::uint8_t byte);
  /// A byte each, of different decoders that share their states: logits are those that each would
  /// have alone, to the bit.
  static void read_together(const std::vector<Decoder*>& decoders,
                            const std::vector<std::uint8_t>& bytes);

  /// Behind the last byte.
  const Vector& logits() const { return logits_; }
  /// The recurrent states of a layer as heads x d_k x d_v numbers.
  std::vector<float> dense_states(std::size_t layer) { return states_->dense(layer, slot_); }
  StateCosts costs(std::size_t layer) const { return states_->layer(layer)->costs(slot_).means(); }
  std::int64_t position() const { return position_; }
  /// Its place among the recurrent states; -1: suspended.
  int slot() const { return slot_; }
  /// Of the layer's states at the last byte.
  double state_bytes(std::size_t layer) const {
    return states_->layer(layer)->costs(slot_).bytes();
  }
  /// Of the byte that was read last, in the recurrence of a layer, for whoever wants to look.
  HeadToken token(std::size_t layer, int head) const {
    return states_->layer(layer)->token(slot_, head);
  }

 private:
  void begin(std::uint8_t byte);
  void before_states(std::size_t layer);
  void after_states(std::size_t layer);
  void end();
  void before_delta_rule(std::size_t layer);
  void after_delta_rule(std::size_t layer);
  void before_mamba2(std::size_t layer);
  void after_mamba2(std::size_t layer);
  void attention(std::size_t layer);

  const Model& model_;
  std::shared_ptr<ModelStates> states_;
  int slot_;
  std::vector<LayerMemory> memories_;
  std::int64_t position_ = 0;
  std::vector<AlignedBytes> suspended_;  // recurrent states of each layer
  // A draft: what each of its bytes has found. Attention overwrites what lies behind its position.
  struct Mark {
    std::vector<LayerMemory> pasts;  // without keys and values
    Vector logits;
  };
  bool drafting_ = false;
  std::vector<Mark> marks_;
  // Of the whole model, and of the layer at work.
  Vector residual_, logits_;
  Vector input_, mixed_;
};

}  // namespace sinkstate::hybrid_lm
