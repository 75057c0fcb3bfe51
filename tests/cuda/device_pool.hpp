// A pool in device memory; every call waits, looks at every error of CUDA, and throws. A .cpp sees no
// CUDA, the .cu no Eigen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sinkstate/algorithm/pool_dense.hpp>
#include <sinkstate/algorithm/pool_step.hpp>
#include <sinkstate/core/number_formats.hpp>
#include <sinkstate/core/policy.hpp>
#include <sinkstate/core/status.hpp>
#include <sinkstate/model/pool_config.hpp>
#include <vector>

namespace sinkstate::testing {

using Slots = std::vector<std::int32_t>;
using Statuses = std::vector<Status>;

// Bytes on the host in which all arrays of a batch lie, and what they are after a step.
struct BatchBytes {
  const void* sent = nullptr;
  std::size_t size = 0;
  void* received = nullptr;
};

// Which kernels make a step.
enum class StepPath { usual, distinct, one_warp, four_warps };

// The dense states of a batch: entry by entry, [heads, K, V].
struct DenseNumbers {
  std::vector<float> states;
  std::vector<float> certificates;   // empty: null
  std::vector<std::int64_t> tokens;  // empty: null
};

// Kernels for inputs of 16 bits are compiled for some policies only: minutes each.
template <class P>
inline constexpr bool takes_narrow_inputs =
    P::Compaction::adaptive&& detail::StoredAs<typename P::Stored>::narrow ==
    detail::StoredAs<typename P::Buffered>::narrow;

template <class P>
class DevicePool {
 public:
  // `directions`: value_heads x d_v, or null without a sink. `teams` bounds the warps of a compaction.
  DevicePool(const PoolConfig& config, const float* directions, Index teams = 256);
  DevicePool(const DevicePool&) = delete;
  ~DevicePool();

  // All bytes of a host pool of the same policy and configuration.
  std::size_t size() const;
  void upload(const void* image);
  void download(void* image) const;

  Statuses admit(const Slots& slots);
  Statuses reset(const Slots& slots);
  Statuses release(const Slots& slots);
  Statuses fork(const Slots& from, const Slots& to);
  Statuses copy_to(DevicePool& pool, const Slots& from, const Slots& to) const;
  Statuses roll_back(const Slots& slots, const Slots& tokens);
  Statuses open_draft(const Slots& slots);
  Statuses close_draft(const Slots& slots, const Slots& rejected);
  Statuses compact(const Slots& slots);
  Statuses compact_due(const Slots& slots);
  Statuses initialize(const Slots& slots, const DenseNumbers& dense);
  Statuses materialize(const Slots& slots, DenseNumbers& dense);

  // Arrays of the batch lie in `bytes.sent`; on the device they lie as far from each other.
  template <class Number>
  Statuses step(const TokenBatch<float, Number>& batch, const BatchBytes& bytes,
                StepPath path = StepPath::usual);

  // A graph of `step` and `compact_due` over the arrays of a batch, which stay where they are.
  void capture(const TokenBatch<float>& batch, const BatchBytes& bytes);
  // Sends the arrays to where the graph finds them, runs it once, and brings them back.
  // @returns statuses of the step, then of the compaction
  Statuses replay(const BatchBytes& bytes);

 private:
  struct Implementation;
  std::unique_ptr<Implementation> own_;
};

}  // namespace sinkstate::testing
