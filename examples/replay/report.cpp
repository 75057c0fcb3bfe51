#include "report.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sinkstate/model/state_config.hpp>
#include <utility>

#include "line_chart.hpp"
#include "profile_report.hpp"
#include "safetensors.hpp"
#include "text_table.hpp"

namespace sinkstate::tools {
namespace {

using Json = nlohmann::ordered_json;

/// "-" for what was not measured.
std::string nanoseconds(double ns) { return std::isnan(ns) ? "-" : format("%.0f", ns); }

Json to_json(const ReplayFigures& f) {
  return Json{
      {"output_error_rms", f.output_error_rms},
      {"output_error_worst", f.output_error_worst},
      {"output_error_worst_token", f.output_error_worst_token},
      {"state_error_rel", f.state_error_rel},
      {"state_error_abs", f.state_error_abs},
      {"certificate", f.certificate},
      {"certificate_holds", f.certificate_holds},
      {"certificate_looseness", f.certificate_looseness},
      {"rank_mean", f.rank_mean},
      {"rank_peak", f.rank_peak},
      {"rank_final", f.rank_final},
      {"rank_histogram", f.rank_histogram},
      {"bytes_mean", f.bytes_mean},
      {"bytes_peak", f.bytes_peak},
      {"bytes_dense", f.bytes_dense},
      {"ratio_mean", f.ratio_mean()},
      {"ratio_peak", f.ratio_peak()},
      {"compactions", f.compactions},
      {"recompressions", f.recompressions ? Json(*f.recompressions) : Json()},
      {"dense_fallback", f.dense_fallback},
      {"ns_per_token_dense", f.ns_per_token_dense},
      {"ns_per_token_step", f.ns_per_token_step},
      {"ns_per_token_compaction", f.ns_per_token_compaction},
  };
}

bool adaptive(Compaction compaction) {
  return compaction == Compaction::local_svd || compaction == Compaction::full_svd;
}

Json to_json(const ReplayOptions& options, const TraceReport& report) {
  const StateConfig& config = report.config;
  const bool local = options.compaction == Compaction::local_svd;
  Json policy{{"name", to_string(options.compaction)}, {"buffer", config.buffer}};
  if (adaptive(options.compaction)) {
    policy["epsilon"] = config.epsilon;
    policy["rank_cap"] = config.rank_cap;
    policy["dense_fallback"] = config.dense_fallback;
    policy["dense_retry"] = config.dense_retry;
  }
  if (local) {
    policy["active"] = config.active;
    policy["recompress_growth"] = config.recompress_growth;
    policy["recompress_slack"] = config.recompress_slack;
    policy["tail_share"] = config.tail_share;
    policy["tail_period"] = config.tail_period;
  }
  if (options.compaction == Compaction::fixed_rank) policy["rank"] = config.rank_cap;
  const bool stochastic = options.rounding == Rounding::stochastic;
  if (options.compaction != Compaction::dense_buffered || stochastic) policy["seed"] = config.seed;
  policy["sink"] = options.sink;
  policy["prefill"] = options.prefill;
  policy["storage"] = to_string(options.storage);
  policy["rounding"] = to_string(options.rounding);
  policy["backend"] = to_string(options.backend);
  return policy;
}

std::vector<std::string> row(const std::string& trace, const std::string& head,
                             const ReplayFigures& f) {
  return {trace,
          head,
          format("%.1f", f.rank_mean) + " / " + std::to_string(f.rank_peak),
          format("%.2f", f.ratio_mean()) + " / " + format("%.2f", f.ratio_peak()),
          format("%.0f%%", 100 * f.dense_fallback),
          format("%.2e", f.output_error_rms),
          format("%.2e", f.output_error_worst),
          format("%.2e", f.state_error_rel),
          std::string(f.certificate_holds ? "holds" : "VIOLATED") + ", " +
              format("%.0fx", f.certificate_looseness),
          nanoseconds(f.ns_per_token_dense),
          nanoseconds(f.ns_per_token_step) + " + " + nanoseconds(f.ns_per_token_compaction)};
}

/// "local-svd, epsilon 0.01, buffer 8"
std::string describe(const ReplayOptions& options) {
  std::string text = to_string(options.compaction);
  if (adaptive(options.compaction)) {
    text += ", epsilon " + format("%g", options.epsilon);
    if (options.rank_cap > 0) text += ", rank cap " + std::to_string(options.rank_cap);
    if (!options.dense_fallback) text += ", dense fallback off";
  }
  if (options.active > 0) text += ", active " + std::to_string(options.active);
  if (options.compaction == Compaction::fixed_rank && options.rank_cap > 0) {
    text += ", rank " + std::to_string(options.rank_cap);
  }
  text += ", buffer " + std::to_string(options.buffer);
  if (options.sink) text += ", sink";
  if (options.storage != Storage::fp32) {
    text += ", " + std::string(to_string(options.storage)) + " storage";
    if (options.rounding == Rounding::stochastic) text += " rounded stochastically";
  }
  if (options.backend == Backend::cuda) text += ", on a CUDA device";
  if (options.prefill > 0) text += ", prefill " + std::to_string(options.prefill);
  return text;
}

double mean(const double* first, const double* last) {
  return std::accumulate(first, last, 0.0) / static_cast<double>(last - first);
}
double largest(const double* first, const double* last) { return *std::max_element(first, last); }

/// A line of few points: `summary` of each of so many equal parts, over the middle of the part.
template <class Summary>
std::vector<ChartPoint> points_of(const std::vector<double>& values, std::ptrdiff_t first_token,
                                  const Summary& summary) {
  constexpr std::size_t most = 200;
  const std::size_t parts = std::min(most, values.size());
  std::vector<ChartPoint> points;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t begin = i * values.size() / parts;
    const std::size_t end = (i + 1) * values.size() / parts;
    points.push_back({static_cast<double>(first_token) + static_cast<double>(begin + end - 1) / 2,
                      summary(values.data() + begin, values.data() + end),
                      {}});
  }
  return points;
}

}  // namespace

