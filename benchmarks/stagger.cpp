// Decoding steps of a whole model, compactions included: how long the slowest takes when all layers compact at the same
// step, when they are staggered, when recompressions are capped, and while another core consolidates.

#include <benchmark/benchmark.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <sinkstate/sinkstate.hpp>
#include <utility>
#include <vector>

#include "machine.hpp"
#include "states.hpp"

namespace {

using namespace sinkstate;

using P = Policy<GatedDelta>;

constexpr Index layers = 24, period = 8, slots = 4, heads = 2, d = 128;
constexpr int warm_up = 256, steps = 800;

/// As heads of a trained model write: some keys and values again and again.
class Streams {
 public:
  Streams() {
    for (std::uint64_t s = 0; s < 16; ++s) {
      streams_.push_back(testing::realistic(testing::traits_of<GatedDelta>, d, d, tokens,
                                            testing::derived_seed(testing::test_seed(), s)));
    }
  }
  /// What a head writes at a step: heads that share a stream are at different places of it.
  std::pair<const testing::Stream*, int> at(Index head, int step) const {
    return {&streams_[static_cast<std::size_t>(head) % streams_.size()],
            (step + 37 * static_cast<int>(head)) % tokens};
  }

 private:
  static constexpr int tokens = 1200;
  std::vector<testing::Stream> streams_;
};

const Streams& streams() {
  static const Streams all;
  return all;
}

/// The tensors of one layer, a key head for each value head.
struct Tensors {
  std::vector<float> keys, queries, values, outputs, log_decays, write_strengths;

  Tensors()
      : keys(slots * heads * d),
        queries(keys.size()),
        values(keys.size()),
        outputs(keys.size()),
        log_decays(slots * heads),
        write_strengths(slots * heads) {}

  void fill(Index layer, int step) {
    for (Index i = 0; i < slots * heads; ++i) {
      const auto [stream, t] = streams().at(layer * slots * heads + i, step);
      const auto put = [&](std::vector<float>& tensor, const float* x) {
        std::memcpy(tensor.data() + i * d, x, d * sizeof(float));
      };
      put(keys, stream->key_at(t));
      put(queries, stream->query_at(t));
      put(values, stream->value_at(t));
      log_decays[static_cast<std::size_t>(i)] = *stream->log_decay_at(t);
      write_strengths[static_cast<std::size_t>(i)] = stream->write_strength_at(t);
    }
  }
  TokenBatch<float> batch(const std::vector<std::int32_t>& numbers) {
    TokenBatch<float> b;
    b.entries = slots;
    b.slots = numbers.data();
    b.keys = {keys.data(), heads * d, d};
    b.queries = {queries.data(), heads * d, d};
    b.values = {values.data(), heads * d, d};
    b.log_decays = {log_decays.data(), heads, 1};
    b.write_strengths = {write_strengths.data(), heads, 1};
    b.outputs = {outputs.data(), heads * d, d};
    return b;
  }
};

enum Consolidation { none, beside };

/// The cores that this program may run on, of which the first is the decoding thread's.
std::vector<int> cores() {
  static const std::vector<int> allowed = [] {
    cpu_set_t set;
    std::vector<int> numbers;
    if (sched_getaffinity(0, sizeof(set), &set) != 0) return numbers;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) numbers.push_back(core);
    }
    CPU_ZERO(&set);
    CPU_SET(numbers.front(), &set);
    if (sched_setaffinity(0, sizeof(set), &set) != 0) numbers.clear();
    return numbers;
  }();
  return allowed;
}

double microseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

