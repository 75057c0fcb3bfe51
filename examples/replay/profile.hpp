/// @file
/// The low rank of a trace under a microscope: how far its queries, keys and values stay in a few
/// directions, and how far its exact states and outputs do. docs/traces.md, section "The profile",
/// has the definitions.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "error_ladder.hpp"
#include "replay.hpp"
#include "trace.hpp"

namespace sinkstate::tools {

/// So many top directions are asked for what they hold.
inline constexpr std::array<std::ptrdiff_t, 5> profiled_directions{1, 2, 4, 8, 16};
/// In a share of energy for each; NaN where there is no energy.
using TopShares = std::array<double, profiled_directions.size()>;

/// The q, k or v of a head, all tokens stacked. A top direction is a right singular vector of the
/// stack: no mean is taken off.
struct VectorProfile {
  TopShares top{};            // of all energy, in the top directions of all tokens
  TopShares late_in_early{};  // of the energy of the late part, in those of the early part
  TopShares late_in_late{};   // and in its own, the most that any subspace can hold
};

/// The exact state at one moment. Energies are squares of singular values; NaN is what a state or a
/// trace does not have.
struct StateMoment {
  std::ptrdiff_t tokens = 0;  // the state after so many
  double top_1 = 0;           // share of its energy in the strongest term
  double top_8 = 0;
  std::ptrdiff_t r99 = 0;          // fewest strongest terms with 99 % of its energy
  std::ptrdiff_t r99_9 = 0;        // with 99.9 %
  std::ptrdiff_t r99_output = 0;   // with 99 % of the energy of S^T q, q of the last token
  double sink = 0;                 // share of its energy along the sink direction
  double sink_cosine = 0;          // |cosine| of that and the strongest right singular vector
  std::ptrdiff_t content_r99 = 0;  // fewest terms with 99 % of what is left without the sink
  std::ptrdiff_t rank_exact = 0;   // terms of at least epsilon, as the policy counts them
  double rank_stored = 0;          // terms that the policy has
};

struct HeadProfile {
  VectorProfile q;
  VectorProfile k;
  VectorProfile v;
  std::vector<StateMoment> moments;             // the last is the end of the trace
  std::ptrdiff_t r99_output = 0;                // over the outputs of all moments
  std::vector<double> singular_values;          // at the end
  std::vector<double> content_singular_values;  // at the end; empty without a sink direction
  // [i]: share of the energy of the next token's k or v along the i-th singular vector of the
  // state, mean over the moments.
  std::vector<double> captured_k;
  std::vector<double> captured_v;
};

struct TraceProfile {
  bool sink = false;        // the trace has sink directions
  double epsilon = 0;       // of `rank_exact`
  std::ptrdiff_t part = 0;  // tokens of the early part, and of the late one
  std::vector<HeadProfile> heads;
  std::optional<ErrorLadders> error;  // if one was asked for
};

/// The moments at which a replay's exact states are looked at: after compactions, spread evenly, at
/// most 64, and the last after the last token.
std::vector<std::ptrdiff_t> profile_moments(std::ptrdiff_t tokens, const ReplayOptions& options);

/// @throws ToolError for heads that are too wide to be decomposed in reasonable time
void check_profile(const std::string& name, const Trace& trace);

/// @param name      of the trace, for errors
/// @param report    of the same replay, with its series: the stored ranks
/// @param progress  called now and then, from any thread, with the tokens done since the last call
TraceProfile profile(const std::string& name, const Trace& trace, const ReplayOptions& options,
                     const TraceReport& report,
                     const std::function<void(std::ptrdiff_t)>& progress);

}  // namespace sinkstate::tools
