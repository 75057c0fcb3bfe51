// Does compaction pay? Steps and compactions of a state that keeps its rank, per token, by policy,
// rank and buffer: to be held against the dense step of `decode`. And what initialisation costs.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "machine.hpp"
#include "replay/thread_time.hpp"
#include "states.hpp"

namespace {

using namespace sinkstate;

/// Tokens after which a state has settled.
constexpr int settling = 256;
constexpr std::int64_t steps_in_memory = 16384;

/// Rows become their projections onto a random subspace, at their old norms.
void project(HostTeam& team, testing::Random& random, Index rank, Index length,
             std::vector<float>& rows) {
  const std::vector<float> basis = bench::orthonormal(team, random, rank, length);
  const MatrixView<const float> directions{basis.data(), rank, length, length};
  std::vector<float> weights(static_cast<std::size_t>(rank));
  for (float* row = rows.data(); row != rows.data() + rows.size(); row += length) {
    const float before = team.norm(length, row);
    team.project(directions, row, weights.data());
    team.fill(length, 0.0f, row);
    team.add_combination(directions, weights.data(), row);
    const float after = team.norm(length, row);
    if (after > 0) team.scale(length, before / after, row, row);
  }
}

/// Tokens that write into `rank` directions only.
template <class Rule>
testing::Stream stream_of_rank(HostTeam& team, Index d_k, Index d_v, Index rank) {
  testing::Stream stream = bench::stream_of<Rule>(d_k, d_v, 2 * settling);
  testing::Random random(testing::test_seed());
  project(team, random, rank, d_k, stream.key);
  project(team, random, rank, d_v, stream.value);
  return stream;
}

/// The time is that of a token; `compact`, in ns, is what of it compaction takes, `whole` the share of
/// compactions that decompose all terms.
template <class Rule, class Compaction>
void total(benchmark::State& bench) {
  using P = Policy<Rule, Host, Fp32, Compaction>;
  StateConfig config;
  config.d_k = bench.range(0);
  config.d_v = bench.range(1);
  config.buffer = bench.range(4);
  config.epsilon = 1e-4;  // so that no direction is weak enough to be dropped
  config.dense_fallback = false;
  const Index rank = bench.range(3);
  if (!Compaction::adaptive) config.rank_cap = rank;
  const auto bytes =
      bench::StepBytes::factored<P>(config, rank, 0.5 * static_cast<double>(config.buffer - 1));
  // Compactions are long: half of the memory of `decode` is several caches still.
  const auto count = static_cast<std::size_t>(
      bench.range(2) != 0 ? bench::in_memory_bytes / 2 / bytes.fetched : 1);
  bench::States<P> states(config, count);
  HostTeam team(workspace_bytes<P>(config));
  const testing::Stream stream = stream_of_rank<Rule>(team, config.d_k, config.d_v, rank);
  for (int t = 0; t < settling; ++t) {
    if (states[0].due()) bench::require_ok(compact(team, states[0]));
    bench::require_ok(advance(team, states[0], bench::token_of(stream, t)));
  }
  if (states[0].due()) bench::require_ok(compact(team, states[0]));
  for (std::size_t i = 1; i < count; ++i) {
    states.copy(i - 1, i);
    bench::require_ok(
        advance(team, states[i], bench::token_of(stream, static_cast<int>(i) % settling)));
    if (states[i].due()) bench::require_ok(compact(team, states[i]));
  }
  std::vector<float> output(static_cast<std::size_t>(config.d_v));
  CompactionReport report;
  double compacting = 0, compactions = 0, ranks = 0, whole = 0;
  std::size_t i = 0;
  int t = settling;
  for (auto _ : bench) {
    const SinkStateView<P>& state = states[i];
    states.expect_next(team, i);
    Status status =
        step(team, state, bench::token_of(stream, t), stream.query_at(t), output.data());
    benchmark::DoNotOptimize(status);
    benchmark::DoNotOptimize(output.data());
    if (state.due()) {
      const double begin = tools::thread_seconds();
      bench::require_ok(compact(team, state, &report));
      compacting += tools::thread_seconds() - begin;
      ++compactions;
      ranks += static_cast<double>(report.rank_after);
      whole += report.decomposed == report.rank_before ? 1 : 0;
    }
    i = states.after(i);
    // The first visit in a round moves time on.
    if (i == 0) t = t + 1 < stream.tokens ? t + 1 : settling;
  }
  compactions = std::max(compactions, 1.0);
  bench.counters["compact"] = 1e9 * compacting / static_cast<double>(bench.iterations());
  bench.counters["us/compaction"] = 1e6 * compacting / compactions;
  bench.counters["rank"] = ranks / compactions;
  bench.counters["whole"] = whole / compactions;
}

/// Of a state that has exactly this rank.
void initialize_randomized(benchmark::State& bench) {
  using P = Policy<GatedDelta>;
  StateConfig config;
  config.d_k = bench.range(0);
  config.d_v = bench.range(1);
  SinkState<P> state(config);
  HostTeam team(workspace_bytes<P>(config));
  const Index rank = bench.range(2);
  testing::Random random(testing::test_seed());
  const std::vector<float> keys = bench::orthonormal(team, random, rank, config.d_k);
  const std::vector<float> values = bench::orthonormal(team, random, rank, config.d_v);
  std::vector<float> dense(static_cast<std::size_t>(config.d_k * config.d_v));
  for (Index r = 0; r < rank; ++r) {
    const MatrixView<const float> value{values.data() + r * config.d_v, 1, config.d_v, config.d_v};
    for (Index i = 0; i < config.d_k; ++i) {
      const float weight = keys[static_cast<std::size_t>(r * config.d_k + i)];
      team.add_combination(value, &weight, dense.data() + i * config.d_v);
    }
  }
  const MatrixView<const float> view{dense.data(), config.d_k, config.d_v, config.d_v};
  for (auto _ : bench) {
    Status status = initialize(team, state.view(), view);
    benchmark::DoNotOptimize(status);
  }
  if (state.view().rank() != rank) std::abort();
}

const std::vector<std::int64_t> ranks{4, 8, 16, 32, 48};

template <class Rule, class Compaction>
void add_totals(const std::string& rule, const std::string& policy, std::int64_t d_k,
                std::int64_t d_v, bool memory) {
  for (const std::int64_t buffer : {8, 16, 32, 64}) {
    for (const std::int64_t rank : ranks) {
      const std::string name = "total/" + rule + "/" + policy + (memory ? "/memory/" : "/cache/");
      auto* const added = benchmark::RegisterBenchmark(name.c_str(), total<Rule, Compaction>);
      added->Args({d_k, d_v, memory ? 1 : 0, rank, buffer});
      // Many states take long to set up, so that is done once; one state is soon through its tokens.
      added->Iterations(memory ? steps_in_memory : std::int64_t{16 * settling});
    }
  }
}

template <class Rule>
void add_policies(const std::string& rule, std::int64_t d_k, std::int64_t d_v) {
  add_totals<Rule, LocalSvd>(rule, "local-svd", d_k, d_v, true);
  add_totals<Rule, LocalSvd>(rule, "local-svd", d_k, d_v, false);
  add_totals<Rule, FullSvd>(rule, "full-svd", d_k, d_v, false);
  add_totals<Rule, FixedRank>(rule, "fixed-rank", d_k, d_v, false);
}

const bool registered = [] {
  add_policies<Mamba2>("mamba2", 128, 80);
  add_policies<GatedDelta>("gated_delta", 128, 128);
  add_policies<KimiDelta>("kimi_delta", 128, 128);
  for (const std::int64_t rank : ranks) {
    benchmark::RegisterBenchmark("initialize/gated_delta/", initialize_randomized)
        ->Args({128, 128, rank});
  }
  return true;
}();

}  // namespace