std::string name_of(const TraceReport& report) {
  const std::string stem = report.trace.substr(report.trace.find_last_of('/') + 1);
  return stem.substr(0, stem.find_last_of('.'));
}

std::string json(const std::vector<TraceReport>& reports, const ReplayOptions& options,
                 const std::vector<TraceProfile>& profiles) {
  Json traces = Json::array();
  for (const TraceReport& report : reports) {
    Json heads = Json::array();
    for (const ReplayFigures& head : report.per_head) heads.push_back(to_json(head));
    traces.push_back(Json{{"trace", report.trace},
                          {"rule", report.rule},
                          {"tokens", report.tokens},
                          {"heads", report.heads},
                          {"d_k", report.d_k},
                          {"d_v", report.d_v},
                          {"policy", to_json(options, report)},
                          {"total", to_json(report.total)},
                          {"per_head", heads}});
    if (!profiles.empty()) traces.back()["profile"] = to_json(profiles[traces.size() - 1]);
  }
  // A path may be any bytes. Of a number that is not finite, JSON says null.
  return Json{{"traces", traces}}.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string table(const std::vector<TraceReport>& reports, const ReplayOptions& options) {
  std::vector<std::vector<std::string>> rows{{"trace", "head", "rank", "bytes", "dense",
                                              "output error", "worst", "state error", "certificate",
                                              "ns dense", "ns step + compact"}};
  for (const TraceReport& report : reports) {
    const std::string name = name_of(report);
    for (std::size_t h = 0; h < report.per_head.size() && report.per_head.size() > 1; ++h) {
      rows.push_back(row(name, std::to_string(h), report.per_head[h]));
    }
    rows.push_back(row(name, "all", report.total));
  }

  std::string text = "policy " + describe(options) + "\n\n" + aligned(rows);
  text +=
      "\nrank: stored terms, a dense body counted as min(d_k, d_v), mean / peak over the tokens;\n"
      "bytes: in use, against a dense fp32 state, mean / peak; dense: share of tokens so held;\n"
      "output error: RMS and worst token, over the RMS output;\n"
      "certificate: the state's own bound of its error, and the median of bound over error;\n";
  text += options.backend == Backend::host
              ? "ns: per token and head, of a dense fp32 step and of ours; one state at a time, in "
                "cache.\n"
              : "ns: not taken on a device, where one state at a time is no timing.\n";
  return text;
}

std::string figure(const std::vector<TraceReport>& reports, const ReplayOptions& options,
                   const std::vector<TraceProfile>& profiles) {
  std::vector<LineChart> charts;
  for (std::size_t i = 0; i < reports.size(); ++i) {
    const TraceReport& report = reports[i];
    // A name may be any bytes, XML takes only some.
    const std::string name = quote(name_of(report));
    const std::string title = name + ", " + describe(options);
    LineChart rank{title + ": stored rank", "token", "terms, mean of the tokens at a point", {}};
    rank.linear = true;
    LineChart error{
        title + ": output error", "token", "|o~ - o| over RMS of |o|, largest at a point", {}};
    for (std::size_t h = 0; h < report.series.size(); ++h) {
      const std::string head = "head " + std::to_string(h);
      const bool dashed = h / chart_colours % 2 == 1;
      const HeadSeries& series = report.series[h];
      rank.series.push_back({head, points_of(series.rank, options.prefill, mean), dashed, false});
      error.series.push_back(
          {head, points_of(series.output_error, options.prefill, largest), dashed, false});
    }
    charts.push_back(std::move(rank));
    charts.push_back(std::move(error));
    if (profiles.empty()) continue;
    for (LineChart& chart : charts_of(profiles[i], name, describe(options)))
      charts.push_back(std::move(chart));
  }
  return to_svg(charts);
}

void say(const char* program, std::string line) {
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  }
  std::fprintf(stderr, "%s: %s\n", program, line.c_str());
}

Progress::Progress(std::FILE* stream, std::ptrdiff_t total)
    : stream_(stream), visible_(isatty(fileno(stream)) != 0), total_(total) {}

Progress::~Progress() {
  if (visible_) std::fprintf(stream_, "\r\033[K");
}

void Progress::add(std::ptrdiff_t count) {
  const std::lock_guard lock(mutex_);
  done_ += count;
  const auto now = std::chrono::steady_clock::now();
  if (!visible_ || now - drawn_ < std::chrono::milliseconds(100)) return;
  drawn_ = now;
  constexpr std::ptrdiff_t width = 40;
  const std::ptrdiff_t filled = done_ * width / std::max<std::ptrdiff_t>(total_, 1);
  const std::string bar(static_cast<std::size_t>(std::min(filled, width)), '#');
  std::fprintf(stream_, "\r[%-40s] %3.0f%%", bar.c_str(),
               100.0 * static_cast<double>(done_) / static_cast<double>(total_));
  std::fflush(stream_);
}

}  // namespace sinkstate::tools
