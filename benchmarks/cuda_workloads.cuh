// Layers of real models, what their tokens look like, and the same step on the host in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <sinkstate/core/number_formats.hpp>
#include <sinkstate/core/random.hpp>
#include <sinkstate/model/update_rules.hpp>
#include <utility>
#include <vector>

#include "cuda_support.cuh"

namespace sinkstate::bench {

template <class RuleTag, int KeyHeads, int ValueHeads, int KeySize, int ValueSize>
struct Workload {
  using Rule = RuleTag;
  static constexpr int key_heads = KeyHeads;
  static constexpr int value_heads = ValueHeads;
  static constexpr int key_size = KeySize;
  static constexpr int value_size = ValueSize;
  static constexpr int log_decays = static_cast<int>(Rule::log_decays(key_size));
  static constexpr int state_size = key_size * value_size;
  /// The largest rank whose terms are smaller than the matrix.
  static constexpr int paying_rank = (state_size - 1) / (key_size + value_size);

  SINKSTATE_HOST_DEVICE static constexpr int key_head(int value_head) {
    return value_head / (value_heads / key_heads);
  }

  /// Rank of a state as trained models have them: a good half of the states are below 17, a few
  /// are far above.
  SINKSTATE_HOST_DEVICE static int rank(std::uint64_t layer, std::uint64_t state) {
    const Philox::Block random = Philox{20}.block(state, layer);
    const int percentile = static_cast<int>(random.word[0] % 100);
    const int middle = Rule::corrects ? 52 : 60;
    const int high = Rule::corrects ? 82 : 87;
    const int most = Rule::corrects ? 60 : 48;
    const auto within = [&](int first, int last) {
      return first + static_cast<int>(random.word[1] % static_cast<unsigned>(last - first + 1));
    };
    if (percentile < 22) return within(4, 8);
    if (percentile < middle) return within(9, 16);
    if (percentile < high) return within(17, 32);
    return within(33, most);
  }

  /// Bytes of one token's inputs and outputs, slot index included.
  static constexpr double token_bytes = 4 + 2.0 * 2 * key_heads * key_size +
                                        value_heads * (2.0 * 2 * value_size + 4 * log_decays + 4);
  /// Bytes of a dense step of one request.
  static constexpr double dense_bytes = 2.0 * 4 * value_heads * state_size + token_bytes;
};

/// Mamba-2 of Nemotron-3-Nano-4B.
using WorkloadA = Workload<Mamba2, 8, 96, 128, 80>;
/// Gated DeltaNet of Qwen3.5-9B.
using WorkloadB = Workload<GatedDelta, 16, 32, 128, 128>;
/// Kimi Delta Attention of Kimi-Linear.
using WorkloadC = Workload<KimiDelta, 32, 32, 128, 128>;
/// Mamba-2 of Nemotron-3-Super.
using WorkloadD = Workload<Mamba2, 8, 128, 128, 64>;

/// One token of each request, [entries, heads, numbers] in device memory.
struct TokenTensors {
  int entries = 0;
  const std::int32_t* slots = nullptr;
  const std::uint16_t* keys = nullptr;  ///< codes of BFloat16, as are queries, values and outputs
  const std::uint16_t* queries = nullptr;
  const std::uint16_t* values = nullptr;
  const float* log_decays = nullptr;
  const float* write_strengths = nullptr;
  std::uint16_t* outputs = nullptr;
};

namespace detail {

SINKSTATE_HOST_DEVICE inline float uniform(std::uint32_t word, float least, float most) {
  return least + (most - least) * (static_cast<float>(word >> 8) * 0x1p-24f);
}

/// Sum over the lanes of a warp, known to all.
__device__ inline float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
  return x;
}

/// Vectors of unit length, a warp each.
static __global__ void fill_unit_vectors(std::uint16_t* codes, std::int64_t vectors, int size,
                                         std::uint64_t seed) {
  const std::int64_t vector = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (vector >= vectors) return;
  const auto number = [&](int i) {
    const auto position = static_cast<std::uint64_t>(vector * size + i);
    return uniform(Philox{seed}.block(position).word[0], -1.0f, 1.0f);
  };
  float square = 0;
  for (int i = lane; i < size; i += 32) square += number(i) * number(i);
  const float scale = rsqrtf(warp_sum(square));
  for (int i = lane; i < size; i += 32) {
    codes[vector * size + i] = round_to_nearest<BFloat16>(scale * number(i));
  }
}

static __global__ void fill_codes(std::uint16_t* codes, std::int64_t count, std::uint64_t seed) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const std::uint32_t word = Philox{seed}.block(static_cast<std::uint64_t>(i)).word[0];
  codes[i] = round_to_nearest<BFloat16>(uniform(word, -1.7f, 1.7f));
}

