/// @file
/// Between the dense states of a prefill and a pool on a device.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "../algorithm/initialize.hpp"
#include "../algorithm/materialize.hpp"
#include "../algorithm/pool_dense.hpp"
#include "../config.hpp"
#include "../core/status.hpp"
#include "rewrite_bodies.cuh"

SINKSTATE_NAMESPACE_BEGIN

/// Dense states of several requests.
template <class T>
struct DenseBatch {
  DenseStates<T> states;   ///< of the first entry
  Index entry_stride = 0;  ///< between neighbouring entries

  SINKSTATE_HOST_DEVICE StridedMatrix<T> head(Index entry, Index h,
                                              const StateConfig& config) const {
    StridedMatrix<T> matrix = states.head(h, config);
    matrix.data += entry * entry_stride;
    return matrix;
  }
};

namespace detail {

struct MayInitialize {
  template <class Policy>
  __device__ Permission operator()(const StatePoolView<Policy>& pool, Index slot) const {
    if (pool.slot(slot).draft >= 0) return {false, Status::draft_open};
    return {true, Status::ok};
  }
};

struct MostRows {
  template <class View>
  __device__ Index operator()(const View& view) const {
    return StatePoolView<typename View::Policy>::most_rows(view.config);
  }
};

/// All heads are looked at before the first is replaced: what fails is noted in the slot.
template <class Policy>
__global__ void check_dense(const __grid_constant__ StatePoolView<Policy> pool, SlotList list,
                            DenseBatch<const float> dense, const std::int64_t* tokens,
                            const float* certificates) {
  const Index heads = pool.config.value_heads;
  const StateConfig& config = pool.config.state;
  for (Index i = blockIdx.x; i < list.entries * heads; i += gridDim.x) {
    const Index b = i / heads;
    if (!list.works(pool, b)) continue;
    const auto matrix = dense.head(b, i % heads, config);
    bool finite = true;
    for (Index n = threadIdx.x; n < config.d_k * config.d_v; n += blockDim.x) {
      finite = finite && isfinite(matrix(n / config.d_v, n % config.d_v));
    }
    const bool usable = (tokens == nullptr || tokens[b] >= 0) &&
                        (certificates == nullptr || certificates[i] >= 0.0f);
    const Status status = !usable   ? Status::invalid_argument
                          : !finite ? Status::non_finite_input
                                    : Status::ok;
    if (status != Status::ok) {
      atomicMax(reinterpret_cast<int*>(&pool.slot(list.slots[b]).failed), static_cast<int>(status));
    }
  }
}

template <class Policy, class Method>
struct InitializeBody {
  StatePoolView<Policy> pool;
  DenseBatch<const float> dense;
  const float* certificates = nullptr;
  const std::int32_t* slots = nullptr;
  Method method;

  __device__ Status operator()(WarpTeam& team, Index b, Index h,
                               const SinkStateView<Policy>& view) const {
    // The slot is as it was, then.
    const int failed = *reinterpret_cast<const int*>(&pool.slot(slots[b]).failed);
    if (failed != 0) return static_cast<Status>(failed);
    CompactionReport done;
    const float certificate =
        certificates == nullptr ? 0.0f : certificates[b * pool.config.value_heads + h];
    const Status status =
        initialize(team, view, dense.head(b, h, pool.config.state), method, certificate, &done);
    return status == Status::ok && lacked_rows(view, done) ? Status::truncated : status;
  }
};

struct SettleTokens {
  const std::int64_t* tokens = nullptr;

