#include "report.hpp"

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "replay/line_chart.hpp"

namespace sinkstate::hybrid_lm {
namespace {

using Json = nlohmann::ordered_json;

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string
format(const char* pattern, ...) {
  char text[512];
  std::va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

/// A KL below it is no drift, and would stretch the figure's axis.
constexpr double rounding = 1e-9;

Json to_json(const StateCosts& costs) {
  return Json{{"bytes_mean", costs.bytes_mean},
              {"step_seconds", costs.step_seconds},
              {"compaction_seconds", costs.compaction_seconds}};
}

}  // namespace

std::string text(const Evaluation& e) {
  std::string out = format("%td bytes behind a prefill of %td\n\n", e.bytes, e.prefill);
  out += format("  bits per byte      %.5f dense, %.5f factored\n", e.bits_per_byte_dense,
                e.bits_per_byte);
  out += format("  KL(dense||factored) %.2e nats a byte, worst %.2e; by 1024 bytes:", e.kl_mean,
                e.kl_worst);
  for (const double kl : e.kl_per_1024) out += format(" %.1e", kl);
  out += format("\n  same likeliest byte %.2f %%\n", 100 * e.top1_agreement);
  out += format("  state bytes        %.3f of dense (peak %.3f), everything counted\n",
                e.state_ratio_mean, e.state_ratio_peak);
  out += format("  bytes per second   %.0f dense, %.0f factored, of processor time\n\n",
                e.bytes_per_second_dense, e.bytes_per_second);
  out +=
      "  layer   mean rank of each head (share of bytes in dense form)   us a byte: dense, "
      "step + compaction\n";
  for (const LayerFigures& layer : e.layers) {
    out += format("  %zu %-7s", layer.layer, layer.mixer.c_str());
    for (std::size_t h = 0; h < layer.factored.rank_mean.size(); ++h) {
      out += format(" %.1f (%.0f%%)", layer.factored.rank_mean[h],
                    100 * layer.factored.dense_fallback[h]);
    }
    const double scale = 1e6 / static_cast<double>(e.bytes);
    out += format("   %.0f, %.0f + %.0f\n", scale * layer.dense.step_seconds,
                  scale * layer.factored.step_seconds, scale * layer.factored.compaction_seconds);
  }
  return out;
}

std::string json(const Evaluation& e) {
  Json ranks = Json::array(), fallback = Json::array(), dense = Json::array(),
       factored = Json::array();
  for (const LayerFigures& layer : e.layers) {
    ranks.push_back(
        {{"layer", layer.layer}, {"mixer", layer.mixer}, {"heads", layer.factored.rank_mean}});
    fallback.push_back({{"layer", layer.layer}, {"heads", layer.factored.dense_fallback}});
    dense.push_back(to_json(layer.dense));
    factored.push_back(to_json(layer.factored));
  }
  return Json{{"bytes", e.bytes},
              {"prefill", e.prefill},
              {"bits_per_byte_dense", e.bits_per_byte_dense},
              {"bits_per_byte", e.bits_per_byte},
              {"kl_mean", e.kl_mean},
              {"kl_worst", e.kl_worst},
              {"kl_per_1024", e.kl_per_1024},
              {"top1_agreement", e.top1_agreement},
              {"logit_error", e.logit_error},
              {"state_ratio_mean", e.state_ratio_mean},
              {"state_ratio_peak", e.state_ratio_peak},
              {"rank_mean", ranks},
              {"dense_fallback", fallback},
              {"bytes_per_second_dense", e.bytes_per_second_dense},
              {"bytes_per_second", e.bytes_per_second},
              {"states_dense", dense},
              {"states", factored}}
             .dump(2) +
         "\n";
}

std::string text(const std::vector<SweepRow>& rows) {
  const bool by_part = !rows.empty() && rows.front().kl_per_1024.size() > 2;
  std::string out = "| policy | bytes, mean | peak | KL, mean | worst | same likeliest byte | " +
                    std::string("bits per byte lost | mean rank | dense |") +
                    (by_part ? " KL by 1024 bytes |" : "") + "\n|---" +
                    std::string("|---|---|---|---|---|---|---|---|") + (by_part ? "---|" : "") +
                    "\n";
  for (const SweepRow& row : rows) {
    out += "| `" + row.setting.flags + "` |";
    out += format(" %.3f | %.3f | %.2e | %.2e | %.2f %% | %.5f | %.1f | %.0f %% |",
                  row.state_ratio_mean, row.state_ratio_peak, row.kl_mean, row.kl_worst,
                  100 * row.top1_agreement, row.bits_lost, row.rank_mean, 100 * row.dense_fallback);
    if (by_part) {
      for (const double kl : row.kl_per_1024) out += format(" %.1e", kl);
      out += " |";
    }
    out += "\n";
  }
  out += "\n";
  for (const double bar : {0.01, 0.005, 0.001}) {
    const SweepRow* least = nullptr;
    for (const SweepRow& row : rows) {
      if (!(row.kl_mean <= bar)) continue;
      if (least == nullptr || row.state_ratio_mean < least->state_ratio_mean) least = &row;
    }
    if (least == nullptr) {
      out += format("- No setting reaches a KL of %g.\n", bar);
    } else {
      out += format("- A KL of %g: %.3f of the dense bytes, ", bar, least->state_ratio_mean);
      out += "`" + least->setting.flags + "`.\n";
    }
  }
  return out;
}

std::string json(const std::vector<SweepRow>& rows) {
  Json list = Json::array();
  for (const SweepRow& row : rows) {
    list.push_back({{"series", row.setting.series},
                    {"flags", row.setting.flags},
                    {"state_ratio_mean", row.state_ratio_mean},
                    {"state_ratio_peak", row.state_ratio_peak},
                    {"kl_mean", row.kl_mean},
                    {"kl_worst", row.kl_worst},
                    {"kl_per_1024", row.kl_per_1024},
                    {"top1_agreement", row.top1_agreement},
                    {"bits_lost", row.bits_lost},
                    {"rank_mean", row.rank_mean},
                    {"dense_fallback", row.dense_fallback}});
  }
  return list.dump(2) + "\n";
}

std::string figure(const std::vector<SweepRow>& rows) {
  tools::LineChart chart;
  chart.title = "Drift against memory";
  chart.x_label = "state bytes, everything counted, over dense (not drawn: what only rounds)";
  chart.y_label = "KL(dense || factored), nats per byte";
  for (const SweepRow& row : rows) {
    if (row.kl_mean < rounding) continue;
    const std::string& name = row.setting.series;
    if (chart.series.empty() || chart.series.back().name != name) {
      chart.series.push_back({name, {}, name.find("sink") != std::string::npos});
    }
    chart.series.back().points.push_back({row.state_ratio_mean, row.kl_mean, row.setting.flags});
  }
  return to_svg(chart);
}

}  // namespace sinkstate::hybrid_lm