static __global__ void fill_numbers(float* numbers, std::int64_t count, float least, float most,
                                    bool logarithms, std::uint64_t seed) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float x = uniform(Philox{seed}.block(static_cast<std::uint64_t>(i)).word[0], least, most);
  numbers[i] = logarithms ? logf(x) : x;
}

inline unsigned blocks_of(std::int64_t threads, int block) {
  return static_cast<unsigned>((threads + block - 1) / block);
}

}  // namespace detail

/// Tokens for several layers, each with its own, and slots in random order.
template <class W>
class LayerTokens {
 public:
  /// @param padding  entries that stand for nobody, the last ones
  LayerTokens(const Stream& stream, int layers, int entries, int slots, int padding = 0)
      : entries_(entries),
        keys_(size(layers, W::key_heads * W::key_size)),
        queries_(size(layers, W::key_heads * W::key_size)),
        values_(size(layers, W::value_heads * W::value_size)),
        log_decays_(size(layers, W::value_heads * W::log_decays)),
        write_strengths_(size(layers, W::value_heads)),
        outputs_(size(layers, W::value_heads * W::value_size)) {
    std::vector<std::int32_t> indices;
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(slots));
      std::iota(order.begin(), order.end(), 0);
      for (std::size_t i = order.size(); i > 1; --i) {
        const Philox::Block random = Philox{10}.block(i, static_cast<std::uint64_t>(layer));
        std::swap(order[i - 1], order[random.word[0] % i]);
      }
      order.resize(static_cast<std::size_t>(entries), -1);
      std::fill(order.end() - padding, order.end(), -1);
      indices.insert(indices.end(), order.begin(), order.end());
    }
    slots_ = DeviceArray<std::int32_t>(indices);

    constexpr int block = 256;
    const auto launch = [&](std::int64_t threads, const auto& kernel, const auto&... arguments) {
      kernel<<<detail::blocks_of(threads, block), block, 0, stream>>>(arguments...);
      check_launch("inputs");
    };
    const auto count = [](const auto& array) { return static_cast<std::int64_t>(array.count()); };
    const std::int64_t vectors = count(keys_) / W::key_size;
    launch(32 * vectors, detail::fill_unit_vectors, keys_.data(), vectors, W::key_size,
           std::uint64_t{11});
    launch(32 * vectors, detail::fill_unit_vectors, queries_.data(), vectors, W::key_size,
           std::uint64_t{12});
    launch(count(values_), detail::fill_codes, values_.data(), count(values_), std::uint64_t{13});
    launch(count(log_decays_), detail::fill_numbers, log_decays_.data(), count(log_decays_), 0.8f,
           0.999f, true, std::uint64_t{14});
    launch(count(write_strengths_), detail::fill_numbers, write_strengths_.data(),
           count(write_strengths_), 0.05f, 0.95f, false, std::uint64_t{15});
    check(cudaMemsetAsync(outputs_.data(), 0xFF, outputs_.count() * sizeof(std::uint16_t), stream),
          "cudaMemset");
    stream.wait();
  }

  TokenTensors layer(int index) const {
    const auto at = [&](const auto& array, int width) {
      return array.data() + std::size_t{static_cast<unsigned>(index)} *
                                static_cast<std::size_t>(entries_) *
                                static_cast<std::size_t>(width);
    };
    TokenTensors tokens;
    tokens.entries = entries_;
    tokens.slots = at(slots_, 1);
    tokens.keys = at(keys_, W::key_heads * W::key_size);
    tokens.queries = at(queries_, W::key_heads * W::key_size);
    tokens.values = at(values_, W::value_heads * W::value_size);
    tokens.log_decays = at(log_decays_, W::value_heads * W::log_decays);
    tokens.write_strengths = at(write_strengths_, W::value_heads);
    tokens.outputs = at(outputs_, W::value_heads * W::value_size);
    return tokens;
  }

  /// The slot of each entry of the first layer.
  std::vector<std::int32_t> slots() const {
    std::vector<std::int32_t> all = slots_.download();
    all.resize(static_cast<std::size_t>(entries_));
    return all;
  }

  /// Outputs of all layers.
  std::vector<std::uint16_t> outputs() const { return outputs_.download(); }

  /// States advance by the tokens of the first layer.
  /// @param states   [slots, value_heads, value_size, key_size]
  /// @param outputs  [entries, value_heads, value_size]; those of padding stay as they are
  void step_on_host(std::vector<double>& states, std::vector<double>& outputs) const {
    const auto numbers = [](const DeviceArray<std::uint16_t>& codes) {
      std::vector<double> wide;
      wide.reserve(codes.count());
      for (const std::uint16_t code : codes.download()) wide.push_back(widen<BFloat16>(code));
      return wide;
    };
    const auto keys = numbers(keys_);
    const auto queries = numbers(queries_);
    const auto values = numbers(values_);
    const auto log_decays = log_decays_.download();
    const auto write_strengths = write_strengths_.download();
    const auto all_slots = slots();
    for (int b = 0; b < entries_; ++b) {
      const int slot = all_slots[static_cast<std::size_t>(b)];
      if (slot < 0) continue;
      for (int h = 0; h < W::value_heads; ++h) {
        const int head = b * W::value_heads + h;
        const double* const key = &keys[unit(b * W::key_heads + W::key_head(h), W::key_size)];
        const double* const query = &queries[unit(b * W::key_heads + W::key_head(h), W::key_size)];
        const float* const log_decay = &log_decays[unit(head, W::log_decays)];
        double decay[W::key_size];
        for (int c = 0; c < W::key_size; ++c) {
          decay[c] = std::exp(static_cast<double>(log_decay[W::log_decays == 1 ? 0 : c]));
        }
        double* const state = &states[unit(slot * W::value_heads + h, W::state_size)];
        for (int v = 0; v < W::value_size; ++v) {
          double* const row = state + std::ptrdiff_t{v} * W::key_size;
          double recalled = 0;
          for (int c = 0; c < W::key_size; ++c) recalled += decay[c] * row[c] * key[c];
          const double value = values[unit(head, W::value_size) + static_cast<std::size_t>(v)];
          const double correction = static_cast<double>(write_strengths[unit(head, 1)]) *
                                    (value - (W::Rule::corrects ? recalled : 0.0));
          double output = 0;
          for (int c = 0; c < W::key_size; ++c) {
            row[c] = decay[c] * row[c] + key[c] * correction;
            output += row[c] * query[c];
          }
          outputs[unit(head, W::value_size) + static_cast<std::size_t>(v)] = output;
        }
      }
    }
  }

 private:
  std::size_t size(int layers, int width) const {
    return static_cast<std::size_t>(layers) * static_cast<std::size_t>(entries_) *
           static_cast<std::size_t>(width);
  }
  static std::size_t unit(int index, int width) {
    return static_cast<std::size_t>(index) * static_cast<std::size_t>(width);
  }

  int entries_;
  DeviceArray<std::int32_t> slots_;
  DeviceArray<std::uint16_t> keys_;
  DeviceArray<std::uint16_t> queries_;
  DeviceArray<std::uint16_t> values_;
  DeviceArray<float> log_decays_;
  DeviceArray<float> write_strengths_;
  DeviceArray<std::uint16_t> outputs_;
};

