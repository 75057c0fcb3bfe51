// Faults of slots, padding, sizes, types, drafts and snapshots that others shipped (docs/faults.md), fed to a pool.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <sinkstate/sinkstate.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/pool_requests.hpp"
#include "support/pool_rows.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using Local = Policy<GatedDelta, Host, Fp32, LocalSvd>;
using Dense = Policy<GatedDelta, Host, Fp32, DenseBuffered>;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// Two key heads for four value heads, states that turn dense and shared component rows.
PoolConfig shared_pool(Index slots) {
  PoolConfig config = pool_of(8, 6, slots, 2, 4);
  config.state.epsilon = 0.05;
  config.quota = 1;
  config.reserve = slots * 4 * 8;
  return config;
}

// The bytes of a slot, its component rows apart.
template <class P>
std::vector<unsigned char> slot_memory(StatePoolView<P> pool, Index slot) {
  const unsigned char* const begin =
      pool.slot_memory + static_cast<std::size_t>(slot) * pool.slot_bytes;
  return {begin, begin + pool.slot_bytes};
}

// A slot that has seen the first tokens of a request, as a pool that has seen nothing else has it.
template <class P>
AlignedMemory fresh(const PoolConfig& config, std::uint64_t request, Index tokens) {
  PoolRunner<P> alone(config);
  const Index slot = free_slot(alone.view());
  alone.admit(slot);
  alone.run(slot, request, 0, tokens);
  return snapshot_of(alone.view(), slot);
}

template <class T>
std::uint64_t address(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

}  // namespace

// ---- Slots and stale memory --------------------------------------------------------------------

TEST_CASE("B30: a snapshot is restored for its own number of tokens only", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(2));
  pool.admit(0);
  pool.run(0, 1, 0, 13);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  const auto before = image_of(pool.view());
  for (const Index tokens : {0, 12, 14, 16, -13}) {
    CAPTURE(tokens);
    CHECK(restore(pool.view(), 1, bytes, tokens) == Status::wrong_snapshot);
    CHECK(image_of(pool.view()) == before);
  }
  CHECK(restore(pool.view(), 1, bytes, 13) == Status::ok);
  CHECK(snapshot_of(pool.view(), 1) == bytes);
}

TEMPLATE_TEST_CASE("B33: a new request finds nothing of a former one", "[faults][pool]", Local,
                   Dense) {
  PoolConfig config = shared_pool(2);
  if (!TestType::Compaction::adaptive) config.quota = config.reserve = 0;
  // NaN in whatever number, a former tenant of all of the memory.
  const std::size_t size = pool_bytes<TestType>(config).total;
  AlignedMemory memory(size, 0xFF);
  const auto pool = make_pool<TestType>(memory.data(), size, config);
  PoolRunner<TestType> inputs(config);
  const auto run = [&](Index slot, std::uint64_t request, float scale) {
    for (Index t = 0; t < 19; ++t) {
      auto tensors = inputs.tensors(1);
      tensors.set(0, request, t);
      for (float& value : tensors.values) value *= scale;
      const std::vector<std::int32_t> slots{static_cast<std::int32_t>(slot)};
      REQUIRE(step(inputs.teams(), pool, tensors.batch(slots)) == Status::ok);
      REQUIRE(compact_due(inputs.teams(), pool, slots.data(), 1) == Status::ok);
    }
  };
  REQUIRE(admit(pool, 0) == Status::ok);
  run(0, 1, 1);
  CHECK(snapshot_of(pool, 0) == fresh<TestType>(config, 1, 19));

  REQUIRE(admit(pool, 1) == Status::ok);
  run(1, 2, 1e30F);
  REQUIRE(release(pool, 0) == Status::ok);
  REQUIRE(release(pool, 1) == Status::ok);
  for (const Index slot : {1, 0}) {
    REQUIRE(admit(pool, slot) == Status::ok);
    run(slot, 1, 1);
    CHECK(snapshot_of(pool, slot) == fresh<TestType>(config, 1, 19));
  }
}

TEST_CASE("B34: a reset clears states, ranks, buffers, draft and counters", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(2));
  pool.admit(0);
  pool.run(0, 1, 0, 22);
  REQUIRE(open_draft(pool.view(), 0) == Status::ok);
  pool.step(0, 1, 22);
  REQUIRE(report(pool.view()).rows > 0);
  REQUIRE(reset(pool.view(), 0) == Status::ok);

  CHECK(report(pool.view()).rows == 0);
  CHECK(report(pool.view()).reserve == pool.config().reserve);
  CHECK(report(pool.view()).certificate == 0);
  CHECK(pool.view().slot(0).draft == -1);
  CHECK(snapshot_of(pool.view(), 0) == fresh<Local>(shared_pool(2), 1, 0));
  pool.run(0, 5, 0, 17);
  CHECK(snapshot_of(pool.view(), 0) == fresh<Local>(shared_pool(2), 5, 17));
}

