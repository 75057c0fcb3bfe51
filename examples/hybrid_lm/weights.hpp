/// @file
/// The model's files: configuration and weights, checked against each other.
#pragma once

#include <Eigen/Core>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "replay/safetensors.hpp"

namespace sinkstate::hybrid_lm {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXf;

enum class Mixer { gated_delta, kimi_delta, mamba2, attention };

/// As a configuration spells it.
const char* to_string(Mixer mixer);

/// The heads of one recurrent layer.
struct HeadShape {
  int heads = 0;      // of values
  int key_heads = 0;  // value head h reads key head h / (heads / key_heads)
  int d_k = 0;
  int d_v = 0;

  int key_head(int head) const { return head / (heads / key_heads); }
};

struct Config {
  int vocabulary = 0;
  int width = 0;
  int hidden = 0;  // of the MLP
  std::vector<Mixer> layers;
  HeadShape gated_delta;
  HeadShape kimi_delta;
  HeadShape mamba2;
  int kimi_decay_rank = 0;  // of the projections in two steps
  int kimi_gate_rank = 0;
  int norm_groups = 0;  // of Mamba-2's output
  int attention_heads = 0;
  int attention_width = 0;  // of a head
  double rope_theta = 0;

  const HeadShape& heads(Mixer mixer) const;
};

inline constexpr int conv_kernel = 4;
inline constexpr float norm_epsilon = 1e-6f;

/// @throws tools::ToolError for a file that is missing, malformed, or describes a model of another
/// kind
Config load_config(const std::filesystem::path& path);

/// Tensors by name, in fp32.
class Weights {
 public:
  explicit Weights(const std::filesystem::path& path) : file_(path) {}
  /// @throws tools::ToolError naming the wanted and the given shape, or for numbers that are not
  /// finite
  Matrix matrix(const std::string& name, int rows, int cols);
  Vector vector(const std::string& name, int size);

  /// @throws tools::ToolError naming a tensor that nobody asked for: a part of another model
  void require_all_used() const;

 private:
  std::vector<float> take(const std::string& name, const std::vector<std::size_t>& shape);

  tools::SafetensorsFile file_;
  std::set<std::string> used_;
};

}  // namespace sinkstate::hybrid_lm
