// The pool as its users meet it: sizes, refusals, batches, threads, and no allocation in between.
#include <atomic>
#include <cstring>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/count_allocations.hpp"
#include "support/pool_requests.hpp"
#include "support/same_state.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using Simple = Policy<GatedDelta>;

PoolConfig small() {
  PoolConfig config = pool_of(6, 5, 4, 2, 4);
  config.state.draft = 2;
  return config;
}

template <class Build>
std::string error_of(const Build& build) {
  try {
    build();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

template <class P = Simple>
std::string error_of(const PoolConfig& config) {
  return error_of([&] { (void)pool_bytes<P>(config); });
}

// Rows of tokens, one after the other.
struct Tensors : BatchTensors<Simple> {
  Tensors(Index rows, std::uint64_t request) : BatchTensors(small(), rows) {
    for (Index row = 0; row < rows; ++row) set(row, request, row);
  }
};

using Pool = PoolRunner<Simple>;

// An engine's own executor.
struct Backwards {
  HostTeam team{workspace_bytes<Simple>(small().state)};
  template <class Task>
  void for_each(Index count, const Task& task) {
    for (Index i = count - 1; i >= 0; --i) task(team, i);
  }
};

bool same_pools(StatePoolView<Simple> a, StatePoolView<Simple> b) {
  for (Index s = 0; s < a.config.slots; ++s) {
    if (a.in_use(s) != b.in_use(s)) return false;
    for (Index h = 0; a.in_use(s) && h < a.config.value_heads; ++h) {
      if (!same_state(a.state(s, h), b.state(s, h))) return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("pool: a configuration that cannot be used names the wanted and the given value",
          "[pool]") {
  using Catch::Contains;
  const auto with = [](const auto& change) {
    PoolConfig config = small();
    change(config);
    return config;
  };
  CHECK(error_of(small()) == "none");
  CHECK_THAT(error_of(with([](PoolConfig& c) { c.slots = 0; })),
             Contains("PoolConfig::slots: wanted a number in [1, ") && Contains("given 0"));
  CHECK_THAT(error_of(with([](PoolConfig& c) {
               c.slots = 1;
               c.padding = Padding::slot_zero;
             })),
             Contains("PoolConfig::slots: wanted a number in [2, ") && Contains("given 1"));
  CHECK_THAT(error_of(with([](PoolConfig& c) { c.key_heads = 3; })),
             Contains("wanted a multiple of key_heads = 3, given 4"));
  CHECK_THAT(error_of(with([](PoolConfig& c) { c.first_head = -1; })), Contains("given -1"));
  CHECK_THAT(error_of(with([](PoolConfig& c) { c.reserve = -5; })), Contains("given -5"));
  CHECK_THAT(error_of(with([](PoolConfig& c) { c.quota = 7; })),
             Contains("PoolConfig::quota: wanted at most 3, which a state can need, given 7"));
  CHECK_THAT(error_of(with([](PoolConfig& c) { c.state.d_k = 0; })), Contains("StateConfig::d_k"));
  CHECK_THAT(error_of(with([](PoolConfig& c) { c.slots = c.value_heads = 1 << 20; })),
             Contains("component rows of a pool: wanted at most 2147483647"));
  using Fixed = Policy<GatedDelta, Host, Fp32, FixedRank>;
  CHECK_THAT(error_of<Fixed>(with([](PoolConfig& c) { c.quota = 1; })),
             Contains("this policy's states all need the same rows") && Contains("given 1 and 0"));

  const std::size_t size = pool_bytes<Simple>(small()).total;
  AlignedMemory bytes(size + 64);
  auto* const memory = bytes.data();
  CHECK_THAT(error_of([&] { (void)make_pool<Simple>(memory, size - 1, small()); }),
             Contains("memory of a pool: wanted " + std::to_string(size) + " bytes, given " +
                      std::to_string(size - 1)));
  CHECK_THAT(error_of([&] { (void)make_pool<Simple>(memory + 8, size, small()); }),
             Contains("aligned to 64 bytes, given one off by 8"));
  CHECK_THAT(error_of([&] { (void)make_pool<Simple>(nullptr, size, small()); }), Contains("null"));
  using Sink = Policy<GatedDelta, Host, Fp32, LocalSvd, MeanValueSink>;
  std::vector<float> direction(20, 1.0f);
  CHECK_THAT(error_of([&] { StatePool<Sink> pool(small()); }), Contains("sink direction"));
  CHECK_THAT(error_of([&] {
               StatePool<Sink> pool(small(), {direction.data(), 3, 5, 5});
             }),
             Contains("wanted 4 x 5, given 3 x 5"));
  CHECK_THAT(error_of([&] {
               StatePool<Simple> pool(small(), {direction.data(), 4, 5, 5});
             }),
             Contains("none (NoSink)"));
  CHECK(error_of([&] { (void)make_pool<Simple>(memory, size, small()); }) == "none");
}

TEST_CASE("pool: bytes before anything is allocated, and in use", "[pool]") {
  PoolConfig config = small();
  const PoolBytes whole = pool_bytes<Simple>(config);
  // Two terms of 11 numbers are less than 30; the matrix takes three rows of two of its own.
  CHECK(whole.most_rows == 3);
  CHECK(whole.quota == 3);
  CHECK(whole.rows == 4 * 4 * 3);
  CHECK(whole.row == 11 * 4 + 4);
  CHECK(whole.worst == whole.total);
  CHECK(whole.total == whole.fixed + 4 * whole.slot + 48 * whole.row);
  config.quota = 1;
  config.reserve = 5;
  const PoolBytes less = pool_bytes<Simple>(config);
  CHECK(less.rows == 4 * 4 + 5);
  CHECK(less.slot == whole.slot);
  CHECK(less.worst == whole.total);
  CHECK(less.total < whole.total);
  // A row of the reserve has a number beside, in a stack of the free ones.
  config.reserve += 16;
  const PoolBytes more = pool_bytes<Simple>(config);
  CHECK(more.row == less.row);
  CHECK(more.fixed >= less.fixed + 16 * sizeof(std::int32_t) - 2 * Workspace::alignment);
  config.reserve -= 16;

  Pool p(config);
  CHECK(report(p.view()).slots == 0);
  REQUIRE(admit(p.view(), 2) == Status::ok);
  Tensors tensors(1, 3);
  const std::vector<std::int32_t> slots{2};
  REQUIRE(step(p.teams(), p.view(), tensors.batch(slots)) == Status::ok);
  REQUIRE(compact(p.teams(), p.view(), slots.data(), 1) == Status::ok);
  const PoolReport now = report(p.view());
  CHECK(now.slots == 1);
  CHECK(now.rows == 4);
  CHECK(now.reserve == 5);
  CHECK(now.dense_states == 0);
  CHECK(now.bytes == less.in_use(1, 4));
  CHECK(now.certificate > 0);
  CHECK(now.certificate < 1e-4);
}

TEST_CASE("pool: free slots are found, also where the first is padding", "[pool]") {
  PoolConfig config = small();
  config.padding = Padding::slot_zero;
  Pool p(config);
  CHECK(free_slot(p.view()) == 1);
  CHECK(admit(p.view(), 0) == Status::invalid_slot);
  for (Index s = 1; s < 4; ++s) CHECK(admit(p.view(), s) == Status::ok);
  CHECK(free_slot(p.view()) == -1);
  CHECK(release(p.view(), 2) == Status::ok);
  CHECK(free_slot(p.view()) == 2);
}

TEST_CASE("pool: padded, packed and counted batches say the same", "[pool]") {
  // Slot 0 has three tokens, slot 1 none, slot 3 one.
  Tensors packed(4, 5), padded(9, 6);
  for (const auto& [to, from] : {std::pair<Index, Index>{0, 0}, {1, 1}, {2, 2}, {6, 3}}) {
    const auto copy = [to = to, from = from](std::vector<float>& a, const std::vector<float>& b,
                                             Index width) {
      std::copy_n(b.begin() + from * width, width, a.begin() + to * width);
    };
    copy(padded.keys, packed.keys, 12);
    copy(padded.queries, packed.queries, 12);
    copy(padded.values, packed.values, 20);
    copy(padded.log_decays, packed.log_decays, 4);
    copy(padded.write_strengths, packed.write_strengths, 4);
  }
  const std::vector<std::int32_t> slots{0, 1, 3}, starts{0, 3, 3, 4}, counts{3, 0, 1};
  Pool a(small()), b(small()), c(small());
  for (Pool* const p : {&a, &b, &c}) {
    for (const Index s : {0, 1, 3}) REQUIRE(admit(p->view(), s) == Status::ok);
  }
  TokenBatch<float> batch = packed.batch(slots);
  batch.starts = starts.data();
  REQUIRE(step(a.teams(), a.view(), batch) == Status::ok);
  const std::vector<float> outputs = packed.outputs;
  batch.counts = counts.data();
  REQUIRE(step(b.teams(), b.view(), batch) == Status::ok);
  CHECK(packed.outputs == outputs);
  batch = padded.batch(slots);
  batch.tokens = 3;
  batch.counts = counts.data();
  REQUIRE(step(c.teams(), c.view(), batch) == Status::ok);
  CHECK(same_pools(a.view(), b.view()));
  CHECK(same_pools(a.view(), c.view()));
  CHECK(std::equal(outputs.begin(), outputs.begin() + 60, padded.outputs.begin()));
  CHECK(std::equal(outputs.begin() + 60, outputs.end(), padded.outputs.begin() + 120));
  CHECK(a.view().slot(0).tokens == 3);
  CHECK(a.view().slot(1).tokens == 0);
  // What belongs to no token is not written.
  for (std::size_t i = 60; i < 120; ++i) CHECK(padded.outputs[i] == Tensors::untouched());
}

TEST_CASE("pool: slots that are written and not read", "[pool]") {
  Tensors tensors(3, 7);
  Pool p(small()), reference(small());
  for (Pool* const q : {&p, &reference}) {
    REQUIRE(admit(q->view(), 0) == Status::ok);
    REQUIRE(step(q->teams(), q->view(), tensors.batch({0})) == Status::ok);
  }
  const auto stepped = [&](const std::vector<std::int32_t>& slots,
                           const std::vector<std::int32_t>& write) {
    TokenBatch<float> batch = tensors.batch(slots);
    batch.write_slots = write.data();
    std::vector<Status> statuses(slots.size());
    const Status first = step(p.teams(), p.view(), batch, statuses.data());
    for (const Status status : statuses) {
      if (status == Status::ok) continue;
      CHECK(first != Status::ok);
    }
    return statuses;
  };
  const auto ok = Status::ok;
  const auto no = Status::invalid_slot;
  // One request into three, itself among them: all begin from what it was.
  CHECK(stepped({0, 0, 0}, {1, 0, 2}) == std::vector<Status>{ok, ok, ok});
  for (const Index s : {1, 2}) {
    REQUIRE(fork(reference.view(), 0, s) == Status::ok);
  }
  REQUIRE(step(reference.teams(), reference.view(), tensors.batch({1, 0, 2})) == Status::ok);
  CHECK(same_pools(p.view(), reference.view()));
  // Nothing is replaced that another entry is to fork, or written twice.
  CHECK(stepped({0, 1}, {1, 2}) == std::vector<Status>{no, ok});
  CHECK(stepped({0, 1}, {2, 2}) == std::vector<Status>{ok, no});
  CHECK(stepped({0, 0}, {0, 0}) == std::vector<Status>{ok, no});
  CHECK(stepped({0}, {-1}) == std::vector<Status>{no});
  CHECK(stepped({3}, {1}) == std::vector<Status>{no});
  CHECK(stepped({-1}, {1}) == std::vector<Status>{ok});
}

TEST_CASE("pool: any executor, any number of threads", "[pool]") {
  Pool one(small()), many(small(), 5), own(small());
  Backwards backwards;
  for (Pool* const p : {&one, &many, &own}) {
    for (const Index s : {3, 0, 2}) REQUIRE(admit(p->view(), s) == Status::ok);
  }
  const std::vector<std::int32_t> slots{2, 0, -1, 3};
  for (std::uint64_t t = 0; t < 24; ++t) {
    Tensors a(4, t), b(4, t), c(4, t);
    REQUIRE(step(one.teams(), one.view(), a.batch(slots)) == Status::ok);
    REQUIRE(step(many.teams(), many.view(), b.batch(slots)) == Status::ok);
    REQUIRE(step(backwards, own.view(), c.batch(slots)) == Status::ok);
    CHECK(a.outputs == b.outputs);
    CHECK(a.outputs == c.outputs);
    REQUIRE(compact_due(one.teams(), one.view(), slots.data(), 4) == Status::ok);
    REQUIRE(compact_due(many.teams(), many.view(), slots.data(), 4) == Status::ok);
    REQUIRE(compact_due(backwards, own.view(), slots.data(), 4) == Status::ok);
  }
  CHECK(same_pools(one.view(), many.view()));
  CHECK(same_pools(one.view(), own.view()));
  CHECK_THAT(error_of([] { HostTeams teams(0, 64); }), Catch::Contains("threads of HostTeams"));

  HostTeams teams(3, 64);
  for (const Index count : {Index{0}, Index{1}, Index{7}, Index{1000}}) {
    std::vector<std::atomic<int>> done(static_cast<std::size_t>(count));
    teams.for_each(count, [&](HostTeam&, Index i) { ++done[static_cast<std::size_t>(i)]; });
    for (const auto& times : done) CHECK(times == 1);
  }
}

TEST_CASE("pool: nothing is allocated between building and the end", "[pool]") {
  Pool p(small(), 3);
  REQUIRE(admit(p.view(), 0) == Status::ok);
  REQUIRE(admit(p.view(), 1) == Status::ok);
  Tensors tensors(2, 8);
  const std::vector<std::int32_t> slots{0, 1};
  const TokenBatch<float> batch = tensors.batch(slots);
  std::vector<float> dense(4 * 30);
  const auto states = DenseStates<float>::keys_by_values(dense.data(), 6, 5);
  AlignedMemory memory(1 << 16);
  void* const bytes = memory.data();
  Status statuses[2];
  bool good = true;
  const auto expect_ok = [&](Status status) { good = good && status == Status::ok; };
  const long before = allocations;
  for (int t = 0; t < 30; ++t) {
    expect_ok(step(p.teams(), p.view(), batch, statuses));
    expect_ok(compact_due(p.teams(), p.view(), slots.data(), 2, statuses));
  }
  expect_ok(open_draft(p.view(), 0));
  expect_ok(step(p.teams(), p.view(), batch));
  expect_ok(close_draft(p.view(), 0, 1));
  expect_ok(fork(p.view(), 0, 2));
  expect_ok(roll_back(p.view(), 2, 1));
  expect_ok(materialize(p.teams(), p.view(), 1, states));
  expect_ok(
      initialize(p.teams(), p.view(), 3 - 1, DenseStates<const float>{dense.data(), 30, 5, 1}, 31));
  const std::size_t size = snapshot_bytes(p.view(), 1);
  expect_ok(snapshot(p.view(), 1, bytes, size));
  expect_ok(restore(p.view(), 3, SnapshotBytes{bytes, size}, 31));
  expect_ok(reset(p.view(), 3));
  expect_ok(release(p.view(), 2));
  (void)report(p.view());
  const long after = allocations;
  CHECK(good);
  CHECK(after == before);
}
