/// @file
/// A request as bytes: to keep, to send, to cut by heads.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../config.hpp"
#include "../core/checksum.hpp"
#include "../core/matrix_view.hpp"
#include "../core/number_formats.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/pool_slots.hpp"
#include "../model/state_pool.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// The value heads [first, first + count) of a pool.
struct HeadRange {
  Index first = 0;
  Index count = 0;
};

/// Bytes of a snapshot, the whole of a request or a range of its heads.
struct SnapshotBytes {
  const void* data = nullptr;  ///< aligned to 64
  std::size_t size = 0;
};

namespace detail {

/// docs/snapshot.md describes the format. All numbers are as the machine has them; `byte_order`
/// tells whether another would read them differently.
struct SnapshotHeader {
  static constexpr char expected_magic[8] = {'s', 'i', 'n', 'k', 's', 't', 'a', 't'};
  static constexpr std::uint32_t expected_version = 1;
  static constexpr std::uint32_t expected_order = 0x01020304;

  char magic[8] = {};
  std::uint64_t checksum = 0;  // of all that follows
  std::uint32_t version = 0;
  std::uint32_t byte_order = 0;
  std::uint64_t size = 0;  // of the whole
  std::uint32_t policy[6] = {};
  std::int32_t buffered = 0;  // tokens, in each head
  std::int32_t reserved = 0;
  std::int64_t d_k = 0;
  std::int64_t d_v = 0;
  std::int64_t first_head = 0;  // in the whole layer
  std::int64_t heads = 0;
  std::int64_t key_heads = 0;  // whose buffered keys are here
  std::int64_t tokens = 0;
};
static_assert(std::is_trivially_copyable_v<SnapshotHeader> && sizeof(SnapshotHeader) == 112);

struct SnapshotHead {
  std::int64_t compactions = 0;
  std::int64_t settled_rank = 0;
  std::int64_t tokens = 0;  // of its record
  std::int32_t dense_age = 0;
  std::int32_t dense = 0;
  std::int32_t rank = 0;
  std::int32_t key_head = 0;         // among those that are here
  std::uint64_t sink_direction = 0;  // checksum; 0 without a sink
};
static_assert(std::is_trivially_copyable_v<SnapshotHead> && sizeof(SnapshotHead) == 48);

inline std::uint64_t snapshot_checksum(const void* data, std::size_t size) {
  constexpr std::size_t before = 16;  // magic and checksum
  return checksum(static_cast<const unsigned char*>(data) + before, size - before);
}

template <class Number>
constexpr std::uint32_t format_id() {
  if constexpr (std::is_same_v<Number, double>) return 64;
  if constexpr (std::is_same_v<Number, Float16>) return 16;
  if constexpr (std::is_same_v<Number, BFloat16>) return 17;
  if constexpr (std::is_same_v<Number, Float8E4M3>) return 8;
  return 32;
}

/// What of a policy decides how bytes are read and continued.
template <class Policy>
void set_policy(std::uint32_t (&id)[6]) {
  using Compaction = typename Policy::Compaction;
  id[0] = (Policy::Rule::corrects ? 4u : 0u) + static_cast<std::uint32_t>(Policy::Rule::decay);
  id[1] = format_id<typename Policy::Compute>();
  id[2] = format_id<typename Policy::Stored>();
  id[3] = format_id<typename Policy::Buffered>();
  id[4] = std::is_same_v<Compaction, LocalSvd>    ? 0u
          : std::is_same_v<Compaction, FullSvd>   ? 1u
          : std::is_same_v<Compaction, FixedRank> ? 2u
                                                  : 3u;
  id[5] = Policy::Sink::present ? 1u : 0u;
}

/// The arrays of one head, one after the other as they lie.
template <class Policy>
struct SnapshotArrays {
  using T = typename Policy::Compute;
  using Code = typename StatePoolView<Policy>::Code;
  using BufferedCode = typename StatePoolView<Policy>::BufferedCode;

