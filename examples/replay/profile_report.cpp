#include "profile_report.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "report.hpp"
#include "text_table.hpp"

namespace sinkstate::tools {
namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

// --- text ----------------------------------------------------------------------------------------

/// "-" for what a state or a trace does not have.
std::string cell(const char* pattern, double value) {
  return std::isnan(value) ? "-" : format(pattern, value);
}
std::string three(double value) { return cell("%.3f", value); }

double top_8(const TopShares& shares) {
  const auto place =
      std::find(profiled_directions.begin(), profiled_directions.end(), std::ptrdiff_t{8});
  return shares[static_cast<std::size_t>(place - profiled_directions.begin())];
}

Row vector_row(const Row& start, const char* name, const VectorProfile& vectors) {
  Row cells = start;
  cells.push_back(name);
  for (const double top : vectors.top) cells.push_back(three(top));
  const double early = top_8(vectors.late_in_early);
  cells.push_back(three(early));
  cells.push_back(three(early / top_8(vectors.late_in_late)));
  return cells;
}

template <class Value>
double mean(const std::vector<StateMoment>& moments, Value StateMoment::*value) {
  double sum = 0;
  for (const StateMoment& moment : moments) sum += static_cast<double>(moment.*value);
  return sum / static_cast<double>(moments.size());
}

/// "30 (22..47)": at the end, and least and most of all moments.
std::string with_range(const std::vector<StateMoment>& moments, std::ptrdiff_t StateMoment::*rank) {
  const auto [least, most] = std::minmax_element(
      moments.begin(), moments.end(),
      [&](const StateMoment& a, const StateMoment& b) { return a.*rank < b.*rank; });
  return std::to_string(moments.back().*rank) + " (" + std::to_string((*least).*rank) + ".." +
         std::to_string((*most).*rank) + ")";
}

Row state_row(const Row& start, const TraceProfile& profile, const HeadProfile& head) {
  const StateMoment& end = head.moments.back();
  const double exact = mean(head.moments, &StateMoment::rank_exact);
  const double stored = mean(head.moments, &StateMoment::rank_stored);
  Row cells = start;
  cells.insert(cells.end(),
               {three(end.top_1), three(end.top_8), with_range(head.moments, &StateMoment::r99),
                with_range(head.moments, &StateMoment::r99_9), std::to_string(head.r99_output),
                three(end.sink), three(end.sink_cosine),
                profile.sink ? std::to_string(end.content_r99) : "-", format("%.1f", exact),
                format("%.1f", stored), exact > 0 ? format("%.2fx", stored / exact) : "-"});
  return cells;
}

void add_captured(Row& cells, const std::vector<double>& shares) {
  const auto count = std::min<std::ptrdiff_t>(8, static_cast<std::ptrdiff_t>(shares.size()));
  cells.push_back(three(shares.front()));
  cells.push_back(three(std::accumulate(shares.begin(), shares.begin() + count, 0.0)));
  cells.push_back(cell("%.4f", shares.back()));
}

Row captured_row(const Row& start, const HeadProfile& head) {
  Row cells = start;
  add_captured(cells, head.captured_k);
  add_captured(cells, head.captured_v);
  return cells;
}

/// The setting that meets an error, and what it then costs.
void add_met(Row& cells, const LadderRung* rung, const ReplayFigures* figures) {
  if (rung == nullptr) {
    cells.insert(cells.end(), {"none", "-", "-", "-"});
    return;
  }
  cells.insert(cells.end(),
               {format("%g", rung->setting), format("%.2e", figures->output_error_rms),
                format("%.1f", figures->rank_mean), format("%.2f", figures->ratio_mean())});
}

Row error_row(const Row& start, const ErrorLadders& error, std::optional<std::size_t> head) {
  Row cells = start;
  for (const Ladder* ladder : {&error.epsilons, &error.ranks}) {
    const LadderRung* const rung =
        head ? ladder->meets(error.wanted, *head) : ladder->meets(error.wanted);
    const ReplayFigures* const figures = rung == nullptr ? nullptr
                                         : head          ? &rung->per_head[*head]
                                                         : &rung->total;
    add_met(cells, rung, figures);
  }
  return cells;
}

std::string error_table(const std::vector<TraceReport>& reports,
                        const std::vector<TraceProfile>& profiles) {
  const ErrorLadders& first = *profiles.front().error;
  std::vector<Row> rows{
      {"trace", "head", "epsilon", "error", "rank", "bytes", "R", "error", "rank", "bytes"}};
  for (std::size_t i = 0; i < reports.size(); ++i) {
    const std::string name = name_of(reports[i]);
    const std::size_t heads = profiles[i].heads.size();
    for (std::size_t h = 0; h < heads && heads > 1; ++h) {
      rows.push_back(error_row({name, std::to_string(h)}, *profiles[i].error, h));
    }
    rows.push_back(error_row({name, "all"}, *profiles[i].error, std::nullopt));
  }
  return "\nprofile: what keeps the output error at " + format("%g", first.wanted) +
         " or below\n\n" + aligned(rows) + "\nepsilon: the largest of " +
         "0.3, 0.1, 0.03, ... 1e-4" + " that does (" + to_string(first.adaptive) +
         "),\nR: the smallest fixed rank of 1, 2, 3, 4, 6, 8, 12, ... up to min(d_k, d_v); "
         "replayed "
         "with the other\noptions as given. error: RMS, over the RMS output; rank, bytes: mean "
         "over "
         "the tokens.\n";
}

// --- JSON ----------------------------------------------------------------------------------------

Json to_json(const VectorProfile& vectors) {
  return Json{{"top", vectors.top},
              {"late_in_early", vectors.late_in_early},
              {"late_in_late", vectors.late_in_late}};
}

Json to_json(const StateMoment& moment, bool sink) {
  Json object{{"tokens", moment.tokens},         {"top_1", moment.top_1},
              {"top_8", moment.top_8},           {"r99", moment.r99},
              {"r99_9", moment.r99_9},           {"r99_output", moment.r99_output},
              {"rank_exact", moment.rank_exact}, {"rank_stored", moment.rank_stored}};
  if (sink) {
    object["sink"] = moment.sink;
    object["sink_cosine"] = moment.sink_cosine;
    object["content_r99"] = moment.content_r99;
  }
  return object;
}

Json to_json(const HeadProfile& head, bool sink) {
  Json moments = Json::array();
  for (const StateMoment& moment : head.moments) moments.push_back(to_json(moment, sink));
  Json object{{"q", to_json(head.q)},          {"k", to_json(head.k)},
              {"v", to_json(head.v)},          {"moments", moments},
              {"r99_output", head.r99_output}, {"singular_values", head.singular_values},
              {"captured_k", head.captured_k}, {"captured_v", head.captured_v}};
  if (sink) object["content_singular_values"] = head.content_singular_values;
  return object;
}

Json to_json(const ReplayFigures& figures, const char* name, double setting) {
  return Json{{name, setting},
              {"output_error_rms", figures.output_error_rms},
              {"rank_mean", figures.rank_mean},
              {"ratio_mean", figures.ratio_mean()}};
}

/// What meets the error, null if nothing does, and all that was tried.
Json to_json(const Ladder& ladder, const char* name, double wanted, std::size_t heads) {
  const auto met = [&](const LadderRung* rung) { return rung ? Json(rung->setting) : Json(); };
  Json object{{"total", met(ladder.meets(wanted))}, {"per_head", Json::array()}};
  for (std::size_t h = 0; h < heads; ++h) {
    object["per_head"].push_back(met(ladder.meets(wanted, h)));
  }
  object["tried"] = Json::array();
  for (const LadderRung& rung : ladder.rungs) {
    object["tried"].push_back(to_json(rung.total, name, rung.setting));
  }
  return object;
}

}  // namespace

