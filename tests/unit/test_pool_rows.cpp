// Who has which component row of a pool, and what happens when they run short.
#include <algorithm>
#include <cmath>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/pool_requests.hpp"
#include "support/pool_rows.hpp"
#include "support/same_state.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using Simple = Policy<LinearAttention, Host, Fp32, FullSvd>;

// One head a slot, 12 x 7: nine terms at most need less than the matrix, which takes twelve half
// rows.
PoolConfig one_head(Index slots, Index quota, Index reserve) {
  PoolConfig config;
  config.state.d_k = 12;
  config.state.d_v = 7;
  config.state.buffer = 4;
  config.slots = slots;
  config.quota = quota;
  config.reserve = reserve;
  return config;
}

struct OneHeadPool {
  explicit OneHeadPool(const PoolConfig& config)
      : owner(config), pool(owner.view()), teams(1, workspace_bytes<Simple>(config.state)) {
    for (Index s = 0; s < config.slots; ++s) REQUIRE(admit(pool, s) == Status::ok);
  }
  // A token of each slot: key and value of slot s are those at row s.
  Status step_all(const std::vector<float>& keys, const std::vector<float>& values) {
    std::vector<std::int32_t> slots;
    for (Index s = 0; s < pool.config.slots; ++s) slots.push_back(static_cast<std::int32_t>(s));
    TokenBatch<float> batch;
    batch.entries = pool.config.slots;
    batch.slots = slots.data();
    batch.keys = {keys.data(), 12, 12};
    batch.values = {values.data(), 7, 7};
    return step(teams, pool, batch);
  }
  std::vector<Status> compact_all() {
    std::vector<std::int32_t> slots;
    for (Index s = 0; s < pool.config.slots; ++s) slots.push_back(static_cast<std::int32_t>(s));
    std::vector<Status> statuses(slots.size());
    const Status first = compact(teams, pool, slots.data(), pool.config.slots, statuses.data());
    for (const Status status : statuses) {
      if (status == Status::ok) continue;
      CHECK(first == status);
      break;
    }
    return statuses;
  }

  StatePool<Simple> owner;
  StatePoolView<Simple> pool;
  HostTeams teams;
};

// Orthogonal tokens: as many terms as tokens.
void feed_units(OneHeadPool& p, int tokens, Index slots) {
  for (int t = 0; t < tokens; ++t) {
    std::vector<float> keys(static_cast<std::size_t>(12 * slots)),
        values(static_cast<std::size_t>(7 * slots));
    for (Index s = 0; s < slots; ++s) {
      keys[static_cast<std::size_t>(12 * s + t)] = 1;
      values[static_cast<std::size_t>(7 * s + t)] = static_cast<float>(4 - t);
    }
    REQUIRE(p.step_all(keys, values) == Status::ok);
  }
}

}  // namespace

TEST_CASE("reserve rows: each row once, in any order", "[pool]") {
  AlignedBytes bytes(4096);
  for (const Index rows : {Index{1}, Index{63}, Index{64}, Index{65}, Index{200}}) {
    Workspace memory = bytes.workspace();
    const ReserveRowsView reserve = ReserveRowsView::carve(memory, rows);
    const Index first = 1000;
    reserve.reset(first);
    Random random(test_seed());
    INFO(seed_note(test_seed()) << ", " << rows << " rows");
    std::set<std::int32_t> taken;
    for (Index i = 0; i < rows; ++i) {
      const std::int32_t row = reserve.take();
      REQUIRE(row == first + i);
      taken.insert(row);
    }
    for (int n = 0; n < 5000; ++n) {
      if (static_cast<Index>(taken.size()) < rows && (taken.empty() || random.chance(0.6))) {
        const std::int32_t row = reserve.take();
        REQUIRE(row >= first);
        REQUIRE(row < first + rows);
        REQUIRE(taken.insert(row).second);
      } else {
        auto at = taken.begin();
        std::advance(at, random.below(static_cast<int>(taken.size())));
        reserve.give(*at);
        taken.erase(at);
      }
      REQUIRE(*reserve.free == rows - static_cast<Index>(taken.size()));
    }
  }
}