  BufferedCode* corrections = nullptr;  // buffered x d_v
  T* log_decays = nullptr;              // buffered x Rule::log_decays(d_k)
  T* certificates = nullptr;            // buffered + 1
  T* masses = nullptr;                  // buffered + 1
  Code* sink = nullptr;                 // d_k
  T* strengths = nullptr;               // rank
  Code* body = nullptr;                 // rank x (d_k + d_v), or d_k x d_v
  float* scales = nullptr;              // of the sink, then two a term, or one a matrix row

  /// @param piece  piece(pointer, count): takes `count` numbers more
  template <class Piece>
  void for_each(const StateConfig& config, Index buffered, Index rank, bool dense,
                const Piece& piece) {
    constexpr Index sinks = Policy::Sink::present ? 1 : 0;
    constexpr bool scaled = StoredAs<typename Policy::Stored>::scaled;
    piece(corrections, buffered * config.d_v);
    piece(log_decays, buffered * Policy::Rule::log_decays(config.d_k));
    piece(certificates, buffered + 1);
    piece(masses, buffered + 1);
    piece(sink, sinks * config.d_k);
    piece(strengths, dense ? 0 : rank);
    piece(body, dense ? config.d_k * config.d_v : rank * (config.d_k + config.d_v));
    piece(scales, scaled ? sinks + (dense ? config.d_k : 2 * rank) : 0);
  }
};

/// Value heads [first, first + count): how many key heads they read, and which of those head h
/// does.
inline Index key_heads_of(const PoolConfig& config, const HeadRange& range) {
  if (config.head_map == HeadMap::tiled) {
    return range.count < config.key_heads ? range.count : config.key_heads;
  }
  return config.key_head(range.first + range.count - 1) - config.key_head(range.first) + 1;
}
inline Index key_place(const PoolConfig& config, const HeadRange& range, Index h) {
  return config.head_map == HeadMap::tiled ? (h - range.first) % config.key_heads
                                           : config.key_head(h) - config.key_head(range.first);
}
/// The inverse: the key head of the pool at a place.
inline Index key_head_at(const PoolConfig& config, const HeadRange& range, Index place) {
  return config.head_map == HeadMap::tiled ? (range.first + place) % config.key_heads
                                           : config.key_head(range.first) + place;
}

inline bool is_range(const PoolConfig& config, const HeadRange& range) {
  return range.first >= 0 && range.count >= 1 && range.count <= config.value_heads &&
         range.first <= config.value_heads - range.count;
}

/// Lays a snapshot out, or counts its bytes.
/// @param memory  the bytes, zeroed, or an empty workspace
template <class Policy>
void write_snapshot(const StatePoolView<Policy>& pool, Index slot, const HeadRange& range,
                    Workspace& memory) {
  using View = StatePoolView<Policy>;
  const StateConfig& config = pool.config.state;
  const Index buffered = pool.slot(slot).buffered;
  const Index key_heads = key_heads_of(pool.config, range);
  const auto copy = [](const auto* from, Index count, auto* to) {
    if (to != nullptr && count > 0) {
      std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(*to));
    }
  };

