// States in narrow formats: the certificate bounds the error that rounding adds as well, whatever the stream, the rounding
// and the form of the state; and what rounding adds does not grow from compaction to compaction.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/state_runner.hpp"
#include "support/watched_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// Every rule with a decay, every compaction, every format of body and buffer, with and without sink.
using NarrowPolicies = std::tuple<
    Policy<Mamba2, Host, Fp8, LocalSvd>, Policy<Mamba2, Host, Fp16, FullSvd, MeanValueSink>,
    Policy<Mamba2, Host, Bf16, FixedRank>, Policy<Mamba2, Host, Fp8, DenseBuffered, MeanValueSink>,
    Policy<GatedDelta, Host, Bf16, LocalSvd, MeanValueSink>, Policy<GatedDelta, Host, Fp8, FullSvd>,
    Policy<GatedDelta, Host, Fp16, FixedRank, MeanValueSink>,
    Policy<GatedDelta, Host, Fp16, DenseBuffered>,
    Policy<KimiDelta, Host, Precision<float, Float8E4M3, BFloat16>, LocalSvd, MeanValueSink>,
    Policy<KimiDelta, Host, Precision<float, Float16, Float16>, LocalSvd>,
    Policy<KimiDelta, Host, Fp8, FixedRank, MeanValueSink>,
    Policy<KimiDelta, Host, Precision<float, BFloat16, BFloat16>, DenseBuffered>,
    Policy<DeltaNet, Host, Precision<float, float, BFloat16>, LocalSvd>>;

StateConfig config_of(const Stream& stream, std::uint64_t run) {
  StateConfig config;
  config.d_k = stream.d_k;
  config.d_v = stream.d_v;
  config.buffer = 1 + static_cast<Index>(run % 8);
  config.epsilon = run % 3 == 0 ? 0 : 1e-2;
  config.dense_fallback = run % 2 == 0;
  config.rank_cap = run % 5 == 0 ? 2 : 0;
  config.dense_retry = 2;
  config.active = 1 + static_cast<Index>(run % 3);
  config.tail_period = run % 4 == 0 ? 2 : 0;
  config.rounding = run % 7 < 3 ? Rounding::stochastic : Rounding::nearest;
  config.seed = run;
  return config;
}

using SlowPolicies =
    std::tuple<Policy<Mamba2, Host, Fp8, LocalSvd>, Policy<Mamba2, Host, Fp8, FixedRank>,
               Policy<Mamba2, Host, Bf16, LocalSvd>>;

}  // namespace

TEMPLATE_LIST_TEST_CASE("storage: the certificate is never below the true error", "[storage]",
                        NarrowPolicies) {
  using P = TestType;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const auto runs = static_cast<std::uint64_t>(2 * scenarios * test_scale());
  for (std::uint64_t run = 0; run < runs; ++run) {
    const int scenario = static_cast<int>(run % scenarios);
    const Stream stream =
        scenario_stream(scenario, traits_of<typename P::Rule>, 9 + static_cast<int>(run % 4),
                        7 + static_cast<int>(run % 3), 96, derived_seed(seed, run));
    INFO(policy_name<P>() << ", run " << run << "; " << scenario_name(scenario) << "; "
                          << describe(stream));
    Watched<P> watched(stream, config_of(stream, run));
    Margin margin;
    watched.replay(0, stream.tokens, margin);
    check_bound(margin);
  }
}

// Over 1,024 compactions a bound that counted each rounding as if it stayed would be of no use, and without the
// corrected strengths a slow fp8 head diverges (docs/numerics.md, section 11).
TEMPLATE_LIST_TEST_CASE(
    "B19, pitfall 13: 1,024 compactions at decay 0.9995 do not make an error grow", "[storage]",
    SlowPolicies) {
  using P = TestType;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    Stream stream = realistic(traits_of<typename P::Rule>, 32, 24, 8 * 1024, seed);
    std::fill(stream.log_decay.begin(), stream.log_decay.end(), std::log(0.9995f));
    StateConfig config;
    config.d_k = stream.d_k;
    config.d_v = stream.d_v;
    config.rank_cap = 16;
    config.dense_fallback = false;
    config.rounding = rounding;
    Watched<P> watched(stream, config);
    double early = 0;
    double late = 0;
    for (int t = 0; t < stream.tokens; ++t) {
      watched.step(t);
      watched.runner().compact_if_due();
      if ((t + 1) % 64 != 0) continue;
      const auto& exact = watched.exact().state();
      const double error =
          distance(stored_state(watched.runner().view()), exact) / oracle::frobenius_norm(exact);
      double& worst = t < stream.tokens / 4 ? early : late;
      worst = std::max(worst, error);
    }
    INFO(policy_name<P>() << (rounding == Rounding::nearest ? ", nearest" : ", stochastic")
                          << ": worst error " << early << ", then " << late);
    CHECK(late <= 2 * early);
    CHECK(late < 1);
  }
}
