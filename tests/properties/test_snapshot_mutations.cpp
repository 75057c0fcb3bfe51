// A million random mutations of a snapshot: it is restored exactly, or refused and nothing changes.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/sanitized.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

struct Count {
  Index refused = 0;
  Index accepted = 0;
};

// Half of the mutations get a new checksum: that finds damage, not malice.
template <class P>
Count mutate(Index mutations, std::uint64_t seed) {
  PoolConfig config;
  config.state.d_k = 5;
  config.state.d_v = 3;
  config.state.buffer = 4;
  config.slots = 2;
  config.key_heads = 1;
  config.value_heads = 2;
  std::vector<float> directions(6, 0.5f);
  StatePool<P> owner(config, P::Sink::present ? MatrixView<const float>{directions.data(), 2, 3, 3}
                                              : MatrixView<const float>{});
  const auto pool = owner.view();
  HostTeams teams(1, workspace_bytes<P>(config.state));
  Random random(seed);
  REQUIRE(admit(pool, 0) == Status::ok);
  REQUIRE(admit(pool, 1) == Status::ok);
  std::vector<float> keys(5), values(6), decays(10, -0.1f), outputs(6);
  const std::int32_t slot = 0;
  TokenBatch<float> batch;
  batch.entries = 1;
  batch.slots = &slot;
  batch.keys = {keys.data(), 5, 5};
  batch.queries = {keys.data(), 5, 5};
  batch.values = {values.data(), 6, 3};
  batch.log_decays = {decays.data(), 10, P::Rule::log_decays(5)};
  batch.outputs = {outputs.data(), 6, 3};
  for (int t = 0; t < 7; ++t) {
    for (float& x : keys) x = static_cast<float>(0.3 * random.normal());
    for (float& x : values) x = static_cast<float>(random.normal());
    REQUIRE(step(teams, pool, batch) == Status::ok);
    REQUIRE(compact_due(teams, pool, &slot, 1) == Status::ok);
  }
  const std::size_t size = snapshot_bytes(pool, 0);
  AlignedBytes original(size), mutated(size), again(1 << 16), untouched(1 << 16);
  const auto bytes = [](AlignedBytes& memory) { return memory.workspace().take<unsigned char>(0); };
  REQUIRE(snapshot(pool, 0, bytes(original), size) == Status::ok);
  REQUIRE(snapshot(pool, 1, bytes(untouched), snapshot_bytes(pool, 1)) == Status::ok);
  const std::size_t untouched_size = snapshot_bytes(pool, 1);

  Count count;
  for (Index n = 0; n < mutations; ++n) {
    unsigned char* const data = bytes(mutated);
    std::memcpy(data, bytes(original), size);
    for (int changes = 1 + random.below(3); changes > 0; --changes) {
      const auto at = static_cast<std::size_t>(random.below(static_cast<int>(size)));
      const auto any = static_cast<unsigned>(random.below(256));
      const unsigned flipped = data[at] ^ (1u << (any % 8));
      data[at] = static_cast<unsigned char>(random.chance(0.5) ? flipped : any);
    }
    if (random.chance(0.5)) {
      const std::uint64_t sum = sinkstate::detail::snapshot_checksum(data, size);
      std::memcpy(data + 8, &sum, sizeof(sum));
    }
    const std::size_t given =
        random.chance(0.9) ? size : static_cast<std::size_t>(random.below(static_cast<int>(size)));
    std::int64_t tokens = 0;
    std::memcpy(&tokens, data + 104, sizeof(tokens));
    const Status status =
        restore(pool, 1, SnapshotBytes{data, given}, random.chance(0.9) ? tokens : 7);
    const std::size_t now = snapshot_bytes(pool, 1);
    REQUIRE(snapshot(pool, 1, bytes(again), now) == Status::ok);
    if (status == Status::ok) {
      ++count.accepted;
      REQUIRE(now == given);
      REQUIRE(std::memcmp(bytes(again), data, now) == 0);
      // What is accepted can be gone on with. It may hold any numbers.
      const std::int32_t restored = 1;
      batch.slots = &restored;
      (void)!static_cast<int>(step(teams, pool, batch));
      (void)!static_cast<int>(compact(teams, pool, &restored, 1));
      REQUIRE(reset(pool, 1) == Status::ok);
      batch.slots = &slot;
    } else {
      ++count.refused;
      REQUIRE(now == untouched_size);
      REQUIRE(std::memcmp(bytes(again), bytes(untouched), now) == 0);
    }
  }
  return count;
}

template <class P>
void run(Index mutations, std::uint64_t seed) {
  const Count count = mutate<P>(mutations, seed);
  INFO(count.accepted << " accepted, " << count.refused << " refused; " << seed_note(seed));
  CHECK(count.accepted > mutations / 50);  // the hostile part: values that a state could have
  CHECK(count.refused > mutations / 2);
}

}  // namespace

TEST_CASE("snapshot: a million mutations are restored exactly or refused", "[pool]") {
  const std::uint64_t seed = test_seed();
  const Index mutations = Index{test_scale()} * (sanitized ? 20000 : 250000);
  run<Policy<GatedDelta, Host, Fp32, LocalSvd, NoSink>>(mutations, seed);
  run<Policy<KimiDelta, Host, Fp8, LocalSvd, MeanValueSink>>(mutations, seed + 1);
  run<Policy<Mamba2, Host, Precision<float, Float16, BFloat16>, FixedRank, NoSink>>(mutations,
                                                                                    seed + 2);
  run<Policy<GatedDelta, Host, Fp8, DenseBuffered, MeanValueSink>>(mutations, seed + 3);
}