  auto* const header = memory.take<SnapshotHeader>(1);
  if (header != nullptr) {
    SnapshotHeader filled;
    std::memcpy(filled.magic, SnapshotHeader::expected_magic, sizeof(filled.magic));
    filled.version = SnapshotHeader::expected_version;
    filled.byte_order = SnapshotHeader::expected_order;
    set_policy<Policy>(filled.policy);
    filled.buffered = static_cast<std::int32_t>(buffered);
    filled.d_k = config.d_k;
    filled.d_v = config.d_v;
    filled.first_head = pool.config.first_head + range.first;
    filled.heads = range.count;
    filled.key_heads = key_heads;
    filled.tokens = pool.slot(slot).tokens;
    copy(&filled, 1, header);
  }
  for (Index k = 0; k < key_heads; ++k) {
    auto* const keys = memory.take<typename View::BufferedCode>(buffered * config.d_k);
    copy(codes_of(pool.keys(slot, key_head_at(pool.config, range, k))).row(0),
         buffered * config.d_k, keys);
  }
  for (Index h = range.first; h < range.first + range.count; ++h) {
    const auto state = pool.state(slot, h);
    const bool dense = state.dense();
    const Index rank = state.rank();
    auto* const head = memory.take<SnapshotHead>(1);
    SnapshotArrays<Policy> to;
    to.for_each(config, buffered, rank, dense, [&](auto*& array, Index count) {
      array = memory.take<std::remove_reference_t<decltype(*array)>>(count);
    });
    if (head == nullptr || memory.exhausted()) continue;
    SnapshotHead filled;
    filled.compactions = state.record->compactions;
    filled.settled_rank = state.record->settled_rank;
    filled.tokens = state.record->tokens;
    filled.dense_age = state.record->dense_age;
    filled.dense = state.record->dense;
    filled.rank = static_cast<std::int32_t>(rank);
    filled.key_head = static_cast<std::int32_t>(key_place(pool.config, range, h));
    if (Policy::Sink::present) {
      filled.sink_direction = checksum(state.sink_direction, static_cast<std::size_t>(config.d_v) *
                                                                 sizeof(*state.sink_direction));
    }
    copy(&filled, 1, head);
    copy(codes_of(state.buffer.corrections).row(0), buffered * config.d_v, to.corrections);
    copy(state.buffer.log_decays.row(0), buffered * state.buffer.log_decays.cols, to.log_decays);
    copy(state.buffer.certificates, buffered + 1, to.certificates);
    copy(state.buffer.masses, buffered + 1, to.masses);
    const auto write = [&](const auto& rows, Index count, auto* target, Index stride, float* scales,
                           Index scale_stride) {
      for (Index i = 0; i < count; ++i) {
        if constexpr (StoredAs<typename Policy::Stored>::narrow) {
          copy(rows.codes.row(i), rows.codes.cols, target + i * stride);
          if (StoredAs<typename Policy::Stored>::scaled) scales[i * scale_stride] = rows.scale(i);
        } else {
          copy(rows.row(i), rows.cols, target + i * stride);
        }
      }
    };
    constexpr Index sinks = Policy::Sink::present ? 1 : 0;
    constexpr bool scaled = StoredAs<typename Policy::Stored>::scaled;
    float* const scales = scaled ? to.scales + sinks : nullptr;
    write(state.sink, sinks, to.sink, config.d_k, to.scales, 1);
    if (dense) {
      write(state.matrix, config.d_k, to.body, config.d_v, scales, 1);
    } else {
      const Index width = config.d_k + config.d_v;
      write(state.factors.keys(), rank, to.body, width, scales, 2);
      write(state.factors.values(), rank, to.body + config.d_k, width,
            scaled ? scales + 1 : nullptr, 2);
      for (Index i = 0; i < rank; ++i) to.strengths[i] = state.factors.strength(i);
    }
  }
}

/// Takes arrays from bytes that nobody vouches for: never past their end, and what is between two
/// arrays must be zero.
class SnapshotReader {
 public:
  explicit SnapshotReader(const SnapshotBytes& bytes) : bytes_(bytes) {}

  /// `count` numbers; null when there are not as many.
  template <class T>
  const T* take(Index count) {
    const std::size_t size = static_cast<std::size_t>(count) * sizeof(T);
    const std::size_t padded =
        (size + Workspace::alignment - 1) / Workspace::alignment * Workspace::alignment;
    if (padded > bytes_.size - used_) {
      good_ = false;
      return nullptr;
    }
    const auto* const start = static_cast<const unsigned char*>(bytes_.data) + used_;
    for (std::size_t i = size; i < padded; ++i) good_ = good_ && start[i] == 0;
    used_ += padded;
    return good_ ? reinterpret_cast<const T*>(start) : nullptr;
  }
  bool good() const { return good_; }
  bool at_end() const { return good_ && used_ == bytes_.size; }

 private:
  SnapshotBytes bytes_;
  std::size_t used_ = 0;
  bool good_ = true;
};

