#include "error_ladder.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sinkstate::tools {
namespace {

constexpr double epsilons[] = {0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4};

/// 1, 2, 3, 4, 6, 8, 12, ... and the full rank.
std::vector<double> ranks(const Trace& trace) {
  const std::ptrdiff_t full = std::min(trace.d_k, trace.d_v);
  std::vector<double> ladder;
  for (std::ptrdiff_t power = 1; power < full; power *= 2) {
    ladder.push_back(static_cast<double>(power));
    const std::ptrdiff_t between = power + power / 2;
    if (power > 1 && between < full) ladder.push_back(static_cast<double>(between));
  }
  ladder.push_back(static_cast<double>(full));
  return ladder;
}

template <class FiguresOf>
const LadderRung* first(const std::vector<LadderRung>& rungs, double wanted,
                        const FiguresOf& figures_of) {
  const auto found = std::find_if(rungs.begin(), rungs.end(), [&](const LadderRung& rung) {
    return figures_of(rung).output_error_rms <= wanted;
  });
  return found == rungs.end() ? nullptr : &*found;
}

bool all_meet(const Ladder& ladder, double wanted, std::size_t heads) {
  for (std::size_t h = 0; h < heads; ++h) {
    if (ladder.meets(wanted, h) == nullptr) return false;
  }
  return ladder.meets(wanted) != nullptr;
}

}  // namespace

const LadderRung* Ladder::meets(double wanted) const {
  return first(
      rungs, wanted, [](const LadderRung& rung) -> auto& { return rung.total; });
}
const LadderRung* Ladder::meets(double wanted, std::size_t head) const {
  return first(
      rungs, wanted, [&](const LadderRung& rung) -> auto& { return rung.per_head[head]; });
}

std::ptrdiff_t most_rungs(const Trace& trace) {
  return static_cast<std::ptrdiff_t>(std::size(epsilons) + ranks(trace).size());
}

ErrorLadders climb(const std::string& name, const Trace& trace, const ReplayOptions& options,
                   double wanted, const std::function<void(std::ptrdiff_t)>& progress) {
  ErrorLadders result;
  result.wanted = wanted;
  if (options.compaction == Compaction::full_svd) result.adaptive = Compaction::full_svd;

  const auto climb_one = [&](Ladder& ladder, const auto& settings, const auto& apply_to) {
    const auto heads = static_cast<std::size_t>(trace.value_heads);
    for (const double setting : settings) {
      if (all_meet(ladder, wanted, heads)) {
        progress(trace.tokens * trace.value_heads);
        continue;
      }
      ReplayOptions trial = options;
      trial.series = false;
      apply_to(trial, setting);
      TraceReport report = replay(name, trace, trial, nullptr, progress);
      ladder.rungs.push_back({setting, std::move(report.total), std::move(report.per_head)});
    }
  };
  climb_one(result.epsilons, epsilons, [&](ReplayOptions& trial, double epsilon) {
    trial.compaction = result.adaptive;
    trial.epsilon = epsilon;
    if (options.compaction == Compaction::fixed_rank) trial.rank_cap = 0;
  });
  climb_one(result.ranks, ranks(trace), [](ReplayOptions& trial, double rank) {
    trial.compaction = Compaction::fixed_rank;
    trial.rank_cap = static_cast<std::ptrdiff_t>(rank);
  });
  return result;
}

}  // namespace sinkstate::tools
