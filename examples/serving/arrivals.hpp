/// @file
/// Requests as they come in: the same for the same seed on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sinkstate::serving {

struct ArrivalOptions {
  std::ptrdiff_t requests = 16;
  double rate = 0.2;                  // of them in a step, in the mean
  std::ptrdiff_t prompt_bytes = 96;   // at most; from a quarter of it on, evenly
  std::ptrdiff_t output_bytes = 128;  // likewise
  double fork_share = 0.25;           // of requests that become two behind the prompt
  std::uint64_t seed = 1;
};

struct Arrival {
  std::int64_t step = 0;
  std::string prompt;
  std::size_t output = 0;  // bytes that each sample writes
  int samples = 1;
  std::uint64_t seeds[2] = {};  // of the sampling of each
};

/// A Poisson process over steps; prompts are passages of a text.
/// @throws tools::ToolError for a text that is too short
std::vector<Arrival> make_arrivals(const std::string& text, const ArrivalOptions& options);

}  // namespace sinkstate::serving
