// Decoding on factored states: pools of the library, with ranks as trained models have them.
#pragma once

#include <cstdint>
#include <numeric>
#include <sinkstate/sinkstate_cuda.cuh>
#include <vector>

#include "cuda_workloads.cuh"

namespace sinkstate::bench {

template <class W, class Precision>
using FactoredPolicy = Policy<typename W::Rule, Cuda, Precision, LocalSvd, NoSink>;

/// Tokens between two compactions: steps are measured from an empty buffer to a full one.
constexpr int cycle = 8;

namespace detail {

/// A random body for each admitted state, a block each; buffers stay empty.
template <class W, class P>
__global__ void fill_pool(StatePoolView<P> pool, std::uint64_t layer) {
  using View = StatePoolView<P>;
  const Index slot = blockIdx.x;
  const Index head_index = blockIdx.y;
  const Index state_index = slot * W::value_heads + head_index;
  const auto position = static_cast<std::uint64_t>(state_index);
  const int rank = W::rank(layer, position);
  const bool dense = rank > W::paying_rank;
  const int held = dense ? static_cast<int>(View::dense_rows(pool.config.state)) : rank;
  const auto head = pool.head(slot, head_index);
  const Index quota = View::quota(pool.config);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < held; i += threads) {
    head.list[i] = static_cast<std::int32_t>(state_index * quota + i);
  }
  if (thread == 0) {
    *head.held = held;
    *head.rank = dense ? 0 : rank;
    head.record->dense = dense ? 1 : 0;
    head.record->settled_rank = dense ? 0 : rank;
  }
  __syncthreads();

  const auto state = pool.state(slot, head_index);
  const int lane = thread % 32;
  const Philox random{position ^ (layer << 32)};
  const auto fill_row = [&](const auto& rows, Index i, int size, std::uint64_t stream,
                            float length) {
    const auto number = [&](int j) {
      const auto place = static_cast<std::uint64_t>(i * size + j);
      return uniform(random.block(place, stream).word[0], -1.0f, 1.0f);
    };
    float square = 0;
    for (int j = lane; j < size; j += 32) square += number(j) * number(j);
    const float scale = length * rsqrtf(warp_sum(square));
    auto* const numbers = sinkstate::detail::codes_of(rows).row(i);
    for (int j = lane; j < size; j += 32) {
      if constexpr (sinkstate::detail::StoredAs<typename P::Stored>::narrow) {
        numbers[j] = round_to_nearest<typename P::Stored>(scale * number(j));
      } else {
        numbers[j] = scale * number(j);
      }
    }
  };
  // Strengths fall from 1 to 0.01.
  const auto strength = [&](int i) { return exp10f(-2.0f * i / (rank < 2 ? 1 : rank - 1)); };
  if (dense) {
    for (int i = thread / 32; i < W::key_size; i += threads / 32) {
      fill_row(state.matrix, i, W::value_size, 2, 0.2f);
    }
  } else {
    for (int i = thread / 32; i < rank; i += threads / 32) {
      fill_row(state.factors.keys(), i, W::key_size, 0, 1.0f);
      fill_row(state.factors.values(), i, W::value_size, 1, 1.0f);
      if (lane == 0) state.factors.strength(i) = strength(i);
    }
  }
  if (thread == 0) {
    float mass = dense ? 3.0f : 0.0f;
    for (int i = 0; !dense && i < rank; ++i) mass += strength(i);
    state.buffer.masses[0] = mass;
    state.buffer.certificates[0] = 0;
  }
}

/// Buffers are empty again, and nothing else changes.
template <class P>
__global__ void rewind_pool(StatePoolView<P> pool) {
  const Index heads = pool.config.value_heads;
  const Index i = Index{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= pool.config.slots * heads) return;
  const auto head = pool.head(i / heads, i % heads);
  *head.buffer.count = 0;
  head.record->tokens = 0;
  if (i % heads != 0) return;
  SlotRecord& record = pool.slot(i / heads);
  record.buffered = 0;
  record.tokens = 0;
}

/// How many states have not buffered so many tokens, or their slots say otherwise.
template <class P>
__global__ void count_out_of_step(StatePoolView<P> pool, int buffered, int* count) {
  const Index heads = pool.config.value_heads;
  const Index i = Index{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= pool.config.slots * heads) return;
  const auto head = pool.head(i / heads, i % heads);
  if (*head.buffer.count != buffered || pool.slot(i / heads).buffered != buffered) {
    atomicAdd(count, 1);
  }
}

/// Bodies as [slots, value_heads, value_size, key_size], a block each.
template <class W, class P>
__global__ void expand_pool(StatePoolView<P> pool, float* states) {
  const Index slot = blockIdx.x;
  const Index head = blockIdx.y;
  const auto state = pool.state(slot, head);
  float* const expanded = states + (slot * W::value_heads + head) * W::state_size;
  for (int i = static_cast<int>(threadIdx.x); i < W::state_size;
       i += static_cast<int>(blockDim.x)) {
    const int value = i / W::key_size;
    const int key = i % W::key_size;
    double sum = 0;
    if (state.dense()) {
      sum = state.matrix(key, value);
    } else {
      const auto keys = state.factors.keys();
      const auto values = state.factors.values();
      for (Index r = 0; r < state.rank(); ++r) {
        sum += static_cast<double>(state.factors.strength(r)) * static_cast<double>(keys(r, key)) *
               static_cast<double>(values(r, value));
      }
    }
    expanded[i] = static_cast<float>(sum);
  }
}

}  // namespace detail

