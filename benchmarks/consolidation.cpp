// What a consolidator takes off the rank on traces, alone, in the place of recompressions and beside them, and what it
// costs. On the traces of the command line, or else the shipped ones.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <utility>
#include <vector>

#include "machine.hpp"
#include "replay/dense_step.hpp"
#include "replay/trace.hpp"
#include "states.hpp"
#include "traces.hpp"

namespace {

using namespace sinkstate;

struct Mode {
  const char* name;
  bool recompresses;
  bool consolidates;
};
/// The paper's update has no recompression, and drops at epsilon.
constexpr Mode modes[] = {{"neither", false, false},
                          {"consolidation", false, true},
                          {"recompression", true, false},
                          {"both", true, true}};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// All heads of a trace as one request of a pool, a token a step.
template <class Rule>
class Decoding {
 public:
  using P = Policy<Rule>;

  Decoding(const tools::Trace& trace, double epsilon, bool fallback, bool recompresses)
      : trace_(trace),
        config_(config_of(trace, epsilon, fallback, recompresses)),
        owner_(config_),
        teams_(1, workspace_bytes<P>(config_.state)),
        outputs_(static_cast<std::size_t>(trace.value_heads * trace.d_v)) {
    bench::require_ok(admit(pool(), 0));
  }
  StatePoolView<P> pool() const { return owner_.view(); }
  HostTeams& teams() { return teams_; }
  const std::vector<float>& outputs() const { return outputs_; }

  void step(std::ptrdiff_t t) {
    TokenBatch<float> batch;
    batch.entries = 1;
    batch.slots = &slot;
    batch.keys = {&trace_.k[static_cast<std::size_t>(t * trace_.key_heads * trace_.d_k)], 0,
                  trace_.d_k};
    batch.queries = {&trace_.q[static_cast<std::size_t>(t * trace_.key_heads * trace_.d_k)], 0,
                     trace_.d_k};
    batch.values = {trace_.value(t, 0), 0, trace_.d_v};
    batch.log_decays = {trace_.log_decays(t, 0), 0, trace_.decays_per_token()};
    batch.write_strengths = {&trace_.beta[static_cast<std::size_t>(t * trace_.value_heads)], 0, 1};
    batch.outputs = {outputs_.data(), 0, trace_.d_v};
    bench::require_ok(sinkstate::step(teams_, pool(), batch));
  }
  /// @returns whether it was time to
  bool compact_due() {
    if (!pool().due(0)) return false;
    bench::require_ok(sinkstate::compact_due(teams_, pool(), &slot, 1));
    return true;
  }

  static constexpr std::int32_t slot = 0;

 private:
  static PoolConfig config_of(const tools::Trace& trace, double epsilon, bool fallback,
                              bool recompresses) {
    PoolConfig config;
    config.state.d_k = trace.d_k;
    config.state.d_v = trace.d_v;
    config.state.epsilon = epsilon;
    config.state.dense_fallback = fallback;
    if (!recompresses) {
      config.state.recompress_growth = 0;
      config.state.tail_share = 1;
    }
    config.slots = 1;
    config.key_heads = trace.key_heads;
    config.value_heads = trace.value_heads;
    config.head_map = trace.head_map == tools::HeadMap::tiled ? sinkstate::HeadMap::tiled
                                                              : sinkstate::HeadMap::interleaved;
    return config;
  }