/// Whether numbers, or codes times their scale, are finite.
template <class Stored, class Code>
bool all_finite(const Code* codes, Index count, float scale = 1.0f) {
  for (Index i = 0; i < count; ++i) {
    if constexpr (StoredAs<Stored>::narrow) {
      if (!std::isfinite(scale * widen<Stored>(codes[i]))) return false;
    } else {
      if (!std::isfinite(codes[i])) return false;
    }
  }
  return true;
}
template <class T>
bool all_at_least_zero(const T* numbers, Index count) {
  for (Index i = 0; i < count; ++i) {
    if (!(numbers[i] >= T(0))) return false;
  }
  return true;
}

/// No number is larger than the one before it.
template <class T>
bool all_falling(const T* numbers, Index count) {
  for (Index i = 1; i < count; ++i) {
    if (!(numbers[i] <= numbers[i - 1])) return false;
  }
  return true;
}

/// A head of a snapshot.
template <class Policy>
struct ReadHead {
  SnapshotHead head;
  SnapshotArrays<Policy> arrays;
};

/// Takes the next head and looks at its counters.
template <class Policy>
Status read_head(SnapshotReader& reader, const StateConfig& config, const SnapshotHeader& header,
                 ReadHead<Policy>& read) {
  using State = SinkStateView<Policy>;
  const auto* const head = reader.take<SnapshotHead>(1);
  if (head == nullptr) return Status::damaged_snapshot;
  read.head = *head;
  const SnapshotHead& h = read.head;
  const bool dense = h.dense == 1;
  const bool form =
      dense ? h.rank == 0 : h.dense == 0 && h.rank >= 0 && Policy::Compaction::low_rank;
  if (!form || h.key_head < 0 || h.key_head >= header.key_heads || h.compactions < 0 ||
      h.tokens < header.buffered || h.tokens > header.tokens ||
      h.compactions > h.tokens - header.buffered || h.dense_age < 0 || h.dense_age > largest_size ||
      h.settled_rank < 0 || h.settled_rank > largest_size) {
    return Status::damaged_snapshot;
  }
  // As much as a state of this configuration can have.
  if (dense ? !State::may_be_dense(config) : h.rank > State::rank_capacity(config)) {
    return Status::wrong_snapshot;
  }
  read.arrays.for_each(config, header.buffered, h.rank, dense, [&](auto*& array, Index count) {
    using Number = std::remove_reference_t<decltype(*array)>;
    array = const_cast<Number*>(reader.template take<Number>(count));
  });
  return reader.good() ? Status::ok : Status::damaged_snapshot;
}

/// Whether all numbers of a head could be those of a state.
template <class Policy>
bool check_numbers(const StateConfig& config, const SnapshotHeader& header,
                   const ReadHead<Policy>& read) {
  using Stored = typename Policy::Stored;
  using T = typename Policy::Compute;
  SnapshotArrays<Policy> a = read.arrays;
  Index counts[8] = {};
  int n = 0;
  a.for_each(config, header.buffered, read.head.rank, read.head.dense == 1,
             [&](auto*&, Index count) { counts[n++] = count; });
  bool scales = true;
  for (Index i = 0; i < counts[7]; ++i) {
    int exponent = 0;
    scales = scales && std::isfinite(a.scales[i]) && std::frexp(a.scales[i], &exponent) == 0.5f;
  }
  if constexpr (StoredAs<Stored>::scaled) {
    // What a scale stands before: the sink, then keys and values in turn, or rows of a matrix.
    const auto finite = [&](const auto* codes, Index count, Index place) {
      return all_finite<Stored>(codes, count, a.scales[place]);
    };
    const Index sinks = Policy::Sink::present ? 1 : 0;
    scales = scales && (sinks == 0 || finite(a.sink, config.d_k, 0));
    const bool dense = read.head.dense == 1;
    const Index width = dense ? config.d_v : config.d_k + config.d_v;
    for (Index i = 0; scales && i < (dense ? config.d_k : Index{read.head.rank}); ++i) {
      const auto* const row = a.body + i * width;
      scales = dense ? finite(row, width, sinks + i)
                     : finite(row, config.d_k, sinks + 2 * i) &&
                           finite(row + config.d_k, config.d_v, sinks + 2 * i + 1);
    }
  }
  // Compactions count on the order, where rounding has not changed it.
  const bool falling = StoredAs<Stored>::narrow || all_falling(a.strengths, counts[5]);
  bool decays = true;
  for (Index i = 0; i < counts[1]; ++i) decays = decays && a.log_decays[i] <= T(0);
  return scales && falling && decays &&
         all_finite<typename Policy::Buffered>(a.corrections, counts[0]) &&
         all_at_least_zero(a.certificates, counts[2]) && all_at_least_zero(a.masses, counts[3]) &&
         all_finite<Stored>(a.sink, counts[4]) && all_finite<T>(a.strengths, counts[5]) &&
         all_at_least_zero(a.strengths, counts[5]) && all_finite<Stored>(a.body, counts[6]);
}

