// Decoding on dense states, the baseline: one pass in place over [value_size, key_size] matrices.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda_workloads.cuh"

namespace sinkstate::bench {

/// How a dense step is cut.
///
/// @tparam Rows       that a warp has in flight
/// @tparam Passes     over so many rows by each warp; from two on the next rows are fetched ahead
/// @tparam Warps      a block
/// @tparam Streaming  reads and writes pass by the cache as far as they can
template <int Rows, int Passes, int Warps, bool Streaming>
struct DenseShape {
  static constexpr int rows = Rows;
  static constexpr int passes = Passes;
  static constexpr int warps = Warps;
  static constexpr bool streaming = Streaming;
  static constexpr int block_rows = rows * passes * warps;
  /// State bytes that a warp has asked for at a time.
  static constexpr int warp_bytes = (passes > 1 ? 2 : 1) * rows * 32 * 16;
};

namespace detail {

/// A lane's four numbers of a vector along the key channels.
struct Channels {
  float x[4];
};

__device__ inline Channels channels_of(uint2 codes) {
  return {{__uint_as_float(codes.x << 16), __uint_as_float(codes.x & 0xFFFF0000u),
           __uint_as_float(codes.y << 16), __uint_as_float(codes.y & 0xFFFF0000u)}};
}
__device__ inline Channels channels_of(float4 numbers) {
  return {{numbers.x, numbers.y, numbers.z, numbers.w}};
}
__device__ inline float dot(const Channels& a, const Channels& b) {
  return a.x[0] * b.x[0] + a.x[1] * b.x[1] + a.x[2] * b.x[2] + a.x[3] * b.x[3];
}
__device__ inline Channels product(const Channels& a, const Channels& b) {
  return {{a.x[0] * b.x[0], a.x[1] * b.x[1], a.x[2] * b.x[2], a.x[3] * b.x[3]}};
}

/// Sums of `Rows` numbers over the lanes of a warp at once: each step halves the numbers that a
/// lane holds on to. Sum r is known to the lanes from 32 / Rows r on.
template <int Rows, int Mask = 16>
__device__ float sums_of_rows(const float (&x)[Rows], int lane) {
  if constexpr (Rows == 1) {
    float sum = x[0];
#pragma unroll
    for (int mask = Mask; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
    return sum;
  } else {
    constexpr int half = Rows / 2;
    const bool upper = (lane & Mask) != 0;
    float sums[half];
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? x[i] : x[i + half];
      const float kept = upper ? x[i + half] : x[i];
      sums[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, Mask);
    }
    return sums_of_rows<half, Mask / 2>(sums, lane);
  }
}

template <class Shape>
__device__ void fetch_rows(const float4* state, float4 (&rows)[Shape::rows]) {
#pragma unroll
  for (int r = 0; r < Shape::rows; ++r) {
    rows[r] = Shape::streaming ? __ldcs(state + 32 * r) : state[32 * r];
  }
  // Else the compiler moves loads behind the stores of rows before them, to save registers.
  __syncwarp();
}

/// One token into one state of each entry: blocks are [entries, value heads, parts of a state].
template <class W, class Shape>
__global__ void __launch_bounds__(32 * Shape::warps)
    dense_step(TokenTensors tokens, float* __restrict__ states) {
  using Rule = typename W::Rule;
  static_assert(W::key_size == 128, "a lane has four of the key channels");
  static_assert(32 % Shape::rows == 0, "each row's sum belongs to a power of two of lanes");
  constexpr int lanes_a_row = 32 / Shape::rows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int entry = static_cast<int>(blockIdx.z);
  const int head = static_cast<int>(blockIdx.y);
  const int first =
      (static_cast<int>(blockIdx.x) * Shape::warps + warp) * Shape::rows * Shape::passes;

  const std::int32_t slot = __ldg(tokens.slots + entry);
  if (slot < 0) return;
  const auto state_index = std::int64_t{slot} * W::value_heads + head;
  float4* const state =
      reinterpret_cast<float4*>(states + state_index * W::state_size) + first * 32 + lane;
  float4 next[Shape::rows];
  fetch_rows<Shape>(state, next);

  const int vector = (entry * W::key_heads + W::key_head(head)) * 32 + lane;
  const int token = entry * W::value_heads + head;
  const Channels key = channels_of(__ldg(reinterpret_cast<const uint2*>(tokens.keys) + vector));
  const Channels query =
      channels_of(__ldg(reinterpret_cast<const uint2*>(tokens.queries) + vector));
  const float write_strength = __ldg(tokens.write_strengths + token);
  Channels decay;
  if constexpr (Rule::decay == Decay::per_channel) {
    decay = channels_of(__ldg(reinterpret_cast<const float4*>(tokens.log_decays) +
                              std::int64_t{token} * 32 + lane));
    for (float& x : decay.x) x = expf(x);
  } else {
    const float all = expf(__ldg(tokens.log_decays + token));
    for (float& x : decay.x) x = all;
  }
  const Channels decayed_key = product(decay, key);
  const Channels decayed_query = product(decay, query);
  const float overlap = warp_sum(dot(key, query));
  const std::int64_t column = std::int64_t{token} * W::value_size + first + lane / lanes_a_row;

#pragma unroll
  for (int pass = 0; pass < Shape::passes; ++pass) {
    float4 rows[Shape::rows];
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) rows[r] = next[r];
    const std::uint16_t code = __ldg(tokens.values + column + pass * Shape::rows);
    if (pass + 1 < Shape::passes) {
      fetch_rows<Shape>(state + (pass + 1) * Shape::rows * 32, next);
    }

    float read[Shape::rows];
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) read[r] = dot(channels_of(rows[r]), decayed_query);
    float correction = __uint_as_float(static_cast<std::uint32_t>(code) << 16);
    if constexpr (Rule::corrects) {
      float recalled[Shape::rows];
#pragma unroll
      for (int r = 0; r < Shape::rows; ++r) recalled[r] = dot(channels_of(rows[r]), decayed_key);
      correction -= sums_of_rows(recalled, lane);
    }
    correction *= write_strength;
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) {
      const float n = __shfl_sync(0xFFFFFFFFu, correction, r * lanes_a_row);
      const Channels old = channels_of(rows[r]);
      const float4 updated = {
          decay.x[0] * old.x[0] + key.x[0] * n, decay.x[1] * old.x[1] + key.x[1] * n,
          decay.x[2] * old.x[2] + key.x[2] * n, decay.x[3] * old.x[3] + key.x[3] * n};
      float4* const place = state + (pass * Shape::rows + r) * 32;
      if constexpr (Shape::streaming) {
        __stcs(place, updated);
      } else {
        *place = updated;
      }
    }
    const float output = sums_of_rows(read, lane) + correction * overlap;
    if (lane % lanes_a_row == 0) {
      tokens.outputs[column + pass * Shape::rows] =
          __bfloat16_as_ushort(__float2bfloat16_rn(output));
    }
  }
}

