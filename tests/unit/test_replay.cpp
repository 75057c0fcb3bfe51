// The engine of `replay` through its C++ interface, on small traces made here and on the shipped
// ones.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "replay/replay.hpp"
#include "replay/report.hpp"
#include "replay/trace.hpp"
#include "support/catch.hpp"
#include "support/sanitized.hpp"
#include "support/streams.hpp"

using namespace sinkstate::tools;
namespace oracle = sinkstate::oracle;
namespace testing = sinkstate::testing;
using Json = nlohmann::json;

// AddressSanitizer is here for addresses, not for figures, and slow: the first tokens will do.
namespace {

using sinkstate::testing::sanitized;

constexpr Rule all_rules[] = {Rule::mamba2, Rule::gated_delta, Rule::kimi_delta};
constexpr HeadMap all_maps[] = {HeadMap::interleaved, HeadMap::tiled};

constexpr std::ptrdiff_t tokens = 45;  // five buffers of eight, and five more
constexpr std::ptrdiff_t key_heads = 2;
constexpr std::ptrdiff_t value_heads = 4;
constexpr std::ptrdiff_t d_k = 12;
constexpr std::ptrdiff_t d_v = 20;
constexpr std::ptrdiff_t state_size = d_k * d_v;

std::size_t at(std::ptrdiff_t index) { return static_cast<std::size_t>(index); }

oracle::RuleTraits traits_of(Rule rule) {
  return rule == Rule::mamba2        ? oracle::mamba2
         : rule == Rule::gated_delta ? oracle::gated_delta
                                     : oracle::kimi_delta;
}

// Every head different, so that a wrong head map shows.
Trace synthetic(Rule rule, HeadMap map) {
  Trace trace;
  trace.rule = rule;
  trace.head_map = map;
  trace.tokens = tokens;
  trace.key_heads = key_heads;
  trace.value_heads = value_heads;
  trace.d_k = d_k;
  trace.d_v = d_v;
  std::vector<testing::Stream> heads;
  for (std::ptrdiff_t h = 0; h < value_heads; ++h) {
    heads.push_back(testing::realistic(traits_of(rule), d_k, d_v, tokens,
                                       testing::derived_seed(7, static_cast<std::uint64_t>(h))));
    trace.sink_direction.insert(trace.sink_direction.end(), heads.back().sink.begin(),
                                heads.back().sink.end());
  }
  const auto append = [](std::vector<float>& to, const float* from, std::ptrdiff_t count) {
    to.insert(to.end(), from, from + count);
  };
  for (int t = 0; t < tokens; ++t) {
    for (std::ptrdiff_t h = 0; h < key_heads; ++h) {
      append(trace.q, heads[at(h)].query_at(t), d_k);
      append(trace.k, heads[at(h)].key_at(t), d_k);
    }
    for (const testing::Stream& head : heads) {
      append(trace.v, head.value_at(t), d_v);
      append(trace.log_decay, head.log_decay_at(t), trace.decays_per_token());
      trace.beta.push_back(head.write_strength_at(t));
    }
  }
  return trace;
}

// What the trace means, by the oracle and with indices of its own.
struct Exact {
  std::vector<double> output;  // as ReplayOutputs
  std::vector<double> state;
};

Exact exact_of(const Trace& trace) {
  const auto count = [](std::ptrdiff_t n) { return static_cast<std::size_t>(n); };
  Exact exact;
  exact.output.resize(count(trace.tokens * trace.value_heads * trace.d_v));
  const auto map = trace.head_map == HeadMap::interleaved ? oracle::HeadMap::interleaved
                                                          : oracle::HeadMap::tiled;
  const std::ptrdiff_t decays = trace.rule == Rule::kimi_delta ? trace.d_k : 1;
  for (std::ptrdiff_t h = 0; h < trace.value_heads; ++h) {
    oracle::DenseRecurrence<double> head(traits_of(trace.rule), static_cast<int>(trace.d_k),
                                         static_cast<int>(trace.d_v));
    const std::ptrdiff_t size = trace.d_k * trace.d_v;
    if (!trace.initial_state.empty()) {
      std::copy_n(trace.initial_state.data() + h * size, size, head.state().data());
    }
    const int key_head =
        oracle::key_head(map, static_cast<int>(h), static_cast<int>(trace.key_heads),
                         static_cast<int>(trace.value_heads));
    for (std::ptrdiff_t t = 0; t < trace.tokens; ++t) {
      const std::ptrdiff_t key_row = (t * trace.key_heads + key_head) * trace.d_k;
      const std::ptrdiff_t row = t * trace.value_heads + h;
      head.step_read(trace.k.data() + key_row, trace.v.data() + row * trace.d_v,
                     trace.log_decay.data() + row * decays, trace.beta[count(row)],
                     trace.q.data() + key_row, exact.output.data() + row * trace.d_v);
    }
    exact.state.insert(exact.state.end(), head.state().begin(), head.state().end());
  }
  return exact;
}

struct Result {
  TraceReport report;
  ReplayOutputs outputs;
};

Result replay(const Trace& trace, const ReplayOptions& options) {
  Result result;
  result.report =
      sinkstate::tools::replay("a trace", trace, options, &result.outputs, [](std::ptrdiff_t) {});
  return result;
}

// The message with which a replay is refused, empty when it is not.
std::string error_of(const Trace& trace, const ReplayOptions& options) {
  try {
    replay(trace, options);
  } catch (const ToolError& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::set<std::string> keys_of(const Json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

const std::set<std::string> trace_keys = {"trace", "rule",   "tokens", "heads",   "d_k",
                                          "d_v",   "policy", "total",  "per_head"};
const std::set<std::string> figure_keys = {"output_error_rms",
                                           "output_error_worst",
                                           "output_error_worst_token",
                                           "state_error_rel",
                                           "state_error_abs",
                                           "certificate",
                                           "certificate_holds",
                                           "certificate_looseness",
                                           "rank_mean",
                                           "rank_peak",
                                           "rank_final",
                                           "rank_histogram",
                                           "bytes_mean",
                                           "bytes_peak",
                                           "bytes_dense",
                                           "ratio_mean",
                                           "ratio_peak",
                                           "compactions",
                                           "recompressions",
                                           "dense_fallback",
                                           "ns_per_token_dense",
                                           "ns_per_token_step",
                                           "ns_per_token_compaction"};

Json without_times(Json report) {
  for (Json& trace : report["traces"]) {
    std::vector<Json*> all = {&trace["total"]};
    for (Json& head : trace["per_head"]) all.push_back(&head);
    for (Json* figures : all) {
      for (const char* key :
           {"ns_per_token_dense", "ns_per_token_step", "ns_per_token_compaction"}) {
        figures->erase(key);
      }
    }
  }
  return report;
}

// Of one head or, with the number of heads, of all together.
void check_sane(const Json& figures, std::ptrdiff_t heads, std::ptrdiff_t replayed) {
  CHECK(keys_of(figures) == figure_keys);
  for (const auto& [key, value] : figures.items()) {
    INFO(key);
    if (key == "certificate_holds") {
      CHECK(value == Json(true));
    } else if (key == "rank_histogram") {
      CHECK(value.is_array());
    } else {
      REQUIRE(value.is_number());
      CHECK(value.get<double>() >= 0);
    }
  }
  const auto number = [&](const char* key) { return figures[key].get<double>(); };
  std::ptrdiff_t counted = 0;
  double rank_sum = 0;
  const auto histogram = figures["rank_histogram"].get<std::vector<std::ptrdiff_t>>();
  for (std::size_t r = 0; r < histogram.size(); ++r) {
    CHECK(histogram[r] >= 0);
    counted += histogram[r];
    rank_sum += static_cast<double>(r) * static_cast<double>(histogram[r]);
  }
  CHECK(counted == replayed * heads);
  CHECK(histogram.back() > 0);
  CHECK(figures["rank_peak"] == histogram.size() - 1);
  CHECK(number("rank_mean") ==
        Catch::Approx(rank_sum / static_cast<double>(counted)).epsilon(1e-12));
  CHECK(number("rank_final") <= static_cast<double>(std::min(d_k, d_v)));
  CHECK(number("output_error_worst_token") < static_cast<double>(tokens));
  CHECK(number("output_error_worst_token") >= static_cast<double>(tokens - replayed));
  CHECK(number("output_error_worst") >= number("output_error_rms"));
  CHECK(number("certificate") >= number("state_error_abs"));
  CHECK(number("bytes_dense") == 4.0 * static_cast<double>(state_size * heads));
  CHECK(number("bytes_peak") >= number("bytes_mean"));
  CHECK(number("ratio_mean") == number("bytes_mean") / number("bytes_dense"));
  CHECK(number("ratio_peak") == number("bytes_peak") / number("bytes_dense"));
  CHECK(figures["compactions"] == heads * (replayed / 8));
  CHECK(number("recompressions") <= number("compactions"));
  CHECK(number("dense_fallback") <= 1);
}

// The largest error of an output row and of a state, over the largest norm of an exact one.
double output_error(const Result& result, const Exact& exact, const Trace& trace) {
  double error = 0;
  double norm = 0;
  for (std::ptrdiff_t row = 0; row < trace.tokens * trace.value_heads; ++row) {
    const std::ptrdiff_t offset = row * trace.d_v;
    const auto width = at(trace.d_v);
    error = std::max(error, oracle::frobenius_distance(result.outputs.output.data() + offset,
                                                       exact.output.data() + offset, width));
    norm = std::max(norm, oracle::frobenius_norm(exact.output.data() + offset, width));
  }
  return error / norm;
}

}  // namespace

TEST_CASE("the report has the keys that are promised, with sane values") {
  for (const Rule rule : all_rules) {
    for (const HeadMap map : all_maps) {
      const Trace trace = synthetic(rule, map);
      for (const bool sink : {false, true}) {
        for (const Compaction compaction : all_compactions) {
          INFO(to_string(rule) << ", " << to_string(map) << ", " << to_string(compaction)
                               << (sink ? ", sink" : ""));
          ReplayOptions options;
          options.compaction = compaction;
          options.sink = sink;
          options.epsilon = 0.05;
          const Result result = replay(trace, options);
          const Json report = Json::parse(json({result.report}, options));
          REQUIRE(keys_of(report) == std::set<std::string>{"traces"});
          REQUIRE(report["traces"].size() == 1);
          const Json& entry = report["traces"][0];
          REQUIRE(keys_of(entry) == trace_keys);
          CHECK(entry["trace"] == "a trace");
          CHECK(entry["rule"] == to_string(rule));
          CHECK(entry["tokens"] == tokens);
          CHECK(entry["heads"] == value_heads);
          CHECK(entry["d_k"] == d_k);
          CHECK(entry["d_v"] == d_v);
          CHECK(entry["policy"]["name"] == to_string(compaction));
          CHECK(entry["policy"]["buffer"] == 8);
          CHECK(entry["policy"]["sink"] == sink);
          const bool adaptive =
              compaction == Compaction::local_svd || compaction == Compaction::full_svd;
          CHECK(entry["policy"].contains("epsilon") == adaptive);
          CHECK(entry["policy"].contains("rank") == (compaction == Compaction::fixed_rank));
          CHECK(entry["policy"].contains("active") == (compaction == Compaction::local_svd));

          check_sane(entry["total"], value_heads, tokens);
          REQUIRE(entry["per_head"].size() == at(value_heads));
          for (const Json& head : entry["per_head"]) check_sane(head, 1, tokens);
        }
      }
    }
  }
}

TEST_CASE("the policy of the report is the resolved one") {
  const Trace trace = synthetic(Rule::gated_delta, HeadMap::tiled);
  const auto policy = [&](const ReplayOptions& options) {
    const Result result = replay(trace, options);
    return Json::parse(json({result.report}, options))["traces"][0]["policy"];
  };
  ReplayOptions options;
  options.epsilon = 0.25;
  options.seed = 18446744073709551615u;
  options.recompress_growth = 1.5;
  options.recompress_slack = 3;
  options.tail_share = 0.5;
  options.tail_period = 7;
  // 7 (12 + 20) < 12 * 20 <= 8 (12 + 20)
  CHECK(policy(options) == Json({{"name", "local-svd"},
                                 {"buffer", 8},
                                 {"epsilon", 0.25},
                                 {"rank_cap", 7},
                                 {"dense_fallback", true},
                                 {"dense_retry", 16},
                                 {"active", 8},
                                 {"recompress_growth", 1.5},
                                 {"recompress_slack", 3},
                                 {"tail_share", 0.5},
                                 {"tail_period", 7},
                                 {"seed", 18446744073709551615u},
                                 {"sink", false},
                                 {"prefill", 0},
                                 {"storage", "fp32"},
                                 {"rounding", "nearest"},
                                 {"backend", "host"}}));
  options.dense_fallback = false;
  CHECK(policy(options)["rank_cap"] == 12);
  options.rank_cap = 5;
  CHECK(policy(options)["rank_cap"] == 5);
  options.rank_cap = std::numeric_limits<std::ptrdiff_t>::max();
  CHECK(policy(options)["rank_cap"] == 12);

  options.active = 3;
  CHECK(policy(options)["active"] == 3);
  options.compaction = Compaction::full_svd;
  CHECK(policy(options)["name"] == "full-svd");
  CHECK_FALSE(policy(options).contains("active"));

  ReplayOptions fixed;
  fixed.compaction = Compaction::fixed_rank;
  CHECK(policy(fixed) == Json({{"name", "fixed-rank"},
                               {"buffer", 8},
                               {"rank", 12},
                               {"seed", 0},
                               {"sink", false},
                               {"prefill", 0},
                               {"storage", "fp32"},
                               {"rounding", "nearest"},
                               {"backend", "host"}}));
  fixed.rank_cap = 5;
  CHECK(policy(fixed)["rank"] == 5);

  ReplayOptions dense;
  dense.compaction = Compaction::dense_buffered;
  dense.buffer = 3;
  dense.sink = true;
  dense.prefill = 4;
  CHECK(policy(dense) == Json({{"name", "dense-buffered"},
                               {"buffer", 3},
                               {"sink", true},
                               {"prefill", 4},
                               {"storage", "fp32"},
                               {"rounding", "nearest"},
                               {"backend", "host"}}));
}

TEST_CASE("figures are what outputs, states and the library say, recomputed here") {
  namespace ss = sinkstate;
  const Trace trace = synthetic(Rule::gated_delta, HeadMap::tiled);
  ReplayOptions options;
  options.compaction = Compaction::full_svd;
  options.epsilon = 0.05;
  options.dense_fallback = false;
  options.sink = true;
  const Result result = replay(trace, options);
  const Exact exact = exact_of(trace);

  double all_output_error = 0, all_output = 0, all_state_error = 0, all_state = 0;
  double all_certificates = 0, all_ranks = 0, all_bytes = 0, all_peaks = 0, worst_of_all = 0;
  std::ptrdiff_t worst_token_of_all = -1;
  std::vector<double> all_looseness;
  const auto median = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  for (std::ptrdiff_t h = 0; h < value_heads; ++h) {
    INFO("head " << h);
    const ReplayFigures& figures = result.report.per_head[at(h)];

    double error_squares = 0, squares = 0, worst = -1;
    std::ptrdiff_t worst_token = -1;
    for (std::ptrdiff_t t = 0; t < tokens; ++t) {
      const std::ptrdiff_t row = (t * value_heads + h) * d_v;
      const double error = oracle::frobenius_distance(result.outputs.output.data() + row,
                                                      exact.output.data() + row, at(d_v));
      error_squares += error * error;
      squares += std::pow(oracle::frobenius_norm(exact.output.data() + row, at(d_v)), 2);
      if (error > worst) {
        worst = error;
        worst_token = t;
      }
    }
    const double rms = std::sqrt(squares / static_cast<double>(tokens));
    CHECK(figures.output_error_rms ==
          Catch::Approx(std::sqrt(error_squares / squares)).epsilon(1e-9));
    CHECK(figures.output_error_worst == Catch::Approx(worst / rms).epsilon(1e-9));
    CHECK(figures.output_error_worst_token == worst_token);
    CHECK(figures.output_error_rms > 1e-4);  // something was truncated
    all_output_error += error_squares;
    all_output += squares;
    if (worst / rms > worst_of_all) {
      worst_of_all = worst / rms;
      worst_token_of_all = worst_token;
    }

    const float* const state = result.outputs.state.data() + h * state_size;
    const double* const exact_state = exact.state.data() + h * state_size;
    const double state_error = oracle::frobenius_distance(state, exact_state, at(state_size));
    const double state_norm = oracle::frobenius_norm(exact_state, at(state_size));
    CHECK(figures.state_error_abs == Catch::Approx(state_error).epsilon(1e-9));
    CHECK(figures.state_error_rel == Catch::Approx(state_error / state_norm).epsilon(1e-9));
    all_state_error += state_error * state_error;
    all_state += state_norm * state_norm;

    // The library, driven by hand.
    using Policy = ss::Policy<ss::GatedDelta, ss::Host, ss::Fp32, ss::FullSvd, ss::MeanValueSink>;
    ss::StateConfig config;
    config.d_k = d_k;
    config.d_v = d_v;
    config.epsilon = options.epsilon;
    config.dense_fallback = false;
    ss::SinkState<Policy> owner(config, trace.sink_direction.data() + h * d_v);
    const auto view = owner.view();
    ss::HostTeam team(ss::workspace_bytes<Policy>(config));
    oracle::DenseRecurrence<double> recurrence(oracle::gated_delta, d_k, d_v);
    std::vector<double> looseness;
    std::vector<float> dense(at(state_size));
    float bound = 0;
    const auto look = [&] {
      REQUIRE(ss::materialize(team, view, ss::MatrixView<float>{dense.data(), d_k, d_v, d_v},
                              &bound) == ss::Status::ok);
      const double error = oracle::frobenius_distance(dense, recurrence.state());
      CHECK(static_cast<double>(bound) >= error);
      if (error > 0) looseness.push_back(static_cast<double>(bound) / error);
    };
    std::vector<std::ptrdiff_t> histogram;
    double rank_sum = 0;
    std::ptrdiff_t compactions = 0;
    for (std::ptrdiff_t t = 0; t < tokens; ++t) {
      const float* const key = trace.k.data() + (t * key_heads + h % key_heads) * d_k;
      const float* const query = trace.q.data() + (t * key_heads + h % key_heads) * d_k;
      const std::ptrdiff_t row = t * value_heads + h;
      const ss::Token<float> token{key, trace.v.data() + row * d_v, trace.log_decay.data() + row,
                                   trace.beta[at(row)]};
      std::vector<float> output(at(d_v));
      REQUIRE(ss::step(team, view, token, query, output.data()) == ss::Status::ok);
      CHECK(std::equal(output.begin(), output.end(), result.outputs.output.begin() + row * d_v));
      recurrence.step(token.key, token.value, token.log_decay, token.write_strength);
      const auto rank = static_cast<std::size_t>(view.rank());
      histogram.resize(std::max(histogram.size(), rank + 1));
      ++histogram[rank];
      rank_sum += static_cast<double>(rank);
      if (t % 8 == 7) {
        REQUIRE(ss::compact(team, view) == ss::Status::ok);
        ++compactions;
        look();
      }
    }
    look();
    CHECK(figures.certificate == static_cast<double>(bound));
    CHECK(figures.certificate_looseness == Catch::Approx(median(looseness)).epsilon(1e-9));
    CHECK(figures.rank_histogram == histogram);
    CHECK(figures.rank_final == static_cast<double>(view.rank()));
    CHECK(figures.compactions == compactions);
    CHECK(figures.compactions == tokens / 8);
    CHECK(figures.recompressions == compactions);
    CHECK(figures.dense_fallback == 0);
    all_certificates += static_cast<double>(bound) * static_cast<double>(bound);
    all_looseness.insert(all_looseness.end(), looseness.begin(), looseness.end());

    // Bytes by hand: a term is a key half, a value half and a strength; the sink d_k coefficients;
    // the buffer eight times a key, a correction and a log decay; nine certificates and masses, a
    // record of 32 bytes, two counters.
    const double fixed = 4.0 * 12 + 8 * 4.0 * (12 + 20 + 1) + 9 * 2 * 4.0 + 32 + 8;
    const double rank_mean = rank_sum / static_cast<double>(tokens);
    const double rank_peak = static_cast<double>(histogram.size() - 1);
    CHECK(figures.rank_mean == Catch::Approx(rank_mean).epsilon(1e-12));
    CHECK(figures.bytes_mean == Catch::Approx(4.0 * 33 * rank_mean + fixed).epsilon(1e-12));
    CHECK(figures.bytes_peak == 4.0 * 33 * rank_peak + fixed);
    CHECK(figures.bytes_dense == 4.0 * 12 * 20);
    CHECK(figures.ratio_mean() == figures.bytes_mean / 960);
    CHECK(figures.ratio_peak() == figures.bytes_peak / 960);
    all_ranks += figures.rank_mean;
    all_bytes += figures.bytes_mean;
    all_peaks += figures.bytes_peak;
  }

  const ReplayFigures& total = result.report.total;
  CHECK(total.output_error_rms ==
        Catch::Approx(std::sqrt(all_output_error / all_output)).epsilon(1e-9));
  CHECK(total.output_error_worst == Catch::Approx(worst_of_all).epsilon(1e-9));
  CHECK(total.output_error_worst_token == worst_token_of_all);
  CHECK(total.state_error_abs == Catch::Approx(std::sqrt(all_state_error)).epsilon(1e-9));
  CHECK(total.state_error_rel ==
        Catch::Approx(std::sqrt(all_state_error / all_state)).epsilon(1e-9));
  CHECK(total.certificate == Catch::Approx(std::sqrt(all_certificates)).epsilon(1e-12));
  CHECK(total.certificate_looseness == Catch::Approx(median(all_looseness)).epsilon(1e-9));
  CHECK(total.rank_mean == Catch::Approx(all_ranks / 4).epsilon(1e-12));
  CHECK(total.bytes_mean == Catch::Approx(all_bytes).epsilon(1e-12));
  CHECK(total.bytes_peak == all_peaks);
  CHECK(total.bytes_dense == 4 * 960.0);
  CHECK(total.ratio_mean() == Catch::Approx(all_bytes / (4 * 960.0)).epsilon(1e-12));
  CHECK(total.compactions == 4 * (tokens / 8));
}

TEST_CASE("outputs belong to the heads that the map says") {
  for (const Rule rule : all_rules) {
    for (const HeadMap map : all_maps) {
      INFO(to_string(rule) << ", " << to_string(map));
      const Trace trace = synthetic(rule, map);
      const Exact exact = exact_of(trace);
      for (int run = 0; run < 8; ++run) {
        const bool sink = run % 2 == 1;
        ReplayOptions options;
        options.compaction = all_compactions[run / 2];
        options.epsilon = 0;
        options.dense_fallback = false;
        options.sink = sink;
        if (options.compaction == Compaction::fixed_rank) options.rank_cap = 64;
        INFO(to_string(options.compaction) << (sink ? ", sink" : ""));
        const Result result = replay(trace, options);
        CHECK(output_error(result, exact, trace) < 2e-6);
        CHECK(oracle::relative_error(result.outputs.state, exact.state) < 2e-6);
        CHECK(result.report.total.output_error_rms < 2e-6);
        CHECK(result.report.total.state_error_rel < 2e-6);
        CHECK(result.report.total.certificate_holds);

        // The other map leads to other outputs, or this test shows nothing.
        Trace other = trace;
        other.head_map = map == HeadMap::tiled ? HeadMap::interleaved : HeadMap::tiled;
        CHECK(output_error(result, exact_of(other), trace) > 0.1);
      }
    }
  }
}

TEST_CASE("results are bit-equal for any number of threads") {
  for (const Rule rule : all_rules) {
    const Trace trace = synthetic(rule, HeadMap::interleaved);
    ReplayOptions options;
    options.prefill = 6;
    options.sink = true;
    const Result one = replay(trace, options);
    const Json report = Json::parse(json({one.report}, options));
    for (const int threads : {1, 2, 5, 1000}) {
      options.threads = threads;
      const Result many = replay(trace, options);
      CHECK(many.outputs.output == one.outputs.output);
      CHECK(many.outputs.state == one.outputs.state);
      CHECK(without_times(Json::parse(json({many.report}, options))) == without_times(report));
    }
  }
}

TEST_CASE("a prefill runs exactly and is then compressed") {
  for (const Rule rule : all_rules) {
    for (const std::ptrdiff_t prefill : {1, 20, 44}) {
      INFO(to_string(rule) << ", prefill " << prefill);
      const Trace trace = synthetic(rule, HeadMap::tiled);
      const Exact exact = exact_of(trace);
      ReplayOptions options;
      options.prefill = prefill;
      options.epsilon = 0.02;
      const Result result = replay(trace, options);
      bool same = true;
      for (std::ptrdiff_t i = 0; i < prefill * value_heads * d_v; ++i) {
        same = same && result.outputs.output[at(i)] == static_cast<float>(exact.output[at(i)]);
      }
      CHECK(same);
      const std::ptrdiff_t rest = tokens - prefill;
      const Json report = Json::parse(json({result.report}, options));
      check_sane(report["traces"][0]["total"], value_heads, rest);
      for (const Json& head : report["traces"][0]["per_head"]) check_sane(head, 1, rest);
      CHECK(report["traces"][0]["policy"]["prefill"] == prefill);
      CHECK(result.report.total.state_error_rel < 0.2);

      // The seed decides the sketch, and nothing that matters.
      options.seed = 1;
      CHECK(replay(trace, options).report.total.state_error_rel < 0.2);
      // Nothing truncated: all outputs are exact to rounding.
      options.epsilon = 0;
      options.dense_fallback = false;
      CHECK(output_error(replay(trace, options), exact, trace) < 5e-6);
      options.compaction = Compaction::dense_buffered;
      CHECK(output_error(replay(trace, options), exact, trace) < 2e-6);
    }
  }
  const Trace trace = synthetic(Rule::mamba2, HeadMap::tiled);
  ReplayOptions options;
  for (const std::ptrdiff_t prefill : {tokens, tokens + 1}) {
    options.prefill = prefill;
    CHECK(error_of(trace, options) ==
          "a trace: --prefill: wanted fewer than the 45 tokens of the trace, given " +
              std::to_string(prefill));
  }
}

TEST_CASE("a given initial state is where the recurrence starts") {
  for (const Rule rule : all_rules) {
    INFO(to_string(rule));
    Trace trace = synthetic(rule, HeadMap::tiled);
    const Exact before = exact_of(trace);
    trace.initial_state.assign(before.state.begin(), before.state.end());
    const Exact exact = exact_of(trace);
    for (const Compaction compaction : all_compactions) {
      for (const std::ptrdiff_t prefill : {0, 10}) {
        ReplayOptions options;
        options.compaction = compaction;
        options.epsilon = 0;
        options.dense_fallback = false;
        options.prefill = prefill;
        const Result result = replay(trace, options);
        CHECK(output_error(result, exact, trace) < 5e-6);
        CHECK(output_error(result, before, trace) > 0.01);
        CHECK(oracle::relative_error(result.outputs.state, exact.state) < 5e-6);
        CHECK(result.report.total.certificate_holds);
      }
    }
  }
}

TEST_CASE("a state_end that the recurrence does not reach is refused") {
  Trace trace = synthetic(Rule::kimi_delta, HeadMap::tiled);
  const Exact exact = exact_of(trace);
  trace.state_end.assign(exact.state.begin(), exact.state.end());
  const ReplayOptions options;
  CHECK(error_of(trace, options).empty());

  SECTION("a number changed") {
    trace.state_end[at(2 * state_size + 5)] += 0.1f;
    const std::string error = error_of(trace, options);
    CHECK(error.rfind("a trace: state_end of head 2: wanted ", 0) == 0);
    CHECK(contains(error, "given one "));
  }
  SECTION("another head map") {
    trace.head_map = HeadMap::interleaved;
    CHECK(contains(error_of(trace, options), "state_end of head 1"));
  }
  SECTION("another decay") {
    for (float& g : trace.log_decay) g *= 0.9f;
    CHECK(contains(error_of(trace, options), "state_end of head 0"));
  }
  SECTION("an initial state left out") {
    trace.initial_state.assign(at(value_heads * state_size), 1.0f);
    const Exact other = exact_of(trace);
    trace.state_end.assign(other.state.begin(), other.state.end());
    CHECK(error_of(trace, options).empty());
    trace.initial_state.clear();
    CHECK(contains(error_of(trace, options), "state_end of head 0"));
  }
  SECTION("a zero where there is something, and the reverse") {
    trace.state_end.assign(at(value_heads * state_size), 0.0f);
    CHECK(contains(error_of(trace, options), "state_end of head 0"));
    trace.beta.assign(trace.beta.size(), 0.0f);
    CHECK(error_of(trace, options).empty());
    trace.state_end.back() = 1e-20f;
    CHECK(contains(error_of(trace, options), "state_end of head 3"));
  }
}

TEST_CASE("a sink needs its direction") {
  Trace trace = synthetic(Rule::mamba2, HeadMap::tiled);
  ReplayOptions options;
  options.sink = true;
  CHECK(error_of(trace, options).empty());
  trace.sink_direction.assign(trace.sink_direction.size(), 0.0f);  // no sink in any head
  CHECK(error_of(trace, options).empty());
  trace.sink_direction.clear();
  CHECK(error_of(trace, options) ==
        "a trace: --sink: wanted a tensor sink_direction in the trace, given none");
}

TEST_CASE("log decays of -inf, -150 and 0 are followed") {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Rule rule : all_rules) {
    INFO(to_string(rule));
    Trace trace = synthetic(rule, HeadMap::tiled);
    const std::ptrdiff_t decays = trace.decays_per_token();
    const auto set = [&](std::ptrdiff_t t, std::ptrdiff_t h, float g) {
      std::fill_n(trace.log_decay.data() + (t * value_heads + h) * decays, decays, g);
    };
    set(0, 0, -infinity);
    set(11, 1, -infinity);
    set(15, 2, -infinity);
    set(16, 2, -infinity);
    set(44, 3, -infinity);
    set(20, 0, -150);
    set(21, 0, 0);
    trace.log_decay[at((30 * value_heads + 1) * decays)] = -infinity;
    const Exact exact = exact_of(trace);
    for (const Compaction compaction : all_compactions) {
      ReplayOptions options;
      options.compaction = compaction;
      options.epsilon = 0;
      options.dense_fallback = false;
      options.sink = true;
      const Result result = replay(trace, options);
      CHECK(output_error(result, exact, trace) < 2e-6);
      CHECK(result.report.total.certificate_holds);
      options.prefill = 12;
      CHECK(output_error(replay(trace, options), exact, trace) < 5e-6);
    }
  }
}

TEST_CASE("dense-buffered is exact to rounding and counts as dense") {
  for (const Rule rule : all_rules) {
    for (const std::ptrdiff_t buffer : {1, 8, 100}) {
      INFO(to_string(rule) << ", buffer " << buffer);
      const Trace trace = synthetic(rule, HeadMap::interleaved);
      ReplayOptions options;
      options.compaction = Compaction::dense_buffered;
      options.buffer = buffer;
      const Result result = replay(trace, options);
      CHECK(output_error(result, exact_of(trace), trace) < 2e-6);
      for (const ReplayFigures& head : result.report.per_head) {
        CHECK(head.dense_fallback == 1);
        CHECK(head.rank_mean == 12);
        CHECK(head.rank_peak == 12);
        CHECK(head.rank_final == 12);
        CHECK(head.rank_histogram.size() == 13);
        CHECK(head.rank_histogram.back() == tokens);
        CHECK(head.compactions == tokens / buffer);
        CHECK(head.recompressions == 0);
        CHECK(head.bytes_mean == Catch::Approx(head.bytes_peak).epsilon(1e-12));
        CHECK(head.bytes_peak > head.bytes_dense);
        CHECK(head.certificate_holds);
      }
    }
  }
}

TEST_CASE("more channels than a device takes are refused") {
  Trace trace = synthetic(Rule::gated_delta, HeadMap::tiled);
  ReplayOptions options;
  options.backend = Backend::cuda;
  check_options("a trace", trace, options);
  trace.d_v = 257;
  CHECK(contains(error_of(trace, options),
                 "--backend: cuda wants a d_k and d_v of at most 256, given 257"));
  options.backend = Backend::host;
  check_options("a trace", trace, options);
}

TEST_CASE("what a device does not tell is null in JSON, and a dash in the table") {
  ReplayOptions options;
  TraceReport report = replay(synthetic(Rule::gated_delta, HeadMap::tiled), options).report;
  const std::string host_table = table({report}, options);
  CHECK(contains(host_table, "policy local-svd, epsilon 0.01, buffer 8\n"));
  CHECK(contains(host_table, "one state at a time, in cache"));

  options.backend = Backend::cuda;
  std::vector<ReplayFigures*> all = {&report.total};
  for (ReplayFigures& head : report.per_head) all.push_back(&head);
  for (ReplayFigures* figures : all) {
    figures->recompressions.reset();
    figures->ns_per_token_dense = NAN;
    figures->ns_per_token_step = NAN;
    figures->ns_per_token_compaction = NAN;
  }
  const Json entry = Json::parse(json({report}, options))["traces"][0];
  CHECK(entry["policy"]["backend"] == "cuda");
  CHECK(keys_of(entry["total"]) == figure_keys);
  for (const char* key :
       {"recompressions", "ns_per_token_dense", "ns_per_token_step", "ns_per_token_compaction"}) {
    CHECK(entry["total"][key].is_null());
    CHECK(entry["per_head"][0][key].is_null());
  }
  CHECK(entry["total"]["compactions"].is_number());
  const std::string device_table = table({report}, options);
  CHECK(contains(device_table, "policy local-svd, epsilon 0.01, buffer 8, on a CUDA device\n"));
  CHECK(contains(device_table, "- + -"));
  CHECK(!contains(device_table, "nan"));
  CHECK(contains(device_table, "ns: not taken on a device"));
}

TEST_CASE("a state without a profitable rank goes dense and says so") {
  Trace trace = synthetic(Rule::gated_delta, HeadMap::tiled);
  ReplayOptions options;
  options.epsilon = 0;
  const Result result = replay(trace, options);
  CHECK(result.report.total.dense_fallback > 0.3);
  CHECK(result.report.total.rank_peak == 12);
  CHECK(result.report.total.recompressions < result.report.total.compactions);
  CHECK(output_error(result, exact_of(trace), trace) < 2e-6);
}

TEST_CASE("what is not finite is null in JSON, and an error of nothing is no error") {
  // One number a state: 1 + 2^-30 - 1 - 2^-30 is 0 in double and cannot be in float.
  Trace trace;
  trace.tokens = 4;
  trace.key_heads = trace.value_heads = trace.d_k = trace.d_v = 1;
  trace.q.assign(4, 1.0f);
  trace.k.assign(4, 1.0f);
  trace.v = {1.0f, 0x1p-30f, -1.0f, -0x1p-30f};
  trace.log_decay.assign(4, 0.0f);
  trace.beta.assign(4, 1.0f);
  ReplayOptions options;
  const Result rounded = replay(trace, options);
  REQUIRE(rounded.report.total.state_error_abs > 0);
  CHECK(rounded.report.total.certificate_holds);
  Json total = Json::parse(json({rounded.report}, options))["traces"][0]["total"];
  CHECK(total["state_error_rel"].is_null());
  CHECK(total["state_error_abs"].is_number());
  CHECK(contains(table({rounded.report}, options), "inf"));

  trace.v.assign(4, 0.0f);
  const Result zero = replay(trace, options);
  total = Json::parse(json({zero.report}, options))["traces"][0]["total"];
  for (const char* key : {"output_error_rms", "output_error_worst", "output_error_worst_token",
                          "state_error_rel", "state_error_abs", "certificate_looseness"}) {
    INFO(key);
    CHECK(total[key] == 0);
  }
  CHECK(zero.report.total.certificate_holds);
}

TEST_CASE("the worst token without any error is the first that was replayed") {
  Trace trace = synthetic(Rule::mamba2, HeadMap::tiled);
  trace.v.assign(trace.v.size(), 0.0f);
  ReplayOptions options;
  options.prefill = 10;
  CHECK(replay(trace, options).report.total.output_error_worst_token == 10);
}

TEST_CASE("what leaves the range of fp32 is refused, with head and token") {
  Trace trace = synthetic(Rule::mamba2, HeadMap::tiled);
  trace.v[at((17 * value_heads + 3) * d_v)] = 3e38f;
  trace.beta[at(17 * value_heads + 3)] = 1000;
  for (const int threads : {1, 3}) {
    ReplayOptions options;
    options.threads = threads;
    CHECK(error_of(trace, options) ==
          "a trace: head 3, token 17: the result does not fit the arithmetic type");
    options.prefill = 20;
    CHECK(contains(error_of(trace, options), "a trace: head 3, token 20: "));
  }
}

TEST_CASE("progress adds up to all tokens of all heads") {
  for (const std::ptrdiff_t prefill : {0, 13}) {
    ReplayOptions options;
    options.threads = 3;
    options.prefill = prefill;
    std::mutex mutex;
    std::ptrdiff_t done = 0;
    sinkstate::tools::replay("a trace", synthetic(Rule::mamba2, HeadMap::tiled), options, nullptr,
                             [&](std::ptrdiff_t count) {
                               const std::lock_guard<std::mutex> lock(mutex);
                               done += count;
                             });
    CHECK(done == tokens * value_heads);
  }
}

TEST_CASE("the table names traces and heads") {
  const Trace trace = synthetic(Rule::mamba2, HeadMap::tiled);
  ReplayOptions options;
  Result result = replay(trace, options);
  result.report.trace = "some/folder/layer.3.safetensors";
  const std::string text = table({result.report, result.report}, options);
  CHECK(text.rfind("policy local-svd, epsilon 0.01, buffer 8\n", 0) == 0);
  CHECK(contains(text, "\nlayer.3 "));
  CHECK(!contains(text, "folder"));
  CHECK(contains(text, " all "));
  CHECK(contains(text, "holds, "));
  CHECK(!contains(text, "VIOLATED"));
  result.report.total.certificate_holds = false;
  CHECK(contains(table({result.report}, options), "VIOLATED"));
  result.report.trace = "bytes \xff that are not text";
  CHECK(Json::accept(json({result.report}, options)));
}

TEST_CASE("the shipped traces: the certificate holds and is useful") {
  for (const char* name : {"mamba2", "gated_delta", "kimi_delta"}) {
    Trace trace = load_trace(std::string(SINKSTATE_TEST_DATA "/") + name + ".safetensors");
    CHECK(to_string(trace.rule) == std::string(name));
    CHECK(trace.ignored.empty());
    REQUIRE(!trace.state_end.empty());
    if (sanitized) {
      std::vector<std::ptrdiff_t> heads;
      for (std::ptrdiff_t h = 0; h < trace.value_heads; ++h) heads.push_back(h);
      trace = cut(trace, 300, heads);
    }
    for (int run = 0; run < 8; ++run) {
      ReplayOptions options;
      options.threads = 2;
      options.compaction = all_compactions[run / 2];
      options.sink = run % 2 == 1;
      INFO(name << ", " << to_string(options.compaction) << (options.sink ? ", sink" : ""));
      const TraceReport report =
          sinkstate::tools::replay(name, trace, options, nullptr, [](std::ptrdiff_t) {});
      CHECK(report.total.certificate_holds);
      CHECK(report.total.certificate >= report.total.state_error_abs);
      CHECK(report.total.certificate_looseness >= 1);
      for (const ReplayFigures& head : report.per_head) CHECK(head.certificate_holds);
      // A rank that is fixed or full leaves rounding alone on some heads, where no bound is near.
      if (options.compaction == Compaction::fixed_rank ||
          options.compaction == Compaction::dense_buffered) {
        continue;
      }
      CHECK(report.total.certificate_looseness <= 50);
      CHECK(report.total.state_error_rel < 0.1);
      CHECK(report.total.output_error_rms < 0.05);
      CHECK(report.total.ratio_mean() < 1);
      for (const ReplayFigures& head : report.per_head) CHECK(head.certificate_looseness <= 50);
    }
  }
}