  const tools::Trace& trace_;
  PoolConfig config_;
  StatePool<P> owner_;
  HostTeams teams_;
  std::vector<float> outputs_;
};

/// @param bench  range 0: of `modes`; 1: epsilon, in thousandths; 2: whether states may be dense
template <class Rule>
void rank(benchmark::State& bench, const tools::Trace& trace) {
  const Mode& mode = modes[bench.range(0)];
  const double epsilon = static_cast<double>(bench.range(1)) / 1000;
  double terms = 0, bytes = 0, error = 0, norm = 0;
  ConsolidatorStatistics statistics;
  for (auto _ : bench) {
    Decoding<Rule> decoding(trace, epsilon, bench.range(2) != 0, mode.recompresses);
    std::unique_ptr<Consolidator> consolidator;
    if (mode.consolidates) {
      ConsolidatorOptions options;
      options.delay = 1;
      std::vector<std::unique_ptr<ConsolidatedLayer>> layers;
      layers.push_back(consolidated(decoding.pool()));
      consolidator = std::make_unique<Consolidator>(std::move(layers), options);
    }
    std::vector<tools::DenseStep<Rule>> dense(
        static_cast<std::size_t>(trace.value_heads),
        tools::DenseStep<Rule>(static_cast<int>(trace.d_k), static_cast<int>(trace.d_v)));
    std::vector<float> exact(static_cast<std::size_t>(trace.d_v));
    for (std::ptrdiff_t t = 0; t < trace.tokens; ++t) {
      decoding.step(t);
      for (std::ptrdiff_t h = 0; h < trace.value_heads; ++h) {
        dense[static_cast<std::size_t>(h)](trace.key(t, h), trace.value(t, h),
                                           trace.log_decays(t, h), trace.write_strength(t, h),
                                           trace.query(t, h), exact.data());
        for (std::ptrdiff_t j = 0; j < trace.d_v; ++j) {
          const double x = exact[static_cast<std::size_t>(j)];
          const double y = decoding.outputs()[static_cast<std::size_t>(h * trace.d_v + j)];
          error += (x - y) * (x - y);
          norm += x * x;
        }
        const auto state = decoding.pool().state(0, h);
        terms += static_cast<double>(state.dense() ? state.config.full_rank() : state.rank());
        bytes += static_cast<double>(state.bytes().total());
      }
      if (consolidator) consolidator->swap();
      if (decoding.compact_due() && consolidator) consolidator->request(0, &decoding.slot, 1);
    }
    if (consolidator) statistics = consolidator->statistics();
  }
  const auto all = static_cast<double>(trace.tokens * trace.value_heads);
  bench.counters["rank"] = terms / all;
  bench.counters["bytes"] = bytes / all / static_cast<double>(4 * trace.d_k * trace.d_v);
  bench.counters["output error"] = std::sqrt(error / norm);
  bench.counters["stale"] = static_cast<double>(statistics.stale);
  bench.counters["removed"] = static_cast<double>(statistics.rank_removed);
  bench.SetLabel(mode.name);
}

/// Here and now, behind every compaction. @param bench  range 0: epsilon, in thousandths
template <class Rule>
void cost(benchmark::State& bench, const tools::Trace& trace) {
  double compacting = 0, consolidating = 0, times = 0;
  for (auto _ : bench) {
    Decoding<Rule> decoding(trace, static_cast<double>(bench.range(0)) / 1000, false, false);
    for (std::ptrdiff_t t = 0; t < trace.tokens; ++t) {
      decoding.step(t);
      const auto begin = std::chrono::steady_clock::now();
      if (!decoding.compact_due()) continue;
      compacting += seconds_since(begin);
      const auto compacted = std::chrono::steady_clock::now();
      bench::require_ok(consolidate(decoding.teams(), decoding.pool(), 0));
      consolidating += seconds_since(compacted);
      times += static_cast<double>(trace.value_heads);
    }
  }
  bench.counters["us compact"] = 1e6 * compacting / times;
  bench.counters["us consolidate"] = 1e6 * consolidating / times;
}

void add(const std::string& path) {
  const auto run = [path](const auto& task) {
    return [path, task](benchmark::State& state) {
      const tools::Trace trace = tools::load_trace(path);
      bench::with_rule(trace.rule, [&](auto rule) { task(state, trace, rule); });
    };
  };
  benchmark::RegisterBenchmark(("rank/" + bench::file_name(path)).c_str(),
                               run([](benchmark::State& state, const tools::Trace& trace,
                                      auto rule) { rank<decltype(rule)>(state, trace); }))
      ->ArgNames({"mode", "epsilon", "fallback"})
      ->ArgsProduct({{0, 1, 2, 3}, {10, 30, 100}, {0, 1}})
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark(("cost/" + bench::file_name(path)).c_str(),
                               run([](benchmark::State& state, const tools::Trace& trace,
                                      auto rule) { cost<decltype(rule)>(state, trace); }))
      ->ArgName("epsilon")
      ->Arg(10)
      ->Arg(30)
      ->Arg(100)
      ->Iterations(1)
      ->Unit(benchmark::kMillisecond);
}

}  // namespace

int main(int argc, char** argv) try {
  benchmark::Initialize(&argc, argv);
  for (const std::string& trace : bench::traces_of(argc, argv)) add(trace);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "consolidation: %s\n", error.what());
  return 2;
}