TEST_CASE("B34: a reset makes a slot whose head overflowed usable again", "[faults][pool]") {
  PoolRunner<Local> pool(pool_of(4, 3, 1));
  pool.admit(0);
  auto tensors = pool.tensors(4);
  for (Index t = 0; t < 4; ++t) tensors.set(t, 1, 0);  // one direction
  std::fill(tensors.values.begin(), tensors.values.end(), 3e38F);
  auto batch = tensors.batch({}, 4);
  const std::int32_t slot = 0;
  batch.entries = 1;
  batch.slots = &slot;
  // A matrix of finite numbers, but with no room for its norm.
  std::vector<float> dense(12, 3e38F);
  REQUIRE(initialize(pool.teams(), pool.view(), 0,
                     DenseStates<const float>::keys_by_values(dense.data(), 4, 3)) == Status::ok);
  std::fill(tensors.write_strengths.begin(), tensors.write_strengths.end(), 0.0F);
  REQUIRE(step(pool.teams(), pool.view(), batch) != Status::ok);
  CHECK(pool.view().slot(0).buffered == 0);
  REQUIRE(reset(pool.view(), 0) == Status::ok);
  pool.run(0, 5, 0, 9);
  CHECK(snapshot_of(pool.view(), 0) == fresh<Local>(pool_of(4, 3, 1), 5, 9));
}

TEST_CASE("B35: indices of padding touch no slot", "[faults][pool]") {
  const bool zero = GENERATE(false, true);
  CAPTURE(zero);
  PoolConfig config = shared_pool(5);
  config.padding = zero ? Padding::slot_zero : Padding::negative;
  const std::int32_t padding = zero ? 0 : -1;
  PoolRunner<Local> pool(config);
  for (Index s = zero ? 1 : 0; s < 5; ++s) {
    pool.admit(s);
    pool.run(s, static_cast<std::uint64_t>(s), 0, 6);
  }
  std::vector<std::vector<unsigned char>> before;
  for (Index s = 0; s < 5; ++s) before.push_back(slot_memory(pool.view(), s));

  // The rows of padding hold what a captured graph left there.
  auto tensors = pool.tensors(4);
  tensors.set(1, 3, 6);
  const auto poison = [&](auto& numbers, Index row) {
    const auto width = numbers.size() / 4;
    std::fill_n(numbers.begin() + static_cast<std::ptrdiff_t>(width) * row, width, not_a_number);
  };
  for (const Index row : {0, 2, 3}) {
    poison(tensors.keys, row);
    poison(tensors.queries, row);
    poison(tensors.values, row);
    poison(tensors.log_decays, row);
    poison(tensors.write_strengths, row);
  }
  const std::vector<std::int32_t> slots{padding, 3, padding, padding};
  std::vector<Status> statuses(4, Status::overflow);
  CHECK(step(pool.teams(), pool.view(), tensors.batch(slots), statuses.data()) == Status::ok);
  CHECK(statuses == std::vector<Status>(4, Status::ok));
  for (Index s = 0; s < 5; ++s) {
    CHECK((slot_memory(pool.view(), s) == before[static_cast<std::size_t>(s)]) == (s != 3));
  }
  CHECK(compact(pool.teams(), pool.view(), slots.data(), 4, statuses.data()) == Status::ok);
  for (const Index s : {0, 1, 2, 4}) {
    CHECK(slot_memory(pool.view(), s) == before[static_cast<std::size_t>(s)]);
  }
  for (Index s = 1; s < 5; ++s) {
    if (s != 3) {
      CHECK(snapshot_of(pool.view(), s) == fresh<Local>(config, static_cast<std::uint64_t>(s), 6));
    }
  }

  // What is padding by one policy is an error, or a slot like any other, by the other one.
  const std::vector<std::int32_t> other{zero ? -1 : 0};
  CHECK(step(pool.teams(), pool.view(), pool.tensors(1).batch(other)) ==
        (zero ? Status::invalid_slot : Status::ok));
  CHECK(admit(pool.view(), padding) == Status::invalid_slot);
  CHECK(release(pool.view(), padding) == Status::invalid_slot);
  const std::vector<std::int32_t> beyond{5};
  CHECK(step(pool.teams(), pool.view(), pool.tensors(1).batch(beyond)) == Status::invalid_slot);
  CHECK(compact(pool.teams(), pool.view(), beyond.data(), 1) == Status::invalid_slot);
}

TEST_CASE("B38: outputs of tokens that are not applied stay as they were", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(3));
  pool.admit(0);
  pool.admit(1);
  pool.run(1, 1, 0, 3);
  // Three tokens for each of six entries, of which one has two, one none, one is padding, one names a
  // slot without a request, one has a NaN in its last token, and one has no room.
  auto tensors = pool.tensors(18);
  for (Index t = 0; t < 18; ++t) tensors.set(t, 9, t);
  tensors.values[tensors.values.size() - 1 - 3 * (tensors.values.size() / 18)] = not_a_number;
  const std::vector<std::int32_t> slots{0, -1, 2, 1, 7, 1};
  const std::vector<std::int32_t> counts{2, 3, 1, 2, 3, 0};
  auto batch = tensors.batch(slots, 3);
  batch.counts = counts.data();
  // Outputs of the tokens lie apart, with gaps between the heads.
  const Index width = 11, stride = 4 * width + 5;
  std::vector<float> outputs(18 * static_cast<std::size_t>(stride), -1.0F);
  batch.outputs = {outputs.data() + 2, stride, width};
  std::vector<Status> statuses(6, Status::ok);
  CHECK(step(pool.teams(), pool.view(), batch, statuses.data()) == Status::invalid_slot);
  CHECK(statuses == std::vector<Status>{Status::ok, Status::ok, Status::invalid_slot,
                                        Status::buffer_full, Status::invalid_slot, Status::ok});
  for (Index t = 0; t < 18; ++t) {
    for (Index i = 0; i < stride; ++i) {
      const Index head = (i - 2) / width, j = i - 2 - head * width;
      const bool applied = t < 2 && i >= 2 && head < 4 && j < 6;
      CHECK((outputs[static_cast<std::size_t>(t * stride + i)] != -1.0F) == applied);
    }
  }

  // A NaN in the last of the tokens: none of them is applied.
  const std::vector<std::int32_t> last{0};
  auto three = pool.tensors(2);
  for (Index t = 0; t < 2; ++t) three.set(t, 9, t);
  three.keys.back() = not_a_number;
  CHECK(step(pool.teams(), pool.view(), three.batch(last, 2)) == Status::non_finite_input);
  for (const float output : three.outputs) CHECK(output == BatchTensors<Local>::untouched());
}

