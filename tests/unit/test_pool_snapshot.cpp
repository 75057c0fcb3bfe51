// Snapshots of requests: cut by heads and put together again, and bytes that are none.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <sinkstate/sinkstate.hpp>
#include <type_traits>
#include <vector>

#include "support/catch.hpp"
#include "support/pool_requests.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using Local = Policy<GatedDelta, Host, Fp32, LocalSvd>;
using NarrowSink =
    Policy<KimiDelta, Host, Precision<float, Float8E4M3, BFloat16>, LocalSvd, MeanValueSink>;
using DenseSink = Policy<Mamba2, Host, Fp16, DenseBuffered, MeanValueSink>;

constexpr Index layer_heads = 8, layer_keys = 4;

PoolConfig layer_of(HeadMap map) {
  PoolConfig config = pool_of(12, 10, 2, layer_keys, layer_heads);
  config.state.epsilon = 0.3;
  config.head_map = map;
  return config;
}

// Part `number` of `count` of a layer.
PoolConfig part_of(const PoolConfig& layer, Index count, Index number) {
  PoolConfig part = layer;
  part.value_heads = layer.value_heads / count;
  part.first_head = number * part.value_heads;
  const Index per_key = layer.value_heads / layer.key_heads;
  part.key_heads = layer.head_map == HeadMap::tiled
                       ? std::min(part.value_heads, layer.key_heads)
                       : std::max<Index>(part.value_heads / per_key, 1);
  return part;
}

// A layer over several pools.
template <class P>
class Parts {
 public:
  using T = typename P::Compute;

  Parts(const PoolConfig& layer, Index count) {
    for (Index i = 0; i < count; ++i) {
      pools_.push_back(std::make_unique<PoolRunner<P>>(part_of(layer, count, i), layer));
    }
  }

