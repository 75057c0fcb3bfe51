/// @file
/// The recurrent states of a layer, dense or on sinkstate. It takes from
/// replay the options of a command line, a state whose policy they choose (`any_state.hpp`, over the
/// verbs of the library), and the dense step to compare with. An engine has its own of the three.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "replay/replay.hpp"
#include "weights.hpp"

namespace sinkstate::hybrid_lm {

/// What one token writes to, and asks of, one head.
struct HeadToken {
  const float* key;        // d_k
  const float* value;      // d_v
  const float* log_decay;  // 1, or d_k for Kimi Delta Attention
  float write_strength;
  const float* query;  // d_k
  float* output;       // d_v
};

/// What the states of a layer have cost since they began to decode.
struct StateCosts {
  double bytes_mean = 0;  // per token, of all heads
  double step_seconds = 0;
  double compaction_seconds = 0;
  std::vector<double> rank_mean;       // per head; dense: min(d_k, d_v)
  std::vector<double> dense_fallback;  // per head, share of tokens
};

class LayerStates {
 public:
  virtual ~LayerStates() = default;
  /// One token of every head.
  /// @throws tools::ToolError when a state overflows
  virtual void step(const std::vector<HeadToken>& heads) = 0;
  /// The state of a head as d_k x d_v numbers.
  virtual std::vector<float> dense(int head) = 0;
  virtual StateCosts costs() const = 0;
  /// In use at the last token, of all heads.
  virtual double bytes() const = 0;
};

/// States that are dense matrices, empty or equal to others.
std::unique_ptr<LayerStates> make_dense_states(Mixer mixer, const HeadShape& shape,
                                               LayerStates* from = nullptr);

/// States under a policy, empty or compressed from others.
/// @param directions  v_mean, heads x d_v; used with options.sink
std::unique_ptr<LayerStates> make_factored_states(Mixer mixer, const HeadShape& shape,
                                                  const tools::ReplayOptions& options,
                                                  const Matrix& directions,
                                                  LayerStates* from = nullptr);

}  // namespace sinkstate::hybrid_lm