// ---- Offsets -----------------------------------------------------------------------------------

// The memory is only an address: nothing of it is looked at.
TEST_CASE("B39: the slots of a pool of 40 GiB lie where they should", "[faults][pool]") {
  using View = StatePoolView<Local>;
  PoolConfig config = pool_of(128, 128, 5001, 32, 32, 16);
  const PoolBytes bytes = pool_bytes<Local>(config);
  constexpr std::uint64_t base = std::uint64_t{1} << 44;
  Workspace memory(reinterpret_cast<void*>(base), bytes.total);
  const View pool = View::carve(memory, config, {});
  REQUIRE(memory.used() == bytes.total);

  // Component rows: 64 a state, in which 63 terms or the matrix fit.
  CHECK(bytes.most_rows == 64);
  CHECK(bytes.rows == Index{5001} * 32 * 64);
  CHECK(bytes.row == 256 * 4 + 4);
  const std::uint64_t rows = static_cast<std::uint64_t>(bytes.rows);
  CHECK(rows * 256 > (std::uint64_t{1} << 31));
  CHECK(bytes.total > rows * 1028);
  CHECK(address(pool.slot_memory) - address(pool.components) == rows * 1024);
  CHECK(address(pool.components) - address(pool.strengths) == rows * 4);

  // Keys: 16 x 128 numbers. A head: corrections, log decays, bounds, list and counters.
  CHECK(pool.key_bytes == 16 * 128 * 4);
  CHECK(pool.slot_bytes == 32 * (pool.key_bytes + pool.head_bytes));
  for (const Index slot : {Index{0}, Index{3971}, Index{3972}, Index{5000}}) {
    const std::uint64_t offset = static_cast<std::uint64_t>(slot) * pool.slot_bytes;
    CHECK(address(pool.keys(slot, 31).row(15)) - address(pool.slot_memory) ==
          offset + 31 * pool.key_bytes + 15 * 128 * 4);
    CHECK(address(pool.head(slot, 31).buffer.corrections.row(0)) - address(pool.slot_memory) ==
          offset + 32 * pool.key_bytes + 31 * pool.head_bytes);
    CHECK(address(&pool.slot(slot)) - base ==
          static_cast<std::uint64_t>(slot) * sizeof(SlotRecord));
  }
  CHECK(address(pool.keys(5000, 31).row(15)) - address(pool.slot_memory) >
        (std::uint64_t{1} << 31));
  CHECK(address(pool.head(5000, 31).status + 1) <= base + bytes.total);
}

TEST_CASE("B40: component rows, keys and tokens around 2^31 elements and bytes", "[faults][pool]") {
  constexpr std::uint64_t base = std::uint64_t{1} << 44;
  float* const numbers = reinterpret_cast<float*>(base);
  std::int32_t rank = 1;
  std::int32_t list = 0;
  LowRankFactorsView<float> factors;
  factors.components = numbers;
  factors.strengths = numbers;
  factors.list = &list;
  factors.rank = &rank;
  factors.d_k = factors.d_v = 128;
  // 2^31 elements, 2^31 and 2^32 bytes, and the last row that can be numbered.
  for (const std::int64_t row : {std::int64_t{1} << 23, std::int64_t{1} << 21,
                                 std::int64_t{1} << 22, PoolConfig::largest_rows - 1}) {
    for (const std::int64_t beside : {-1, 0, 1}) {
      const auto wanted = static_cast<std::uint64_t>(row + beside);
      if (row + beside > PoolConfig::largest_rows) continue;
      list = static_cast<std::int32_t>(wanted);
      CHECK(address(factors.keys().row(0)) - base == wanted * 1024);
      CHECK(address(factors.values().row(0)) - base == wanted * 1024 + 512);
      CHECK(address(factors.matrix(128).row(1)) - base == wanted * 1024 + 512);
      CHECK(address(&factors.strength(0)) - base == wanted * 4);
    }
  }

  // Rows of an engine's tensors: elements 2^31 - 1, 2^31 and 2^31 + 1, as a token and as a head.
  for (const Index place : {(Index{1} << 31) - 1, Index{1} << 31, (Index{1} << 31) + 1}) {
    const auto bytes = 4 * static_cast<std::uint64_t>(place);
    CHECK(address(HeadVectors<float>{numbers, 1, 0}.at(place, 0)) - base == bytes);
    CHECK(address(HeadVectors<float>{numbers, 0, 1}.at(0, place)) - base == bytes);
    CHECK(address(HeadVectors<float>{numbers, place, place}.at(3, 5)) - base == 8 * bytes);
    const auto dense = DenseStates<float>::values_by_keys(numbers, 128, 128);
    StateConfig config = pool_of(128, 128, 1).state;
    CHECK(address(dense.head(place / 128, config).data) - base ==
          static_cast<std::uint64_t>(place / 128) * 65536);
  }
  // A packed batch counts tokens in 32 bits, and multiplies in 64.
  TokenBatch<float> batch;
  const std::int32_t starts[] = {0, 2147483640, 2147483647};
  batch.entries = 2;
  batch.starts = starts;
  batch.keys = {numbers, 4096, 128};
  CHECK(batch.count(0) == 2147483640);
  CHECK(batch.count(1) == 7);
  CHECK(address(batch.keys.at(batch.start(1), 31)) - base == 4 * (2147483640ULL * 4096 + 31 * 128));
  batch.starts = nullptr;
  batch.tokens = Index{1} << 20;
  CHECK(batch.start(4095) == Index{4095} << 20);
  // The rows that are free, to the last one that can be numbered.
  ReserveRowsView reserve;
  std::int32_t rows[70] = {};
  Index free = -1;
  reserve.rows = rows;
  reserve.free = &free;
  reserve.capacity = 70;
  const Index first = PoolConfig::largest_rows - 70;
  reserve.reset(first);
  CHECK(free == 70);
  for (Index i = 0; i < 70; ++i) CHECK(Index{reserve.take()} == first + i);
  CHECK(free == 0);
  const auto last = static_cast<std::int32_t>(PoolConfig::largest_rows - 1);
  reserve.give(last);
  CHECK(free == 1);
  CHECK(reserve.take() == last);
}

