// One decode step of a state: dense in place against factored, in cache and from memory; and what
// compaction and initialisation cost. Bytes are what the step must touch once, so that
// bytes_per_second can be held against `copy`.

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "replay/dense_step.hpp"
#include "support/streams.hpp"

namespace {

using namespace sinkstate;

constexpr Index buffer = 8;
/// Together they exceed any cache.
constexpr std::int64_t in_memory_bytes = std::int64_t{512} << 20;

template <class Rule>
testing::Stream stream_of(Index d_k, Index d_v, int tokens) {
  const oracle::RuleTraits traits{Rule::corrects, Rule::decay == Decay::per_channel
                                                      ? oracle::RuleTraits::Decay::per_channel
                                                      : oracle::RuleTraits::Decay::scalar};
  return testing::realistic(traits, static_cast<int>(d_k), static_cast<int>(d_v), tokens,
                            testing::test_seed());
}

Token<float> token_of(const testing::Stream& stream, int t) {
  return {stream.key_at(t), stream.value_at(t), stream.log_decay_at(t),
          stream.write_strength_at(t)};
}

/// A state with exactly `rank` terms: random orthogonal ones, strengths from 1 down to 1/10.
template <class Policy>
SinkState<Policy> state_of_rank(Index d_k, Index d_v, Index rank) {
  StateConfig config;
  config.d_k = d_k;
  config.d_v = d_v;
  config.buffer = buffer;
  config.epsilon = 1e-2;
  if (!Policy::Compaction::adaptive) config.rank_cap = rank;
  SinkState<Policy> state(config);
  HostTeam team(workspace_bytes<Policy>(config, ExactSvd{}));
  testing::Random random(testing::test_seed());
  const auto orthonormal = [&](Index length) {
    std::vector<float> rows(static_cast<std::size_t>(rank * length));
    for (float& x : rows) x = static_cast<float>(random.normal());
    std::vector<float> z(static_cast<std::size_t>(rank));
    detail::orthogonalize(team, MatrixView<float>{rows.data(), rank, length, length}, 0,
                          MatrixView<float>{}, z.data());
    return rows;
  };
  const std::vector<float> keys = orthonormal(d_k);
  const std::vector<float> values = orthonormal(d_v);
  std::vector<float> dense(static_cast<std::size_t>(d_k * d_v));
  for (Index r = 0; r < rank; ++r) {
    const float strength = std::pow(0.1f, static_cast<float>(r) / static_cast<float>(rank));
    for (Index i = 0; i < d_k; ++i) {
      for (Index j = 0; j < d_v; ++j) {
        dense[static_cast<std::size_t>(i * d_v + j)] +=
            strength * keys[static_cast<std::size_t>(r * d_k + i)] *
            values[static_cast<std::size_t>(r * d_v + j)];
      }
    }
  }
  const Status status = initialize(
      team, state.view(), MatrixView<const float>{dense.data(), d_k, d_v, d_v}, ExactSvd{});
  if (status != Status::ok || state.view().rank() != rank) std::abort();
  return state;
}

/// The bandwidth that a step can hope for: read and write of as many bytes as the dense states.
void copy(benchmark::State& bench) {
  std::vector<float> numbers(static_cast<std::size_t>(in_memory_bytes) / sizeof(float), 1.0f);
  float factor = 1.0001f;
  for (auto _ : bench) {
    for (float& x : numbers) x *= factor;
    benchmark::ClobberMemory();
  }
  bench.SetBytesProcessed(bench.iterations() * 2 * in_memory_bytes);
}

template <class Rule>
void step_dense(benchmark::State& bench) {
  const Index d_k = bench.range(0);
  const Index d_v = bench.range(1);
  const std::int64_t bytes = 4 * d_k * d_v;
  const std::int64_t states = bench.range(2) != 0 ? in_memory_bytes / bytes : 1;
  const testing::Stream stream = stream_of<Rule>(d_k, d_v, 64);
  std::vector<tools::DenseStep<Rule>> dense(static_cast<std::size_t>(states),
                                            tools::DenseStep<Rule>(d_k, d_v));
  std::vector<float> output(static_cast<std::size_t>(d_v));
  std::size_t next = 0;
  int t = 0;
  for (auto _ : bench) {
    const Token<float> token = token_of(stream, t);
    dense[next](token.key, token.value, token.log_decay, token.write_strength, stream.query_at(t),
                output.data());
    benchmark::DoNotOptimize(output.data());
    t = (t + 1) % stream.tokens;
    next = next + 1 == dense.size() ? 0 : next + 1;
  }
  bench.SetBytesProcessed(bench.iterations() * 2 * bytes);
  bench.counters["bytes/token"] = static_cast<double>(2 * bytes);
}

template <class Rule>
void step_factored(benchmark::State& bench) {
  using P = Policy<Rule>;
  const Index d_k = bench.range(0);
  const Index d_v = bench.range(1);
  const Index rank = bench.range(3);
  const SinkState<P> first = state_of_rank<P>(d_k, d_v, rank);
  const StateConfig config = SinkState<P>(first).view().config;
  HostTeam team(workspace_bytes<P>(config));
  // A read-out touches the factors and, on average, half of the buffer; a step writes one token.
  const Index decays = Rule::log_decays(d_k);
  const double numbers = static_cast<double>(rank * (d_k + d_v + 1)) +
                         (0.5 * (buffer - 1) + 1) * static_cast<double>(d_k + d_v + decays);
  const auto states = static_cast<std::size_t>(
      bench.range(2) != 0 ? static_cast<double>(in_memory_bytes) / (4 * numbers) : 1);
  std::vector<SinkState<P>> factored(states, first);
  std::vector<SinkStateView<P>> views;
  for (SinkState<P>& state : factored) views.push_back(state.view());
  const testing::Stream stream = stream_of<Rule>(d_k, d_v, 64);
  std::vector<float> output(static_cast<std::size_t>(d_v));
  std::size_t next = 0;
  int t = 0;
  for (auto _ : bench) {
    const SinkStateView<P> view = views[next];
    if (view.due()) benchmark::DoNotOptimize(roll_back(view, buffer));
    Status status = step(team, view, token_of(stream, t), stream.query_at(t), output.data());
    benchmark::DoNotOptimize(status);
    benchmark::DoNotOptimize(output.data());
    t = (t + 1) % stream.tokens;
    next = next + 1 == views.size() ? 0 : next + 1;
  }
  bench.SetBytesProcessed(
      static_cast<std::int64_t>(static_cast<double>(bench.iterations()) * 4 * numbers));
  bench.counters["bytes/token"] = 4 * numbers;
}

template <class Rule, class Compaction>
void compact_policy(benchmark::State& bench) {
  using P = Policy<Rule, Host, Fp32, Compaction>;
  const SinkState<P> first = state_of_rank<P>(bench.range(0), bench.range(1), bench.range(2));
  SinkState<P> filled = first;
  const StateConfig config = filled.view().config;
  HostTeam team(workspace_bytes<P>(config));
  const testing::Stream stream = stream_of<Rule>(config.d_k, config.d_v, buffer);
  for (int t = 0; t < buffer; ++t) {
    if (advance(team, filled.view(), token_of(stream, t)) != Status::ok) std::abort();
  }
  CompactionReport report;
  for (auto _ : bench) {
    bench.PauseTiming();
    SinkState<P> state = filled;
    bench.ResumeTiming();
    Status status = compact(team, state.view(), &report);
    benchmark::DoNotOptimize(status);
  }
  bench.counters["sweeps"] = report.sweeps;
}

void initialize_randomized(benchmark::State& bench) {
  using P = Policy<GatedDelta>;
  const Index d_k = bench.range(0);
  const Index d_v = bench.range(1);
  SinkState<P> state = state_of_rank<P>(d_k, d_v, bench.range(2));
  const StateConfig config = state.view().config;
  HostTeam team(workspace_bytes<P>(config));
  std::vector<float> dense(static_cast<std::size_t>(d_k * d_v));
  const MatrixView<float> view{dense.data(), d_k, d_v, d_v};
  if (materialize(team, state.view(), view) != Status::ok) std::abort();
  for (auto _ : bench) {
    Status status = initialize(team, state.view(), MatrixView<const float>(view));
    benchmark::DoNotOptimize(status);
  }
}

const std::vector<std::int64_t> ranks{4, 8, 16, 32, 48};

template <class Rule, class Compaction>
void add_compaction(const std::string& name, std::int64_t d_k, std::int64_t d_v) {
  for (const std::int64_t rank : ranks) {
    benchmark::RegisterBenchmark(("compact/" + name).c_str(), compact_policy<Rule, Compaction>)
        ->Args({d_k, d_v, rank});
  }
}

template <class Rule>
void add_steps(const char* name, std::int64_t d_k, std::int64_t d_v) {
  for (const std::int64_t memory : {0, 1}) {
    const std::string where = memory != 0 ? "/memory/" : "/cache/";
    benchmark::RegisterBenchmark(("dense/" + std::string(name) + where).c_str(), step_dense<Rule>)
        ->Args({d_k, d_v, memory});
    for (const std::int64_t rank : ranks) {
      benchmark::RegisterBenchmark(("factored/" + std::string(name) + where).c_str(),
                                   step_factored<Rule>)
          ->Args({d_k, d_v, memory, rank});
    }
  }
  add_compaction<Rule, LocalSvd>(std::string(name) + "/local-svd/", d_k, d_v);
  add_compaction<Rule, FullSvd>(std::string(name) + "/full-svd/", d_k, d_v);
  add_compaction<Rule, FixedRank>(std::string(name) + "/fixed-rank/", d_k, d_v);
}

const bool registered = [] {
  benchmark::RegisterBenchmark("copy", copy);
  add_steps<Mamba2>("mamba2", 128, 80);
  add_steps<GatedDelta>("gated_delta", 128, 128);
  add_steps<KimiDelta>("kimi_delta", 128, 128);
  for (const std::int64_t rank : ranks) {
    benchmark::RegisterBenchmark("initialize/gated_delta/", initialize_randomized)
        ->Args({128, 128, rank});
  }
  return true;
}();

}  // namespace
