/// @file
/// One token into a state of a pool and its output, in one pass over the state.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "../algorithm/pool_step.hpp"
#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../model/certificate.hpp"
#include "../model/state_pool.hpp"
#include "async_copy.cuh"
#include "claim_slots.cuh"
#include "lane_vectors.cuh"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Divides numbers below 2^31 without a division, which a device lacks: n / d is n m / 2^s rounded
/// down, where m = 2^s / d rounded up and s = 31 + log2 d rounded up (Granlund and Montgomery 1994,
/// theorem 4.2).
struct Divisor {
  int divisor = 1;
  unsigned shift = 31;
  std::uint32_t multiplier = std::uint32_t{1} << 31;

  Divisor() = default;
  explicit Divisor(int by) : divisor(by) {
    while ((std::int64_t{1} << (shift - 31)) < by) ++shift;
    const auto wide = static_cast<std::uint64_t>(by);
    multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << shift) + wide - 1) / wide);
  }
  __device__ int divide(int n) const {
    return static_cast<int>(static_cast<std::uint64_t>(n) * multiplier >> shift);
  }
};

/// What the kernel of a step is told. Sizes fit 32 bits, in which a device divides and multiplies
/// several times as fast.
template <class Policy, class Number>
struct StepArguments {
  using View = StatePoolView<Policy>;

  View pool;
  typename View::Head first;  ///< head 0 of slot 0: the others lie at equal distances
  TokenBatch<float, Number> batch;
  Status* statuses = nullptr;
  bool claimed = false;      ///< `SlotRecord::entry` says who may work on a slot
  bool input_quads = false;  ///< four neighbours of each tensor are aligned to their size
  int d_k, d_v;
  int value_heads;
  Divisor by_value_heads;
  bool tiled;        ///< value heads take keys in turn
  Divisor by_group;  ///< key heads, or the heads that share one
  int quota, dense_rows, row_scales;
  int matrix_rows_per_row, per_row_inverse;
  int buffer_capacity;

  StepArguments(const View& view, const TokenBatch<float, Number>& tokens)
      : pool(view), first(view.head(0, 0)), batch(tokens) {
    const auto narrow = [](Index size) { return static_cast<int>(size); };
    const PoolConfig& config = pool.config;
    d_k = narrow(config.state.d_k);
    d_v = narrow(config.state.d_v);
    value_heads = narrow(config.value_heads);
    const int key_heads = narrow(config.key_heads);
    by_value_heads = Divisor(value_heads);
    tiled = config.head_map == HeadMap::tiled;
    by_group = Divisor(tiled ? key_heads : value_heads / key_heads);
    quota = narrow(View::quota(config));
    dense_rows = narrow(View::dense_rows(config.state));
    row_scales = narrow(View::Factors::row_scales(d_k, d_v));
    matrix_rows_per_row = narrow(View::Factors::matrix_rows_per_row(d_k, d_v));
    per_row_inverse = (65536 + matrix_rows_per_row - 1) / matrix_rows_per_row;
    buffer_capacity = narrow(config.state.buffer_capacity());
  }

  /// The component row that holds channel i of a dense body, exact for channels below 256.
  __device__ int piece(int channel) const { return channel * per_row_inverse >> 16; }
  /// The head whose key a value head shares, and which of those that share it the value head is.
  __device__ int key_head(int head, int& sharer) const {
    const int quotient = by_group.divide(head);
    const int remainder = head - quotient * by_group.divisor;
    sharer = tiled ? quotient : remainder;
    return tiled ? remainder : quotient;
  }
};

/// How many numbers a kernel is compiled for, and whether it may load four at once.
template <int KeyChunks, int ValueChunks, bool Aligned>
struct HeadShape {
  using Keys = LaneVector<KeyChunks>;
  using Values = LaneVector<ValueChunks>;
  static constexpr bool quads = Aligned;
};

/// A pointer some bytes on.
template <class T>
__device__ T* moved(T* pointer, Index bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(pointer) + bytes);
}

/// Warps of a multiprocessor at once, for which registers are left over: measured
/// (docs/performance.md).
template <class Policy, class Shape>
inline constexpr int resident_warps =
    Shape::Keys::count > 4                                                        ? 8
    : !Policy::Rule::corrects && sizeof(typename StatePoolView<Policy>::Code) < 4 ? 20
                                                                                  : 16;

