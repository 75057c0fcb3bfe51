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
#include "claim_slots.cuh"
#include "lane_vectors.cuh"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

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
  int value_heads, key_heads, heads_a_key;
  int quota, dense_rows, matrix_rows_per_row;
  int buffer_capacity;

  StepArguments(const View& view, const TokenBatch<float, Number>& tokens)
      : pool(view), first(view.head(0, 0)), batch(tokens) {
    const auto narrow = [](Index size) { return static_cast<int>(size); };
    const PoolConfig& config = pool.config;
    d_k = narrow(config.state.d_k);
    d_v = narrow(config.state.d_v);
    value_heads = narrow(config.value_heads);
    key_heads = narrow(config.key_heads);
    heads_a_key = value_heads / key_heads;
    quota = narrow(View::quota(config));
    dense_rows = narrow(View::dense_rows(config.state));
    matrix_rows_per_row = narrow(View::Factors::matrix_rows_per_row(d_k, d_v));
    buffer_capacity = narrow(config.state.buffer_capacity());
  }

  __device__ bool tiled() const { return pool.config.head_map == HeadMap::tiled; }
  __device__ int key_head(int head) const {
    return tiled() ? head % key_heads : head / heads_a_key;
  }
  /// Whether a value head is the first of those that share its key.
  __device__ bool writes_key(int head) const {
    return tiled() ? head < key_heads : head % heads_a_key == 0;
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

/// Between loads and their use: without it the compiler computes with the first numbers before it
/// asks for the next, and a warp waits for each.
__device__ inline void after_loads() { __syncwarp(); }

/// Brings bytes [from, to) into the cache that all multiprocessors share; a block. It costs no
/// register, so more may be on its way than registers hold.
__device__ inline void prefetch(const void* memory, int from, int to) {
  constexpr int line = 128;
  const auto* const data = static_cast<const char*>(memory);
  const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int i = from + static_cast<int>(threadIdx.x) * line; i < to; i += threads * line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(data + i));
  }
}

/// Warps of a multiprocessor at once, for which registers are left over: measured
/// (docs/performance.md).
template <class Policy, class Shape>
inline constexpr int resident_warps = Shape::Keys::count > 4                      ? 8
                                      : Policy::Rule::decay == Decay::per_channel ? 16
                                      : Policy::Rule::corrects                    ? 20
                                                                                  : 24;

/// A state of a pool as a block finds it, and the sums that the block makes of its rows.
///
/// Rows of each kind are dealt to four groups in turn, every group adds up its own in order, and the
/// four sums are added as a tree. A warp does one group or all four: the bits are the same.
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

 public:
  /// The query and, where the rule corrects, the key.
  static constexpr int vectors = Policy::Rule::corrects ? 2 : 1;
  static constexpr int groups = 4 / Warps;  ///< of this warp

  __device__ HeadReader(const Arguments& arguments, Index slot, int head)
      : arguments_(arguments),
        shift_(slot * static_cast<Index>(arguments.pool.slot_bytes) +
               head * static_cast<Index>(arguments.pool.head_bytes)),
        first_row_((slot * arguments.value_heads + head) * arguments.quota),
        head_(head),
        dense_(record()->dense != 0),
        rank_(*at(first().rank)) {}

  /// How far ahead of what is computed with rows are prefetched. More than the cache holds of all
  /// states at work would be fetched twice.
  static constexpr int ahead = 8192;
  /// The first rows are asked for before anybody knows how many there are.
  __device__ void prefetch_first_rows() const {
    constexpr int early = ahead / 2;
    const int quota_bytes = arguments_.quota * row_bytes();
    prefetch(own_rows(), 0, quota_bytes < early ? quota_bytes : early);
  }
  __device__ void prefetch_more(int buffered, const BufferedCode* keys) const {
    constexpr int size = sizeof(BufferedCode);
    prefetch(keys, 0, buffered * arguments_.d_k * size);
    prefetch(correction(0), 0, buffered * arguments_.d_v * size);
    if constexpr (per_channel) prefetch(log_decay(0), 0, buffered * arguments_.d_k * 4);
    prefetch_ahead(-ahead / 2, ahead / 2);
  }

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

  /// This warp's sums over all rows, decayed by those tokens that are buffered and by `log_decay`.
  /// @param keys  of buffered tokens
  __device__ void read(const Keys (&x)[vectors], int buffered, const Keys& log_decays,
                       float log_decay, const BufferedCode* keys) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
