// A million random mutations of a snapshot: it is restored exactly, or refused and nothing changes.
#include <cstdint>
#include <cstring>
#include <sinkstate/sinkstate.hpp>

#include "support/catch.hpp"
#include "support/pool_requests.hpp"
#include "support/sanitized.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// Half of the mutations get a new checksum: that finds damage, not malice.
template <class P>
void mutate(Index mutations, std::uint64_t seed) {
  INFO(seed_note(seed));
  PoolRunner<P> runner(pool_of(5, 3, 2, 1, 2));
  const auto pool = runner.view();
  Random random(seed);
  runner.admit(0);
  runner.admit(1);
  runner.run(0, seed, 0, 7);
  const AlignedMemory original = snapshot_of(pool, 0);
  const AlignedMemory untouched = snapshot_of(pool, 1);

  Index accepted = 0;
  for (Index n = 0; n < mutations; ++n) {
    AlignedMemory mutated = original;
    for (int changes = 1 + random.below(3); changes > 0; --changes) {
      const auto at = static_cast<std::size_t>(random.below(static_cast<int>(mutated.size())));
      const auto any = static_cast<unsigned>(random.below(256));
      const unsigned flipped = mutated[at] ^ (1u << (any % 8));
      mutated[at] = static_cast<unsigned char>(random.chance(0.5) ? flipped : any);
    }
    if (random.chance(0.5)) sign_snapshot(mutated);
    const Index tokens = random.chance(0.9) ? header_of(mutated).tokens : 7;
    SnapshotBytes given = mutated;
    if (random.chance(0.1)) {
      given.size = static_cast<std::size_t>(random.below(static_cast<int>(mutated.size())));
    }
    const Status status = restore(pool, 1, given, tokens);
    const AlignedMemory now = snapshot_of(pool, 1);
    if (status != Status::ok) {
      REQUIRE(now == untouched);
      continue;
    }
    ++accepted;
    REQUIRE(now == mutated);
    // What is accepted can be gone on with. It may hold any numbers, and say so.
    BatchTensors<P> token = runner.tensors(1);
    token.set(0, seed, 7);
    (void)!static_cast<int>(step(runner.teams(), pool, token.batch({1})));
    const std::int32_t slot = 1;
    (void)!static_cast<int>(compact(runner.teams(), pool, &slot, 1));
    REQUIRE(reset(pool, 1) == Status::ok);
  }
  INFO(accepted << " of " << mutations << " accepted");
  CHECK(accepted > mutations / 50);  // values that a state could have, and the right checksum
  CHECK(accepted < mutations / 2);
}

}  // namespace

TEST_CASE("snapshot: a million mutations are restored exactly or refused", "[pool]") {
  const std::uint64_t seed = test_seed();
  const Index mutations = Index{test_scale()} * (sanitized ? 20000 : 250000);
  mutate<Policy<GatedDelta, Host, Fp32, LocalSvd, NoSink>>(mutations, seed);
  mutate<Policy<KimiDelta, Host, Fp8, LocalSvd, MeanValueSink>>(mutations, seed + 1);
  mutate<Policy<Mamba2, Host, Precision<float, Float16, BFloat16>, FixedRank, NoSink>>(mutations,
                                                                                       seed + 2);
  mutate<Policy<GatedDelta, Host, Fp8, DenseBuffered, MeanValueSink>>(mutations, seed + 3);
}