/// A state of a pool as a block finds it, and the sums that the block makes of its rows.
///
/// Rows of each kind are dealt to four groups in turn, every group adds up its own in order, and the
/// four sums are added as a tree. A warp does one group or all four: the bits are the same.
///
/// A warp goes through its rows in turns, first those of tokens, then those of the body. What the
/// next turns want is on its way to shared memory meanwhile, where every lane finds what it has
/// itself asked for, so that it waits for no other.
template <class Arguments, class Shape, int Warps>
class HeadReader {
  using View = typename Arguments::View;
  using Policy = typename View::Policy;
  using Stored = typename Policy::Stored;
  using Buffered = typename Policy::Buffered;
  using Code = typename View::Code;
  using BufferedCode = typename View::BufferedCode;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  static constexpr bool quads = Shape::quads;
  static constexpr bool scaled = StoredAs<Stored>::scaled;
  static constexpr bool per_channel = Policy::Rule::decay == Decay::per_channel;
  static constexpr int key_width = 32 * Keys::count;
  static constexpr int value_width = 32 * Values::count;

 public:
  /// The query and, where the rule corrects, the key.
  static constexpr int vectors = Policy::Rule::corrects ? 2 : 1;
  static constexpr int groups = 4 / Warps;  ///< of this warp

 private:
  // Of a turn: rows of a warp, and of each of its groups.
  static constexpr int token_rows = Warps > 1 ? 2 : 4;
  static constexpr int token_turns = token_rows / groups;
  static constexpr int tokens = 4 * token_turns;  // of all warps
  static constexpr int term_rows = 4;
  static constexpr int term_turns = term_rows / groups;
  static constexpr int matrix_rows = 4 * (Keys::count + Values::count) / Values::count;
  static constexpr int matrix_turns = matrix_rows / groups;

  // What a turn has in shared memory. Of the strengths, their scales and the decays each lane has
  // its own.
  struct Turn {
    union Rows {
      struct {
        alignas(16) BufferedCode keys[token_rows][key_width];
        alignas(16) BufferedCode values[token_rows][value_width];
      } tokens;
      struct {
        alignas(16) Code keys[term_rows][key_width];
        alignas(16) Code values[term_rows][value_width];
      } terms;
      alignas(16) Code matrix[matrix_rows][value_width];
    } rows;
    float factors[scaled ? 3 : 1][32];
  };
  // Turns at once: measured (docs/performance.md), and less than 48 KB a block.
  static constexpr int depth = [] {
    if (Keys::count > 4) return 1;
    if (sizeof(Turn) < 3000) return 4;
    return Warps > 1 || sizeof(Code) < 4 ? 2 : 3;
  }();

 public:
  /// What a block has in shared memory.
  using Shared = Turn[Warps][depth];

  __device__ HeadReader(const Arguments& arguments, Index slot, int head, Shared& shared)
      : arguments_(arguments),
        turns_(shared[warp()]),
        shift_(slot * static_cast<Index>(arguments.pool.slot_bytes) +
               head * static_cast<Index>(arguments.pool.head_bytes)),
        first_row_((slot * arguments.value_heads + head) * arguments.quota),
        head_(head),
        dense_(record()->dense != 0),
        rank_(*at(first().rank)) {}

  __device__ int terms() const { return dense_ ? arguments_.d_k : rank_; }
  __device__ BufferedCode* correction(int j) const {
    return at(codes_of(first().buffer.corrections).data) + j * arguments_.d_v;
  }
  __device__ float* log_decay(int j) const {
    return at(first().buffer.log_decays.data) +
           j * static_cast<int>(Policy::Rule::log_decays(arguments_.d_k));
  }
  __device__ StateRecord* record() const { return at(first().record); }
  __device__ float* certificates() const { return at(first().buffer.certificates); }
  __device__ float* masses() const { return at(first().buffer.masses); }

  /// Asks for the first rows.
  /// @param keys  of buffered tokens
  __device__ void begin(int buffered, const BufferedCode* keys) {
    buffered_ = buffered;
    keys_ = keys;
    const auto turns_of = [](int rows, int each) { return (rows + each - 1) / each; };
    first_body_turn_ = turns_of(buffered, tokens);
    end_ = first_body_turn_ +
           (dense_ ? turns_of(arguments_.d_k, 4 * matrix_turns) : turns_of(rank_, 4 * term_turns));
#pragma unroll 1
    for (int turn = 0; turn < depth - 1; ++turn) fetch(turn);
  }