/// A snapshot while it is read: its header, checked, and the reader behind the keys.
template <class Policy>
struct ReadSnapshot {
  using BufferedCode = typename StatePoolView<Policy>::BufferedCode;

  SnapshotHeader header;
  SnapshotReader reader;
  const unsigned char* keys = nullptr;
  std::size_t key_bytes = 0;  // from one key head to the next

  explicit ReadSnapshot(const SnapshotBytes& bytes) : reader(bytes) {}

  /// @param whole  look at the checksum and the numbers too, which is to be done once
  Status open(const PoolConfig& config, const SnapshotBytes& bytes, bool whole) {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(bytes.data) % Workspace::alignment;
    if (bytes.data == nullptr || misaligned != 0) return Status::invalid_argument;
    const auto* const first = reader.take<SnapshotHeader>(1);
    if (first == nullptr) return Status::damaged_snapshot;
    header = *first;
    if (std::memcmp(header.magic, SnapshotHeader::expected_magic, sizeof(header.magic)) != 0 ||
        header.size != bytes.size) {
      return Status::damaged_snapshot;
    }
    if (header.version != SnapshotHeader::expected_version ||
        header.byte_order != SnapshotHeader::expected_order) {
      return Status::wrong_snapshot;
    }
    if (whole && header.checksum != snapshot_checksum(bytes.data, bytes.size))
      return Status::damaged_snapshot;
    std::uint32_t policy[6] = {};
    set_policy<Policy>(policy);
    const StateConfig& state = config.state;
    if (std::memcmp(policy, header.policy, sizeof(policy)) != 0 || header.d_k != state.d_k ||
        header.d_v != state.d_v || header.buffered > state.buffer_capacity()) {
      return Status::wrong_snapshot;
    }
    if (header.reserved != 0 || header.buffered < 0 || header.tokens < 0 || header.heads < 1 ||
        header.heads > largest_size || header.first_head < 0 || header.first_head > largest_size ||
        header.key_heads < 1 || header.key_heads > header.heads) {
      return Status::damaged_snapshot;
    }
    const Index numbers = header.buffered * state.d_k;
    for (Index k = 0; k < header.key_heads; ++k) {
      const auto* const one = reader.template take<BufferedCode>(numbers);
      if (one == nullptr) return Status::damaged_snapshot;
      if (whole && !all_finite<typename Policy::Buffered>(one, numbers)) {
        return Status::damaged_snapshot;
      }
      const auto* const place = reinterpret_cast<const unsigned char*>(one);
      if (k == 0) keys = place;
      if (k == 1) key_bytes = static_cast<std::size_t>(place - keys);
    }
    return Status::ok;
  }

  const BufferedCode* keys_of(const SnapshotHead& head) const {
    return reinterpret_cast<const BufferedCode*>(keys + static_cast<std::size_t>(head.key_head) *
                                                            key_bytes);
  }
};

