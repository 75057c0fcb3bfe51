// How near FixedRank comes to the best approximation of its rank: the error of a compaction over the least
// possible, on traces. Those of the command line, or else the shipped ones.

#include <benchmark/benchmark.h>

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "replay/trace.hpp"
#include "support/matrices.hpp"
#include "support/state_runner.hpp"
#include "traces.hpp"

namespace {

using namespace sinkstate;
using testing::Matrix;

template <class P>
Matrix stored_matrix(const SinkStateView<P>& view) {
  const std::vector<double> dense = testing::stored_state<P, double>(view);
  return Eigen::Map<const Matrix>(dense.data(), view.config.d_k, view.config.d_v);
}

/// All compactions that drop more than 1e-5 of the strongest; below that is rounding.
template <class Rule>
void shares(benchmark::State& bench, const tools::Trace& trace) {
  using P = Policy<Rule, Host, Fp32, FixedRank>;
  StateConfig config;
  config.d_k = trace.d_k;
  config.d_v = trace.d_v;
  config.rank_cap = bench.range(0);
  config.buffer = bench.range(1);
  HostTeam team(workspace_bytes<P>(config));
  double sum = 0, worst = 0, count = 0;
  const auto compact_and_compare = [&](const SinkStateView<P>& view) {
    const Matrix before = stored_matrix<P>(view);
    if (compact(team, view) != Status::ok) std::abort();
    const Eigen::MatrixXd square = before.transpose() * before;
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(square, Eigen::EigenvaluesOnly);
    const auto& squares = solver.eigenvalues();  // rising
    const Index weak = std::max<Index>(0, squares.size() - config.rank_cap);
    const double least = std::sqrt(squares.head(weak).cwiseMax(0.0).sum());
    if (!(least > 1e-5 * std::sqrt(squares.tail(1)(0)))) return;
    const double share = (stored_matrix<P>(view) - before).norm() / least;
    sum += share;
    worst = std::max(worst, share);
    ++count;
  };
  for (auto _ : bench) {
    for (std::ptrdiff_t h = 0; h < trace.value_heads; ++h) {
      SinkState<P> state(config);
      for (std::ptrdiff_t t = 0; t < trace.tokens; ++t) {
        const Token<float> token{trace.key(t, h), trace.value(t, h), trace.log_decays(t, h),
                                 trace.write_strength(t, h)};
        if (advance(team, state.view(), token) != Status::ok) std::abort();
        if (state.view().due()) compact_and_compare(state.view());
      }
    }
  }
  bench.counters["compactions"] = count;
  bench.counters["mean"] = sum / count;
  bench.counters["worst"] = worst;
}

void add(const std::string& path) {
  benchmark::RegisterBenchmark(
      ("fixed-rank/" + bench::file_name(path)).c_str(),
      [path](benchmark::State& state) {
        const tools::Trace trace = tools::load_trace(path);
        bench::with_rule(trace.rule, [&](auto rule) { shares<decltype(rule)>(state, trace); });
      })
      ->ArgNames({"rank", "buffer"})
      ->Args({16, 8})
      ->Args({16, 16})
      ->Args({32, 32})
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
  std::fprintf(stderr, "fixed_rank: %s\n", error.what());
  return 2;
}