TEST_CASE("B41: sizes beyond 2^31 are counted, and refused where a row has no number",
          "[faults][pool]") {
  // Scratch of one compaction: over 2^31 bytes for (rank + buffer)^2 numbers alone.
  StateConfig large;
  large.d_k = large.d_v = 16384;
  large.buffer = 16384;
  const double terms = static_cast<double>(large.rank_capacity() + large.buffer);
  CHECK(static_cast<double>(workspace_bytes<Local>(large)) > 8 * terms * terms);
  StateConfig half = large;
  half.d_k = half.d_v = half.buffer = 8192;
  const double ratio = static_cast<double>(workspace_bytes<Local>(large)) /
                       static_cast<double>(workspace_bytes<Local>(half));
  CHECK(ratio == Catch::Approx(4).margin(0.01));

  // 32 heads x 64 rows: 2^20 slots would have 2^31 rows, one more than there are numbers.
  PoolConfig config = pool_of(128, 128, Index{1} << 20, 16, 32, 16);
  CHECK_THROWS_AS(pool_bytes<Local>(config), Error);
  config.slots -= 1;
  CHECK(pool_bytes<Local>(config).rows == (Index{1} << 31) - 2048);
  CHECK(pool_bytes<Local>(config).total > (std::uint64_t{1} << 41));
  config.reserve = 2047;
  CHECK(pool_bytes<Local>(config).rows == PoolConfig::largest_rows);
  config.reserve = 2048;
  CHECK_THROWS_AS(pool_bytes<Local>(config), Error);
}

// ---- Strides, places, types ----------------------------------------------------------------------

TEST_CASE("B44: strides and addresses that nothing is aligned to", "[faults][pool]") {
  const PoolConfig config = shared_pool(2);
  PoolRunner<Local> plain(config), strided(config);
  plain.admit(1);
  strided.admit(1);
  const std::vector<std::int32_t> slots{1};
  for (Index t = 0; t < 9; ++t) {
    auto tensors = plain.tensors(2);
    tensors.set(0, 4, 2 * t);
    tensors.set(1, 4, 2 * t + 1);
    const auto batch = tensors.batch(slots, 2);
    REQUIRE(step(plain.teams(), plain.view(), batch) == Status::ok);

    // The same numbers with heads before tokens, in odd places of one tensor each.
    const auto scattered = [&](const HeadVectors<const float>& from, Index heads, Index width,
                               std::vector<float>& memory) {
      const Index head_stride = 2 * (width + 3) + 1;
      memory.assign(static_cast<std::size_t>(heads * head_stride + 1), not_a_number);
      for (Index h = 0; h < heads; ++h) {
        for (Index i = 0; i < 2; ++i) {
          std::copy_n(from.at(i, h), width, memory.data() + 1 + h * head_stride + i * (width + 3));
        }
      }
      return HeadVectors<const float>{memory.data() + 1, width + 3, head_stride};
    };
    std::vector<float> memory[5];
    auto moved = batch;
    moved.keys = scattered(batch.keys, 2, 8, memory[0]);
    moved.queries = scattered(batch.queries, 2, 8, memory[1]);
    moved.values = scattered(batch.values, 4, 6, memory[2]);
    moved.log_decays = scattered(batch.log_decays, 4, 1, memory[3]);
    moved.write_strengths = scattered(batch.write_strengths, 4, 1, memory[4]);
    std::vector<float> outputs(4 * 17 + 1);
    moved.outputs = {outputs.data() + 1, 8, 17};
    REQUIRE(step(strided.teams(), strided.view(), moved) == Status::ok);
    for (Index h = 0; h < 4; ++h) {
      for (Index i = 0; i < 2; ++i) {
        CHECK(
            std::equal(batch.outputs.at(i, h), batch.outputs.at(i, h) + 6, moved.outputs.at(i, h)));
      }
    }
    plain.compact_due(1);
    strided.compact_due(1);
  }
  CHECK(snapshot_of(plain.view(), 1) == snapshot_of(strided.view(), 1));
}