/// One head of the pieces of a request, as the pool numbers it; outside its range if it has no such
/// head.
template <class Policy, class Visit>
Status for_each_head(const StatePoolView<Policy>& pool, const SnapshotBytes* pieces, Index count,
                     bool whole, const Visit& visit) {
  for (Index p = 0; p < count; ++p) {
    ReadSnapshot<Policy> snapshot(pieces[p]);
    Status status = snapshot.open(pool.config, pieces[p], whole);
    Index keys =
        0;  // that heads have named so far, each for the first time after the one before it
    for (Index i = 0; status == Status::ok && i < snapshot.header.heads; ++i) {
      ReadHead<Policy> read;
      status = read_head(snapshot.reader, pool.config.state, snapshot.header, read);
      if (status == Status::ok) {
        keys += read.head.key_head == keys ? 1 : 0;
        const bool good = read.head.key_head < keys &&
                          (!whole || check_numbers(pool.config.state, snapshot.header, read));
        if (!good) status = Status::damaged_snapshot;
      }
      if (status == Status::ok) {
        status = visit(snapshot, read, snapshot.header.first_head + i - pool.config.first_head);
      }
    }
    if (status != Status::ok) return status;
    if (!snapshot.reader.at_end() || keys != snapshot.header.key_heads) {
      return Status::damaged_snapshot;
    }
  }
  return Status::ok;
}

/// Whether pieces make up a request for this pool and slot, all of it looked at.
template <class Policy>
Status check_pieces(const StatePoolView<Policy>& pool, Index slot, const SnapshotBytes* pieces,
                    Index count, Index tokens) {
  const PoolConfig& config = pool.config;
  const auto is_head = [&](Index h) { return h >= 0 && h < config.value_heads; };
  Index rows = 0;  // of the reserve
  Index found = 0;
  Index buffered = -1;
  const Status status = for_each_head(
      pool, pieces, count, true,
      [&](const ReadSnapshot<Policy>& piece, const ReadHead<Policy>& read, Index h) {
        if (buffered < 0) buffered = piece.header.buffered;
        if (piece.header.tokens != tokens || piece.header.buffered != buffered) {
          return Status::wrong_snapshot;
        }
        if (!is_head(h)) return Status::ok;
        found += 1;
        rows += beyond_quota(
            pool, read.head.dense == 1 ? pool.dense_rows(config.state) : Index{read.head.rank});
        const std::uint64_t direction =
            Policy::Sink::present
                ? checksum(pool.sink_directions.row(h), static_cast<std::size_t>(config.state.d_v) *
                                                            sizeof(typename Policy::Compute))
                : 0;
        return read.head.sink_direction == direction ? Status::ok : Status::wrong_snapshot;
      });
  if (status != Status::ok) return status;
  // Every head once: as many as there are, and no two pieces with the same.
  if (found != config.value_heads) return Status::wrong_snapshot;
  for (Index p = 0; p < count; ++p) {
    ReadSnapshot<Policy> one(pieces[p]);
    if (one.open(config, pieces[p], false) != Status::ok) return Status::damaged_snapshot;
    for (Index o = 0; o < p; ++o) {
      ReadSnapshot<Policy> other(pieces[o]);
      if (other.open(config, pieces[o], false) != Status::ok) return Status::damaged_snapshot;
      const Index pool_end = config.first_head + config.value_heads;
      const auto first = [&](const SnapshotHeader& header) {
        return header.first_head > config.first_head ? header.first_head : config.first_head;
      };
      const auto end = [&](const SnapshotHeader& header) {
        const Index last = header.first_head + header.heads;
        return last < pool_end ? last : pool_end;
      };
      if (first(one.header) < end(other.header) && first(other.header) < end(one.header)) {
        return Status::wrong_snapshot;
      }
    }
  }
  // Heads that share keys in this pool must have shared them before.
  const auto key_bytes = static_cast<std::size_t>(buffered * config.state.d_k) *
                         sizeof(typename StatePoolView<Policy>::BufferedCode);
  for (Index k = 0; k < config.key_heads; ++k) {
    const void* keys = nullptr;
    const Status same = for_each_head(
        pool, pieces, count, false,
        [&](const ReadSnapshot<Policy>& piece, const ReadHead<Policy>& read, Index h) {
          if (!is_head(h) || config.key_head(h) != k) return Status::ok;
          const void* const own = piece.keys_of(read.head);
          const bool equal = keys == nullptr || std::memcmp(keys, own, key_bytes) == 0;
          keys = own;
          return equal ? Status::ok : Status::wrong_snapshot;
        });
    if (same != Status::ok) return same;
  }
  Index released = 0;
  for (Index h = 0; pool.in_use(slot) && h < config.value_heads; ++h) {
    released += beyond_quota(pool, *pool.head(slot, h).held);
  }
  return rows <= *pool.reserve.free + released ? Status::ok : Status::pool_exhausted;
}

