// What storing a state in 16 or 8 bits costs in accuracy: the error of the read-outs beside the exact
// recurrence, after 16 and after 1,024 compactions, over four streams; and in time, per token with
// its share of a compaction.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "replay/thread_time.hpp"
#include "support/state_runner.hpp"
#include "support/streams.hpp"

namespace {

using namespace sinkstate;

constexpr Index buffer = 8;
constexpr int looks[] = {16, 1024};  // compactions

struct Errors {
  double mean = 0;
  double worst = 0;
};

/// Error of the read-outs in a period that ends with one of the looks, over their RMS.
template <class P>
std::vector<double> errors_of(const testing::Stream& stream, const StateConfig& config,
                              double& seconds) {
  SinkState<P> state(config);
  HostTeam team(workspace_bytes<P>(config));
  oracle::DenseRecurrence<double> exact(stream.rule, stream.d_k, stream.d_v);
  std::vector<float> output(static_cast<std::size_t>(stream.d_v));
  std::vector<double> wanted(output.size());
  std::vector<double> errors;
  double squares = 0;
  double all = 0;
  for (int t = 0; t < stream.tokens; ++t) {
    const double begin = tools::thread_seconds();
    Status status = step(
        team, state.view(),
        {stream.key_at(t), stream.value_at(t), stream.log_decay_at(t), stream.write_strength_at(t)},
        stream.query_at(t), output.data());
    if (status == Status::ok && state.view().due()) status = compact(team, state.view());
    seconds += tools::thread_seconds() - begin;
    if (status != Status::ok) std::abort();
    step_read(exact, stream, t, wanted.data());
    for (std::size_t j = 0; j < output.size(); ++j) {
      const double difference = static_cast<double>(output[j]) - wanted[j];
      squares += difference * difference;
      all += wanted[j] * wanted[j];
    }
    // A window of 32 tokens, so that no single query decides.
    if ((t + 1) % (4 * buffer) != 0) continue;
    const bool look = std::any_of(std::begin(looks), std::end(looks),
                                  [&](int count) { return (t + 1) == count * buffer; });
    if (look) errors.push_back(std::sqrt(squares / all));
    squares = all = 0;
  }
  return errors;
}

template <class P>
void storage(benchmark::State& bench, int d_k, int d_v, double decay, Rounding rounding) {
  constexpr int streams = 4;
  std::vector<Errors> errors(std::size(looks));
  double seconds = 0;
  const int tokens = looks[1] * static_cast<int>(buffer);
  for (auto _ : bench) {
    for (std::uint64_t s = 0; s < streams; ++s) {
      testing::Stream stream =
          testing::realistic(testing::traits_of<typename P::Rule>, d_k, d_v, tokens,
                             testing::derived_seed(testing::test_seed(), s));
      if (decay > 0) {
        std::fill(stream.log_decay.begin(), stream.log_decay.end(),
                  static_cast<float>(std::log(decay)));
      }
      StateConfig config;
      config.d_k = d_k;
      config.d_v = d_v;
      config.buffer = buffer;
      config.rounding = rounding;
      config.seed = s;
      config.dense_fallback = false;
      const std::vector<double> own = errors_of<P>(stream, config, seconds);
      for (std::size_t i = 0; i < own.size(); ++i) {
        errors[i].mean += own[i] / streams;
        errors[i].worst = std::max(errors[i].worst, own[i]);
      }
    }
  }
  bench.SetIterationTime(seconds / (streams * tokens));
  for (std::size_t i = 0; i < errors.size(); ++i) {
    const std::string behind = "/" + std::to_string(looks[i]);
    bench.counters["error" + behind] = errors[i].mean;
    bench.counters["worst" + behind] = errors[i].worst;
  }
}

template <class Rule, class Compaction, class Precision>
void add(const std::string& name, int d_k, int d_v, double decay, Rounding rounding) {
  benchmark::RegisterBenchmark(("storage/" + name).c_str(),
                               storage<Policy<Rule, Host, Precision, Compaction>>, d_k, d_v, decay,
                               rounding)
      ->Iterations(1)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

template <class Rule, class Compaction>
void add_formats(const std::string& name, int d_k, int d_v, double decay) {
  add<Rule, Compaction, Fp32>(name + "/fp32", d_k, d_v, decay, Rounding::nearest);
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    const std::string how = rounding == Rounding::nearest ? "/nearest" : "/stochastic";
    add<Rule, Compaction, Fp16>(name + "/fp16" + how, d_k, d_v, decay, rounding);
    add<Rule, Compaction, Bf16>(name + "/bf16" + how, d_k, d_v, decay, rounding);
    add<Rule, Compaction, Fp8>(name + "/fp8" + how, d_k, d_v, decay, rounding);
  }
}

template <class Rule>
void add_rule(const std::string& name, int d_k, int d_v, double decay) {
  add_formats<Rule, LocalSvd>(name + "/local-svd", d_k, d_v, decay);
  add_formats<Rule, DenseBuffered>(name + "/dense-buffered", d_k, d_v, decay);
}

const bool registered = [] {
  add_rule<Mamba2>("mamba2", 128, 80, 0);
  add_rule<Mamba2>("mamba2_decay_0.9995", 128, 80, 0.9995);
  add_rule<GatedDelta>("gated_delta", 128, 128, 0);
  add_rule<KimiDelta>("kimi_delta", 128, 128, 0);
  return true;
}();

}  // namespace
