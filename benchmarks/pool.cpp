// Decode steps of a pool: what its component rows cost where they lie in order, where they lie
// anywhere, and beside states that stand alone in one stretch each; on one thread and on two.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "arena.hpp"
#include "machine.hpp"
#include "states.hpp"

namespace {

using namespace sinkstate;

template <class RuleTag>
struct Layer;
/// Nemotron-3-Nano-4B and Qwen3-Next, as docs/performance.md has them.
template <>
struct Layer<Mamba2> {
  static constexpr Index d_k = 128, d_v = 80, key_heads = 8, value_heads = 96;
};
template <>
struct Layer<GatedDelta> {
  static constexpr Index d_k = 128, d_v = 128, key_heads = 16, value_heads = 32;
};

constexpr Index buffered = 4;

/// Ranks from 4 to 48, mean 17.
std::vector<Index> ranks_of(Index states) {
  testing::Random random(testing::test_seed());
  std::vector<Index> ranks;
  for (Index i = 0; i < states; ++i) {
    const double x = random.uniform();
    ranks.push_back(4 + static_cast<Index>(44.0 * x * x));
  }
  return ranks;
}

template <class Rule>
struct Inputs {
  using L = Layer<Rule>;
  explicit Inputs(Index slots) {
    testing::Random random(testing::test_seed());
    const auto fill = [&](std::vector<float>& tensor, Index count, double size) {
      tensor.resize(static_cast<std::size_t>(slots * count));
      for (float& x : tensor) x = static_cast<float>(size * random.normal());
    };
    fill(keys, L::key_heads * L::d_k, 0.09);
    fill(queries, L::key_heads * L::d_k, 0.09);
    fill(values, L::value_heads * L::d_v, 1);
    log_decays.assign(static_cast<std::size_t>(slots * L::value_heads), -0.05f);
    outputs.resize(values.size());
    for (Index s = 0; s < slots; ++s) numbers.push_back(static_cast<std::int32_t>(s));
  }
  TokenBatch<float> batch() {
    TokenBatch<float> b;
    b.entries = static_cast<Index>(numbers.size());
    b.slots = numbers.data();
    b.keys = {keys.data(), L::key_heads * L::d_k, L::d_k};
    b.queries = {queries.data(), L::key_heads * L::d_k, L::d_k};
    b.values = {values.data(), L::value_heads * L::d_v, L::d_v};
    b.log_decays = {log_decays.data(), L::value_heads, 1};
    b.outputs = {outputs.data(), L::value_heads * L::d_v, L::d_v};
    return b;
  }
  std::vector<float> keys, queries, values, log_decays, outputs;
  std::vector<std::int32_t> numbers;
};

void count(benchmark::State& bench, Index states, double bytes) {
  const auto steps = static_cast<double>(bench.iterations());
  bench.counters["ns/state"] =
      benchmark::Counter(steps * static_cast<double>(states) / 1e9,
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  bench.SetBytesProcessed(static_cast<std::int64_t>(steps * bytes));
}

template <class P>
double bytes_of(const std::vector<Index>& ranks) {
  StateConfig config;
  config.d_k = Layer<typename P::Rule>::d_k;
  config.d_v = Layer<typename P::Rule>::d_v;
  double bytes = 0;
  for (const Index rank : ranks) {
    bytes += bench::StepBytes::factored<P>(config, rank, static_cast<double>(buffered)).touched;
  }
  return bytes;
}

/// Each slot steps and takes the token back, so that every step meets the same buffer.
template <class Rule, bool Shuffled>
void step_pool(benchmark::State& bench) {
  using P = Policy<Rule>;
  using L = Layer<Rule>;
  PoolConfig config;
  config.state.d_k = L::d_k;
  config.state.d_v = L::d_v;
  config.slots = bench.range(0);
  config.key_heads = L::key_heads;
  config.value_heads = L::value_heads;
  const Index states = config.slots * L::value_heads;
  const std::vector<Index> ranks = ranks_of(states);
  // Within a quota rows lie in order. Those of the reserve lie anywhere after a while: here all of
  // a state but the first.
  config.quota = Shuffled ? 1 : 48;
  for (const Index rank : ranks) config.reserve += Shuffled ? rank - 1 : 0;
  bench::Arena arena(pool_bytes<P>(config).total);
  const auto pool = make_pool<P>(arena.at(0), arena.size(), config);

  testing::Random random(testing::test_seed());
  for (Index i = config.reserve; i > 1; --i) {
    const auto j = static_cast<Index>(random.uniform() * static_cast<double>(i));
    std::swap(pool.reserve.rows[i - 1], pool.reserve.rows[j < i ? j : i - 1]);
  }
  const Index width = L::d_k + L::d_v;
  for (Index i = 0; i < states; ++i) {
    const Index slot = i / L::value_heads;
    if (i % L::value_heads == 0) bench::require_ok(admit(pool, slot));
    const auto head = pool.head(slot, i % L::value_heads);
    const Index rank = ranks[static_cast<std::size_t>(i)];
    detail::hold_rows(pool, head, rank);
    *head.rank = static_cast<std::int32_t>(rank);
    for (Index r = 0; r < rank; ++r) {
      const Index row = head.list[r];
      pool.strengths[row] = 0.5f;
      for (Index n = 0; n < width; ++n) {
        pool.components[row * width + n] = static_cast<float>(0.1 * (random.uniform() - 0.5));
      }
    }
  }
  HostTeams teams(bench.range(1), workspace_bytes<P>(config.state));
  Inputs<Rule> inputs(config.slots);
  const TokenBatch<float> batch = inputs.batch();
  for (Index t = 0; t < buffered; ++t) bench::require_ok(step(teams, pool, batch));
  for (auto _ : bench) {
    benchmark::DoNotOptimize(step(teams, pool, batch));
    for (Index s = 0; s < config.slots; ++s) benchmark::DoNotOptimize(roll_back(pool, s, 1));
  }
  count(bench, states, bytes_of<P>(ranks));
}

/// The same states, alone: one stretch each, exactly as long as its rank, as re-packed arrays have
/// it.
template <class Rule>
void step_alone(benchmark::State& bench) {
  using P = Policy<Rule>;
  using L = Layer<Rule>;
  const Index slots = bench.range(0);
  const Index states = slots * L::value_heads;
  const std::vector<Index> ranks = ranks_of(states);
  std::vector<StateConfig> configs;
  std::size_t total = 0;
  for (const Index rank : ranks) {
    StateConfig config;
    config.d_k = L::d_k;
    config.d_v = L::d_v;
    config.rank_cap = rank;
    config.dense_fallback = false;
    configs.push_back(config);
    total += state_bytes<P>(config);
  }
  bench::Arena arena(total);
  std::vector<SinkStateView<P>> views;
  testing::Random random(testing::test_seed());
  std::size_t at = 0;
  for (std::size_t i = 0; i < configs.size(); ++i) {
    const std::size_t size = state_bytes<P>(configs[i]);
    views.push_back(make_view<P>(arena.at(at), size, configs[i]));
    at += size;
    *views[i].factors.rank = static_cast<std::int32_t>(ranks[i]);
    for (Index n = 0; n < ranks[i] * (L::d_k + L::d_v); ++n) {
      views[i].factors.components[n] = static_cast<float>(0.1 * (random.uniform() - 0.5));
    }
    for (Index r = 0; r < ranks[i]; ++r) views[i].factors.strengths[r] = 0.5f;
  }
  StateConfig largest = configs.front();
  largest.rank_cap = 48;
  HostTeam team(workspace_bytes<P>(largest));
  Inputs<Rule> inputs(slots);
  const TokenBatch<float> batch = inputs.batch();
  PoolConfig map;
  map.key_heads = L::key_heads;
  map.value_heads = L::value_heads;
  const auto step_all = [&] {
    for (Index i = 0; i < states; ++i) {
      const Index slot = i / L::value_heads;
      const Index h = i % L::value_heads;
      const auto token = detail::token_at<P>(map, batch, slot, h);
      const auto& after = views[static_cast<std::size_t>(i + 1 < states ? i + 1 : 0)];
      constexpr int reads = P::Rule::corrects ? 2 : 1;
      const auto announce = [&](const float* numbers, Index n) {
        team.expect(numbers, sizeof(float) * static_cast<std::size_t>(n), reads);
      };
      announce(after.factors.components, after.rank() * (L::d_k + L::d_v));
      announce(after.factors.strengths, after.rank());
      announce(after.buffer.corrections.data, (after.buffered() + 1) * L::d_v);
      announce(after.buffer.keys.data, (after.buffered() + 1) * L::d_k);
      benchmark::DoNotOptimize(step(team, views[static_cast<std::size_t>(i)], token,
                                    batch.queries.at(slot, map.key_head(h)),
                                    batch.outputs.at(slot, h)));
    }
  };
  for (Index t = 0; t < buffered; ++t) step_all();
  for (auto _ : bench) {
    step_all();
    for (auto& view : views) benchmark::DoNotOptimize(roll_back(view, 1));
  }
  count(bench, states, bytes_of<P>(ranks));
}

/// What re-packed arrays cost beside that: after a compaction of all states, which have other ranks
/// then, factors move to where they belong now. Once in a period.
template <class Rule>
void repack(benchmark::State& bench) {
  using L = Layer<Rule>;
  const Index states = bench.range(0) * L::value_heads;
  const std::vector<Index> ranks = ranks_of(states);
  const std::size_t row = static_cast<std::size_t>(L::d_k + L::d_v) * sizeof(float);
  const auto rows = static_cast<std::size_t>(std::accumulate(ranks.begin(), ranks.end(), Index{0}));
  bench::Arena from(row * rows), to(row * (rows + ranks.size()));
  std::memset(from.at(0), 1, from.size());
  std::memset(to.at(0), 1, to.size());
  for (auto _ : bench) {
    std::size_t source = 0;
    std::size_t target = 0;
    for (const Index rank : ranks) {
      const std::size_t bytes = row * static_cast<std::size_t>(rank);
      std::memcpy(to.at(target), from.at(source), bytes);
      source += bytes;
      target += bytes + row;
    }
    benchmark::ClobberMemory();
  }
  count(bench, states, 2 * static_cast<double>(row * rows));
}

template <class Rule>
void add(const char* rule, std::int64_t slots) {
  const std::string name = rule;
  benchmark::RegisterBenchmark(("alone/" + name).c_str(), step_alone<Rule>)
      ->Arg(slots)
      ->UseRealTime();
  benchmark::RegisterBenchmark(("repack/" + name).c_str(), repack<Rule>)->Arg(slots)->UseRealTime();
  for (const std::int64_t threads : {1, 2}) {
    benchmark::RegisterBenchmark(("pool-in-order/" + name).c_str(), step_pool<Rule, false>)
        ->Args({slots, threads})
        ->UseRealTime();
    benchmark::RegisterBenchmark(("pool-anywhere/" + name).c_str(), step_pool<Rule, true>)
        ->Args({slots, threads})
        ->UseRealTime();
  }
}

const bool registered = [] {
  add<Mamba2>("mamba2", 128);
  add<GatedDelta>("gated_delta", 256);
  add<Mamba2>("mamba2", 1);
  add<GatedDelta>("gated_delta", 1);
  return true;
}();

}  // namespace
