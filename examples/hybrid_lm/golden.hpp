/// @file
/// The dense model against what the reference program computed.
#pragma once

#include <cstddef>
#include <filesystem>

#include "model.hpp"

namespace sinkstate::hybrid_lm {

/// How far apart, and how much was held side by side.
struct Compared {
  std::ptrdiff_t numbers = 0;
  double difference = 0;  // NaN as soon as one of them is
};

struct GoldenCheck {
  std::ptrdiff_t bytes = 0;
  Compared logits;     // largest difference, absolute
  Compared states;     // largest of all layers and moments, relative to the state's norm
  Compared sequences;  // outputs of head 0, largest difference, relative to a sequence's largest
};

/// Reads `input_bytes` of a golden file and compares what else it has: `logits`,
/// `layers.N.state_T` (after T bytes) and `layers.N.head0.o` (Mamba-2: `.y`), the latter perhaps of
/// fewer tokens. A part that is not there is not compared.
/// @throws tools::ToolError for wrong shapes, a state of a layer without one, and a file that has
/// nothing to compare
GoldenCheck check_golden(const Model& model, const std::filesystem::path& path);

}  // namespace sinkstate::hybrid_lm