TEST_CASE("B44: heads that share one vector, by a stride of 0", "[faults][pool]") {
  const PoolConfig config = pool_of(5, 3, 1, 1, 3);
  PoolRunner<Local> plain(config), shared(config);
  plain.admit(0);
  shared.admit(0);
  const std::vector<std::int32_t> slots{0};
  auto tensors = plain.tensors(1);
  tensors.set(0, 4, 0);
  for (Index h = 1; h < 3; ++h) {
    std::copy_n(tensors.values.begin(), 3, tensors.values.begin() + 3 * h);
    tensors.log_decays[static_cast<std::size_t>(h)] = tensors.log_decays[0];
    tensors.write_strengths[static_cast<std::size_t>(h)] = tensors.write_strengths[0];
  }
  auto batch = tensors.batch(slots);
  REQUIRE(step(plain.teams(), plain.view(), batch) == Status::ok);
  batch.values.head_stride = batch.log_decays.head_stride = batch.write_strengths.head_stride = 0;
  REQUIRE(step(shared.teams(), shared.view(), batch) == Status::ok);
  CHECK(snapshot_of(plain.view(), 0) == snapshot_of(shared.view(), 0));
}

TEST_CASE("B45: a pool lives in the caller's memory, and only there", "[faults][pool]") {
  const PoolConfig config = shared_pool(3);
  const std::size_t size = pool_bytes<Local>(config).total;
  AlignedMemory memory(64 + size + 64, 0x5A);
  const auto pool = make_pool<Local>(memory.data() + 64, size, config);
  PoolRunner<Local> inputs(config);
  REQUIRE(admit(pool, 2) == Status::ok);
  const std::vector<std::int32_t> slots{2};
  for (Index t = 0; t < 11; ++t) {
    auto tensors = inputs.tensors(1);
    tensors.set(0, 6, t);
    // A copy of the view works on the same states.
    const auto copy = pool;
    REQUIRE(step(inputs.teams(), copy, tensors.batch(slots)) == Status::ok);
    REQUIRE(compact_due(inputs.teams(), copy, slots.data(), 1) == Status::ok);
  }
  CHECK(snapshot_of(pool, 2) == fresh<Local>(config, 6, 11));
  for (std::size_t i = 0; i < 64; ++i) {
    CHECK(memory[i] == 0x5A);
    CHECK(memory[64 + size + i] == 0x5A);
  }
  // Moved as bytes it is the same pool: nothing in it is an address.
  AlignedMemory moved(size);
  const auto other = make_pool<Local>(moved.data(), size, config);
  std::memcpy(moved.data(), memory.data() + 64, size);
  CHECK(snapshot_of(other, 2) == snapshot_of(pool, 2));
}

TEST_CASE("B45: dense states with gaps, and transposed, are read and written in place",
          "[faults][pool]") {
  const PoolConfig config = pool_of(5, 3, 1, 1, 2);
  PoolRunner<Dense> pool(config);
  pool.admit(0);
  std::vector<float> rows(2 * 40, -1.0F), columns(2 * 40, -1.0F);
  for (int i = 0; i < 80; ++i) rows[static_cast<std::size_t>(i)] = static_cast<float>(i);
  const DenseStates<float> padded{rows.data() + 1, 37, 5, 1};
  const DenseStates<const float> read{rows.data() + 1, 37, 5, 1};
  REQUIRE(initialize(pool.teams(), pool.view(), 0, read) == Status::ok);
  const DenseStates<float> transposed{columns.data() + 2, 40, 2, 11};
  REQUIRE(materialize(pool.teams(), pool.view(), 0, transposed) == Status::ok);
  int written = 0;
  for (Index h = 0; h < 2; ++h) {
    for (Index i = 0; i < 5; ++i) {
      for (Index j = 0; j < 3; ++j) {
        CHECK(transposed.head(h, config.state)(i, j) == padded.head(h, config.state)(i, j));
      }
    }
  }
  for (const float number : columns) written += number != -1.0F ? 1 : 0;
  CHECK(written == 30);
}

// What is refused, at compile time: architecture.refuses_precision.
TEMPLATE_TEST_CASE("B47: types that a policy takes run", "[faults][pool]", (Precision<double>),
                   (Precision<float>), (Precision<float, float, Float16>),
                   (Precision<float, Float16, BFloat16>), (Precision<float, BFloat16, Float16>),
                   (Precision<float, Float8E4M3, BFloat16>)) {
  using P = Policy<Mamba2, Host, TestType, DenseBuffered>;
  const PoolConfig config = pool_of(8, 6, 1, 2, 4);
  PoolRunner<P> pool(config);
  pool.admit(0);
  pool.run(0, 2, 0, 11);
  // What comes out is what went in: the sum of the written products.
  const auto dense = pool.dense(0);
  std::vector<double> wanted(dense.size(), 0.0);
  for (Index t = 0; t < 11; ++t) {
    auto tensors = pool.tensors(1);
    tensors.set(0, 2, t);
    const auto batch = tensors.batch({});
    for (Index h = 0; h < 4; ++h) {
      const double decay = std::exp(static_cast<double>(*batch.log_decays.at(0, h)));
      for (Index i = 0; i < 8; ++i) {
        for (Index j = 0; j < 6; ++j) {
          double& x = wanted[static_cast<std::size_t>((h * 8 + i) * 6 + j)];
          x = decay * x + static_cast<double>(*batch.write_strengths.at(0, h)) *
                              static_cast<double>(batch.keys.at(0, h / 2)[i]) *
                              static_cast<double>(batch.values.at(0, h)[j]);
        }
      }
    }
  }
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    error = std::hypot(error, static_cast<double>(dense[i]) - wanted[i]);
    norm = std::hypot(norm, wanted[i]);
  }
  CHECK(norm > 0);
  CHECK(error <= 0.05 * norm);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  REQUIRE(release(pool.view(), 0) == Status::ok);
  REQUIRE(restore(pool.view(), 0, bytes, 11) == Status::ok);
  CHECK(snapshot_of(pool.view(), 0) == bytes);
}