static __global__ void fill_states(float4* states, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const Philox::Block random = Philox{16}.block(static_cast<std::uint64_t>(i));
  const auto number = [&](int n) { return uniform(random.word[n], -0.5f, 0.5f); };
  states[i] = {number(0), number(1), number(2), number(3)};
}

}  // namespace detail

/// A dense step, cut in one way.
struct DenseKernel {
  std::string name;
  int registers = 0;
  int spilled = 0;          ///< bytes of local memory
  int bytes_in_flight = 0;  ///< on each multiprocessor
  void (*launch)(const TokenTensors&, float* states, cudaStream_t) = nullptr;
};

namespace detail {

template <class W, class Shape>
void add_dense_kernel(std::vector<DenseKernel>& kernels) {
  if constexpr (W::value_size % Shape::block_rows == 0) {
    const auto kernel = dense_step<W, Shape>;
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "attributes of a dense kernel");
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 32 * Shape::warps, 0),
          "occupancy of a dense kernel");
    DenseKernel entry;
    entry.name = std::to_string(Shape::rows) + "x" + std::to_string(Shape::passes) + "/" +
                 std::to_string(Shape::warps) + (Shape::streaming ? "s" : "");
    entry.registers = attributes.numRegs;
    entry.spilled = static_cast<int>(attributes.localSizeBytes);
    entry.bytes_in_flight = blocks * Shape::warps * Shape::warp_bytes;
    entry.launch = [](const TokenTensors& tokens, float* states, cudaStream_t stream) {
      const dim3 grid(W::value_size / Shape::block_rows, W::value_heads,
                      static_cast<unsigned>(tokens.entries));
      dense_step<W, Shape><<<grid, 32 * Shape::warps, 0, stream>>>(tokens, states);
      check_launch("dense step");
    };
    kernels.push_back(std::move(entry));
  }
}