TEST_CASE("pool rows: those of a quota are always at the place of their state", "[pool]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const Index quota : {Index{0}, Index{1}, Index{3}}) {
    PoolConfig config = pool_of(12, 7, 5, 1, 2, 2);
    config.quota = quota;
    config.reserve = quota == 0 ? 0 : 21;
    config.state.epsilon = 0.02;
    PoolRunner<Policy<GatedDelta>> runner(config);
    const auto pool = runner.view();
    Random random(seed);
    Index held = 0;
    Index beyond = 0;
    for (int n = 0; n < 1500; ++n) {
      const Index slot = random.below(5);
      const auto number = static_cast<std::int32_t>(slot);
      if (!pool.in_use(slot)) {
        REQUIRE(admit(pool, slot) == Status::ok);
      } else if (random.chance(0.06)) {
        REQUIRE(release(pool, slot) == Status::ok);
      } else if (random.chance(0.04)) {
        REQUIRE(reset(pool, slot) == Status::ok);
      } else if (random.chance(0.06)) {
        const Index to = random.below(5);
        const bool free = !pool.in_use(to);
        const Status status = fork(pool, slot, to);
        REQUIRE((free ? status == Status::ok || status == Status::pool_exhausted
                      : status == Status::slot_in_use));
      } else {
        runner.step(number, static_cast<std::uint64_t>(n), 0, 1);
        const Status status = compact_due(runner.teams(), pool, &number, 1);
        REQUIRE((status == Status::ok || status == Status::truncated));
      }
      REQUIRE(check_rows(pool) == "");
      held = std::max(held, report(pool).rows);
      beyond = std::max(beyond, config.reserve - *pool.reserve.free);
    }
    CHECK(held > 20);
    CHECK((quota == 0 || beyond > 10));
    for (Index s = 0; s < 5; ++s) (void)release(pool, s);
    CHECK(report(pool).rows == 0);
    CHECK(*pool.reserve.free == config.reserve);
  }
}

TEMPLATE_TEST_CASE("pool rows: a slot copied to a pool of another quota is the same to the bit",
                   "[pool]", Fp32, Fp8) {
  using P = Policy<GatedDelta, Host, TestType, LocalSvd>;
  PoolConfig config = pool_of(12, 7, 3, 1, 2, 4);
  config.state.epsilon = 0.02;
  config.quota = 2;
  config.reserve = 60;
  PoolConfig other = config;
  other.slots = 2;
  other.quota = 5;
  other.reserve = 9;
  PoolRunner<P> here(config), there(other);
  const auto a = here.view();
  const auto b = there.view();
  here.admit(2);
  here.run(2, 7, 0, 18);
  there.admit(1);
  there.run(1, 3, 0, 40);
  const auto same = [&] {
    bool equal = true;
    for (Index h = 0; h < 2; ++h) equal = equal && same_state(a.state(2, h), b.state(1, h));
    return equal;
  };
  Index rows = 0;
  Index wanted = 0;
  for (Index h = 0; h < 2; ++h) {
    const Index held = *a.head(2, h).held;
    rows += held;
    wanted += std::max(Index{0}, held - 5);
  }
  REQUIRE(wanted > 0);
  REQUIRE(wanted <= 9);
  REQUIRE(a.slot(2).buffered > 0);
  REQUIRE(!same());
  // What the slot has beyond its quota counts as free: it is given back first.
  REQUIRE(sinkstate::detail::may_copy_slot(a, 2, b, 1));
  sinkstate::detail::copy_slot(a, 2, b, 1);
  CHECK(same());
  CHECK(*b.reserve.free == 9 - wanted);
  CHECK(report(b).rows == rows);
  CHECK(b.slot(1).tokens == 18);
  CHECK(b.slot(1).buffered == a.slot(2).buffered);
  CHECK(check_rows(a) == "");
  CHECK(check_rows(b) == "");
  // Both go on alike.
  here.run(2, 7, 18, 7);
  there.run(1, 7, 18, 7);
  CHECK(same());
  // And back, to a free slot of the pool with the small quota.
  REQUIRE(sinkstate::detail::may_copy_slot(b, 1, a, 0));
  sinkstate::detail::copy_slot(b, 1, a, 0);
  CHECK(a.in_use(0));
  for (Index h = 0; h < 2; ++h) CHECK(same_state(a.state(0, h), b.state(1, h)));
  CHECK(check_rows(a) == "");
  // Where the reserve is too small the answer is no.
  Index needed = 0;
  for (Index h = 0; h < 2; ++h) needed += *a.head(0, h).held - 1;
  PoolConfig small = other;
  small.quota = 1;
  small.reserve = needed - 1;
  PoolRunner<P> less(small);
  CHECK(!sinkstate::detail::may_copy_slot(a, 0, less.view(), 1));
  small.reserve = needed;
  PoolRunner<P> enough(small);
  CHECK(sinkstate::detail::may_copy_slot(a, 0, enough.view(), 1));
  // And what the slot has itself counts, by the quota of its own pool.
  sinkstate::detail::copy_slot(a, 0, enough.view(), 1);
  CHECK(*enough.view().reserve.free == 0);
  CHECK(sinkstate::detail::may_copy_slot(a, 0, enough.view(), 1));
  CHECK(!sinkstate::detail::may_copy_slot(a, 0, enough.view(), 0));
  sinkstate::detail::copy_slot(a, 0, enough.view(), 1);
  CHECK(check_rows(enough.view()) == "");
}