TEMPLATE_TEST_CASE("B47: the other types that a policy takes have sizes", "[faults][pool]",
                   (Precision<float, float, BFloat16>), (Precision<float, Float16>),
                   (Precision<float, Float16, Float16>), (Precision<float, BFloat16>),
                   (Precision<float, BFloat16, BFloat16>), (Precision<float, Float8E4M3>),
                   (Precision<float, Float8E4M3, Float16>)) {
  using P = Policy<KimiDelta, Host, TestType, LocalSvd>;
  const PoolConfig config = pool_of(8, 6, 3, 2, 4);
  const PoolBytes bytes = pool_bytes<P>(config);
  constexpr bool scaled = std::is_same_v<typename P::Stored, Float8E4M3>;
  CHECK(bytes.row == 14 * sizeof(typename StatePoolView<P>::Code) + (scaled ? 2 : 0) * 4 + 4);
  CHECK(bytes.total < pool_bytes<Policy<KimiDelta, Host, Fp32, LocalSvd>>(config).total);
}

// ---- Exits ---------------------------------------------------------------------------------------

TEST_CASE("B49: 10,000 requests come and go by every door, and nothing is lost", "[faults][pool]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t count) { return random() % count; };
  PoolConfig config = pool_of(4, 3, 6, 1, 2, 2);
  config.quota = 1;
  config.reserve = 9;  // too few: copies and snapshots are refused, compactions are cut
  PoolRunner<Local> pool(config);
  const auto view = pool.view();
  std::vector<Index> owner(6, -1);
  Index requests = 0, full = 0, exhausted = 0;
  AlignedMemory kept;
  Index kept_tokens = -1;
  const auto grow = [&](std::vector<std::int32_t> from, std::vector<std::int32_t> to) {
    auto tensors = pool.tensors(1);
    tensors.set(0, below(1000), 1);
    auto batch = tensors.batch(from);
    batch.write_slots = to.data();
    const Status status = step(pool.teams(), view, batch);
    (void)compact_due(pool.teams(), view, to.data(), 1);
    return status;
  };
  while (requests < 10000) {
    const auto slot = static_cast<std::int32_t>(below(6));
    const auto other = static_cast<std::int32_t>(below(6));
    Index& here = owner[static_cast<std::size_t>(slot)];
    Index& there = owner[static_cast<std::size_t>(other)];
    switch (below(7)) {
      case 0:
      case 1: {
        const Index free = free_slot(view);
        CHECK((free < 0) == (std::count(owner.begin(), owner.end(), Index{-1}) == 0));
        if (free < 0) {
          ++full;
          CHECK(admit(view, slot) == Status::slot_in_use);
          break;
        }
        CHECK(admit(view, free) == Status::ok);
        owner[static_cast<std::size_t>(free)] = requests++;
        break;
      }
      case 2:
        CHECK(release(view, slot) == (here < 0 ? Status::invalid_slot : Status::ok));
        here = -1;
        break;
      case 3: {
        const Status status = fork(view, slot, other);
        if (status == Status::ok) there = requests++;
        exhausted += status == Status::pool_exhausted ? 1 : 0;
        break;
      }
      case 4:
        if (here >= 0 && below(4) == 0) {
          CHECK(reset(view, slot) == Status::ok);
          here = requests++;
        } else if (here >= 0 && slot != other) {
          const Status status = grow({slot}, {other});
          if (status == Status::ok) there = requests++;
          exhausted += status == Status::pool_exhausted ? 1 : 0;
        }
        break;
      case 5:
        if (here >= 0 && below(3) == 0) {
          kept = snapshot_of(view, slot);
          kept_tokens = view.slot(slot).tokens;
        } else if (kept_tokens >= 0) {
          const Status status = restore(view, slot, kept, kept_tokens);
          if (status == Status::ok) here = requests++;
          exhausted += status == Status::pool_exhausted ? 1 : 0;
        }
        break;
      default:
        if (here >= 0) (void)grow({slot}, {slot});
    }
    Index held = 0;
    for (Index s = 0; s < 6; ++s) {
      if (view.in_use(s) != (owner[static_cast<std::size_t>(s)] >= 0)) FAIL("a slot has changed");
      for (Index h = 0; view.in_use(s) && h < 2; ++h) held += *view.head(s, h).held;
    }
    if (!check_rows(view).empty()) FAIL(check_rows(view));
    if (report(view).rows != held) FAIL("rows in use");
  }
  CHECK(full > 100);
  CHECK(exhausted > 100);
  for (Index s = 0; s < 6; ++s) {
    if (view.in_use(s)) CHECK(release(view, s) == Status::ok);
  }
  CHECK(report(view).rows == 0);
  CHECK(report(view).reserve == config.reserve);
  CHECK(check_rows(view).empty());
}

// ---- Order, drafts, snapshots ----------------------------------------------------------------------