std::string profile_table(const std::vector<TraceReport>& reports,
                          const std::vector<TraceProfile>& profiles) {
  std::vector<Row> vectors{
      {"trace", "head", "of", "top 1", "2", "4", "8", "16", "early 8 in late", "of the best"}};
  std::vector<Row> states{{"trace", "head", "top 1", "top 8", "r99", "r99.9", "output r99", "sink",
                           "cosine", "content r99", "exact", "stored", "ratio"}};
  std::vector<Row> captured{
      {"trace", "head", "k: first", "first 8", "last", "v: first", "first 8", "last"}};
  bool sink = true;
  for (std::size_t i = 0; i < profiles.size(); ++i) {
    sink = sink && profiles[i].sink;
    for (std::size_t h = 0; h < profiles[i].heads.size(); ++h) {
      const HeadProfile& head = profiles[i].heads[h];
      const Row start{name_of(reports[i]), std::to_string(h)};
      vectors.push_back(vector_row(start, "q", head.q));
      vectors.push_back(vector_row(start, "k", head.k));
      vectors.push_back(vector_row(start, "v", head.v));
      states.push_back(state_row(start, profiles[i], head));
      captured.push_back(captured_row(start, head));
    }
  }
  std::string text =
      "\nprofile: energy of the vectors in their top directions\n\n" + aligned(vectors) +
      "\ntop r: share of the energy of all tokens' vectors in the r directions that hold most;\n"
      "early 8 in late: share of the last quarter's energy in the top 8 directions of the first\n"
      "quarter; of the best: that, over what the last quarter's own top 8 hold.\n"
      "\nprofile: the exact states\n\n" +
      aligned(states) +
      "\ntop 1, top 8: share of the state's energy in its strongest terms, at the end;\n"
      "r99, r99.9: terms that hold so much of it (%), at the end (least..most of all moments);\n"
      "output r99: terms that hold 99 % of the outputs' energy, of all moments together;\n"
      "sink: share of the state's energy along sink_direction, cosine: of that and the strongest\n"
      "right singular vector, content r99: r99 of the rest, at the end" +
      (sink ? "" : "; -: the trace has no sink_direction, or zeros") +
      ";\nexact: terms of the exact state of at least epsilon " +
      format("%g", profiles.front().epsilon) +
      " times the strongest,\n"
      "stored: terms of the policy, a dense body counted as min(d_k, d_v); means over the "
      "moments.\n"
      "Moments: up to 64, after compactions, the last at the end.\n"
      "\nprofile: what the states capture of the next token\n\n" +
      aligned(captured) +
      "\nshare of a k or v along the first, the first 8 and the last singular vector of the state\n"
      "before it, mean over the moments; a random vector leaves 1 / d along each.\n";
  if (profiles.front().error) text += error_table(reports, profiles);
  return text;
}