TEST_CASE("pool: each verb that rewrites the bodies of a slot says so", "[pool]") {
  PoolRunner<Policy<GatedDelta>> runner(pool_of(6, 5, 3));
  const auto pool = runner.view();
  std::uint64_t before = 0;
  const auto changed = [&](Index slot) {
    const bool more = pool.slot(slot).bodies.now() > before;
    before = pool.slot(1).bodies.now();
    return more;
  };
  before = pool.slot(1).bodies.now();
  runner.admit(1);
  CHECK(changed(1));
  CHECK(reset(pool, 1) == Status::ok);
  CHECK(changed(1));
  runner.admit(0);
  runner.run(0, 4, 0, 5);
  CHECK(!changed(1));
  CHECK(fork(pool, 0, 1) == Status::slot_in_use);
  CHECK(!changed(1));
  auto tensors = runner.tensors(1);
  tensors.set(0, 4, 5);
  const std::vector<std::int32_t> from{0};
  auto batch = tensors.batch(from);
  const std::int32_t to = 1;
  batch.write_slots = &to;
  CHECK(step(runner.teams(), pool, batch) == Status::ok);
  CHECK(changed(1));
  const AlignedMemory bytes = snapshot_of(pool, 0);
  CHECK(restore(pool, 1, bytes, 5) == Status::ok);
  CHECK(changed(1));
  CHECK(release(pool, 1) == Status::ok);
  CHECK(changed(1));
  CHECK(fork(pool, 0, 1) == Status::ok);
  CHECK(changed(1));
}

TEST_CASE("pool rows: who lacks them depends on the order, nobody within the quota", "[pool]") {
  // Four terms each; two rows sure, three in common: the first has four, the second three, the
  // third two.
  OneHeadPool p(one_head(3, 2, 3));
  feed_units(p, 4, 3);
  const std::vector<Status> statuses = p.compact_all();
  CHECK(statuses == std::vector<Status>{Status::ok, Status::truncated, Status::truncated});
  const Index ranks[] = {4, 3, 2};
  for (Index s = 0; s < 3; ++s) CHECK(p.pool.state(s, 0).rank() == ranks[s]);
  CHECK(*p.pool.reserve.free == 0);
  // What was dropped: values 1, and 2 and 1.
  CHECK(p.pool.state(0, 0).certificate() < 1e-4f);
  CHECK(p.pool.state(1, 0).certificate() == Catch::Approx(1).epsilon(1e-4));
  CHECK(p.pool.state(2, 0).certificate() == Catch::Approx(std::sqrt(5.0)).epsilon(1e-4));
  // What the first gives back, the next compaction of the others may have.
  REQUIRE(release(p.pool, 0) == Status::ok);
  CHECK(*p.pool.reserve.free == 2);
  CHECK(report(p.pool).rows == 5);
}

TEST_CASE("pool rows: a fork that needs more than the reserve has is refused whole", "[pool]") {
  OneHeadPool p(one_head(2, 2, 3));
  REQUIRE(release(p.pool, 1) == Status::ok);
  std::vector<float> key(24), value(14);
  for (int t = 0; t < 4; ++t) {
    key.assign(24, 0);
    value.assign(14, 0);
    key[static_cast<std::size_t>(t)] = value[static_cast<std::size_t>(t)] = 1;
    const std::int32_t slots[] = {0, -1};
    TokenBatch<float> batch;
    batch.entries = 2;
    batch.slots = slots;
    batch.keys = {key.data(), 12, 12};
    batch.values = {value.data(), 7, 7};
    REQUIRE(step(p.teams, p.pool, batch) == Status::ok);
  }
  const std::int32_t slot = 0;
  REQUIRE(compact(p.teams, p.pool, &slot, 1) == Status::ok);
  CHECK(fork(p.pool, 0, 1) == Status::pool_exhausted);
  CHECK(!p.pool.in_use(1));
  CHECK(*p.pool.reserve.free == 1);
  CHECK(report(p.pool).rows == 4);
}

