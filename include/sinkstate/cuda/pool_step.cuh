/// @file
/// Decode steps of a pool on a device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../algorithm/pool_step.hpp"
#include "../config.hpp"
#include "../core/status.hpp"
#include "../core/stored_rows.hpp"
#include "../model/state_pool.hpp"
#include "claim_slots.cuh"
#include "cuda_teams.hpp"
#include "decode_kernel.cuh"

SINKSTATE_NAMESPACE_BEGIN

/// Whether the slots of a batch are looked at before a step.
enum class SlotCheck {
  /// Slots that two entries would write are refused, which takes a kernel of one block before the
  /// step.
  before_step,
  /// The caller knows that no two entries write the same slot. Where some may fork (`write_slots`),
  /// slots are looked at all the same.
  distinct,
};

namespace detail {

/// Whether four neighbours anywhere in these vectors can be loaded at once.
template <class T>
bool quads_in(const HeadVectors<T>& vectors) {
  constexpr Index size = sizeof(T);
  return vectors.data == nullptr ||
         (reinterpret_cast<std::uintptr_t>(vectors.data) % (4 * size) == 0 &&
          vectors.token_stride % 4 == 0 && vectors.head_stride % 4 == 0);
}
template <class T>
bool quads_in(const T* first) {
  return reinterpret_cast<std::uintptr_t>(first) % (4 * sizeof(T)) == 0;
}

template <class Policy>
bool quads_in(const StatePoolView<Policy>& pool,
              const typename StatePoolView<Policy>::Head& first) {
  const StateConfig& config = pool.config.state;
  return config.d_k % 4 == 0 && config.d_v % 4 == 0 && quads_in(pool.components) &&
         quads_in(pool.slot_memory) && quads_in(codes_of(first.buffer.corrections).data) &&
         quads_in(codes_of(first.sink).data) && quads_in(first.buffer.log_decays.data);
}

/// @param warps  of a block, which has one state: 1 or 4; 0: as the batch is large
template <class Policy, class Number>
cudaError_t launch_step(cudaStream_t stream, const StatePoolView<Policy>& pool,
                        const TokenBatch<float, Number>& batch, Status* statuses, bool claimed,
                        int warps = 0) {
  StepArguments<Policy, Number> arguments(pool, batch);
  arguments.statuses = statuses;
  arguments.claimed = claimed;
  const StateConfig& config = pool.config.state;
  arguments.input_quads = config.d_k % 4 == 0 && config.d_v % 4 == 0 && quads_in(batch.keys) &&
                          quads_in(batch.queries) && quads_in(batch.values) &&
                          quads_in(batch.outputs) &&
                          (Policy::Rule::decay != Decay::per_channel || quads_in(batch.log_decays));
  const Index blocks = batch.entries * pool.config.value_heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7FFFFFFF) return cudaErrorInvalidConfiguration;
  const auto launch = [&](auto shape) {
    using Shape = decltype(shape);
    const auto grid = static_cast<unsigned>(blocks);
    if (warps == 1) {
      step_heads<Policy, Number, Shape, 1><<<grid, 32, 0, stream>>>(arguments);
    } else {
      step_heads<Policy, Number, Shape, 4><<<grid, 128, 0, stream>>>(arguments);
    }
    return cudaGetLastError();
  };
  // Few states have the device to themselves: measured (docs/performance.md).
  constexpr Index few = 2500;
  if (warps == 0) warps = blocks < few ? 4 : 1;
  // Without a read-out and a correction there is nothing to share.
  if (!Policy::Rule::corrects && batch.outputs.data == nullptr) warps = 1;
  const bool small = config.d_k <= 128 && config.d_v <= 128;
  const bool quads = quads_in(pool, arguments.first);
  if (small && quads) return launch(HeadShape<1, 1, true>{});
  return quads ? launch(HeadShape<2, 2, true>{}) : launch(HeadShape<2, 2, false>{});
}

}  // namespace detail

/// Advances the states of a batch of requests and reads them, in one kernel: `step` of host pools,
/// with the same meaning and equal up to rounding. Results do not depend on what else is in the
/// batch, to the bit.
///
/// @param batch     its arrays are in device memory; outputs may not overlap inputs or the pool
/// @param statuses  if not null, one for each entry, in device memory
/// @returns an error of the launch; what became of an entry is in `statuses`, as on a host. An entry
///          that is not ok has changed no state, but its outputs may have been written.
/// O((d_k + d_v) (rank + buffered)) bytes a state; dense d_k d_v. Nothing waits, nothing is
/// allocated.
template <class Policy, class Number>
[[nodiscard]] cudaError_t step(CudaTeams teams, StatePoolView<Policy> pool,
                               const TokenBatch<float, Number>& batch, Status* statuses = nullptr,
                               SlotCheck check = SlotCheck::before_step) {
  const bool claimed = check == SlotCheck::before_step || batch.write_slots != nullptr;
  if (claimed) {
    const cudaError_t error = detail::claim_slots(teams.stream, pool, batch, statuses);
    if (error != cudaSuccess) return error;
  }
  return detail::launch_step(teams.stream, pool, batch, statuses, claimed);
}

SINKSTATE_NAMESPACE_END
