// One decode step of a state: dense in place against factored, in cache and from memory. bytes/token
// is what a step must touch once, so that bytes_per_second can be held against `copy`; fetched/token
// is the part of it that memory has to deliver, to be held against `read`.

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "arena.hpp"
#include "machine.hpp"
#include "replay/dense_step.hpp"
#include "states.hpp"

namespace {

using namespace sinkstate;
using bench::StepBytes;

constexpr std::int64_t steps_in_memory = 100000;

/// The bandwidth that a step can hope for: read and write of as many bytes as the dense states.
void copy(benchmark::State& bench) {
  bench::Arena arena(static_cast<std::size_t>(bench::in_memory_bytes));
  auto* const numbers = arena.at<float>(0);
  const std::size_t count = arena.size() / sizeof(float);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = 1.0f;
  for (auto _ : bench) {
    for (std::size_t i = 0; i < count; ++i) numbers[i] *= 1.0001f;
    benchmark::ClobberMemory();
  }
  bench.SetBytesProcessed(bench.iterations() * 2 * static_cast<std::int64_t>(arena.size()));
}

/// The usual copy, to elsewhere.
void copy_elsewhere(benchmark::State& bench) {
  const auto size = static_cast<std::size_t>(bench::in_memory_bytes);
  bench::Arena from(size), to(size);
  std::memset(from.at(0), 1, size);
  std::memset(to.at(0), 1, size);
  for (auto _ : bench) {
    std::memcpy(to.at(0), from.at(0), size);
    benchmark::ClobberMemory();
  }
  bench.SetBytesProcessed(bench.iterations() * 2 * static_cast<std::int64_t>(size));
}

void read(benchmark::State& bench) {
  bench::Arena arena(static_cast<std::size_t>(bench::in_memory_bytes));
  std::memset(arena.at(0), 1, arena.size());
  const auto* const numbers = arena.at<std::uint64_t>(0);
  const std::size_t count = arena.size() / sizeof(std::uint64_t);
  for (auto _ : bench) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += numbers[i];
    benchmark::DoNotOptimize(sum);
  }
  bench.SetBytesProcessed(bench.iterations() * static_cast<std::int64_t>(arena.size()));
}

void count_bytes(benchmark::State& bench, const StepBytes& bytes) {
  const auto steps = static_cast<double>(bench.iterations());
  bench.SetBytesProcessed(static_cast<std::int64_t>(steps * bytes.touched));
  bench.counters["bytes/token"] = bytes.touched;
  bench.counters["fetched/token"] = bytes.fetched;
  bench.counters["fetched/s"] = benchmark::Counter(
      steps * bytes.fetched, benchmark::Counter::kIsRate, benchmark::Counter::kIs1000);
}

template <class Rule>
void step_dense(benchmark::State& bench) {
  const Index d_k = bench.range(0);
  const Index d_v = bench.range(1);
  const auto numbers = static_cast<std::size_t>(d_k * d_v);
  const StepBytes bytes = StepBytes::dense(d_k, d_v);
  const auto states =
      static_cast<std::size_t>(bench.range(2) != 0 ? bench::in_memory_bytes / bytes.fetched : 1);
  bench::Arena arena(states * numbers * sizeof(float));
  std::memset(arena.at(0), 0, arena.size());
  const testing::Stream stream = bench::stream_of<Rule>(d_k, d_v, 64);
  tools::DenseStep<Rule> dense(d_k, d_v);
  std::vector<float> output(static_cast<std::size_t>(d_v));
  std::size_t i = 0;
  int t = 0;
  for (auto _ : bench) {
    const Token<float> token = bench::token_of(stream, t);
    const std::size_t after = i + 1 == states ? 0 : i + 1;
    float* const matrices = arena.at<float>(0);
    dense.step(matrices + i * numbers, states == 1 ? nullptr : matrices + after * numbers,
               token.key, token.value, token.log_decay, token.write_strength, stream.query_at(t),
               output.data());
    benchmark::DoNotOptimize(output.data());
    benchmark::ClobberMemory();
    t = (t + 1) % stream.tokens;
    i = after;
  }
  count_bytes(bench, bytes);
}