// The singular value of a matrix may overflow while none of its entries does: a single state then
// goes dense, and needs more rows than its rank and buffer said.
TEST_CASE("pool rows: a state whose strengths overflow is tried again with more", "[pool]") {
  for (const Index reserve : {Index{4}, Index{3}}) {
    OneHeadPool p(one_head(1, 2, reserve));
    SinkState<Simple> alone(p.pool.config.state_of(0));
    HostTeam team(workspace_bytes<Simple>(p.pool.config.state));
    const std::vector<float> key(12, 1.0f), value(7, 3e38f);
    REQUIRE(p.step_all(key, value) == Status::ok);
    REQUIRE(advance(team, alone.view(), {key.data(), value.data(), nullptr, 1}) == Status::ok);
    REQUIRE(compact(team, alone.view()) == Status::ok);
    REQUIRE(alone.view().dense());
    const std::vector<Status> statuses = p.compact_all();
    if (reserve == 4) {
      // Six rows hold twelve rows of seven.
      CHECK(statuses[0] == Status::ok);
      CHECK(same_state(p.pool.state(0, 0), alone.view()));
      CHECK(*p.pool.reserve.free == 0);
    } else {
      // There is no way to keep it, and nothing has changed.
      CHECK(statuses[0] == Status::overflow);
      CHECK(p.pool.state(0, 0).buffered() == 1);
      CHECK(*p.pool.reserve.free == reserve);
      CHECK(p.step_all(key, std::vector<float>(7, 1.0f)) == Status::ok);
      CHECK(roll_back(p.pool, 0, 2) == Status::ok);
      CHECK(p.step_all(key, std::vector<float>(7, 1.0f)) == Status::ok);
      CHECK(p.compact_all() == std::vector<Status>{Status::ok});
    }
  }
}

TEST_CASE("pool: a slot of which one head cannot be compacted goes no further", "[pool]") {
  PoolConfig config = one_head(1, 2, 0);
  config.value_heads = 2;
  OneHeadPool p(config);
  const std::vector<float> key(12, 1.0f);
  std::vector<float> values(14, 3e38f);
  std::fill_n(values.begin(), 7, 1.0f);
  const auto step_both = [&] {
    const std::int32_t slot = 0;
    TokenBatch<float> batch;
    batch.entries = 1;
    batch.slots = &slot;
    batch.keys = {key.data(), 12, 12};
    batch.values = {values.data(), 14, 7};
    return step(p.teams, p.pool, batch);
  };
  REQUIRE(step_both() == Status::ok);
  // Teams without scratch change nothing, and are no reason to stop.
  HostTeams none(1, 0);
  const std::int32_t slot = 0;
  CHECK(compact(none, p.pool, &slot, 1) == Status::workspace_too_small);
  CHECK(p.pool.slot(0).blocked == Status::ok);
  CHECK(p.compact_all() == std::vector<Status>{Status::overflow});
  CHECK(p.pool.state(0, 0).buffered() == 0);
  CHECK(p.pool.state(0, 1).buffered() == 1);
  CHECK(step_both() == Status::overflow);
  CHECK(p.compact_all() == std::vector<Status>{Status::overflow});
  CHECK(roll_back(p.pool, 0, 1) == Status::nothing_to_roll_back);
  CHECK(reset(p.pool, 0) == Status::ok);
  CHECK(step_both() == Status::ok);
}

TEST_CASE("pool: heads have seeds of their own, counted over the whole layer", "[pool]") {
  PoolConfig config = one_head(1, 0, 0);
  config.state.seed = 100;
  config.value_heads = 4;
  config.first_head = 8;
  CHECK(config.state_of(0).seed == 108);
  CHECK(config.state_of(3).seed == 111);
  config.seed_stride = 0;
  CHECK(config.state_of(3).seed == 100);
}
