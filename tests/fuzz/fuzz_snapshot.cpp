// Snapshots that were changed, by libFuzzer: what is refused changes nothing, what is accepted is the bytes
// that were given, and every verb works on it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "fuzz_input.hpp"
#include "support/pool_requests.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using sinkstate::detail::SnapshotHead;
using sinkstate::detail::SnapshotHeader;

class Input : public FuzzBytes {
 public:
  using FuzzBytes::FuzzBytes;

  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : (byte() * 256U + byte()) % limit; }
};

template <class T>
void put(AlignedMemory& bytes, std::size_t place, T value) {
  if (place + sizeof(T) <= bytes.size()) std::memcpy(bytes.data() + place, &value, sizeof(T));
}

constexpr std::int64_t integers[] = {0,
                                     1,
                                     -1,
                                     2,
                                     3,
                                     4,
                                     7,
                                     64,
                                     1 << 20,
                                     std::numeric_limits<std::int32_t>::max(),
                                     std::numeric_limits<std::int32_t>::min(),
                                     std::int64_t{1} << 32,
                                     std::numeric_limits<std::int64_t>::max(),
                                     std::numeric_limits<std::int64_t>::min()};
constexpr double numbers[] = {0.0,
                              -0.0,
                              1.0,
                              -1.0,
                              0.5,
                              1e-3,
                              3e38,
                              -3e38,
                              1.7e38,
                              1e30,
                              1e-30,
                              1e-38,
                              1e-45,
                              1e308,
                              -1e20,
                              1e-310,
                              2.0,
                              100.0,
                              -1e-3,
                              0.25,
                              std::numeric_limits<double>::infinity(),
                              -std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()};
// Of header and head: width and place of each field.
constexpr std::size_t header_fields[][2] = {
    {4, 16}, {4, 20}, {8, 24}, {4, 32}, {4, 36}, {4, 40}, {4, 44},  {4, 48}, {4, 52}, {4, 56},
    {4, 60}, {8, 64}, {8, 72}, {8, 80}, {8, 88}, {8, 96}, {8, 104}, {8, 0},  {8, 8}};
constexpr std::size_t head_fields[][2] = {{8, 0},  {8, 8},  {8, 16}, {4, 24},
                                          {4, 28}, {4, 32}, {4, 36}, {8, 40}};

void put_field(AlignedMemory& bytes, const std::size_t (&field)[2], std::size_t base,
               std::int64_t value) {
  if (field[0] == 4) {
    put(bytes, base + field[1], static_cast<std::int32_t>(value));
  } else {
    put(bytes, base + field[1], value);
  }
}

// One change. @param head_places  where the records of the heads are
void change(Input& input, AlignedMemory& bytes, const std::vector<std::size_t>& head_places) {
  const std::size_t size = bytes.size();
  switch (input.byte() % 12) {
    case 0:
      if (size > 0) {
        const std::size_t place = input.below(size);
        bytes[place] = static_cast<unsigned char>(bytes[place] ^ (1U << input.below(8)));
      }
      break;
    case 1:
      if (size > 0) bytes[input.below(size)] = input.byte();
      break;
    case 2: {
      const auto& field = header_fields[input.below(std::size(header_fields))];
      put_field(bytes, field, 0, integers[input.below(std::size(integers))]);
      break;
    }
    case 3: {
      const auto& field = header_fields[input.below(std::size(header_fields))];
      put_field(bytes, field, 0, input.byte());
      break;
    }
    case 4: {
      const auto& field = head_fields[input.below(std::size(head_fields))];
      put_field(bytes, field, head_places[input.below(head_places.size())],
                integers[input.below(std::size(integers))]);
      break;
    }
    case 5: {
      const auto& field = head_fields[input.below(std::size(head_fields))];
      put_field(bytes, field, head_places[input.below(head_places.size())], input.byte());
      break;
    }
    case 6: {
      // A number in some array, or several in a row.
      const auto value = numbers[input.below(std::size(numbers))];
      const std::size_t place = 4 * input.below(size / 4);
      for (std::size_t i = 0, count = 1 + input.below(24); i < count; ++i) {
        put(bytes, place + 4 * i, static_cast<float>(value));
      }
      break;
    }
    case 7: {
      const std::size_t place = 8 * input.below(size / 8);
      put(bytes, place, numbers[input.below(std::size(numbers))]);
      break;
    }
    case 8: {
      const std::size_t place = 2 * input.below(size / 2);
      put(bytes, place, static_cast<std::uint16_t>(input.below(65536)));
      break;
    }
    case 9:
      // A line for another.
      if (size >= 64) {
        std::memmove(bytes.data() + 64 * input.below(size / 64),
                     bytes.data() + 64 * input.below(size / 64), 64);
      }
      break;
    case 10: {
      // Cut, or made longer.
      const std::size_t wanted = std::min(input.below(size + 200), size + 128);
      AlignedMemory other(wanted);
      for (std::size_t i = 0; i < std::min(size, wanted); ++i) other[i] = bytes[i];
      bytes = other;
      break;
    }
    default:
      for (std::size_t place = input.below(size + 1), i = 0; i < 8 && place + i < size; ++i) {
        bytes[place + i] = input.byte();
      }
  }
}

