/// @file
/// Which epsilon, and which fixed rank, keeps the output error of a trace below a wanted one.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "replay.hpp"
#include "trace.hpp"

namespace sinkstate::tools {

/// A replay at one setting.
struct LadderRung {
  double setting = 0;  // epsilon or R
  ReplayFigures total;
  std::vector<ReplayFigures> per_head;
};

/// Replays from the cheapest setting on, until all heads together and each alone meet the error or
/// the ladder ends.
struct Ladder {
  std::vector<LadderRung> rungs;

  /// The first rung whose error is small enough, of all heads; null if none is.
  const LadderRung* meets(double wanted) const;
  /// The same of one head.
  const LadderRung* meets(double wanted, std::size_t head) const;
};

struct ErrorLadders {
  double wanted = 0;
  Compaction adaptive = Compaction::local_svd;  // what the epsilons ran
  Ladder epsilons;                              // falling
  Ladder ranks;                                 // fixed-rank, rising
};

/// Replays that `climb` makes at most of a trace.
std::ptrdiff_t most_rungs(const Trace& trace);

/// @param options   of the replay; its epsilon, rank and, where it says neither local-svd nor
///                  full-svd, its policy give way
/// @param progress  as `replay`; rungs that were not needed count as done
ErrorLadders climb(const std::string& name, const Trace& trace, const ReplayOptions& options,
                   double wanted, const std::function<void(std::ptrdiff_t)>& progress);

}  // namespace sinkstate::tools