/// Makes a head of a slot what a snapshot says. There are rows enough.
template <class Policy>
void restore_head(const StatePoolView<Policy>& pool, Index slot, Index h,
                  const ReadSnapshot<Policy>& piece, const ReadHead<Policy>& read) {
  const StateConfig& config = pool.config.state;
  const auto copy = [](const auto* from, Index count, auto* to) {
    for (Index i = 0; i < count; ++i) to[i] = from[i];
  };
  const auto head = pool.head(slot, h);
  const SnapshotHead& from = read.head;
  const Index buffered = piece.header.buffered;
  *head.record =
      StateRecord{from.tokens, from.compactions, from.dense, from.dense_age, from.settled_rank};
  *head.rank = from.rank;
  *head.buffer.count = static_cast<std::int32_t>(buffered);
  hold_rows(pool, head, rows_in_use(pool, head));
  const auto state = pool.state(slot, h);
  copy(piece.keys_of(from), buffered * config.d_k, codes_of(state.buffer.keys).row(0));
  copy(read.arrays.corrections, buffered * config.d_v, codes_of(state.buffer.corrections).row(0));
  copy(read.arrays.log_decays, buffered * state.buffer.log_decays.cols,
       state.buffer.log_decays.row(0));
  copy(read.arrays.certificates, buffered + 1, state.buffer.certificates);
  copy(read.arrays.masses, buffered + 1, state.buffer.masses);
  const auto write = [&](const auto& rows, Index count, const auto* source, Index stride,
                         const float* scales, Index scale_stride) {
    for (Index i = 0; i < count; ++i) {
      if constexpr (StoredAs<typename Policy::Stored>::narrow) {
        copy(source + i * stride, rows.codes.cols, rows.codes.row(i));
        if (StoredAs<typename Policy::Stored>::scaled) rows.scales(i, 0) = scales[i * scale_stride];
      } else {
        copy(source + i * stride, rows.cols, rows.row(i));
      }
    }
  };
  constexpr Index sinks = Policy::Sink::present ? 1 : 0;
  constexpr bool scaled = StoredAs<typename Policy::Stored>::scaled;
  const float* const scales = scaled ? read.arrays.scales + sinks : nullptr;
  write(state.sink, sinks, read.arrays.sink, config.d_k, read.arrays.scales, 1);
  if (state.dense()) {
    write(state.matrix, config.d_k, read.arrays.body, config.d_v, scales, 1);
  } else {
    const Index width = config.d_k + config.d_v;
    write(state.factors.keys(), from.rank, read.arrays.body, width, scales, 2);
    write(state.factors.values(), from.rank, read.arrays.body + config.d_k, width,
          scaled ? scales + 1 : nullptr, 2);
    for (Index i = 0; i < from.rank; ++i) state.factors.strength(i) = read.arrays.strengths[i];
  }
}

}  // namespace detail

/// Bytes that `snapshot` will write now: they grow with the ranks. 0 for a slot that is not in use,
/// or a range that the pool does not have.
template <class Policy>
std::size_t snapshot_bytes(StatePoolView<Policy> pool, Index slot,
                           const HeadRange& range) noexcept {
  if (!pool.in_use(slot) || !detail::is_range(pool.config, range)) return 0;
  Workspace count;
  detail::write_snapshot(pool, slot, range, count);
  return count.used();
}
/// Of all heads.
template <class Policy>
std::size_t snapshot_bytes(StatePoolView<Policy> pool, Index slot) noexcept {
  return snapshot_bytes(pool, slot, {0, pool.config.value_heads});
}

