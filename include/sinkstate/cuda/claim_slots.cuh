/// @file
/// Which entry of a batch works on which slot, and the forks that come before a step.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../algorithm/pool_step.hpp"
#include "../config.hpp"
#include "../core/status.hpp"
#include "../model/pool_slots.hpp"
#include "../model/state_pool.hpp"
#include "copy_slots.cuh"
#include "lane_vectors.cuh"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

inline constexpr int claiming_threads = 1024;

/// An entry's number in the slot that it wants; the smallest wins, since none is the largest.
__device__ inline void claim(SlotRecord& record, Index b) {
  atomicMin(reinterpret_cast<unsigned*>(&record.entry), static_cast<unsigned>(b));
}

/// Notes in each slot the entry that works on it, and refuses the others; one block.
template <class Policy, class Number>
__global__ void __launch_bounds__(claiming_threads)
    claim_for_step(const __grid_constant__ StatePoolView<Policy> pool,
                   const __grid_constant__ TokenBatch<float, Number> batch, Status* statuses) {
  const auto tell = [&](Index b, Status status) {
    if (statuses != nullptr) statuses[b] = status;
  };
  // Visits entries that have passed so far.
  const auto each = [&](const auto& visit) {
    for (Index b = threadIdx.x; b < batch.entries; b += blockDim.x) {
      if (pool.config.is_padding(batch.slots[b])) continue;
      if (check_entry(pool, batch, b) == Status::ok) visit(b, pool.slot(batch.write_slot(b)));
    }
    __syncthreads();
  };
  for (Index b = threadIdx.x; b < batch.entries; b += blockDim.x) {
    tell(b, pool.config.is_padding(batch.slots[b]) ? Status::ok : check_entry(pool, batch, b));
  }
  each([&](Index b, SlotRecord& record) { claim(record, b); });
  each([&](Index b, SlotRecord& record) {
    if (record.entry != b) {
      tell(b, Status::invalid_slot);
    } else if (batch.slots[b] != batch.write_slot(b)) {
      atomicAdd(&pool.slot(batch.slots[b]).readers, 1);
    }
  });
  if (batch.write_slots == nullptr) return;
  // What another entry is to fork must not be replaced before.
  each([&](Index b, SlotRecord& record) {
    if (record.entry != b) return;
    const bool refused = batch.slots[b] != batch.write_slot(b) && record.readers > 0;
    record.status = refused ? Status::invalid_slot : Status::ok;
  });
  each([&](Index b, SlotRecord& record) {
    pool.slot(batch.slots[b]).readers = 0;
    if (record.entry != b || record.status == Status::ok) return;
    tell(b, record.status);
    record.entry = -1;
  });
}

/// Whether entry b has a slot for which it forks first.
template <class Policy, class Number>
__device__ bool forks(const StatePoolView<Policy>& pool, const TokenBatch<float, Number>& batch,
                      Index b) {
  const Index from = batch.slots[b];
  const Index to = batch.write_slot(b);
  return !pool.config.is_padding(from) && from != to && pool.config.is_slot(to) &&
         pool.slot(to).entry == b;
}

/// A request must not be replaced by a fork whose tokens are refused, so their numbers are looked at
/// before; a block an entry and head.
template <class Policy, class Number>
__global__ void __launch_bounds__(copying_threads)
    check_forks(const __grid_constant__ StatePoolView<Policy> pool,
                const __grid_constant__ TokenBatch<float, Number> batch) {
  const Index heads = pool.config.value_heads;
  const Index d_k = pool.config.state.d_k;
  const Index d_v = pool.config.state.d_v;
  const Index decays = Policy::Rule::log_decays(d_k);
  for (Index i = blockIdx.x; i < batch.entries * heads; i += gridDim.x) {
    const Index b = i / heads;
    const Index head = i % heads;
    if (!forks(pool, batch, b)) continue;
    const Index key_head = pool.config.key_head(head);
    Status worst = Status::ok;
    const auto note = [&](bool fault, Status status) {
      if (fault && status > worst) worst = status;
    };
    for (Index t = batch.start(b); t < batch.start(b) + batch.count(b); ++t) {
      const auto each = [&](Index count, const auto& visit) {
        for (Index n = threadIdx.x; n < count; n += blockDim.x) visit(n);
      };
      each(d_k, [&](Index n) {
        const float key = number_of<Number>(batch.keys.at(t, key_head)[n]);
        note(!isfinite(key), Status::non_finite_input);
        const float stored =
            number_of<typename Policy::Buffered>(code_of<typename Policy::Buffered>(key));
        note(isfinite(key) && !isfinite(stored), Status::overflow);
        note(batch.outputs.data != nullptr &&
                 !isfinite(number_of<Number>(batch.queries.at(t, key_head)[n])),
             Status::non_finite_input);
      });
      each(d_v, [&](Index n) {
        note(!isfinite(number_of<Number>(batch.values.at(t, head)[n])), Status::non_finite_input);
      });
      each(decays, [&](Index n) {
        const float log_decay = batch.log_decays.at(t, head)[n];
        note(log_decay > 0.0f, Status::positive_log_decay);
        note(log_decay != log_decay, Status::non_finite_input);
      });
      note(batch.write_strengths.data != nullptr && !isfinite(*batch.write_strengths.at(t, head)),
           Status::non_finite_input);
    }
    if (worst == Status::ok) continue;
    atomicMax(reinterpret_cast<int*>(&pool.slot(batch.write_slot(b)).failed),
              static_cast<int>(worst));
  }
}

/// Rows for forks: those of the reserve go to the first that asks; one thread.
template <class Policy, class Number>
__global__ void hold_forks(const __grid_constant__ StatePoolView<Policy> pool,
                           const __grid_constant__ TokenBatch<float, Number> batch,
                           Status* statuses) {
  for (Index b = 0; b < batch.entries; ++b) {
    if (!forks(pool, batch, b)) continue;
    const Index from = batch.slots[b];
    const Index to = batch.write_slot(b);
    SlotRecord& record = pool.slot(to);
    auto status = static_cast<Status>(atomicExch(reinterpret_cast<int*>(&record.failed), 0));
    if (status == Status::ok && !may_copy_slot(pool, from, pool, to)) {
      status = Status::pool_exhausted;
    }
    if (status == Status::ok) {
      record.bodies.change_in_kernel();
      hold_copy(pool, from, pool, to);
      continue;
    }
    record.entry = -1;
    if (statuses != nullptr) statuses[b] = status;
  }
}

template <class Policy, class Number>
cudaError_t claim_slots(cudaStream_t stream, const StatePoolView<Policy>& pool,
                        const TokenBatch<float, Number>& batch, Status* statuses) {
  if (batch.entries == 0) return cudaSuccess;
  claim_for_step<<<1, claiming_threads, 0, stream>>>(pool, batch, statuses);
  if (batch.write_slots != nullptr) {
    const unsigned heads = blocks_of(batch.entries * pool.config.value_heads);
    check_forks<<<heads, copying_threads, 0, stream>>>(pool, batch);
    hold_forks<<<1, 1, 0, stream>>>(pool, batch, statuses);
    copy_heads<<<heads, copying_threads, 0, stream>>>(pool, batch.slots, pool, batch.write_slots,
                                                      batch.entries, false);
  }
  return cudaGetLastError();
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