/// The largest error of a head's outputs beyond their rounding, relative to the head's largest.
/// Infinite if padding was written.
template <class W>
double output_error(const std::vector<std::uint16_t>& outputs, const std::vector<double>& wanted,
                    const std::vector<std::int32_t>& slots) {
  double worst = 0;
  for (std::size_t b = 0; b < slots.size(); ++b) {
    for (std::size_t h = 0; h < W::value_heads; ++h) {
      double error = 0;
      double largest = 0;
      for (std::size_t v = 0; v < W::value_size; ++v) {
        const std::size_t i = (b * W::value_heads + h) * W::value_size + v;
        if (slots[b] < 0) {
          if (outputs[i] != 0xFFFF) return HUGE_VAL;
          continue;
        }
        const double difference = std::abs(widen<BFloat16>(outputs[i]) - wanted[i]);
        if (!(difference < HUGE_VAL)) return HUGE_VAL;
        error = std::max(error, difference - 0x1.01p-8 * std::abs(wanted[i]));
        largest = std::max(largest, std::abs(wanted[i]));
      }
      if (largest > 0) worst = std::max(worst, error / largest);
    }
  }
  return worst;
}

/// How many layers take turns so that nothing is found in the cache again.
/// @param touched    bytes of a layer that a step reads or writes
/// @param allocated  bytes that it takes
/// @returns 0 when not even two fit the memory
inline int layers_for(const Device& device, double touched, double allocated, int most) {
  const double wanted = std::ceil(4 * device.cache_bytes / touched);
  const int layers = static_cast<int>(std::clamp(wanted, 2.0, static_cast<double>(most)));
  const double fitting = 0.9 * free_bytes() / allocated;
  if (fitting < 2) return 0;
  return fitting < layers ? static_cast<int>(fitting) : layers;
}

}  // namespace sinkstate::bench