#pragma unroll
      for (int g = 0; g < groups; ++g) sums_[v][g] = Values::zeros();
    }
    if constexpr (per_channel) {
      Keys sum = log_decays;
      read_tokens(x, buffered, sum, keys);
      Keys decayed[vectors];
      decay(x, sum, decayed);
      read_body(decayed, 1.0f);
    } else {
      float sum = log_decay;
      read_tokens(x, buffered, sum, keys);
      read_body(x, exp_decay(sum));
    }
  }

  /// The sums of all warps, in the first; `shared` is of `vectors` x 4 rows of 32 `Values`.
  __device__ void combine(float* shared, Values (&total)[vectors]) const {
    constexpr int width = 32 * Values::count;
    if constexpr (Warps > 1) {
      const int lane = Values::lane();
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
#pragma unroll
        for (int g = 0; g < groups; ++g) {
#pragma unroll
          for (int i = 0; i < Values::count; ++i) {
            shared[(4 * v + group(g)) * width + 32 * i + lane] = sums_[v][g].x[i];
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
          part[g] = Warps > 1 ? shared[(4 * v + g) * width + 32 * i + Values::lane()]
                              : sums_[v][g % groups].x[i];
        }
        total[v].x[i] = (part[0] + part[1]) + (part[2] + part[3]);
      }
    }
  }

 private:
  __device__ const typename View::Head& first() const { return arguments_.first; }
  // The same piece of this head.
  template <class T>
  __device__ T* at(T* of_first) const {
    return moved(of_first, shift_);
  }
  __device__ static int warp() { return Warps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32; }
  __device__ static int group(int g) { return warp() + g * Warps; }

  __device__ int row_bytes() const {
    return (arguments_.d_k + arguments_.d_v) * static_cast<int>(sizeof(Code));
  }
  // Those of the quota.
  __device__ const Code* own_rows() const {
    return arguments_.pool.components + first_row_ * (arguments_.d_k + arguments_.d_v);
  }
  // Of the body, what is `ahead` of bytes [at, at + count).
  __device__ void prefetch_ahead(int at, int count) const {
    const int rows = dense_ ? arguments_.dense_rows : rank_;
    const int end = (rows < arguments_.quota ? rows : arguments_.quota) * row_bytes();
    const int to = at + ahead + count;
    prefetch(own_rows(), at + ahead, to < end ? to : end);
  }
  // Component row i of this state.
  template <bool Listed>
  __device__ Index row(int i) const {
    return Listed ? Index{at(first().list)[i]} : first_row_ + i;
  }
  __device__ const float* scales(Index row) const {
    const int count = static_cast<int>(View::Factors::row_scales(arguments_.d_k, arguments_.d_v));
    return arguments_.pool.scales + row * count;
  }

  // y = exp(sums) o x
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

  // In the loops below all loads of a turn come first, and none is behind a branch, so that they are
  // under way together: what is beyond the last row reads the last row again, with weight zero.

  // Buffered tokens, newest first, each with the decay of those after it; sum ends as the decay of
  // what was before.
  template <class Sum>
  __device__ void read_tokens(const Keys (&x)[vectors], int buffered, Sum& sum,
                              const BufferedCode* keys_begin) {
    constexpr int turns = Warps > 1 ? 2 : 1;
    constexpr int rows = groups * turns;
    constexpr int tokens = 4 * turns;
#pragma unroll 1
    for (int base = 0; base < buffered; base += tokens) {
      const auto token = [&](int n) {
        const int j = buffered - 1 - base - n;
        return j < 0 ? 0 : j;
      };
      Keys keys[rows];
      Values values[rows];
      Sum decays[tokens];
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const int j = token(4 * (r / groups) + group(r % groups));
        keys[r] =
            Keys::template load<Buffered>(keys_begin + j * arguments_.d_k, arguments_.d_k, quads);
        values[r] = Values::template load<Buffered>(correction(j), arguments_.d_v, quads);
      }
#pragma unroll
      for (int n = 0; n < tokens; ++n) load_decay(token(n), decays[n]);
      after_loads();
      float z[vectors * rows];
      float weights[rows];
#pragma unroll
      for (int n = 0; n < tokens; ++n) {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          if (4 * (r / groups) + group(r % groups) != n) continue;
          if constexpr (per_channel) {
            Keys decayed[vectors];
            decay(x, sum, decayed);
#pragma unroll
            for (int v = 0; v < vectors; ++v) z[v * rows + r] = keys[r].part_of_dot(decayed[v]);
          } else {
            weights[r] = exp_decay(sum);
#pragma unroll
            for (int v = 0; v < vectors; ++v) z[v * rows + r] = keys[r].part_of_dot(x[v]);
          }
        }
        if (base + n < buffered) include(decays[n], sum);
      }
      sum_over_warp(z);
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const bool there = base + 4 * (r / groups) + group(r % groups) < buffered;
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          if constexpr (!per_channel) z[v * rows + r] *= weights[r];
          if (!there) z[v * rows + r] = 0;
        }
      }
      add<rows>(z, values);
    }
  }
  __device__ void load_decay(int j, float& decay) const {
    decay = 0;
    if constexpr (Policy::Rule::decay == Decay::scalar) decay = *log_decay(j);
  }
  __device__ void load_decay(int j, Keys& decays) const {
    decays = Keys::template load<float>(log_decay(j), arguments_.d_k, quads);
  }
  __device__ static void include(float decay, float& sum) { sum += decay; }
  __device__ static void include(const Keys& decays, Keys& sum) {
#pragma unroll
    for (int i = 0; i < Keys::count; ++i) sum.x[i] += decays.x[i];
  }

  __device__ void read_body(const Keys (&x)[vectors], float weight) {
    if constexpr (Policy::Sink::present) {
      if (warp() == 0) {
        const Keys key =
            Keys::template load<Stored>(at(codes_of(first().sink).data), arguments_.d_k, quads);
        const Values value[1] = {Values::template load<float>(
            arguments_.pool.sink_directions.row(head_), arguments_.d_v, false)};
        float z[vectors];
#pragma unroll
        for (int v = 0; v < vectors; ++v) z[v] = key.part_of_dot(x[v]);
        sum_over_warp(z);
        float factor = weight;
        if constexpr (scaled) factor *= *at(first().sink.scales.data);
#pragma unroll
        for (int v = 0; v < vectors; ++v) z[v] *= factor;
        add<1>(z, value);
      }
    }
    if constexpr (Policy::Compaction::low_rank) {
      if (!dense_) {
        if (rank_ <= arguments_.quota) {
          read_terms<false>(x, weight);
        } else {
          read_terms<true>(x, weight);
        }
        return;
      }
    }
    if constexpr (!Policy::Compaction::low_rank || Policy::Compaction::adaptive) {
      if (arguments_.dense_rows <= arguments_.quota) {
        read_matrix<false>(x, weight);
      } else {
        read_matrix<true>(x, weight);
      }
    }
  }

  template <bool Listed>
  __device__ void read_terms(const Keys (&x)[vectors], float weight) {
    constexpr int rows = 4;
    constexpr int turns = rows / groups;
    const StatePoolView<Policy>& pool = arguments_.pool;
    const int d_k = arguments_.d_k;
    const int d_v = arguments_.d_v;
    const Code* const own = own_rows();
    const float* const own_strengths = pool.strengths + first_row_;
#pragma unroll 1
    for (int base = 0; base < rank_; base += 4 * turns) {
      Keys keys[rows];
      Values values[rows];
      float strengths[rows];
#pragma unroll
      for (int r = 0; r < rows; ++r) {
        const int i = base + 4 * (r / groups) + group(r % groups);
        const int there = i < rank_ ? i : rank_ - 1;
        const Index place = row<Listed>(there);
        const Code* const codes =
            Listed ? pool.components + place * (d_k + d_v) : own + there * (d_k + d_v);
        keys[r] = Keys::template load<Stored>(codes, d_k, quads);
        values[r] = Values::template load<Stored>(codes + d_k, d_v, quads);
        strengths[r] = Listed ? pool.strengths[place] : own_strengths[there];
        if constexpr (scaled) strengths[r] *= scales(place)[0] * scales(place)[1];
        if (i >= rank_) strengths[r] = 0;
      }
      prefetch_ahead(base * row_bytes(), 4 * turns * row_bytes());
      after_loads();
      float z[vectors * rows];
#pragma unroll
      for (int r = 0; r < rows; ++r) {
#pragma unroll
        for (int v = 0; v < vectors; ++v) z[v * rows + r] = keys[r].part_of_dot(x[v]);
      }
      sum_over_warp(z);
#pragma unroll
      for (int r = 0; r < rows; ++r) {
#pragma unroll
        for (int v = 0; v < vectors; ++v) z[v * rows + r] *= weight * strengths[r];
      }
      add<rows>(z, values);
    }
  }

  // Row i of the matrix belongs to group i % 4: channels 4 l to 4 l + 3 are in lane l.
  template <bool Listed>
  __device__ void read_matrix(const Keys (&x)[vectors], float weight) {
    constexpr int rows = Warps > 1 || vectors == 1 ? 8 : 4;
    constexpr int turns = rows / groups;
    const int d_k = arguments_.d_k;
    const int d_v = arguments_.d_v;
    const int per_row = arguments_.matrix_rows_per_row;
    const float per_piece = 1.0f / static_cast<float>(per_row);
#pragma unroll
    for (int chunk = 0; chunk < Keys::count / 4; ++chunk) {
      float mine[vectors * groups];
#pragma unroll
      for (int g = 0; g < groups; ++g) {
        const int e = group(g);
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
          const float* const four = x[v].x + 4 * chunk;
          const float lower = (e & 1) != 0 ? four[1] : four[0];
          const float upper = (e & 1) != 0 ? four[3] : four[2];
          mine[v * groups + g] = weight * ((e & 2) != 0 ? upper : lower);
        }
      }
#pragma unroll 1
      for (int base = 0; 128 * chunk + 4 * base < d_k && base < 32; base += turns) {
        Values values[rows];
        float coefficients[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
          const int lane = base + r / groups;
          const int i = 128 * chunk + 4 * lane + group(r % groups);
          const bool there = i < d_k && lane < 32;
          const int channel = there ? i : d_k - 1;
          // Exact, since both are small.
          const int piece = static_cast<int>((static_cast<float>(channel) + 0.5f) * per_piece);
          const int part = channel - piece * per_row;
          const Index place = row<Listed>(piece);
          values[r] = Values::template load<Stored>(
              arguments_.pool.components + place * (d_k + d_v) + part * d_v, d_v, quads);
          coefficients[r] = there ? 1.0f : 0.0f;
          if constexpr (scaled) coefficients[r] *= scales(place)[part];
        }
        const int row_size = d_v * static_cast<int>(sizeof(Code));
        prefetch_ahead((128 * chunk + 4 * base) * row_size, 4 * turns * row_size);
        after_loads();
        float z[vectors * rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
#pragma unroll
          for (int v = 0; v < vectors; ++v) {
            const int lane = (base + r / groups) % 32;
            z[v * rows + r] =
                coefficients[r] * __shfl_sync(whole_warp, mine[v * groups + r % groups], lane);
          }
        }
        add<rows>(z, values);
      }
    }
  }

  const Arguments& arguments_;
  Index shift_;
  Index first_row_;
  int head_;
  bool dense_;
  int rank_;
  Values sums_[vectors][groups];
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
  int last = 0;
  if (lane == 0) {
    if (status != Status::ok) {
      atomicMax(failed, static_cast<int>(status));
      __threadfence();
    }
    last = atomicAdd(&record.arrived, 1) == heads - 1 ? 1 : 0;
  }
  if (__shfl_sync(whole_warp, last, 0) == 0) return;
  const auto failure =
      static_cast<Status>(__shfl_sync(whole_warp, lane == 0 ? atomicExch(failed, 0) : 0, 0));
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
  const auto b = static_cast<int>(blockIdx.x / static_cast<unsigned>(arguments.value_heads));
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
  Reader reader(arguments, slot, head);
  reader.prefetch_first_rows();
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
  const int key_head = arguments.key_head(head);
  const auto keys = codes_of(pool.keys(slot, key_head));
  const int tokens = static_cast<int>(count);
  reader.prefetch_more(buffered, keys.row(0));

  Status status = Status::ok;
  float certificate = reader.certificates()[buffered];
  float mass = reader.masses()[buffered];
  for (int t = 0; t < tokens; ++t) {
    const int now = buffered + t;
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
      reader.read(x, now, log_decays, log_decay, keys.row(0));
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
        if (arguments.writes_key(head) || t + 1 < tokens)
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