/// @param bench  range 0: whether layers are staggered; 1: recompressions in a step, or -1;
///               2: Consolidation; 3: what a consolidator has on its way at once
void decode(benchmark::State& bench) {
  const bool staggered = bench.range(0) != 0;
  const Index cap = bench.range(1);
  const auto consolidation = static_cast<Consolidation>(bench.range(2));
  if (cores().size() < 2) {
    bench.SkipWithError("wanted two cores, one of them for the consolidator");
    return;
  }
  PoolConfig config;
  config.state.d_k = config.state.d_v = d;
  config.state.buffer = period;
  config.slots = slots;
  config.key_heads = config.value_heads = heads;
  std::vector<std::int32_t> numbers(slots);
  std::iota(numbers.begin(), numbers.end(), 0);

  for (auto _ : bench) {
    std::vector<std::unique_ptr<StatePool<P>>> pools;
    std::vector<std::unique_ptr<ConsolidatedLayer>> sources;
    for (Index l = 0; l < layers; ++l) {
      pools.push_back(std::make_unique<StatePool<P>>(config));
      for (Index s = 0; s < slots; ++s) bench::require_ok(admit(pools.back()->view(), s));
      sources.push_back(consolidated(pools.back()->view()));
    }
    std::unique_ptr<Consolidator> consolidator;
    if (consolidation != none) {
      ConsolidatorOptions options;
      options.cores.assign(3, cores()[1]);
      options.in_flight = bench.range(3);
      consolidator = std::make_unique<Consolidator>(std::move(sources), options);
    }
    HostTeams teams(1, workspace_bytes<P>(config.state));
    const Stagger stagger{layers, period};
    std::vector<Tensors> tensors(layers);
    std::vector<CompactionReport> reports(slots * heads);

    std::vector<double> times;
    double consolidating = 0, waiting = 0, rank = 0;
    Index most_recompressed = 0;
    ConsolidatorStatistics before;
    for (int step = 0; step < warm_up + steps; ++step) {
      for (Index l = 0; l < layers; ++l) tensors[static_cast<std::size_t>(l)].fill(l, step);
      if (step == warm_up) {
        times.clear();
        consolidating = waiting = rank = 0;
        most_recompressed = 0;
        if (consolidator) before = consolidator->statistics();
      }
      const auto begin = std::chrono::steady_clock::now();
      std::chrono::steady_clock::duration apart{};
      for (Index l = 0; l < layers; ++l) {
        const auto batch = tensors[static_cast<std::size_t>(l)].batch(numbers);
        bench::require_ok(
            sinkstate::step(teams, pools[static_cast<std::size_t>(l)]->view(), batch));
      }
      const auto stepped = std::chrono::steady_clock::now();
      if (consolidator) consolidator->swap();
      apart += std::chrono::steady_clock::now() - stepped;
      Index left = cap, recompressed = 0;
      for (Index i = 0; i < layers; ++i) {
        // Layers that are due together take turns at what the cap allows.
        const Index l = (i + step / period) % layers;
        const auto pool = pools[static_cast<std::size_t>(l)]->view();
        if (staggered ? !stagger.due(l, step) : !pool.due(0)) continue;
        bench::require_ok(compact(teams, pool, numbers.data(), slots, nullptr, reports.data(),
                                  cap < 0 ? nullptr : &left));
        for (const CompactionReport& done : reports) recompressed += done.recompressed ? 1 : 0;
        const auto compacted = std::chrono::steady_clock::now();
        if (consolidator) consolidator->request(l, numbers.data(), slots);
        apart += std::chrono::steady_clock::now() - compacted;
      }
      times.push_back(microseconds(std::chrono::steady_clock::now() - begin));
      consolidating += microseconds(apart);
      most_recompressed = std::max(most_recompressed, recompressed);
      for (const auto& pool : pools) {
        for (Index s = 0; s < slots; ++s) {
          for (Index h = 0; h < heads; ++h) {
            const auto state = pool->view().state(s, h);
            rank += static_cast<double>(state.dense() ? d : state.rank());
          }
        }
      }
      if (consolidator) waiting += static_cast<double>(consolidator->statistics().waiting);
    }

    bench.SetIterationTime(std::accumulate(times.begin(), times.end(), 0.0) / 1e6);
    std::sort(times.begin(), times.end());
    const auto percentile = [&](double share) {
      return times[static_cast<std::size_t>(share * static_cast<double>(times.size() - 1))];
    };
    const double mean = std::accumulate(times.begin(), times.end(), 0.0) / steps;
    bench.counters["mean us"] = mean;
    bench.counters["p50 us"] = percentile(0.5);
    bench.counters["p99 us"] = percentile(0.99);
    bench.counters["max us"] = times.back();
    bench.counters["p99/p50"] = percentile(0.99) / percentile(0.5);
    bench.counters["rank"] = rank / static_cast<double>(steps * layers * slots * heads);
    bench.counters["recompressed"] = static_cast<double>(most_recompressed);
    if (consolidator) {
      const ConsolidatorStatistics now = consolidator->statistics();
      const auto done = static_cast<double>(now.done - before.done);
      const auto stale = static_cast<double>(now.stale - before.stale);
      bench.counters["swap+request us"] = consolidating / steps;
      bench.counters["done/step"] = done / steps;
      bench.counters["stale share"] = stale / std::max(1.0, done + stale);
      bench.counters["removed/step"] =
          static_cast<double>(now.rank_removed - before.rank_removed) / steps;
      bench.counters["waiting"] = waiting / steps;
    }
  }
}

BENCHMARK(decode)
    ->ArgNames({"staggered", "cap", "consolidation", "in flight"})
    ->Args({0, -1, none, 0})
    ->Args({1, -1, none, 0})
    ->Args({1, 4, none, 0})
    ->Args({1, 0, none, 0})
    ->Args({1, -1, beside, 16})
    ->Args({1, 4, beside, 16})
    ->Args({1, 0, beside, 8})
    ->Args({1, 0, beside, 3})
    ->Args({1, 0, beside, 16})
    ->Iterations(1)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