// The places of the heads' records in a good snapshot of a pool.
template <class P>
std::vector<std::size_t> places_of_heads(StatePoolView<P> pool, Index slot,
                                         const HeadRange& range) {
  std::vector<std::size_t> places;
  const Index buffered = pool.slot(slot).buffered;
  Workspace walk;
  walk.take<SnapshotHeader>(1);
  for (Index k = 0; k < sinkstate::detail::key_heads_of(pool.config, range); ++k) {
    walk.take<typename StatePoolView<P>::BufferedCode>(buffered * pool.config.state.d_k);
  }
  for (Index h = range.first; h < range.first + range.count; ++h) {
    places.push_back(walk.used());
    walk.take<SnapshotHead>(1);
    sinkstate::detail::SnapshotArrays<P> arrays;
    const auto state = pool.state(slot, h);
    arrays.for_each(pool.config.state, buffered, state.rank(), state.dense(),
                    [&](auto*& array, Index count) {
                      walk.take<std::remove_reference_t<decltype(*array)>>(count);
                    });
  }
  return places;
}

template <class P>
class Target {
 public:
  using T = typename P::Compute;

  explicit Target(const PoolConfig& config) : pool_(config) {
    // The bystanders.
    pool_.admit(0);
    pool_.run(0, 1, 0, 5);
    pool_.admit(2);
    pool_.run(2, 2, 0, 11);
    // What is snapshot: nothing, tokens alone, factors and tokens, noise that may have turned dense, and
    // a state of one term.
    for (const Index tokens : {0, 2, 5, 11}) {
      pool_.admit(1);
      pool_.run(1, 3, 0, tokens);
      keep(tokens);
    }
    pool_.admit(1);
    for (Index t = 0; t < 11; ++t) {
      pool_.step(1, 4, 0);
      pool_.compact_due(1);
    }
    keep(11);
    alone_ = image_of(pool_.view());
  }

  void run(Input& input) {
    const auto view = pool_.view();
    const Case& chosen = cases_[input.below(cases_.size())];
    const int flags = input.byte();
    std::vector<Piece> pieces = chosen.parts[flags / 8 % 2];
    for (int operation = 0; operation < 40 && !input.empty(); ++operation) {
      Piece& piece = pieces[input.below(pieces.size())];
      change(input, piece.bytes, piece.head_places);
    }
    std::vector<SnapshotBytes> given;
    for (Piece& piece : pieces) {
      if (flags % 4 != 0 && piece.bytes.size() >= sizeof(SnapshotHeader))
        sign_snapshot(piece.bytes);
      given.push_back(piece.bytes);
    }
    std::uint64_t before = alone_;
    if (flags / 4 % 2 == 1) {
      require(fork(view, 0, 1) == Status::ok, "a fork was refused");
      before = image_of(view);
    }
    const auto count = static_cast<Index>(given.size());
    const Status status = restore(view, 1, given.data(), count, chosen.tokens);
    if (status == Status::ok) {
      check_accepted(pieces, chosen.tokens);
      use();
    } else {
      require(image_of(view) == before, "a refused snapshot changed the pool");
    }
    if (view.in_use(1)) require(release(view, 1) == Status::ok, "a release was refused");
    require(image_of(view) == alone_, "another request has changed, or rows are lost");
  }

 private:
  struct Piece {
    AlignedMemory bytes;
    std::vector<std::size_t> head_places;
  };
  struct Case {
    Index tokens = 0;
    std::vector<Piece> parts[2];  // in one piece, and in two
  };

  void keep(Index tokens) {
    const auto view = pool_.view();
    const auto piece = [&](const HeadRange& range) {
      return Piece{snapshot_of(view, 1, range), places_of_heads(view, 1, range)};
    };
    const Index heads = view.config.value_heads;
    cases_.push_back({tokens, {{piece({0, heads})}, {piece({0, 1}), piece({1, heads - 1})}}});
    require(release(view, 1) == Status::ok, "a release was refused");
  }