/// What the states of a few layers are like.
struct RankSummary {
  double mean = 0;         ///< of all, those that are kept dense included
  double dense_share = 0;  ///< of states
  double body_bytes = 0;   ///< of a layer, rows and strengths

  template <class W>
  static RankSummary of(int layers, int slots, int code_bytes) {
    RankSummary summary;
    const int states = slots * W::value_heads;
    for (int layer = 0; layer < layers; ++layer) {
      for (int state = 0; state < states; ++state) {
        const int rank =
            W::rank(static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(state));
        const bool dense = rank > W::paying_rank;
        summary.mean += rank;
        summary.dense_share += dense ? 1 : 0;
        summary.body_bytes +=
            dense ? static_cast<double>(code_bytes) * W::state_size
                  : rank * (static_cast<double>(code_bytes) * (W::key_size + W::value_size) + 4.0);
      }
    }
    summary.mean /= static_cast<double>(layers) * states;
    summary.dense_share /= static_cast<double>(layers) * states;
    summary.body_bytes /= layers;
    return summary;
  }
};

/// Bytes of `tokens` buffered by one request: keys once a key head, corrections and log decays for
/// each value head.
template <class W>
double buffered_bytes(double tokens) {
  return tokens * 4 *
         (W::key_heads * W::key_size + W::value_heads * (W::value_size + W::log_decays));
}

/// Pools of several layers, all of their slots in use.
template <class W, class Precision>
class FactoredLayers {
 public:
  using P = FactoredPolicy<W, Precision>;

  inline static int warps = 0;  ///< a state; 0: as the library chooses

  static PoolConfig config(int slots) {
    PoolConfig config;
    config.state.d_k = W::key_size;
    config.state.d_v = W::value_size;
    config.state.buffer = cycle;
    config.slots = slots;
    config.key_heads = W::key_heads;
    config.value_heads = W::value_heads;
    return config;
  }
  /// Device memory of one layer.
  static std::size_t layer_bytes(int slots) {
    return (pool_bytes<P>(config(slots)).total + 255) / 256 * 256;
  }
  /// Bytes of a layer's states that a cycle reads or writes at all.
  static double touched_bytes(int slots) {
    return RankSummary::of<W>(1, slots, sizeof(Code)).body_bytes + slots * buffered_bytes<W>(cycle);
  }
  /// Bytes of one step of a layer, the mean over a cycle: bodies, what is buffered before it, what
  /// it buffers, inputs and outputs.
  static double step_bytes(int layers, int slots) {
    return RankSummary::of<W>(layers, slots, sizeof(Code)).body_bytes +
           slots * (buffered_bytes<W>((cycle - 1) / 2.0 + 1) + W::token_bytes);
  }