template <class W, bool Streaming>
void add_dense_kernels(std::vector<DenseKernel>& kernels) {
  const auto add = [&](auto... shapes) { (add_dense_kernel<W, decltype(shapes)>(kernels), ...); };
  add(DenseShape<2, 1, 4, Streaming>{}, DenseShape<4, 1, 1, Streaming>{},
      DenseShape<4, 1, 4, Streaming>{}, DenseShape<4, 1, 5, Streaming>{},
      DenseShape<4, 2, 4, Streaming>{}, DenseShape<4, 4, 1, Streaming>{},
      DenseShape<4, 4, 4, Streaming>{}, DenseShape<4, 4, 5, Streaming>{},
      DenseShape<8, 1, 1, Streaming>{}, DenseShape<8, 1, 2, Streaming>{},
      DenseShape<8, 1, 4, Streaming>{}, DenseShape<8, 1, 5, Streaming>{},
      DenseShape<8, 2, 1, Streaming>{}, DenseShape<8, 2, 4, Streaming>{},
      DenseShape<8, 2, 5, Streaming>{}, DenseShape<16, 1, 1, Streaming>{},
      DenseShape<16, 1, 2, Streaming>{}, DenseShape<16, 1, 4, Streaming>{},
      DenseShape<16, 1, 5, Streaming>{});
}

}  // namespace detail

/// All ways to cut the dense step of a workload; names are rows x passes / warps, s if streaming.
template <class W>
std::vector<DenseKernel> dense_kernels() {
  std::vector<DenseKernel> kernels;
  detail::add_dense_kernels<W, true>(kernels);
  detail::add_dense_kernels<W, false>(kernels);
  return kernels;
}

/// Random dense states, [layers, slots, value_heads, value_size, key_size].
template <class W>
class DenseLayers {
 public:
  DenseLayers(const Stream& stream, int layers, int slots)
      : layer_size_(static_cast<std::size_t>(slots) * W::value_heads * W::state_size),
        states_(static_cast<std::size_t>(layers) * layer_size_) {
    fill(stream);
  }

  void fill(const Stream& stream) const {
    const auto count = static_cast<std::int64_t>(states_.count() / 4);
    detail::fill_states<<<detail::blocks_of(count, 256), 256, 0, stream>>>(
        reinterpret_cast<float4*>(states_.data()), count);
    check_launch("dense states");
    stream.wait();
  }
  float* layer(int index) const {
    return states_.data() + static_cast<std::size_t>(index) * layer_size_;
  }
  std::vector<float> download() const { return states_.download(); }

 private:
  std::size_t layer_size_;
  DeviceArray<float> states_;
};

/// The largest error of a head's state, relative to its largest number. Infinite if a state that
/// was not to be touched was.
template <class W>
double state_error(const std::vector<float>& states, const std::vector<double>& wanted,
                   const std::vector<std::int32_t>& slots, int all_slots) {
  double worst = 0;
  for (int slot = 0; slot < all_slots; ++slot) {
    const bool touched = std::find(slots.begin(), slots.end(), slot) != slots.end();
    for (std::size_t h = 0; h < W::value_heads; ++h) {
      double error = 0;
      double largest = 0;
      const std::size_t head = static_cast<std::size_t>(slot) * W::value_heads + h;
      for (std::size_t i = head * W::state_size; i < (head + 1) * W::state_size; ++i) {
        const double difference = std::abs(static_cast<double>(states[i]) - wanted[i]);
        if (!(difference < HUGE_VAL)) return HUGE_VAL;
        error = std::max(error, difference);
        largest = std::max(largest, std::abs(wanted[i]));
      }
      if (!touched && error > 0) return HUGE_VAL;
      worst = std::max(worst, error / largest);
    }
  }
  return worst;
}

}  // namespace sinkstate::bench