  // Slot 0 of each.
  void restore_from(const std::vector<AlignedMemory>& pieces, Index tokens) {
    const std::vector<SnapshotBytes> given(pieces.begin(), pieces.end());
    for (auto& pool : pools_) {
      const PoolConfig& config = pool->config();
      // The pieces that have heads of this part.
      std::vector<SnapshotBytes> some;
      for (const AlignedMemory& piece : pieces) {
        const auto header = header_of(piece);
        if (header.first_head < config.first_head + config.value_heads &&
            config.first_head < header.first_head + header.heads) {
          some.push_back(piece);
        }
      }
      const auto count = static_cast<Index>(some.size());
      REQUIRE(restore(pool->view(), 0, some.data(), count, tokens) == Status::ok);
    }
  }
  // One piece a pool, or each cut in two.
  std::vector<AlignedMemory> snapshots(Index cuts = 1) const {
    std::vector<AlignedMemory> pieces;
    for (const auto& pool : pools_) {
      const Index heads = pool->config().value_heads / cuts;
      for (Index i = 0; i < cuts; ++i) {
        pieces.push_back(snapshot_of(pool->view(), 0, {i * heads, heads}));
      }
    }
    return pieces;
  }
  // Outputs in the order of the whole layer.
  std::vector<T> run(std::uint64_t request, Index first, Index count) {
    std::vector<T> all;
    for (Index t = first; t < first + count; ++t) {
      for (auto& pool : pools_) {
        const std::vector<T> some = pool->run(0, request, t, 1);
        all.insert(all.end(), some.begin(), some.end());
      }
    }
    return all;
  }
  PoolRunner<P>& pool(Index i) { return *pools_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<std::unique_ptr<PoolRunner<P>>> pools_;
};

// A request of one small head.
PoolConfig small_pool() {
  PoolConfig config = pool_of(3, 2, 2);
  config.state.epsilon = 0.3;
  return config;
}

template <class Change>
AlignedMemory changed_head(const AlignedMemory& bytes, std::size_t place, const Change& change) {
  AlignedMemory changed = bytes;
  sinkstate::detail::SnapshotHead head;
  std::memcpy(static_cast<void*>(&head), changed.data() + place, sizeof(head));
  change(head);
  std::memcpy(changed.data() + place, &head, sizeof(head));
  sign_snapshot(changed);
  return changed;
}
template <class T>
AlignedMemory changed_number(const AlignedMemory& bytes, std::size_t place, T number) {
  AlignedMemory changed = bytes;
  std::memcpy(changed.data() + place, &number, sizeof(number));
  sign_snapshot(changed);
  return changed;
}

constexpr std::size_t lines(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

TEMPLATE_TEST_CASE("snapshot: a layer over one, two and four pools, and back", "[snapshot]", Local,
                   NarrowSink, DenseSink) {
  const HeadMap map = GENERATE(HeadMap::interleaved, HeadMap::tiled);
  CAPTURE(static_cast<int>(map));
  const PoolConfig layer = layer_of(map);
  const Index tokens = GENERATE(0, 2, 15, 16);
  CAPTURE(tokens);
  Parts<TestType> whole(layer, 1), two(layer, 2), four(layer, 4), two_again(layer, 2),
      whole_again(layer, 1), at_once(layer, 4), direct(layer, 1);
  whole.pool(0).admit(0);
  whole.run(1, 0, tokens);
  const PoolReport now = report(whole.pool(0).view());
  if (std::is_same_v<TestType, Local> && tokens >= 15) {
    CHECK((now.dense_states > 0 && now.dense_states < layer_heads));
  }

  two.restore_from(whole.snapshots(2), tokens);
  CHECK(two.snapshots() == whole.snapshots(2));
  four.restore_from(two.snapshots(2), tokens);
  CHECK(four.snapshots() == whole.snapshots(4));
  two_again.restore_from(four.snapshots(), tokens);
  CHECK(two_again.snapshots() == two.snapshots());
  whole_again.restore_from(two_again.snapshots(), tokens);
  CHECK(whole_again.snapshots() == whole.snapshots());
  // A whole layer into each part, and four parts into one whole.
  at_once.restore_from(whole.snapshots(), tokens);
  CHECK(at_once.snapshots() == whole.snapshots(4));
  direct.restore_from(four.snapshots(), tokens);
  CHECK(direct.snapshots() == whole.snapshots());

  const auto outputs = whole.run(1, tokens, 20);
  const auto end = whole.snapshots();
  CHECK(two.run(1, tokens, 20) == outputs);
  CHECK(four.run(1, tokens, 20) == outputs);
  CHECK(whole_again.run(1, tokens, 20) == outputs);
  CHECK(whole_again.snapshots() == end);
  CHECK(at_once.snapshots(1) != four.snapshots(1));
  CHECK(four.snapshots() == whole.snapshots(4));
}

TEST_CASE("snapshot: a key head that two pieces share", "[snapshot]") {
  const PoolConfig layer = layer_of(HeadMap::interleaved);
  PoolRunner<Local> whole(layer), other(layer), target(layer);
  whole.admit(0);
  whole.run(0, 1, 0, 7);
  other.admit(0);
  other.run(0, 2, 0, 7);
  const auto pieces = [](PoolRunner<Local>& pool) {
    std::vector<AlignedMemory> heads;
    for (Index h = 0; h < layer_heads; ++h) heads.push_back(snapshot_of(pool.view(), 0, {h, 1}));
    return heads;
  };
  std::vector<AlignedMemory> heads = pieces(whole);
  const auto restored = [&] {
    const std::vector<SnapshotBytes> given(heads.begin(), heads.end());
    return restore(target.view(), 1, given.data(), layer_heads, 7);
  };
  std::swap(heads[2], heads[5]);  // in any order
  CHECK(restored() == Status::ok);
  CHECK(snapshot_of(target.view(), 1) == snapshot_of(whole.view(), 0));
  std::swap(heads[2], heads[5]);

  // Three pending tokens with other keys.
  heads[3] = pieces(other)[3];
  const auto before = image_of(target.view());
  CHECK(restored() == Status::wrong_snapshot);
  CHECK(image_of(target.view()) == before);
  heads[2] = pieces(other)[2];  // and now the whole of that key head
  CHECK(restored() == Status::ok);
  CHECK(target.view().key_bytes > 0);
}

TEST_CASE("snapshot: without pending tokens no keys are compared", "[snapshot]") {
  const PoolConfig layer = part_of(layer_of(HeadMap::interleaved), 4, 0);
  PoolRunner<Local> one(layer), two(layer);
  one.admit(0);
  one.run(0, 1, 0, 8);
  two.admit(0);
  two.run(0, 2, 0, 8);
  const AlignedMemory left = snapshot_of(one.view(), 0, {0, 1}),
                      right = snapshot_of(two.view(), 0, {1, 1});
  const SnapshotBytes pieces[] = {left, right};
  CHECK(restore(one.view(), 1, pieces, 2, 8) == Status::ok);
}

TEST_CASE("snapshot: what may differ", "[snapshot]") {
  PoolConfig config = layer_of(HeadMap::interleaved);
  PoolRunner<Local> pool(config);
  pool.admit(0);
  pool.run(0, 1, 0, 7);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  config.state.epsilon = 0.01;
  config.state.rank_cap = 12;
  config.state.seed = 99;
  config.state.buffer = 6;
  config.state.draft = 3;
  config.slots = 3;
  config.quota = 2;
  config.reserve = 100;
  config.padding = Padding::slot_zero;
  PoolRunner<Local> other(config);
  REQUIRE(restore(other.view(), 2, bytes, 7) == Status::ok);
  CHECK(snapshot_of(other.view(), 2) == bytes);
  CHECK(restore(other.view(), 0, bytes, 7) == Status::invalid_slot);
  CHECK(restore(other.view(), 3, bytes, 7) == Status::invalid_slot);
  CHECK(restore(other.view(), 2, &static_cast<const SnapshotBytes&>(bytes), 0, 7) ==
        Status::invalid_argument);
}

TEST_CASE("snapshot: of another kind, shape or range", "[snapshot]") {
  const PoolConfig config = layer_of(HeadMap::interleaved);
  PoolRunner<Local> pool(config);
  pool.admit(0);
  pool.run(0, 1, 0, 15);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  const auto refused = [&](auto&& other, const AlignedMemory& given) {
    other.admit(0);
    const auto before = image_of(other.view());
    const Status status = restore(other.view(), 1, given, 15);
    CHECK(image_of(other.view()) == before);
    CHECK(restore(other.view(), 0, given, 15) == status);
    CHECK(image_of(other.view()) == before);
    return status;
  };
  SECTION("policies") {
    const auto wrong = Status::wrong_snapshot;
    CHECK(refused(PoolRunner<Policy<KimiDelta, Host, Fp32, LocalSvd>>(config), bytes) == wrong);
    CHECK(refused(PoolRunner<Policy<Mamba2, Host, Fp32, LocalSvd>>(config), bytes) == wrong);
    CHECK(refused(PoolRunner<Policy<GatedDelta, Host, Fp64, LocalSvd>>(config), bytes) == wrong);
    CHECK(refused(PoolRunner<Policy<GatedDelta, Host, Fp16, LocalSvd>>(config), bytes) == wrong);
    CHECK(refused(PoolRunner<Policy<GatedDelta, Host, Fp32, FullSvd>>(config), bytes) == wrong);
    CHECK(refused(PoolRunner<Policy<GatedDelta, Host, Fp32, FixedRank>>(config), bytes) == wrong);
    CHECK(refused(PoolRunner<Policy<GatedDelta, Host, Fp32, DenseBuffered>>(config), bytes) ==
          wrong);
    CHECK(refused(PoolRunner<Policy<GatedDelta, Host, Fp32, LocalSvd, MeanValueSink>>(config),
                  bytes) == wrong);
  }
  SECTION("shapes and ranges") {
    const auto differs = [&](const auto& change) {
      PoolConfig other = config;
      change(other);
      return refused(PoolRunner<Local>(other), bytes);
    };
    CHECK(differs([](auto& c) { c.state.d_k = 13; }) == Status::wrong_snapshot);
    CHECK(differs([](auto& c) { c.state.d_v = 9; }) == Status::wrong_snapshot);
    CHECK(differs([](auto& c) { c.state.buffer = 2; }) == Status::wrong_snapshot);  // 3 pending
    CHECK(differs([](auto& c) { c.state.rank_cap = 1; }) == Status::wrong_snapshot);
    CHECK(differs([](auto& c) { c.state.dense_fallback = false; }) == Status::wrong_snapshot);
    CHECK(differs([](auto& c) { c.first_head = 1; }) == Status::wrong_snapshot);
    CHECK(differs([](auto& c) { c.value_heads = 12; }) == Status::wrong_snapshot);
    // Two heads that have shared a key do no longer, and the reverse.
    CHECK(differs([](auto& c) { c.head_map = HeadMap::tiled; }) == Status::wrong_snapshot);
    CHECK(differs([](auto& c) { c.key_heads = 2; }) == Status::wrong_snapshot);
    CHECK(differs([](auto& c) { c.quota = 1; }) == Status::pool_exhausted);
  }
  SECTION("pieces") {
    const auto piece = [&](Index first, Index count) {
      return snapshot_of(pool.view(), 0, {first, count});
    };
    const auto before = image_of(pool.view());
    const auto restored = [&](const std::vector<AlignedMemory>& pieces) {
      const std::vector<SnapshotBytes> given(pieces.begin(), pieces.end());
      const Status status =
          restore(pool.view(), 1, given.data(), static_cast<Index>(given.size()), 15);
      if (status != Status::ok) CHECK(image_of(pool.view()) == before);
      return status;
    };
    CHECK(restored({piece(0, 4)}) == Status::wrong_snapshot);
    CHECK(restored({piece(0, 4), piece(5, 3)}) == Status::wrong_snapshot);               // a gap
    CHECK(restored({piece(0, 5), piece(4, 4)}) == Status::wrong_snapshot);               // twice
    CHECK(restored({piece(0, 4), piece(3, 1), piece(5, 3)}) == Status::wrong_snapshot);  // both
    CHECK(restored({piece(0, 4), piece(0, 4)}) == Status::wrong_snapshot);
    CHECK(restored({bytes, bytes}) == Status::wrong_snapshot);
    CHECK(restored({bytes, piece(7, 1)}) == Status::wrong_snapshot);
    // Of another moment.
    pool.step(0, 1, 15);
    REQUIRE(roll_back(pool.view(), 0, 2) == Status::ok);
    const AlignedMemory earlier = piece(4, 4);
    pool.step(0, 1, 14);
    CHECK(restored({piece(0, 4), earlier}) == Status::wrong_snapshot);
    CHECK(restored({piece(4, 4), piece(0, 4)}) == Status::ok);
  }
}

TEST_CASE("snapshot: other sink directions", "[snapshot]") {
  const PoolConfig config = layer_of(HeadMap::interleaved);
  PoolRunner<NarrowSink> pool(config);
  pool.admit(0);
  pool.run(0, 1, 0, 7);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  std::vector<float> directions = sink_rows<NarrowSink>(config);
  const auto restored = [&] {
    StatePool<NarrowSink> other(config, {directions.data(), layer_heads, 10, 10});
    const Status status = restore(other.view(), 1, bytes, 7);
    CHECK(other.view().in_use(1) == (status == Status::ok));
    return status;
  };
  CHECK(restored() == Status::ok);
  directions.back() += 1e-6F;
  CHECK(restored() == Status::wrong_snapshot);
}

TEST_CASE("snapshot: rows that the slot gives back are there for what replaces it", "[snapshot]") {
  PoolConfig config = small_pool();
  config.state.d_k = config.state.d_v = 8;
  config.state.epsilon = 0;
  config.quota = 1;
  config.reserve = 4;  // one dense state has 4 rows, 3 of them beyond its quota
  PoolRunner<Local> pool(config);
  pool.admit(0);
  pool.run(0, 1, 0, 12);
  REQUIRE(report(pool.view()).dense_states == 1);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  const auto before = image_of(pool.view());
  CHECK(restore(pool.view(), 1, bytes, 12) == Status::pool_exhausted);
  CHECK(image_of(pool.view()) == before);
  pool.run(0, 1, 12, 5);
  CHECK(restore(pool.view(), 0, bytes, 12) == Status::ok);
  CHECK(image_of(pool.view()) == before);
}

TEMPLATE_TEST_CASE("snapshot: every byte counts, and every length", "[snapshot]", Local,
                   NarrowSink) {
  PoolRunner<TestType> pool(small_pool());
  const Index tokens = GENERATE(0, 6);
  CAPTURE(tokens);
  pool.admit(0);
  pool.run(0, 1, 0, tokens);
  const AlignedMemory good = snapshot_of(pool.view(), 0);
  pool.admit(1);
  pool.run(1, 2, 0, 3);
  const auto before = image_of(pool.view());
  std::size_t refused = 0;
  for (std::size_t i = 0; i < good.size(); ++i) {
    AlignedMemory bytes = good;
    bytes[i] = static_cast<unsigned char>(bytes[i] ^ (1U << i % 8));
    const Status status = restore(pool.view(), 1, bytes, tokens);
    refused += status == Status::damaged_snapshot || status == Status::wrong_snapshot ? 1 : 0;
  }
  CHECK(refused == good.size());
  for (std::size_t size = 0; size < good.size(); ++size) {
    // As it was cut, and as somebody would have it who writes a new header.
    AlignedMemory cut(size);
    if (size > 0) std::memcpy(cut.data(), good.data(), size);
    const SnapshotBytes in_place{good.data(), size};
    if (restore(pool.view(), 1, in_place, tokens) != Status::damaged_snapshot) FAIL(size);
    if (size < sizeof(sinkstate::detail::SnapshotHeader)) continue;
    sign_snapshot(cut);
    if (restore(pool.view(), 1, cut, tokens) != Status::damaged_snapshot) FAIL(size);
  }
  for (const std::size_t more : {1U, 63U, 64U, 128U}) {
    AlignedMemory longer(good.size() + more);
    std::memcpy(longer.data(), good.data(), good.size());
    sign_snapshot(longer);
    CHECK(restore(pool.view(), 1, longer, tokens) == Status::damaged_snapshot);
  }
  CHECK(image_of(pool.view()) == before);
  CHECK(restore(pool.view(), 1, good, tokens) == Status::ok);
}

// Whoever writes the right checksum may write anything.
TEST_CASE("snapshot: counters and numbers that no state has", "[snapshot]") {
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  PoolConfig config = small_pool();
  config.state.d_k = 8;
  config.state.d_v = 7;
  config.state.epsilon = 0;
  config.state.buffer = 3;
  PoolRunner<Local> pool(config);
  pool.admit(0);
  pool.run(0, 1, 0, 5);
  REQUIRE(pool.view().state(0, 0).rank() >= 2);
  const AlignedMemory good = snapshot_of(pool.view(), 0);
  const auto rank = static_cast<std::size_t>(pool.view().state(0, 0).rank());
  const auto before = image_of(pool.view());
  const auto restored = [&](const AlignedMemory& bytes) {
    const Status status = restore(pool.view(), 1, bytes, 5);
    if (status != Status::ok) CHECK(image_of(pool.view()) == before);
    return status;
  };
  // Header, keys of two tokens, then the head.
  const std::size_t keys = 128, head = keys + lines(2 * 8 * 4), corrections = head + 64,
                    decays = corrections + lines(2 * 7 * 4), certificates = decays + 64,
                    masses = certificates + 64, strengths = masses + 64,
                    body = strengths + lines(rank * 4);
  REQUIRE(good.size() == body + lines(rank * 15 * 4));
  const auto counter = [&](const auto& change) {
    return restored(changed_head(good, head, change));
  };
  CHECK(counter([](auto&) {}) == Status::ok);
  REQUIRE(release(pool.view(), 1) == Status::ok);
  const auto damaged = Status::damaged_snapshot;
  CHECK(counter([&](auto& h) { h.tokens = most; }) == damaged);
  CHECK(counter([](auto& h) { h.tokens = 6; }) == damaged);
  CHECK(counter([](auto& h) { h.tokens = 1; }) == damaged);
  CHECK(counter([&](auto& h) { h.compactions = most; }) == damaged);
  CHECK(counter([](auto& h) { h.compactions = 4; }) == damaged);
  CHECK(counter([](auto& h) { h.compactions = -1; }) == damaged);
  CHECK(counter([](auto& h) { h.dense_age = std::numeric_limits<std::int32_t>::max(); }) ==
        damaged);
  CHECK(counter([](auto& h) { h.dense_age = -1; }) == damaged);
  CHECK(counter([&](auto& h) { h.settled_rank = most; }) == damaged);
  CHECK(counter([](auto& h) { h.settled_rank = -1; }) == damaged);
  CHECK(counter([](auto& h) { h.dense = 2; }) == damaged);
  CHECK(counter([](auto& h) { h.dense = 1; }) == damaged);
  CHECK(counter([](auto& h) { h.rank = -1; }) == damaged);
  CHECK(counter([](auto& h) { h.rank += 1; }) != Status::ok);
  CHECK(counter([](auto& h) { h.rank = 1 << 30; }) == Status::wrong_snapshot);
  CHECK(counter([](auto& h) { h.key_head = 1; }) == damaged);
  CHECK(counter([](auto& h) { h.key_head = -1; }) == damaged);
  CHECK(counter([](auto& h) { h.sink_direction = 1; }) == Status::wrong_snapshot);

  constexpr float infinite = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const auto number = [&](std::size_t place, float value) {
    return restored(changed_number(good, place, value));
  };
  for (const float bad : {infinite, -infinite, nan}) {
    CAPTURE(bad);
    CHECK(number(keys + 4, bad) == damaged);
    CHECK(number(corrections + 4, bad) == damaged);
    CHECK(number(strengths, bad) == damaged);
    CHECK(number(body + 4, bad) == damaged);
    if (bad != -infinite) CHECK(number(decays, bad) == damaged);
    if (bad != infinite) CHECK(number(certificates, bad) == damaged);
    if (bad != infinite) CHECK(number(masses + 4, bad) == damaged);
  }
  CHECK(number(decays + 4, 1e-30F) == damaged);
  CHECK(number(certificates + 4, -1.0F) == damaged);
  CHECK(number(masses, -1.0F) == damaged);
  CHECK(number(strengths, 0.0F) == damaged);  // weaker than the second
  CHECK(number(strengths + 4, -1.0F) == damaged);
  // What is between the arrays is zero.
  for (const std::size_t padding : {keys - 4, head + 60, corrections + 2 * 7 * 4, decays + 8,
                                    certificates + 12, masses + 60, good.size() - 4}) {
    CHECK(number(padding, 1.0F) == damaged);
  }
}

TEST_CASE("snapshot: scales and keys that no state has", "[snapshot]") {
  PoolConfig config = small_pool();
  config.key_heads = config.value_heads = 2;
  PoolRunner<NarrowSink> pool(config);
  pool.admit(0);
  pool.run(0, 1, 0, 8);
  const AlignedMemory good = snapshot_of(pool.view(), 0);
  const auto before = image_of(pool.view());
  const auto restored = [&](const AlignedMemory& bytes) {
    const Status status = restore(pool.view(), 1, bytes, 8);
    if (status != Status::ok) CHECK(image_of(pool.view()) == before);
    return status;
  };
  // No token is pending: the scales are the last array of the last head.
  const std::size_t scales = good.size() - 64;
  float scale = 0;
  std::memcpy(&scale, good.data() + scales, sizeof(scale));
  REQUIRE(scale > 0);
  for (const float bad :
       {0.0F, -scale, 1.5F * scale, 1.7014118e38F /* 2^127 */,
        std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    CAPTURE(bad);
    CHECK(restored(changed_number(good, scales, bad)) == Status::damaged_snapshot);
  }
  CHECK(restored(changed_number(good, scales, 2 * scale)) == Status::ok);
  REQUIRE(release(pool.view(), 1) == Status::ok);
  // Key heads are named in their order, and none is left out.
  const auto keyed = [&](std::int32_t first) {
    return restored(changed_head(good, 128, [&](auto& h) { h.key_head = first; }));
  };
  CHECK(keyed(1) == Status::damaged_snapshot);
  AlignedMemory more = good;
  auto header = header_of(more);
  header.key_heads = 1;
  std::memcpy(more.data(), &header, sizeof(header));
  sign_snapshot(more);
  CHECK(restored(more) == Status::damaged_snapshot);
}

TEST_CASE("snapshot: sizes that grow with what is there", "[snapshot]") {
  PoolRunner<Local> pool(layer_of(HeadMap::interleaved));
  pool.admit(0);
  const auto view = pool.view();
  // Header, and of each head its record, two bounds and nothing else.
  CHECK(snapshot_bytes(view, 0) == 128 + layer_heads * 3 * 64);
  CHECK(snapshot_bytes(view, 0, {3, 1}) == 128 + 3 * 64);
  pool.run(0, 1, 0, 3);
  CHECK(snapshot_bytes(view, 0, {3, 1}) ==
        128 + lines(3 * 12 * 4) + 64 + lines(3 * 10 * 4) + 3 * 64);
  CHECK(snapshot_bytes(view, 0, {2, 2}) ==
        128 + lines(3 * 12 * 4) + 2 * (64 + lines(3 * 10 * 4) + 3 * 64));
  CHECK(snapshot_bytes(view, 0, {1, 2}) ==
        128 + 2 * lines(3 * 12 * 4) + 2 * (64 + lines(3 * 10 * 4) + 3 * 64));
}