TEST_CASE("B52: five runs and any number of threads give the same bits", "[faults][pool]") {
  PoolConfig config = shared_pool(6);
  config.reserve = 40;  // who lacks rows does not depend on threads either
  std::vector<AlignedMemory> first;
  std::vector<float> first_outputs;
  for (const Index threads : {1, 4, 4, 3, 2}) {
    PoolRunner<Local> pool(config, threads);
    const std::vector<std::int32_t> slots{0, 1, 2, 3, 4, 5};
    for (const std::int32_t s : slots) pool.admit(s);
    std::vector<float> outputs;
    bool truncated = false;
    for (Index t = 0; t < 21; ++t) {
      auto tensors = pool.tensors(6);
      for (Index s = 0; s < 6; ++s) tensors.set(s, static_cast<std::uint64_t>(s), t);
      REQUIRE(step(pool.teams(), pool.view(), tensors.batch(slots)) == Status::ok);
      outputs.insert(outputs.end(), tensors.outputs.begin(), tensors.outputs.end());
      const Status status = compact_due(pool.teams(), pool.view(), slots.data(), 6);
      truncated = truncated || status == Status::truncated;
    }
    CHECK(truncated);
    std::vector<AlignedMemory> states;
    for (const std::int32_t s : slots) states.push_back(snapshot_of(pool.view(), s));
    if (first.empty()) {
      first = states;
      first_outputs = outputs;
    }
    CHECK(states == first);
    CHECK(outputs == first_outputs);
  }
}

TEST_CASE("B60: 2 of 4 accepted, a step without a draft, 0 of 4 accepted", "[faults][pool]") {
  PoolConfig config = shared_pool(1);
  config.state.draft = 4;
  PoolRunner<Local> drafting(config), plain(config);
  drafting.admit(0);
  plain.admit(0);
  const auto draft = [&](std::uint64_t request, Index first, Index accepted) {
    REQUIRE(open_draft(drafting.view(), 0) == Status::ok);
    drafting.step(0, request, first, 4);
    drafting.compact_due(0);  // not in a draft
    REQUIRE(drafting.view().slot(0).buffered >= 4);
    REQUIRE(close_draft(drafting.view(), 0, 4 - accepted) == Status::ok);
    drafting.compact_due(0);
  };
  const auto same = [&] { CHECK(snapshot_of(drafting.view(), 0) == snapshot_of(plain.view(), 0)); };
  drafting.run(0, 1, 0, 5);
  plain.run(0, 1, 0, 5);
  draft(1, 5, 2);
  plain.run(0, 1, 5, 2);
  same();
  drafting.run(0, 1, 7, 1);
  plain.run(0, 1, 7, 1);
  same();
  draft(2, 8, 0);  // tokens that the request never sees
  same();
  drafting.run(0, 1, 8, 9);
  plain.run(0, 1, 8, 9);
  same();
}

TEST_CASE("B61: a draft whose accepted end is the end of a period", "[faults][pool]") {
  PoolConfig config = shared_pool(1);
  config.state.draft = 4;
  const Index accepted = GENERATE(0, 1, 2, 3, 4);
  CAPTURE(accepted);
  // Two of four tokens are buffered: two accepted ones make the period full, three go beyond it.
  PoolRunner<Local> drafting(config), plain(config);
  drafting.admit(0);
  plain.admit(0);
  drafting.run(0, 1, 0, 6);
  plain.run(0, 1, 0, 6);
  REQUIRE(drafting.view().slot(0).buffered == 2);
  REQUIRE(open_draft(drafting.view(), 0) == Status::ok);
  drafting.step(0, 1, 6, 4);
  CHECK_FALSE(drafting.view().due(0));
  REQUIRE(close_draft(drafting.view(), 0, 4 - accepted) == Status::ok);
  CHECK(drafting.view().due(0) == (accepted >= 2));
  drafting.compact_due(0);
  if (accepted > 0) plain.step(0, 1, 6, accepted);
  plain.compact_due(0);
  CHECK(snapshot_of(drafting.view(), 0) == snapshot_of(plain.view(), 0));
  CHECK(drafting.view().slot(0).tokens == 6 + accepted);
  CHECK(drafting.run(0, 1, 6 + accepted, 7) == plain.run(0, 1, 6 + accepted, 7));
  CHECK(snapshot_of(drafting.view(), 0) == snapshot_of(plain.view(), 0));
}

TEST_CASE("B64: a snapshot has the pending tokens", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(2));
  pool.admit(0);
  pool.run(0, 1, 0, 11);
  REQUIRE(pool.view().slot(0).buffered == 3);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  REQUIRE(restore(pool.view(), 1, bytes, 11) == Status::ok);
  CHECK(pool.view().slot(1).buffered == 3);
  CHECK(pool.dense(1) == pool.dense(0));
  CHECK(pool.run(1, 1, 11, 10) == pool.run(0, 1, 11, 10));
  // They can be taken back as before.
  REQUIRE(restore(pool.view(), 1, bytes, 11) == Status::ok);
  REQUIRE(roll_back(pool.view(), 1, 3) == Status::ok);
  CHECK(snapshot_of(pool.view(), 1) == fresh<Local>(shared_pool(2), 1, 8));
}

TEST_CASE("B65: a snapshot does not change with its request", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(2));
  pool.admit(0);
  pool.run(0, 1, 0, 11);
  const AlignedMemory bytes = snapshot_of(pool.view(), 0);
  const AlignedMemory kept = bytes;
  pool.run(0, 1, 11, 20);
  REQUIRE(release(pool.view(), 0) == Status::ok);
  CHECK(bytes == kept);
  REQUIRE(restore(pool.view(), 0, bytes, 11) == Status::ok);
  pool.run(0, 1, 11, 20);
  CHECK(bytes == kept);
}