Json to_json(const TraceProfile& profile) {
  Json heads = Json::array();
  for (const HeadProfile& head : profile.heads) heads.push_back(to_json(head, profile.sink));
  Json object{{"epsilon", profile.epsilon},
              {"directions", profiled_directions},
              {"part", profile.part},
              {"per_head", heads}};
  if (profile.error) {
    const ErrorLadders& error = *profile.error;
    object["error"] =
        Json{{"wanted", error.wanted},
             {"policy", to_string(error.adaptive)},
             {"epsilon", to_json(error.epsilons, "epsilon", error.wanted, profile.heads.size())},
             {"rank", to_json(error.ranks, "rank", error.wanted, profile.heads.size())}};
  }
  return object;
}

std::vector<LineChart> charts_of(const TraceProfile& profile, const std::string& name,
                                 const std::string& policy) {
  LineChart spectrum{name + ": singular values at the end",
                     "term, from 0",
                     "over the strongest, down to 1e-6",
                     {}};
  LineChart rank{
      name + ", " + policy + ": stored rank (solid), exact rank (dashed)", "token", "terms", {}};
  rank.linear = true;
  for (std::size_t h = 0; h < profile.heads.size(); ++h) {
    const HeadProfile& head = profile.heads[h];
    const std::string label = "head " + std::to_string(h);
    ChartSeries values{label, {}, h / chart_colours % 2 == 1, false, {}};
    for (std::size_t i = 0; i < head.singular_values.size(); ++i) {
      const double value = head.singular_values[i] / head.singular_values.front();
      if (value >= 1e-6) values.points.push_back({static_cast<double>(i), value, {}});
    }
    ChartSeries stored{label + ", stored", {}, false, false, h};
    ChartSeries exact{label + ", exact", {}, true, false, h};
    for (const StateMoment& moment : head.moments) {
      const auto token = static_cast<double>(moment.tokens);
      stored.points.push_back({token, moment.rank_stored, {}});
      exact.points.push_back({token, static_cast<double>(moment.rank_exact), {}});
    }
    spectrum.series.push_back(std::move(values));
    rank.series.push_back(std::move(stored));
    rank.series.push_back(std::move(exact));
  }
  return {std::move(spectrum), std::move(rank)};
}

}  // namespace sinkstate::tools
