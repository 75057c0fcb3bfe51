/// @file
/// Drift against memory over many policies.
#pragma once

#include <string>
#include <vector>

#include "evaluate.hpp"
#include "policies.hpp"

namespace sinkstate::hybrid_lm {

struct Setting {
  std::string series;  // what it shares with its neighbours in a figure
  std::string flags;   // of the policies
};

/// All policies over epsilon, rank and period, with and without sink.
std::vector<Setting> default_settings();

/// Means over passages; worst and peak over all of them.
struct SweepRow {
  Setting setting;
  double state_ratio_mean = 0;
  double state_ratio_peak = 0;
  double kl_mean = 0;
  double kl_worst = 0;
  std::vector<double> kl_per_1024;
  double top1_agreement = 0;
  double bits_lost = 0;       // bits per byte more than dense
  double rank_mean = 0;       // over layers and heads
  double dense_fallback = 0;  // share of tokens, over layers and heads
};

/// @throws tools::ToolError for flags that are refused, before anything is read
std::vector<SweepRow> sweep(const Model& model, const std::vector<std::string>& passages,
                            std::ptrdiff_t prefill, std::ptrdiff_t bytes,
                            const std::vector<Setting>& settings, std::ptrdiff_t threads,
                            const Progress& progress);

}  // namespace sinkstate::hybrid_lm