TEST_CASE("B65: a restore that fails half way has not begun", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(2));
  pool.admit(0);
  pool.run(0, 1, 0, 11);
  const AlignedMemory first = snapshot_of(pool.view(), 0, {0, 2});
  AlignedMemory second = snapshot_of(pool.view(), 0, {2, 2});
  second[second.size() - 200] ^= 1;
  pool.admit(1);
  pool.run(1, 2, 0, 9);
  const auto before = image_of(pool.view());
  const SnapshotBytes pieces[] = {first, second};
  CHECK(restore(pool.view(), 1, pieces, 2, 11) == Status::damaged_snapshot);
  CHECK(restore(pool.view(), 0, pieces, 2, 11) == Status::damaged_snapshot);
  CHECK(image_of(pool.view()) == before);
  second[second.size() - 200] ^= 1;
  CHECK(restore(pool.view(), 1, pieces, 2, 11) == Status::ok);
}

TEST_CASE("B66: what holds no request is not written", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(2));
  AlignedMemory bytes(1 << 16, 0x77);
  const AlignedMemory untouched = bytes;
  const auto refused = [&](Index slot) {
    CHECK(snapshot_bytes(pool.view(), slot) == 0);
    CHECK(snapshot(pool.view(), slot, bytes.data(), bytes.size()) == Status::invalid_slot);
    CHECK(bytes == untouched);
  };
  for (const Index slot : {-1, 0, 1, 2}) refused(slot);
  pool.admit(1);
  pool.run(1, 1, 0, 9);
  REQUIRE(release(pool.view(), 1) == Status::ok);
  refused(1);
  // Nor is a range that there is not, nor anything into memory that does not fit.
  pool.admit(1);
  for (const HeadRange range :
       {HeadRange{0, 0}, HeadRange{0, 5}, HeadRange{4, 1}, HeadRange{-1, 2}, HeadRange{2, -1}}) {
    CHECK(snapshot_bytes(pool.view(), 1, range) == 0);
    CHECK(snapshot(pool.view(), 1, range, bytes.data(), bytes.size()) == Status::invalid_argument);
  }
  const std::size_t size = snapshot_bytes(pool.view(), 1);
  CHECK(snapshot(pool.view(), 1, bytes.data(), size - 1) == Status::invalid_argument);
  CHECK(snapshot(pool.view(), 1, bytes.data() + 32, size) == Status::invalid_argument);
  CHECK(snapshot(pool.view(), 1, nullptr, size) == Status::invalid_argument);
  CHECK(bytes == untouched);
}

TEST_CASE("B68: the header of a snapshot", "[faults][pool]") {
  PoolRunner<Local> pool(shared_pool(2));
  pool.admit(0);
  pool.run(0, 1, 0, 11);
  const AlignedMemory good = snapshot_of(pool.view(), 0);
  CHECK(good.size() % 64 == 0);
  const auto header = header_of(good);
  CHECK(std::memcmp(header.magic, "sinkstat", 8) == 0);
  CHECK(header.version == 1);
  CHECK(header.byte_order == 0x01020304);
  CHECK(header.size == good.size());
  CHECK(header.buffered == 3);
  CHECK(header.tokens == 11);
  CHECK((header.d_k == 8 && header.d_v == 6 && header.heads == 4 && header.key_heads == 2));

  const auto before = image_of(pool.view());
  const auto restored = [&](const auto& change, bool sign = true) {
    AlignedMemory bytes = good;
    auto changed = header_of(bytes);
    change(changed);
    std::memcpy(bytes.data(), &changed, sizeof(changed));
    if (sign) sign_snapshot(bytes);
    const Status status = restore(pool.view(), 1, bytes, 11);
    CHECK(image_of(pool.view()) == before);
    return status;
  };
  CHECK(restored([](auto& h) { h.magic[0] = 'S'; }) == Status::damaged_snapshot);
  CHECK(restored([](auto& h) { h.version = 2; }) == Status::wrong_snapshot);
  CHECK(restored([](auto& h) { h.byte_order = 0x04030201; }) == Status::wrong_snapshot);
  CHECK(restored([](auto& h) { h.checksum += 1; }, false) == Status::damaged_snapshot);
  CHECK(restored([](auto& h) { h.size -= 64; }, false) == Status::damaged_snapshot);
  CHECK(restored([](auto& h) { h.reserved = 1; }) == Status::damaged_snapshot);
  CHECK(restored([](auto& h) { h.tokens = 12; }) == Status::wrong_snapshot);
  CHECK(restored([](auto& h) { h.buffered = 5; }) == Status::wrong_snapshot);
  CHECK(restored([](auto& h) { h.buffered = -1; }) == Status::damaged_snapshot);

  // One byte off, as a reader of a header of odd length would be: refused by its address.
  AlignedMemory shifted(good.size() + 64);
  std::memcpy(shifted.data() + 1, good.data(), good.size());
  CHECK(restore(pool.view(), 1, SnapshotBytes{shifted.data() + 1, good.size()}, 11) ==
        Status::invalid_argument);
  CHECK(restore(pool.view(), 1, SnapshotBytes{nullptr, good.size()}, 11) ==
        Status::invalid_argument);
  CHECK(restore(pool.view(), 1, SnapshotBytes{good.data(), 0}, 11) == Status::damaged_snapshot);
  CHECK(image_of(pool.view()) == before);
  CHECK(restore(pool.view(), 1, good, 11) == Status::ok);
}
