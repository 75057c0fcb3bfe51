// The same random operations with several threads give the bits of single states, too.
#include "support/catch.hpp"
#include "support/pool_run.hpp"
#include "support/state_runner.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class P>
void run(int variant, Index threads) {
  const std::uint64_t seed = derived_seed(test_seed(), static_cast<std::uint64_t>(variant));
  PoolTally tally;
  const Index operations = Index{test_scale()} * 2000;
  const std::string failure = run_pool<P>(small_pool(variant), threads, operations, seed, tally);
  INFO(policy_name<P>() << ", " << threads << " threads, variant " << variant << ", "
                        << seed_note(test_seed()));
  CHECK(failure == "");
}

}  // namespace

TEST_CASE("pool: random operations with threads against single states", "[pool]") {
  run<Policy<GatedDelta, Host, Fp32, LocalSvd, MeanValueSink>>(6, 3);
  run<Policy<Mamba2, Host, Fp16, LocalSvd, NoSink>>(7, 4);
}
