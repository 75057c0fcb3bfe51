// 100,000 tokens through one state beside the exact recurrence: do rank, error, orthogonality and
// time stay what they were? A row for each 20,000 tokens, which begin where those of the row before
// end. Time is that of the thread, so that other work on the machine is not in it.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "replay/thread_time.hpp"
#include "support/matrices.hpp"
#include "support/state_runner.hpp"
#include "support/streams.hpp"

namespace {

using namespace sinkstate;

constexpr int tokens = 100000;
constexpr int part = tokens / 5;
constexpr int stride = 20;  // compactions from one look at the state to the next

struct Looks {
  double rank = 0;
  double error = 0;  // relative, squared
  double orthogonality = 0;
  double least_bound = std::numeric_limits<double>::infinity();  // over the error
  double seconds = 0;
  int count = 0;
};

template <class P>
class LongRun {
 public:
  explicit LongRun(const StateConfig& config)
      : stream_(testing::realistic(testing::traits_of<typename P::Rule>,
                                   static_cast<int>(config.d_k), static_cast<int>(config.d_v),
                                   tokens, testing::test_seed())),
        state_(config),
        team_(workspace_bytes<P>(config)),
        exact_(stream_.rule, stream_.d_k, stream_.d_v),
        output_(static_cast<std::size_t>(config.d_v)),
        exact_output_(output_.size()) {}

  /// The tokens up to `end`, and what was seen after every `stride` compactions. Only library calls
  /// are timed.
  Looks advance_to(int end) {
    Looks looks;
    for (; token_ < end; ++token_) {
      looks.seconds += seconds_of([&] {
        return step(team_, state_.view(),
                    {stream_.key_at(token_), stream_.value_at(token_), stream_.log_decay_at(token_),
                     stream_.write_strength_at(token_)},
                    stream_.query_at(token_), output_.data());
      });
      step_read(exact_, stream_, token_, exact_output_.data());
      if (!state_.view().due()) continue;
      const bool look = ++compactions_ % stride == 0;
      const std::set<std::vector<float>> before = look ? values() : std::set<std::vector<float>>{};
      CompactionReport report;
      looks.seconds += seconds_of([&] { return compact(team_, state_.view(), &report); });
      if (look) include(looks, before, report);
    }
    return looks;
  }

 private:
  template <class Verb>
  static double seconds_of(const Verb& verb) {
    const double begin = tools::thread_seconds();
    if (verb() != Status::ok) std::abort();
    return tools::thread_seconds() - begin;
  }

  std::vector<float> value_row(Index i) {
    const float* const row = state_.view().factors.values().row(i);
    return {row, row + stream_.d_v};
  }
  std::set<std::vector<float>> values() {
    std::set<std::vector<float>> rows;
    for (Index i = 0; i < state_.view().rank(); ++i) rows.insert(value_row(i));
    return rows;
  }

  void include(Looks& looks, const std::set<std::vector<float>>& before,
               const CompactionReport& report) {
    const auto view = state_.view();
    const double error =
        oracle::frobenius_distance(testing::stored_state<P, double>(view), exact_.state());
    looks.rank += static_cast<double>(view.rank());
    looks.error += std::pow(error / oracle::frobenius_norm(exact_.state()), 2);
    looks.least_bound =
        std::min(looks.least_bound, static_cast<double>(view.certificate()) / error);
    // Frozen terms are orthogonal to nothing; the compaction did not write to their values.
    std::vector<Index> made;
    for (Index i = 0; i < view.rank(); ++i) {
      if (report.decomposed == report.rank_before || before.count(value_row(i)) == 0) {
        made.push_back(i);
      }
    }
    for (const auto& side : {view.factors.keys(), view.factors.values()}) {
      testing::Matrix rows(static_cast<Index>(made.size()), side.cols);
      for (Index i = 0; i < rows.rows(); ++i) {
        rows.row(i) = testing::wide(side.middle_rows(made[static_cast<std::size_t>(i)], 1));
      }
      looks.orthogonality = std::max(looks.orthogonality, testing::orthogonality_error(rows));
    }
    ++looks.count;
  }

  testing::Stream stream_;
  SinkState<P> state_;
  HostTeam team_;
  oracle::DenseRecurrence<double> exact_;
  std::vector<float> output_;
  std::vector<double> exact_output_;
  int token_ = 0;
  int compactions_ = 0;
};

template <class Rule, class Compaction>
void add(const std::string& name, Index d_k, Index d_v) {
  using P = Policy<Rule, Host, Fp32, Compaction>;
  StateConfig config;
  config.d_k = d_k;
  config.d_v = d_v;
  config.dense_fallback = false;  // so that the rank says what the state needs
  // One run at a time is in memory: from its first row to its last.
  const auto run = std::make_shared<std::unique_ptr<LongRun<P>>>();
  for (int end = part; end <= tokens; end += part) {
    const auto row = [run, config, end](benchmark::State& bench) {
      if (*run == nullptr) *run = std::make_unique<LongRun<P>>(config);
      Looks looks;
      for (auto _ : bench) {
        looks = (*run)->advance_to(end);
        bench.SetIterationTime(looks.seconds);
      }
      if (end == tokens) run->reset();
      bench.counters["rank"] = looks.rank / looks.count;
      bench.counters["error"] = std::sqrt(looks.error / looks.count);
      bench.counters["orthogonality"] = looks.orthogonality;
      bench.counters["bound/error"] = looks.least_bound;
      bench.counters["us/token"] = 1e6 * looks.seconds / part;
    };
    benchmark::RegisterBenchmark(("long-run/" + name + "/" + std::to_string(end)).c_str(), row)
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
}

template <class Rule>
void add_policies(const std::string& name, Index d_k, Index d_v) {
  add<Rule, LocalSvd>(name + "/local-svd", d_k, d_v);
  add<Rule, FixedRank>(name + "/fixed-rank", d_k, d_v);
}

const bool registered = [] {
  add_policies<Mamba2>("mamba2", 128, 80);
  add_policies<GatedDelta>("gated_delta", 128, 128);
  add_policies<KimiDelta>("kimi_delta", 128, 128);
  add_policies<LinearAttention>("linear_attention", 128, 128);
  add_policies<GatedLinearAttention>("gated_linear_attention", 128, 128);
  add_policies<DeltaNet>("delta_net", 128, 128);
  return true;
}();

}  // namespace
