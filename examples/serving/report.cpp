#include "report.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "replay/line_chart.hpp"
#include "replay/text_table.hpp"

namespace sinkstate::serving {
namespace {

using Json = nlohmann::ordered_json;
using tools::format;

/// What a setting is judged by.
struct Summary {
  double bytes_per_second = 0;
  int requests_most = 0;
  double requests_mean = 0;
  double p50 = 0, p90 = 0, p99 = 0, most = 0;  // of a step, ms
  std::int64_t compacted_most = 0, recompressed_most = 0;
  double rank_mean = 0;      // over requests and steps
  double request_bytes = 0;  // likewise
  double bytes_peak = 0;
};

Summary summarize(const ServingResult& result) {
  Summary s;
  std::vector<double> times;
  double requests = 0, kept = 0;
  for (const StepFigures& step : result.steps) {
    times.push_back(1e3 * step.seconds);
    s.requests_most = std::max(s.requests_most, step.requests);
    requests += step.requests;
    s.compacted_most = std::max(s.compacted_most, step.compacted);
    s.recompressed_most = std::max(s.recompressed_most, step.recompressed);
    s.rank_mean += step.rank * step.measured;
    s.request_bytes += step.bytes;
    kept += step.measured;
    s.bytes_peak = std::max(s.bytes_peak, step.bytes);
  }
  if (times.empty()) return s;
  std::sort(times.begin(), times.end());
  const auto share = [&](double part) {
    const auto rank = static_cast<std::size_t>(std::ceil(part * static_cast<double>(times.size())));
    return times[rank - 1];
  };
  s.p50 = share(0.5);
  s.p90 = share(0.9);
  s.p99 = share(0.99);
  s.most = times.back();
  s.requests_mean = requests / static_cast<double>(times.size());
  if (kept > 0) {
    s.rank_mean /= kept;
    s.request_bytes /= kept;
  }
  if (result.seconds > 0) {
    s.bytes_per_second = static_cast<double>(result.generated) / result.seconds;
  }
  return s;
}

}  // namespace

std::string text(const std::vector<ServingResult>& results) {
  std::vector<std::vector<std::string>> rows{{"", "bytes/s", "requests", "ms p50", "p90", "p99",
                                              "max", "p99/p50", "compactions", "recompr.", "rank",
                                              "KB/request", "evictions", "accepted", "consolidated",
                                              "rank removed", "KL", "worst", "top-1"}};
  for (const ServingResult& result : results) {
    const Summary s = summarize(result);
    const auto whole = [](std::int64_t number) { return std::to_string(number); };
    const bool compared = result.drift.bytes > 0;
    const auto factored = [&](std::string cell) { return result.factored ? cell : "-"; };
    const auto consolidated = [&](std::string cell) { return result.consolidated ? cell : "-"; };
    rows.push_back({result.name, format("%.0f", s.bytes_per_second),
                    whole(s.requests_most) + " / " + format("%.1f", s.requests_mean),
                    format("%.2f", s.p50), format("%.2f", s.p90), format("%.2f", s.p99),
                    format("%.2f", s.most), format("%.2f", s.p50 > 0 ? s.p99 / s.p50 : 0),
                    factored(whole(s.compacted_most)), factored(whole(s.recompressed_most)),
                    format("%.1f", s.rank_mean), format("%.1f", s.request_bytes / 1e3),
                    whole(result.evictions), whole(result.accepted) + " / " + whole(result.drafted),
                    consolidated(whole(result.consolidations.done) + " / " +
                                 whole(result.consolidations.stale)),
                    consolidated(whole(result.consolidations.rank_removed)),
                    compared ? format("%.1e", result.drift.kl_mean) : "-",
                    compared ? format("%.1e", result.drift.kl_worst) : "-",
                    compared ? format("%.1f%%", 100 * result.drift.top1_agreement) : "-"});
  }
  return tools::aligned(rows) +
         "\nrequests: at once, most / mean; ms: of a step that serves anybody; compactions, "
         "recompr.: states, in a step,\nat most; rank, KB: mean over requests and steps; accepted: "
         "of drafted bytes; consolidated: done / stale;\nKL: from the dense model on the same "
         "bytes, nats a byte.\n";
}

std::string json(const std::vector<ServingResult>& results, const ArrivalOptions& arrivals,
                 const ServingOptions& options) {
  Json settings = Json::array();
  for (const ServingResult& result : results) {
    const Summary s = summarize(result);
    const auto compared = [&](double number) {
      return result.drift.bytes > 0 ? Json(number) : Json();
    };
    Json steps = Json::array();
    for (const StepFigures& step : result.steps) {
      steps.push_back({{"step", step.step},
                       {"seconds", step.seconds},
                       {"requests", step.requests},
                       {"left", step.measured},
                       {"evicted", step.evicted},
                       {"bytes", step.bytes},
                       {"bytes_kept", step.bytes_kept},
                       {"rank", step.measured > 0 ? Json(step.rank) : Json()},
                       {"compacted", step.compacted},
                       {"recompressed", step.recompressed}});
    }
    settings.push_back({{"name", result.name},
                        {"seconds", result.seconds},
                        {"generated", result.generated},
                        {"bytes_per_second", s.bytes_per_second},
                        {"finished", result.finished.size()},
                        {"requests_most", s.requests_most},
                        {"requests_mean", s.requests_mean},
                        {"step_ms_p50", s.p50},
                        {"step_ms_p90", s.p90},
                        {"step_ms_p99", s.p99},
                        {"step_ms_most", s.most},
                        {"compacted_most", s.compacted_most},
                        {"recompressed_most", s.recompressed_most},
                        {"rank_mean", s.rank_mean},
                        {"request_bytes_mean", s.request_bytes},
                        {"bytes_peak", s.bytes_peak},
                        {"evictions", result.evictions},
                        {"forks", result.forks},
                        {"drafted", result.drafted},
                        {"accepted", result.accepted},
                        {"consolidations_done", result.consolidations.done},
                        {"consolidations_stale", result.consolidations.stale},
                        {"rank_removed", result.consolidations.rank_removed},
                        {"compared_bytes", result.drift.bytes},
                        {"kl_mean", compared(result.drift.kl_mean)},
                        {"kl_worst", compared(result.drift.kl_worst)},
                        {"top1_agreement", compared(result.drift.top1_agreement)},
                        {"steps", steps}});
  }
  const Json given{
      {"requests", arrivals.requests},
      {"arrival_rate", arrivals.rate},
      {"prompt_bytes", arrivals.prompt_bytes},
      {"output_bytes", arrivals.output_bytes},
      {"fork_share", arrivals.fork_share},
      {"arrival_seed", arrivals.seed},
      {"budget", options.budget},
      {"slots", options.slots},
      {"threads", options.threads},
      {"draft", options.draft},
      {"chunk", options.chunk},
      {"steps", options.steps},
      {"recompressions", options.recompressions ? Json(*options.recompressions) : Json()},
      {"consolidation_delay", options.consolidation_delay},
      {"temperature", options.sampling.temperature}};
  return Json{{"options", given}, {"settings", settings}}.dump(2) + "\n";
}

std::string figure(const std::vector<ServingResult>& results) {
  tools::LineChart bytes, rank;
  bytes.title = "Bytes of recurrent states";
  rank.title = "Mean stored rank";
  bytes.x_label = rank.x_label = "step";
  bytes.y_label = "bytes";
  rank.y_label = "terms";
  bytes.linear = rank.linear = true;
  for (const ServingResult& result : results) {
    tools::ChartSeries b, r;
    b.name = r.name = result.name;
    b.marks = r.marks = false;
    for (const StepFigures& step : result.steps) {
      const auto x = static_cast<double>(step.step);
      b.points.push_back({x, step.bytes, result.name});
      if (step.measured > 0) r.points.push_back({x, step.rank, result.name});
    }
    bytes.series.push_back(std::move(b));
    rank.series.push_back(std::move(r));
  }
  return to_svg(std::vector<tools::LineChart>{bytes, rank});
}

}  // namespace sinkstate::serving
