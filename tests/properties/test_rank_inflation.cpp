// What LocalSvd leaves unmerged: its rank and error on the shipped traces against those of FullSvd.
#include <cstddef>
#include <string>

#include "replay/replay.hpp"
#include "support/catch.hpp"

using namespace sinkstate;
using namespace sinkstate::tools;

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
