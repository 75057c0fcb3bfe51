// What a fork could share with its original if component rows were shared: the rows of a body that are
// still there, to the bit, after some compactions. On the traces of the command line, or else the shipped
// ones.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "replay/trace.hpp"
#include "traces.hpp"

namespace {

using namespace sinkstate;

/// Value halves of the terms: decays change keys of Kimi Delta Attention, and only those.
template <class P>
std::set<std::vector<float>> rows_of(const SinkStateView<P>& state) {
  std::set<std::vector<float>> rows;
  const auto values = state.factors.values();
  for (Index i = 0; i < state.rank(); ++i) {
    rows.emplace(values.row(i), values.row(i) + state.config.d_v);
  }
  return rows;
}

template <class Rule>
void survivors(benchmark::State& bench, const tools::Trace& trace) {
  using P = Policy<Rule>;
  constexpr std::size_t after[] = {1, 2, 4};
  StateConfig config;
  config.d_k = trace.d_k;
  config.d_v = trace.d_v;
  HostTeam team(workspace_bytes<P>(config));
  double compactions = 0, whole = 0;
  double left[3] = {}, all[3] = {};
  for (auto _ : bench) {
    for (std::ptrdiff_t h = 0; h < trace.value_heads; ++h) {
      SinkState<P> state(config);
      const auto view = state.view();
      std::vector<std::set<std::vector<float>>> past;  // since the body was dense
      for (std::ptrdiff_t t = 0; t < trace.tokens; ++t) {
        const Token<float> token{trace.key(t, h), trace.value(t, h), trace.log_decays(t, h),
                                 trace.write_strength(t, h)};
        if (advance(team, view, token) != Status::ok) std::abort();
        if (!view.due()) continue;
        CompactionReport report;
        if (compact(team, view, &report) != Status::ok) std::abort();
        if (view.dense()) {
          past.clear();
          continue;
        }
        ++compactions;
        whole += report.decomposed == report.rank_before ? 1 : 0;
        const auto now = rows_of(view);
        for (int i = 0; i < 3; ++i) {
          if (past.size() < after[i]) continue;
          for (const auto& row : past[past.size() - after[i]]) {
            all[i] += 1;
            left[i] += static_cast<double>(now.count(row));
          }
        }
        past.push_back(now);
      }
    }
  }
  bench.counters["all decomposed"] = whole / std::max(1.0, compactions);
  for (int i = 0; i < 3; ++i) {
    bench.counters["after " + std::to_string(after[i])] = left[i] / std::max(1.0, all[i]);
  }
}

void add(const std::string& path) {
  benchmark::RegisterBenchmark(
      ("shared-rows/" + bench::file_name(path)).c_str(),
      [path](benchmark::State& state) {
        const tools::Trace trace = tools::load_trace(path);
        bench::with_rule(trace.rule, [&](auto rule) { survivors<decltype(rule)>(state, trace); });
      })
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
  std::fprintf(stderr, "shared_rows: %s\n", error.what());
  return 2;
}