  FactoredLayers(const Stream& stream, int layers, int slots)
      : stream_(stream),
        memory_(static_cast<std::size_t>(layers) * layer_bytes(slots)),
        scratch_(scratch_bytes),
        statuses_(static_cast<std::size_t>(slots)),
        teams_{stream, scratch_.data(), scratch_.count()} {
    check(cudaMemsetAsync(statuses_.data(), 0, statuses_.count() * sizeof(Status), stream),
          "cudaMemset");
    std::vector<std::int32_t> all(static_cast<std::size_t>(slots));
    std::iota(all.begin(), all.end(), 0);
    const DeviceArray<std::int32_t> indices(all);
    for (int layer = 0; layer < layers; ++layer) {
      unsigned char* const memory =
          memory_.data() + static_cast<std::size_t>(layer) * layer_bytes(slots);
      pools_.push_back(make_pool<P>(teams_, memory, layer_bytes(slots), config(slots)));
      check(admit(teams_, pools_.back(), indices.data(), Index{slots}, statuses_.data()), "admit");
      const dim3 states(static_cast<unsigned>(slots), W::value_heads);
      detail::fill_pool<W, P>
          <<<states, 128, 0, stream>>>(pools_.back(), static_cast<std::uint64_t>(layer));
      check_launch("fill_pool");
    }
    stream.wait();
  }

  /// One token into each of a layer's states.
  void step(int layer, const TokenTensors& tokens) {
    TokenBatch<float, BFloat16> batch;
    batch.entries = tokens.entries;
    batch.slots = tokens.slots;
    batch.keys = {tokens.keys, W::key_heads * W::key_size, W::key_size};
    batch.queries = {tokens.queries, W::key_heads * W::key_size, W::key_size};
    batch.values = {tokens.values, W::value_heads * W::value_size, W::value_size};
    batch.log_decays = {tokens.log_decays, W::value_heads * W::log_decays, W::log_decays};
    batch.write_strengths = {tokens.write_strengths, W::value_heads, 1};
    batch.outputs = {tokens.outputs, W::value_heads * W::value_size, W::value_size};
    if (warps == 0) {
      check(sinkstate::step(teams_, pool(layer), batch, statuses_.data(), SlotCheck::distinct),
            "step");
    } else {
      check(sinkstate::detail::launch_step(stream_, pool(layer), batch, statuses_.data(), false,
                                           warps),
            "step");
    }
  }
  void rewind(int layer) {
    constexpr int block = 256;
    const StatePoolView<P>& pools = pool(layer);
    const Index states = pools.config.slots * pools.config.value_heads;
    detail::rewind_pool<P><<<detail::blocks_of(states, block), block, 0, stream_>>>(pools);
    check_launch("rewind_pool");
  }

  /// Whether all slots of a layer have buffered so many tokens.
  bool in_step(int layer, int buffered) {
    constexpr int block = 256;
    const StatePoolView<P>& pools = pool(layer);
    const Index states = pools.config.slots * pools.config.value_heads;
    const DeviceArray<int> count(std::vector<int>{0});
    detail::count_out_of_step<P>
        <<<detail::blocks_of(states, block), block, 0, stream_>>>(pools, buffered, count.data());
    check_launch("count_out_of_step");
    stream_.wait();
    return count.download()[0] == 0;
  }
  /// Of the last step, one for each entry.
  std::vector<Status> statuses() const { return statuses_.download(); }

  /// The bodies of the first layer, [slots, value_heads, value_size, key_size].
  std::vector<float> expand() {
    const auto slots = static_cast<unsigned>(pool(0).config.slots);
    const DeviceArray<float> states(std::size_t{slots} * W::value_heads * W::state_size);
    detail::expand_pool<W, P>
        <<<dim3(slots, W::value_heads), 256, 0, stream_>>>(pool(0), states.data());
    check_launch("expand_pool");
    stream_.wait();
    return states.download();
  }

 private:
  using Code = typename sinkstate::detail::StoredAs<typename P::Stored>::Code;
  static constexpr std::size_t scratch_bytes = std::size_t{256} << 20;

  const StatePoolView<P>& pool(int layer) const { return pools_[static_cast<std::size_t>(layer)]; }

  const Stream& stream_;
  DeviceArray<unsigned char> memory_;
  DeviceArray<unsigned char> scratch_;
  DeviceArray<Status> statuses_;
  CudaTeams teams_;
  std::vector<StatePoolView<P>> pools_;
};

}  // namespace sinkstate::bench