  template <class Policy>
  __device__ Status operator()(const StatePoolView<Policy>& pool, Index slot, Index b) const {
    SlotRecord& record = pool.slot(slot);
    atomicExch(reinterpret_cast<int*>(&record.failed), 0);
    const Status status = settle_slot(pool, slot);
    if (status == Status::ok || status == Status::truncated) {
      record.tokens = tokens == nullptr ? 0 : tokens[b];
    }
    return status;
  }
};

template <class Policy>
__global__ void __launch_bounds__(32)
    materialize_states(const __grid_constant__ StatePoolView<Policy> pool, SlotList list,
                       DenseBatch<float> dense, float* certificates, unsigned char* scratch,
                       std::size_t team_bytes) {
  const Index heads = pool.config.value_heads;
  WarpTeam team(scratch + counter_bytes + blockIdx.x * team_bytes, team_bytes);
  for (Index i = blockIdx.x; i < list.entries * heads; i += gridDim.x) {
    const Index b = i / heads;
    if (pool.config.is_padding(list.slots[b]) || !pool.in_use(list.slots[b])) continue;
    const Status status = materialize(team, pool.state(list.slots[b], i % heads),
                                      dense.head(b, i % heads, pool.config.state),
                                      certificates == nullptr ? nullptr : certificates + i);
    __syncwarp();
    if (threadIdx.x == 0) *pool.head(list.slots[b], i % heads).status = status;
  }
}

template <class Policy>
__global__ void tell_materialized(const __grid_constant__ StatePoolView<Policy> pool, SlotList list,
                                  Status* statuses) {
  for (Index b = Index{blockIdx.x} * blockDim.x + threadIdx.x; b < list.entries;
       b += Index{gridDim.x} * blockDim.x) {
    Status worst = Status::ok;
    if (!pool.config.is_padding(list.slots[b])) {
      if (!pool.in_use(list.slots[b])) worst = Status::invalid_slot;
      for (Index h = 0; worst != Status::invalid_slot && h < pool.config.value_heads; ++h) {
        const Status status = *pool.head(list.slots[b], h).status;
        if (status > worst) worst = status;
      }
    }
    statuses[b] = worst;
  }
}

}  // namespace detail

/// `initialize` of host pools for several requests, equal up to rounding; a warp a state.
///
/// @param slots         entries numbers in device memory, each in use; padding is skipped
/// @param dense         in device memory
/// @param tokens        entries numbers in device memory; null: 0
/// @param certificates  entries x value_heads numbers in device memory; null: exact
/// @param statuses      if not null, one for each entry, in device memory
/// @returns as `compact`; cudaErrorInvalidValue also for a method that cannot be used
template <class Policy, class Method = RandomizedSvd>
[[nodiscard]] cudaError_t initialize(CudaTeams teams, StatePoolView<Policy> pool,
                                     const std::int32_t* slots, Index entries,
                                     const DenseBatch<const float>& dense,
                                     const std::int64_t* tokens = nullptr,
                                     const Method& method = {}, const float* certificates = nullptr,
                                     Status* statuses = nullptr) {
  if (!detail::usable(method)) return cudaErrorInvalidValue;
  if (entries == 0) return cudaSuccess;
  const detail::SlotList list{slots, entries};
  const detail::InitializeBody<Policy, Method> rewrite{pool, dense, certificates, slots, method};
  return detail::rewrite_pool(
      teams, pool, list, workspace_bytes<Policy>(pool.config.state, method),
      detail::MayInitialize{}, detail::MostRows{}, rewrite, detail::SettleTokens{tokens}, statuses,
      [&] {
        const Index blocks = entries * pool.config.value_heads;
        detail::check_dense<<<detail::blocks_of(blocks), 128, 0, teams.stream>>>(
            pool, list, dense, tokens, certificates);
      });
}

/// `materialize` of host pools for several requests; a warp a state. The states are unchanged.
///
/// @param certificates  if not null, entries x value_heads numbers in device memory
/// @param statuses      if not null, one for each entry, in device memory: invalid_slot, overflow
/// @returns as `compact`
template <class Policy>
[[nodiscard]] cudaError_t materialize(CudaTeams teams, StatePoolView<Policy> pool,
                                      const std::int32_t* slots, Index entries,
                                      const DenseBatch<float>& dense, float* certificates = nullptr,
                                      Status* statuses = nullptr) {
  if (entries == 0) return cudaSuccess;
  const std::size_t each = detail::padded_team(workspace_bytes<Policy>(pool.config.state));
  if (teams.scratch == nullptr || teams.scratch_bytes < detail::counter_bytes + each) {
    return cudaErrorInvalidValue;
  }
  const auto room = static_cast<Index>((teams.scratch_bytes - detail::counter_bytes) / each);
  const Index states = entries * pool.config.value_heads;
  detail::
      materialize_states<<<detail::blocks_of(states < room ? states : room), 32, 0, teams.stream>>>(
          pool, {slots, entries}, dense, certificates, static_cast<unsigned char*>(teams.scratch),
          each);
  if (statuses != nullptr) {
    detail::tell_materialized<<<detail::blocks_of((entries + 127) / 128), 128, 0, teams.stream>>>(
        pool, {slots, entries}, statuses);
  }
  return cudaGetLastError();
}

SINKSTATE_NAMESPACE_END