/// Writes a request, or a range of its heads, as bytes from which `restore` makes it again to the
/// bit, here or in another process: body, pending tokens, certificate and counters
/// (docs/snapshot.md).
///
/// @param memory  `snapshot_bytes` bytes, aligned to 64, apart from the pool
/// @returns invalid_slot; invalid_argument for a range that the pool does not have, or memory null,
///          misaligned or too small; the status of a compaction or initialisation that has failed
/// The request is unchanged and goes on independently. O(value_heads (d_k + d_v) (rank +
/// buffered)).
template <class Policy>
Status snapshot(StatePoolView<Policy> pool, Index slot, const HeadRange& range, void* memory,
                std::size_t size) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
  if (pool.slot(slot).blocked != Status::ok) return pool.slot(slot).blocked;
  const std::size_t wanted = snapshot_bytes(pool, slot, range);
  if (wanted == 0 || memory == nullptr || size < wanted ||
      reinterpret_cast<std::uintptr_t>(memory) % Workspace::alignment != 0) {
    return Status::invalid_argument;
  }
  std::memset(memory, 0, wanted);
  Workspace bytes(memory, wanted);
  detail::write_snapshot(pool, slot, range, bytes);
  auto* const header = static_cast<detail::SnapshotHeader*>(memory);
  header->size = wanted;
  header->checksum = detail::snapshot_checksum(memory, wanted);
  return Status::ok;
}
/// Of all heads.
template <class Policy>
Status snapshot(StatePoolView<Policy> pool, Index slot, void* memory, std::size_t size) noexcept {
  return snapshot(pool, slot, {0, pool.config.value_heads}, memory, size);
}

/// Makes a request what snapshots say, whether the slot was free or not. No draft is open in it
/// then.
///
/// @param pieces  snapshots that together have each head of this pool once; they may have more
///                heads, so that a whole layer can be restored into a part of it, and parts into
///                the whole. Policy, shape and sink directions are those of this pool; epsilon,
///                caps and seeds may differ.
/// @param tokens  that the request has seen, by the caller's own count: snapshots of another count
///                are refused
/// @returns invalid_slot; invalid_argument (misaligned or null bytes); damaged_snapshot,
///          wrong_snapshot; pool_exhausted. Any bytes may be given: unless the result is ok,
///          nothing has changed.
/// Allocates nothing. O(bytes).
template <class Policy>
Status restore(StatePoolView<Policy> pool, Index slot, const SnapshotBytes* pieces, Index count,
               Index tokens) noexcept {
  if (!pool.config.is_slot(slot)) return Status::invalid_slot;
  if (count < 1) return Status::invalid_argument;
  const Status status = detail::check_pieces(pool, slot, pieces, count, tokens);
  if (status != Status::ok) return status;

  pool.slot(slot).bodies.change();
  for (Index h = 0; pool.in_use(slot) && h < pool.config.value_heads; ++h) {
    detail::hold_rows(pool, pool.head(slot, h), 0);
  }
  SlotRecord& record = pool.slot(slot);
  const Status done = detail::for_each_head(pool, pieces, count, false,
                                            [&](const detail::ReadSnapshot<Policy>& piece,
                                                const detail::ReadHead<Policy>& read, Index h) {
                                              record.buffered = piece.header.buffered;
                                              if (h >= 0 && h < pool.config.value_heads)
                                                detail::restore_head(pool, slot, h, piece, read);
                                              return Status::ok;
                                            });
  record.in_use = 1;
  record.tokens = tokens;
  record.draft = -1;
  record.blocked = Status::ok;
  return done;
}
/// From one snapshot.
template <class Policy>
Status restore(StatePoolView<Policy> pool, Index slot, const SnapshotBytes& bytes,
               Index tokens) noexcept {
  return restore(pool, slot, &bytes, 1, tokens);
}

SINKSTATE_NAMESPACE_END