/// Random orthogonal terms, strengths from 1 down to 1/10.
template <class P>
void set_terms(const SinkStateView<P>& state, Index rank) {
  const StateConfig& config = state.config;
  HostTeam team(workspace_bytes<P>(config));
  testing::Random random(testing::test_seed());
  const std::vector<float> keys = bench::orthonormal(team, random, rank, config.d_k);
  const std::vector<float> values = bench::orthonormal(team, random, rank, config.d_v);
  std::vector<float> dense(static_cast<std::size_t>(config.d_k * config.d_v));
  for (Index r = 0; r < rank; ++r) {
    const float strength = std::pow(0.1f, static_cast<float>(r) / static_cast<float>(rank));
    for (Index i = 0; i < config.d_k; ++i) {
      for (Index j = 0; j < config.d_v; ++j) {
        dense[static_cast<std::size_t>(i * config.d_v + j)] +=
            strength * keys[static_cast<std::size_t>(r * config.d_k + i)] *
            values[static_cast<std::size_t>(r * config.d_v + j)];
      }
    }
  }
  HostTeam exact(workspace_bytes<P>(config, ExactSvd{}));
  const MatrixView<const float> view{dense.data(), config.d_k, config.d_v, config.d_v};
  bench::require_ok(initialize(exact, state, view, ExactSvd{}));
  if (state.rank() != rank) std::abort();
}

/// States take the room of their rank, as in a pool.
template <class Rule>
void step_factored(benchmark::State& bench) {
  using P = Policy<Rule>;
  StateConfig config;
  config.d_k = bench.range(0);
  config.d_v = bench.range(1);
  config.rank_cap = bench.range(3);
  config.dense_fallback = false;
  // On average half of the buffer is full.
  const StepBytes bytes =
      StepBytes::factored<P>(config, config.rank_cap, 0.5 * static_cast<double>(config.buffer - 1));
  const auto count =
      static_cast<std::size_t>(bench.range(2) != 0 ? bench::in_memory_bytes / bytes.fetched : 1);
  bench::States<P> states(config, count);
  const testing::Stream stream = bench::stream_of<Rule>(config.d_k, config.d_v, 64);
  HostTeam team(workspace_bytes<P>(config));
  set_terms(states[0], config.rank_cap);
  for (std::size_t i = 1; i < count; ++i) {
    states.copy(i - 1, i);
    const SinkStateView<P>& state = states[i];
    const auto t = static_cast<int>(state.buffered());
    bench::require_ok(t + 1 == config.buffer ? roll_back(state, t)
                                             : advance(team, state, bench::token_of(stream, t)));
  }
  std::vector<float> output(static_cast<std::size_t>(config.d_v));
  std::size_t i = 0;
  int t = 0;
  for (auto _ : bench) {
    const SinkStateView<P>& state = states[i];
    states.expect_next(team, i);
    Status status =
        step(team, state, bench::token_of(stream, t), stream.query_at(t), output.data());
    benchmark::DoNotOptimize(status);
    benchmark::DoNotOptimize(output.data());
    if (state.due()) benchmark::DoNotOptimize(roll_back(state, config.buffer));
    t = (t + 1) % stream.tokens;
    i = states.after(i);
  }
  count_bytes(bench, bytes);
}

template <class Rule>
void add_steps(const std::string& rule, std::int64_t d_k, std::int64_t d_v) {
  for (const std::int64_t memory : {0, 1}) {
    const std::string where = memory != 0 ? "/memory/" : "/cache/";
    // Many states take long to set up, so that is done once.
    const auto add = [&](const std::string& name, void (*run)(benchmark::State&),
                         const std::vector<std::int64_t>& sizes) {
      auto* const added = benchmark::RegisterBenchmark((name + rule + where).c_str(), run);
      added->Args(sizes);
      if (memory != 0) added->Iterations(steps_in_memory);
    };
    add("dense/", step_dense<Rule>, {d_k, d_v, memory});
    for (const std::int64_t rank : {4, 8, 16, 32, 48}) {
      add("factored/", step_factored<Rule>, {d_k, d_v, memory, rank});
    }
  }
}

const bool registered = [] {
  benchmark::RegisterBenchmark("copy", copy);
  benchmark::RegisterBenchmark("copy-elsewhere", copy_elsewhere);
  benchmark::RegisterBenchmark("read", read);
  add_steps<Mamba2>("mamba2", 128, 64);
  add_steps<Mamba2>("mamba2", 128, 80);
  add_steps<GatedDelta>("gated_delta", 128, 128);
  add_steps<KimiDelta>("kimi_delta", 128, 128);
  return true;
}();

}  // namespace