  /// This warp's sums over all rows, decayed by those tokens that are buffered and by `log_decay`.
  __device__ void read(Keys (&x)[vectors], const Keys& log_decays, float log_decay) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int g = 0; g < groups; ++g) sums_[v][g] = Values::zeros();
    }
    std::conditional_t<per_channel, Keys, float> sum;
    if constexpr (per_channel) {
      sum = log_decays;
    } else {
      sum = log_decay;
    }
    float weight = 1;  // of the body
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      if (turn == first_body_turn_) {
        if constexpr (per_channel) {
          decay(x, sum, x);
        } else {
          weight = exp_decay(sum);
        }
        read_sink(x, weight);
      }
      if (turn == end_) break;
      fetch(turn + depth - 1);
      const Turn& there = turns_[turn % depth];
      if (turn < first_body_turn_) {
        read_tokens(there, turn, x, sum);
      } else if (!dense_) {
        if constexpr (Policy::Compaction::low_rank) read_terms(there, x, weight);
      } else {
        if constexpr (may_be_dense) read_matrix(there, turn - first_body_turn_, x, weight);
      }
    }
  }

  /// The sums of all warps, in the first; `shared` is of `vectors` x 4 rows of 32 `Values`.
  __device__ void combine(float* shared, Values (&total)[vectors]) const {
    if constexpr (Warps > 1) {
      const int lane = Values::lane();
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
#pragma unroll
        for (int g = 0; g < groups; ++g) {
#pragma unroll
          for (int i = 0; i < Values::count; ++i) {
            shared[(4 * v + group(g)) * value_width + 32 * i + lane] = sums_[v][g].x[i];
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int i = 0; i < Values::count; ++i) {
        float part[4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          part[g] = Warps > 1 ? shared[(4 * v + g) * value_width + 32 * i + Values::lane()]
                              : sums_[v][g % groups].x[i];
        }
        total[v].x[i] = (part[0] + part[1]) + (part[2] + part[3]);
      }
    }
  }

 private:
  static constexpr bool may_be_dense =
      !Policy::Compaction::low_rank || Policy::Compaction::adaptive;

  __device__ const typename View::Head& first() const { return arguments_.first; }
  // The same piece of this head.
  template <class T>
  __device__ T* at(T* of_first) const {
    return moved(of_first, shift_);
  }
  __device__ static int warp() { return Warps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32; }
  __device__ static int group(int g) { return warp() + g * Warps; }
  // Row r of this warp in a turn, among the rows of the turn.
  __device__ static int row_of_turn(int r) { return 4 * (r / groups) + group(r % groups); }
  // The row of the number that a lane has of a turn's `vectors` x `Rows` inner products.
  template <int Rows>
  __device__ static int row_of_lane() {
    return row_of_turn(number_of_lane<vectors * Rows>() % Rows);
  }

  // Asks for this lane's numbers of `Rows` rows, the first of which begin for this lane at `key` and
  // `value`, the others steps further; rows from `count` on, as the turn counts them, are zeros.
  template <class Number, int Rows, class Code>
  __device__ static void fetch_rows(Code (&keys)[Rows][key_width],
                                    Code (&values)[Rows][value_width], const Code* key,
                                    const Code* value, int key_step, int value_step, int d_k,
                                    int d_v, int count) {
    const int lane = Keys::first_channel(0);
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const bool there = row_of_turn(r) < count;
      Keys::template fetch<Number>(keys[r] + lane, key, d_k, there, quads);
      Values::template fetch<Number>(values[r] + lane, value, d_v, there, quads);
      // A warp's rows are neighbours, or as far apart as those of a group.
      key += (groups > 1 ? 1 : 4) * key_step;
      value += (groups > 1 ? 1 : 4) * value_step;
    }
  }

  // Component row i of this state.
  template <bool Listed>
  __device__ Index row(int i) const {
    return Listed ? Index{at(first().list)[i]} : first_row_ + i;
  }

  // y = exp(sums) o x; y may be x
  __device__ static void decay(const Keys (&x)[vectors], const Keys& sums, Keys (&y)[vectors]) {
#pragma unroll
    for (int i = 0; i < Keys::count; ++i) {
      const float weight = exp_decay(sums.x[i]);
#pragma unroll
      for (int v = 0; v < vectors; ++v) y[v].x[i] = weight * x[v].x[i];
    }
  }

  // Adds rows r, of which row r belongs to group r % groups, with coefficients z[v][r].
  template <int Rows>
  __device__ void add(const float (&z)[vectors * Rows], const Values (&values)[Rows]) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int v = 0; v < vectors; ++v) sums_[v][r % groups].add(z[v * Rows + r], values[r]);
    }
  }

  __device__ void fetch(int turn) {
    // Numbers of another size lie elsewhere: what another lane has yet to read may be here.
    if constexpr (sizeof(Code) != sizeof(BufferedCode)) __syncwarp();
    Turn& into = turns_[turn % depth];
    if (turn < first_body_turn_) {
      fetch_tokens(turn, into);
    } else if (turn < end_) {
      const int base = turn - first_body_turn_;
      if (!dense_) {
        if constexpr (Policy::Compaction::low_rank) {
          if (rank_ <= arguments_.quota) {
            fetch_terms<false>(base, into);
          } else {
            fetch_terms<true>(base, into);
          }
        }
      } else {
        if constexpr (may_be_dense) {
          if (arguments_.dense_rows <= arguments_.quota) {
            fetch_matrix<false>(base, into);
          } else {
            fetch_matrix<true>(base, into);
          }
        }
      }
    }
    end_copies();
  }
  // What the turn at hand has asked for is there.
  __device__ static void wait() { wait_for_copies<depth - 1>(); }
  __device__ static int first_channel() { return Keys::first_channel(0); }

  // Buffered tokens, newest first.
  __device__ void fetch_tokens(int turn, Turn& into) const {
    const int newest = buffered_ - 1 - turn * tokens;
    if constexpr (Policy::Rule::decay == Decay::scalar) {
      const int j = newest - Keys::lane();
      copy_async<4>(&into.factors[0][Keys::lane()], log_decay(j), j >= 0);
    }
    const int first = newest - row_of_turn(0);
    const int lane = Keys::first_channel(0);
    fetch_rows<Buffered>(into.rows.tokens.keys, into.rows.tokens.values,
                         keys_ + (first * arguments_.d_k + lane), correction(first) + lane,
                         -arguments_.d_k, -arguments_.d_v, arguments_.d_k, arguments_.d_v,
                         newest + 1);
  }
  // Each has the decay of those after it; sum ends as the decay of what was before.
  template <class Sum>
  __device__ void read_tokens(const Turn& there, int turn, const Keys (&x)[vectors], Sum& sum) {
    Keys decays[per_channel ? tokens : 1];
    if constexpr (per_channel) {
#pragma unroll
      for (int n = 0; n < tokens; ++n) {
        const int j = buffered_ - 1 - turn * tokens - n;
        decays[n] = Keys::zeros();
        if (j >= 0) decays[n] = Keys::template load<float>(log_decay(j), arguments_.d_k, quads);
      }
    }
    wait();
    float z[vectors * token_rows];
    float weight = 1;
    if constexpr (per_channel) {
#pragma unroll
      for (int n = 0; n < tokens; ++n) {
#pragma unroll
        for (int r = 0; r < token_rows; ++r) {
          if (row_of_turn(r) != n) continue;
          const Keys key =
              Keys::template fetched<Buffered>(there.rows.tokens.keys[r] + first_channel());
          Keys decayed[vectors];
          decay(x, sum, decayed);
#pragma unroll
          for (int v = 0; v < vectors; ++v) z[v * token_rows + r] = key.part_of_dot(decayed[v]);
        }
#pragma unroll
        for (int i = 0; i < Keys::count; ++i) sum.x[i] += decays[n].x[i];
      }
    } else {
      if constexpr (Policy::Rule::decay == Decay::scalar) {
        const float mine = there.factors[0][Keys::lane()];
        const int wanted = row_of_lane<token_rows>();
        float sum_of_lane = sum;
#pragma unroll
        for (int n = 0; n < tokens; ++n) {
          const float log_decay = __shfl_sync(whole_warp, mine, n);
          if (n < wanted) sum_of_lane += log_decay;
          sum += log_decay;
        }
        weight = exp_decay(sum_of_lane);
      }
#pragma unroll
      for (int r = 0; r < token_rows; ++r) {
        const Keys key =
            Keys::template fetched<Buffered>(there.rows.tokens.keys[r] + first_channel());
#pragma unroll
        for (int v = 0; v < vectors; ++v) z[v * token_rows + r] = key.part_of_dot(x[v]);
      }
    }
    give_to_lanes(weight * sum_in_lanes(z), z);
    Values values[token_rows];
#pragma unroll
    for (int r = 0; r < token_rows; ++r) {
      values[r] = Values::template fetched<Buffered>(there.rows.tokens.values[r] + first_channel());
    }
    add<token_rows>(z, values);
  }

  __device__ void read_sink(const Keys (&x)[vectors], float weight) {
    if constexpr (Policy::Sink::present) {
      if (warp() != 0) return;
      const Keys key =
          Keys::template load<Stored>(at(codes_of(first().sink).data), arguments_.d_k, quads);
      const Values value[1] = {Values::template load<float>(
          arguments_.pool.sink_directions.row(head_), arguments_.d_v, false)};
      if constexpr (scaled) weight *= *at(first().sink.scales.data);
      float z[vectors];
#pragma unroll
      for (int v = 0; v < vectors; ++v) z[v] = key.part_of_dot(x[v]);
      sum_over_warp(z);
#pragma unroll
      for (int v = 0; v < vectors; ++v) z[v] *= weight;
      add<1>(z, value);
    }
  }

  template <bool Listed>
  __device__ void fetch_terms(int turn, Turn& into) const {
    const StatePoolView<Policy>& pool = arguments_.pool;
    const int d_k = arguments_.d_k;
    const int d_v = arguments_.d_v;
    const int base = turn * 4 * term_turns;
    auto& to = into.rows.terms;
    if constexpr (!Listed) {
      const Code* const own =
          pool.components + (first_row_ + base + row_of_turn(0)) * (d_k + d_v) + first_channel();
      fetch_rows<Stored>(to.keys, to.values, own, own + d_k, d_k + d_v, d_k + d_v, d_k, d_v,
                         rank_ - base);
    } else {
#pragma unroll 1
      for (int r = 0; r < term_rows; ++r) {
        const int i = base + row_of_turn(r);
        const Code* const codes =
            pool.components + row<true>(i < rank_ ? i : 0) * (d_k + d_v) + first_channel();
        Keys::template fetch<Stored>(to.keys[r] + first_channel(), codes, d_k, i < rank_, quads);
        Values::template fetch<Stored>(to.values[r] + first_channel(), codes + d_k, d_v, i < rank_,
                                       quads);
      }
    }
    const int i = base + row_of_lane<term_rows>();
    const Index place = row<Listed>(i < rank_ ? i : 0);
    const auto fetch_factor = [&](int which, const float* factor) {
      copy_async<4>(&into.factors[which][Keys::lane()], factor, i < rank_);
    };
    fetch_factor(0, pool.strengths + place);
    if constexpr (scaled) {
      fetch_factor(1, pool.scales + place * arguments_.row_scales);
      fetch_factor(2, pool.scales + place * arguments_.row_scales + 1);
    }
  }
  __device__ void read_terms(const Turn& there, const Keys (&x)[vectors], float weight) {
    wait();
    float z[vectors * term_rows];
#pragma unroll
    for (int r = 0; r < term_rows; ++r) {
      const Keys key = Keys::template fetched<Stored>(there.rows.terms.keys[r] + first_channel());
#pragma unroll
      for (int v = 0; v < vectors; ++v) z[v * term_rows + r] = key.part_of_dot(x[v]);
    }
    const int lane = Keys::lane();
    weight *= there.factors[0][lane];
    if constexpr (scaled) weight *= there.factors[1][lane] * there.factors[2][lane];
    give_to_lanes(weight * sum_in_lanes(z), z);
    Values values[term_rows];
#pragma unroll
    for (int r = 0; r < term_rows; ++r) {
      values[r] = Values::template fetched<Stored>(there.rows.terms.values[r] + first_channel());
    }
    add<term_rows>(z, values);
  }

  // Row i of the matrix belongs to group i % 4.
  template <bool Listed>
  __device__ void fetch_matrix(int turn, Turn& into) const {
    const int d_k = arguments_.d_k;
    const int d_v = arguments_.d_v;
    const int row_size = d_k + d_v;
    const Code* const components = arguments_.pool.components + first_channel();
    const Code* const first_row = components + first_row_ * row_size;
#pragma unroll(Listed ? 1 : matrix_rows)
    for (int r = 0; r < matrix_rows; ++r) {
      const int i = turn * 4 * matrix_turns + row_of_turn(r);
      const int piece = arguments_.piece(i);
      const int part = i - piece * arguments_.matrix_rows_per_row;
      const Code* const codes =
          Listed ? components + row<Listed>(i < d_k ? piece : 0) * row_size + part * d_v
                 : first_row + (piece * row_size + part * d_v);
      Values::template fetch<Stored>(into.rows.matrix[r] + first_channel(), codes, d_v, i < d_k,
                                     quads);
    }
  }
  // Channels 4 l to 4 l + 3 are in lane l.
  __device__ void read_matrix(const Turn& there, int turn, const Keys (&x)[vectors], float weight) {
    const int base = turn * matrix_turns;
    if (base % 32 == 0) take_channels(base / 32, x, weight);
    wait();
    float z[vectors * matrix_rows];
    Values values[matrix_rows];
#pragma unroll
    for (int r = 0; r < matrix_rows; ++r) {
      const int lane = base % 32 + r / groups;
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        z[v * matrix_rows + r] = __shfl_sync(whole_warp, channels_[v * groups + r % groups], lane);
      }
      values[r] = Values::template fetched<Stored>(there.rows.matrix[r] + first_channel());
    }
    add<matrix_rows>(z, values);
  }
  // Of this lane's channels among 128, those of this warp's groups.
  __device__ void take_channels(int chunk, const Keys (&x)[vectors], float weight) {
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const int e = group(g);
      float factor = weight;
      if constexpr (scaled) {
        const int channel = 128 * chunk + 4 * Keys::lane() + e;
        const int piece = arguments_.piece(channel);
        const int part = channel - piece * arguments_.matrix_rows_per_row;
        const bool listed = arguments_.dense_rows > arguments_.quota;
        if (channel < arguments_.d_k) {
          const Index place = listed ? row<true>(piece) : row<false>(piece);
          factor *= arguments_.pool.scales[place * arguments_.row_scales + part];
        }
      }
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        float channel = 0;
#pragma unroll
        for (int i = 0; i < Keys::count; ++i) {
          if (i == 4 * chunk + e) channel = x[v].x[i];
        }
        channels_[v * groups + g] = factor * channel;
      }
    }
  }

  const Arguments& arguments_;
  Turn* turns_;
  Index shift_;
  Index first_row_;
  int head_;
  bool dense_;
  int rank_;
  int buffered_ = 0;
  const BufferedCode* keys_ = nullptr;
  int first_body_turn_ = 0;  ///< turns before it are of tokens
  int end_ = 0;              ///< of all turns
  Values sums_[vectors][groups];
  float channels_[vectors * groups];
};

