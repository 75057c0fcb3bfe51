/// @file
/// Continuous batching: requests that come and go, decoded together under a budget of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <sinkstate/host/consolidator.hpp>
#include <string>
#include <vector>

#include "arrivals.hpp"
#include "hybrid_lm/model.hpp"
#include "hybrid_lm/sampling.hpp"

namespace sinkstate::serving {

/// The bytes that followed the last earlier occurrence of a text's end: a drafter that costs nothing.
/// @returns at most so many; none when the last three bytes have not occurred before
std::string look_up_draft(const std::string& text, std::size_t most);

/// Steps after which each layer compacts: the shortest buffer.
Index period_of(const hybrid_lm::Policies& policies);

/// How states are kept.
struct Setting {
  std::string name;
  std::optional<hybrid_lm::Policies> policies;  // none: dense
  bool staggered = false;
  bool consolidated = false;
};

struct ServingOptions {
  int slots = 12;
  int threads = 1;
  double budget = 0;                    // bytes of recurrent states
  int draft = 4;                        // bytes at most; 0: none are proposed
  std::ptrdiff_t chunk = 4;             // bytes of a prompt that are read in a step
  std::int64_t steps = 0;               // 0: until all requests are finished
  std::optional<Index> recompressions;  // in a step, of staggered settings; none: no cap
  Index consolidation_threads = 1;
  Index consolidation_delay = 1;        // steps; 0: as soon as it is done, so that runs differ
  hybrid_lm::SamplingOptions sampling;  // its seed is the arrivals'
  std::size_t compared = 2;             // requests whose logits are held against the dense model
  std::function<std::string(const std::string& text, std::size_t most)> drafter = look_up_draft;
};

/// What one step was.
struct StepFigures {
  std::int64_t step = 0;
  int measured = 0;    // requests that are left behind it
  double seconds = 0;  // reading, compactions, swaps
  int requests = 0;
  double bytes = 0;  // of their states behind it, before anybody is evicted
  int evicted = 0;
  double bytes_kept = 0;  // and then
  double rank = 0;        // mean over requests, layers and heads
  std::int64_t compacted = 0;
  std::int64_t recompressed = 0;
};

struct FinishedRequest {
  std::size_t arrival = 0;
  int sample = 0;
  std::int64_t step = 0;  // behind which it was finished
  int evictions = 0;
  std::string text;  // with the prompt
};

struct Drift {
  std::int64_t bytes = 0;
  double kl_mean = 0;  // KL(dense || served), nats per byte
  double kl_worst = 0;
  double top1_agreement = 0;
};

struct ServingResult {
  std::string name;
  bool factored = false;
  bool consolidated = false;
  std::vector<StepFigures> steps;         // in which anybody was served
  std::vector<FinishedRequest> finished;  // in this order
  double seconds = 0;                     // all of it, without what is compared
  std::int64_t generated = 0;             // bytes
  std::int64_t evictions = 0;
  std::int64_t forks = 0;
  std::int64_t drafted = 0;  // bytes
  std::int64_t accepted = 0;
  ConsolidatorStatistics consolidations;
  Drift drift;
};

/// Decisions depend on steps and bytes, never on time.
/// @param progress  called with the bytes generated since the last call
/// @throws tools::ToolError
ServingResult serve(const hybrid_lm::Model& model, const std::vector<Arrival>& arrivals,
                    const Setting& setting, const ServingOptions& options,
                    const std::function<void(std::ptrdiff_t)>& progress);

}  // namespace sinkstate::serving
