// What LocalSvd leaves unmerged: its rank and error on the shipped traces against those of FullSvd.
#include <cstddef>
#include <cstdint>
#include <string>

#include "replay/replay.hpp"
#include "support/catch.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::tools;
using namespace sinkstate::testing;

namespace {

// Over the tokens behind the first third.
template <class Compaction>
double mean_rank(const Stream& stream, Index active) {
  StateConfig config;
  config.d_k = stream.d_k;
  config.d_v = stream.d_v;
  config.dense_fallback = false;
  config.active = active;
  StateRunner<Policy<KimiDelta, Host, Fp32, Compaction>> runner(stream, config);
  double sum = 0;
  for (int t = 0; t < stream.tokens; ++t) {
    runner.step(t);
    runner.compact_if_due();
    if (t >= stream.tokens / 3) sum += static_cast<double>(runner.view().rank());
  }
  return sum / (stream.tokens - stream.tokens / 3);
}

}  // namespace

TEST_CASE("LocalSvd: rank at most 1.25 and error at most 2.5 times those of FullSvd") {
  int compared = 0;
  for (const char* name : {"mamba2", "gated_delta", "kimi_delta"}) {
    const Trace trace = load_trace(std::string(SINKSTATE_TEST_DATA "/") + name + ".safetensors");
    ReplayOptions options;
    options.dense_fallback = false;
    options.threads = 2;
    const auto run = [&](Compaction compaction) {
      options.compaction = compaction;
      return replay(name, trace, options, nullptr, [](std::ptrdiff_t) {});
    };
    const TraceReport full = run(Compaction::full_svd), local = run(Compaction::local_svd);
    const double paying =
        static_cast<double>(trace.d_k * trace.d_v) / static_cast<double>(trace.d_k + trace.d_v);
    for (std::size_t h = 0; h < full.per_head.size(); ++h) {
      const ReplayFigures &best = full.per_head[h], &ours = local.per_head[h];
      if (best.rank_mean >= paying) continue;  // it would be dense
      CAPTURE(name, h, best.rank_mean, ours.rank_mean);
      CHECK(ours.rank_mean <= 1.25 * best.rank_mean);
      CHECK(ours.output_error_rms <= 2.5 * best.output_error_rms);
      ++compared;
    }
  }
  CHECK(compared >= 5);
}

TEST_CASE(
    "pitfall 11: where channels decay on their own, eight active terms inflate the rank more") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  double eight = 0, usual = 0;
  for (std::uint64_t run = 0; run < 4; ++run) {
    const Stream stream =
        realistic(traits_of<KimiDelta>, 96, 64, 900, testing::derived_seed(seed, run));
    const double best = mean_rank<FullSvd>(stream, 0), by_default = mean_rank<LocalSvd>(stream, 0);
    CHECK(by_default == mean_rank<LocalSvd>(stream, 16));
    CHECK(by_default <= 1.25 * best + 1);
    eight += mean_rank<LocalSvd>(stream, 8);
    usual += by_default;
  }
  CHECK(usual < eight);
}