/// The largest log decay of a token, or NaN if there is one; numbers beyond the vector do not count.
template <class Keys>
__device__ float largest_of(const Keys& log_decays, int n) {
  float largest = -infinite_float;
  bool unordered = false;
#pragma unroll
  for (int i = 0; i < Keys::count; ++i) {
    if (Keys::first_channel(i / 4) + i % 4 >= n) continue;
    largest = fmaxf(largest, log_decays.x[i]);
    unordered = unordered || log_decays.x[i] != log_decays.x[i];
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(whole_warp, largest, distance));
  }
  return __any_sync(whole_warp, unordered) ? nan_float : largest;
}

/// The last of an entry's heads moves the cursors of all, if none has failed; a warp.
///
/// So nothing has to be taken back, and nobody waits for what another has written: cursors alone
/// decide what of a buffer is there.
/// @param own  record of one of the heads, all of which have seen as many tokens
template <class Policy>
__device__ void arrive(const StatePoolView<Policy>& pool,
                       const typename StatePoolView<Policy>::Head& first, Index slot,
                       const StateRecord* own, int buffered, int tokens, Status status,
                       Status* entry_status) {
  SlotRecord& record = pool.slot(slot);
  auto* const failed = reinterpret_cast<int*>(&record.failed);
  const int heads = static_cast<int>(pool.config.value_heads);
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Who fails counts for more, so that the last need not ask when nobody has.
  constexpr int fault = 1 << 16;
  const bool marks = heads < fault / 2;
  int last = 0;
  int failure_code = 0;
  if (lane == 0) {
    if (status != Status::ok) {
      atomicMax(failed, static_cast<int>(status));
      __threadfence();
    }
    const int before = atomicAdd(&record.arrived, marks && status != Status::ok ? fault + 1 : 1);
    last = (marks ? before % fault : before) == heads - 1 ? 1 : 0;
    const bool ask = !marks || before >= fault || status != Status::ok;
    if (last != 0 && ask) failure_code = atomicExch(failed, 0);
  }
  if (__shfl_sync(whole_warp, last, 0) == 0) return;
  const auto failure = static_cast<Status>(__shfl_sync(whole_warp, failure_code, 0));
  const Index first_head = slot * static_cast<Index>(pool.slot_bytes);
  const std::int64_t seen = own->tokens;
  __syncwarp();
  for (int h = lane; failure == Status::ok && h < heads; h += 32) {
    const Index shift = first_head + h * static_cast<Index>(pool.head_bytes);
    *moved(first.buffer.count, shift) = buffered + tokens;
    moved(first.record, shift)->tokens = seen + tokens;
  }
  if (lane != 0) return;
  record.arrived = 0;
  record.entry = -1;
  if (failure == Status::ok) {
    record.buffered = buffered + tokens;
    record.tokens += tokens;
  }
  if (entry_status != nullptr) *entry_status = failure;
}