  // The pool's snapshot is the one that was given: to the byte, if that had the heads of the pool in one
  // piece and shares keys as the pool does; else in what it is restored to again.
  void check_accepted(const std::vector<Piece>& pieces, Index tokens) {
    const auto view = pool_.view();
    const AlignedMemory bytes = snapshot_of(view, 1);
    if (pieces.size() == 1 && bytes.size() == pieces[0].bytes.size()) {
      const SnapshotHeader was = header_of(pieces[0].bytes), is = header_of(bytes);
      bool alike =
          was.key_heads == is.key_heads && was.first_head == is.first_head && was.heads == is.heads;
      for (const std::size_t place : places_of_heads(view, 1, {0, view.config.value_heads})) {
        alike = alike && std::memcmp(bytes.data() + place + 36, pieces[0].bytes.data() + place + 36,
                                     sizeof(std::int32_t)) == 0;
      }
      require(!alike || bytes == pieces[0].bytes, "a restored request is not its snapshot");
    }
    require(restore(view, 1, bytes, tokens) == Status::ok,
            "a snapshot of a restored one is refused");
    require(snapshot_of(view, 1) == bytes, "a snapshot of a restored one is another one");
  }

  // Whatever the numbers are: no status is wrong, but each verb ends and stays in its memory.
  void use() {
    const auto view = pool_.view();
    const std::vector<std::int32_t> slots{1};
    auto tensors = pool_.tensors(1);
    std::vector<T> output(static_cast<std::size_t>(view.config.state.d_v));
    std::vector<T> dense(static_cast<std::size_t>(view.config.value_heads * view.config.state.d_k *
                                                  view.config.state.d_v));
    for (Index t = 0; t < 3; ++t) {
      tensors.set(0, 5, t);
      (void)step(pool_.teams(), view, tensors.batch(slots));
      for (Index h = 0; h < view.config.value_heads; ++h) {
        pool_.teams().for_each(1, [&](auto& team, Index) {
          (void)read_out(team, view.state(1, h), tensors.queries.data(), output.data());
        });
      }
      (void)materialize(pool_.teams(), view, 1,
                        DenseStates<T>::values_by_keys(dense.data(), view.config.state.d_k,
                                                       view.config.state.d_v));
      const Status status = compact(pool_.teams(), view, slots.data(), 1);
      if (status != Status::ok && status != Status::truncated) return;
    }
    (void)roll_back(view, 1, 1);
    (void)report(view);
  }

  PoolRunner<P> pool_;
  std::vector<Case> cases_;
  std::uint64_t alone_ = 0;  // the image of the bystanders
};

PoolConfig config_of(Index value_heads, HeadMap map, Index quota, Index reserve) {
  PoolConfig config = pool_of(9, 7, 3, 2, value_heads, 3);
  config.head_map = map;
  config.state.epsilon = 0.05;
  config.state.draft = 1;
  config.state.dense_retry = 2;
  config.state.tail_period = 1;
  config.state.active = 2;
  config.quota = quota;
  config.reserve = reserve;
  return config;
}

template <class P>
void run_policy(Input& input, const PoolConfig& config) {
  static Target<P> target(config);
  target.run(input);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  switch (input.byte() % 5) {
    case 0:
      run_policy<Policy<GatedDelta, Host, Fp32, LocalSvd>>(
          input, config_of(4, HeadMap::interleaved, 1, 48));
      break;
    case 1:
      run_policy<
          Policy<KimiDelta, Host, Precision<float, Float8E4M3, BFloat16>, LocalSvd, MeanValueSink>>(
          input, config_of(4, HeadMap::tiled, 0, 0));
      break;
    case 2: {
      PoolConfig config = config_of(2, HeadMap::interleaved, 0, 0);
      config.state.rank_cap = 3;
      run_policy<Policy<GatedDelta, Host, Precision<float, Float16, Float16>, FixedRank>>(input,
                                                                                          config);
      break;
    }
    case 3:
      run_policy<Policy<Mamba2, Host, Fp8, DenseBuffered, MeanValueSink>>(
          input, config_of(2, HeadMap::interleaved, 0, 0));
      break;
    default:
      run_policy<Policy<KimiDelta, Host, Fp64, FullSvd>>(input,
                                                         config_of(4, HeadMap::tiled, 2, 30));
  }
  return 0;
}