/// `step` on one head of one entry a block: docs/mathematics.md, equations (2) to (4).
///
/// Every head goes ahead as if all others could; the last one that is done knows (`arrive`), and
/// until then what it writes lies beyond the cursors.
template <class Policy, class Number, class Shape, int Warps>
__global__ void __launch_bounds__(32 * Warps, resident_warps<Policy, Shape> / Warps)
    step_heads(const __grid_constant__ StepArguments<Policy, Number> arguments) {
  using Rule = typename Policy::Rule;
  using Buffered = typename Policy::Buffered;
  using Keys = typename Shape::Keys;
  using Values = typename Shape::Values;
  using Reader = HeadReader<StepArguments<Policy, Number>, Shape, Warps>;
  constexpr int vectors = Reader::vectors;
  constexpr bool quads = Shape::quads;
  const StatePoolView<Policy>& pool = arguments.pool;
  const TokenBatch<float, Number>& batch = arguments.batch;
  const int b = arguments.by_value_heads.divide(static_cast<int>(blockIdx.x));
  const auto head = static_cast<int>(blockIdx.x) - b * arguments.value_heads;
  Status* const entry_status = arguments.statuses == nullptr ? nullptr : arguments.statuses + b;
  // Of an entry that is left out, one thread speaks.
  const auto leave = [&](Status status) {
    if (head == 0 && threadIdx.x == 0 && entry_status != nullptr) *entry_status = status;
  };

  const std::int32_t from = batch.slots[b];
  if (pool.config.is_padding(from)) return leave(Status::ok);
  const Index slot = arguments.claimed ? batch.write_slot(b) : Index{from};
  if (!pool.config.is_slot(slot)) {
    if (!arguments.claimed) leave(Status::invalid_slot);
    return;
  }
  // Everything that is asked of the slot and of the head comes at once, whatever will be needed.
  const SlotRecord& record = pool.slot(slot);
  const std::int32_t in_use = record.in_use;
  const std::int32_t buffered = record.buffered;
  const Status blocked = record.blocked;
  const std::int32_t entry = record.entry;
  __shared__ typename Reader::Shared turns;
  Reader reader(arguments, slot, head, turns);
  const auto begin = batch.start(b);
  const auto count = batch.count(b);
  if (arguments.claimed) {
    if (entry != b) return;
  } else {
    const Status status = in_use == 0
                              ? Status::invalid_slot
                              : check_count(blocked, count, buffered, arguments.buffer_capacity);
    if (status != Status::ok) return leave(status);
  }

  __shared__ float shared[Warps > 1 ? vectors * 4 * 32 * Values::count : 1];
  __shared__ Status outcome;
  const int d_k = arguments.d_k;
  const int d_v = arguments.d_v;
  const int warp = Warps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32;
  const bool leads = threadIdx.x == 0;
  const bool quads_in = arguments.input_quads;
  const bool reads = batch.outputs.data != nullptr;
  int sharer = 0;
  const int key_head = arguments.key_head(head, sharer);
  const auto keys = codes_of(pool.keys(slot, key_head));
  const int tokens = static_cast<int>(count);

  Status status = Status::ok;
  float certificate = reader.certificates()[buffered];
  float mass = reader.masses()[buffered];
  for (int t = 0; t < tokens; ++t) {
    const int now = buffered + t;
    if (Rule::corrects || reads) reader.begin(now, keys.row(0));
    const Keys key = Keys::template load<Number>(batch.keys.at(begin + t, key_head), d_k, quads_in);
    const Keys query =
        reads ? Keys::template load<Number>(batch.queries.at(begin + t, key_head), d_k, quads_in)
              : Keys::zeros();
    Keys log_decays = Keys::zeros();
    float log_decay = 0;
    if constexpr (Rule::decay == Decay::per_channel) {
      log_decays = Keys::template load<float>(batch.log_decays.at(begin + t, head), d_k, quads_in);
    } else if constexpr (Rule::decay == Decay::scalar) {
      log_decay = *batch.log_decays.at(begin + t, head);
    }
    Values value;
    float write_strength = 1;
    if (warp == 0) {
      value = Values::template load<Number>(batch.values.at(begin + t, head), d_v, quads_in);
      if (batch.write_strengths.data != nullptr) {
        write_strength = *batch.write_strengths.at(begin + t, head);
      }
    }

    Keys x[vectors];
    x[0] = query;
    if constexpr (Rule::corrects) x[1] = key;
    Values total[vectors];
    if (Rule::corrects || reads) {
      reader.read(x, log_decays, log_decay);
      reader.combine(shared, total);
    }
    if (warp == 0) {
      TokenBounds<float> written;
      written.log_decay = log_decay;
      if constexpr (Rule::decay == Decay::per_channel)
        written.log_decay = largest_of(log_decays, d_k);
      written.write_strength = write_strength;
      if (written.log_decay > 0.0f) {
        status = Status::positive_log_decay;
      } else if (!all_lanes(key.finite() && query.finite() && value.finite() &&
                            isfinite(write_strength) && written.log_decay <= 0.0f)) {
        status = Status::non_finite_input;
      }
      // n = b (v - theta S^T L k), o = S^T L q + n (k . q)
      Values correction;
#pragma unroll
      for (int i = 0; i < Values::count; ++i) {
        float kept = value.x[i];
        if constexpr (Rule::corrects) kept -= total[1].x[i];
        correction.x[i] = write_strength * kept;
      }
      constexpr bool rounds = StoredAs<Buffered>::narrow;
      Keys stored_key = key;
      Values stored = correction;
      if constexpr (rounds) {
        stored_key = key.template rounded<Buffered>();
        stored = correction.template rounded<Buffered>();
      }
      float products[4] = {stored_key.part_of_dot(query), stored_key.part_of_dot(stored_key),
                           stored.part_of_dot(stored), 0};
      sum_over_warp(products);
      Values output = Values::zeros();
      if (reads) {
#pragma unroll
        for (int i = 0; i < Values::count; ++i) {
          output.x[i] = total[0].x[i] + products[0] * stored.x[i];
        }
        if constexpr (StoredAs<Number>::narrow) output = output.template rounded<Number>();
      }
      if (status == Status::ok &&
          !all_lanes(stored_key.finite() && stored.finite() && output.finite())) {
        status = Status::overflow;
      }
      if (status == Status::ok) {
        const float stored_norm = norm(stored_key, products[1]);
        const float correction_norm = norm(stored, products[2]);
        written.key_norm = stored_norm;
        if constexpr (rounds) {
          written.key_norm = norm(key);
          Keys key_change;
          Values change;
#pragma unroll
          for (int i = 0; i < Keys::count; ++i) key_change.x[i] = key.x[i] - stored_key.x[i];
#pragma unroll
          for (int i = 0; i < Values::count; ++i) change.x[i] = correction.x[i] - stored.x[i];
          written.rounded = bound_product(written.key_norm, norm(change)) +
                            bound_product(norm(key_change), correction_norm);
        }
        written.term = round_up(bound_product(stored_norm, correction_norm));
        include_token<Rule::corrects>(d_k, reader.terms() + now + 1, now, written, certificate,
                                      mass);
        stored.template store<Buffered>(reader.correction(now), d_v, quads);
        // Tokens of this call after this one read it too, each head what it has written itself.
        if (sharer == 0 || t + 1 < tokens)
          stored_key.template store<Buffered>(keys.row(now), d_k, quads);
        if constexpr (Rule::decay == Decay::per_channel) {
          log_decays.template store<float>(reader.log_decay(now), d_k, quads);
        }
        if (reads) {
          output.template store<Number>(batch.outputs.at(begin + t, head), d_v, quads_in);
        }
        if (leads) {
          if constexpr (Rule::decay == Decay::scalar) *reader.log_decay(now) = log_decay;
          reader.certificates()[now + 1] = certificate;
          reader.masses()[now + 1] = mass;
        }
      }
    }
    if (t + 1 == tokens) break;
    // The next token reads what this one has written.
    if constexpr (Warps > 1) {
      if (leads) outcome = status;
      __syncthreads();
      status = outcome;
    } else {
      __syncwarp();
    }
    if (status != Status::ok) break;
  }
  if (warp != 0) return;
  arrive(pool, arguments.first, slot, reader.record(), buffered, tokens, status, entry_status);
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
