// One state in device memory, worked on by one warp; every call waits. A .cpp sees no CUDA, the .cu
// no Eigen.
#pragma once

#include <cstddef>
#include <sinkstate/core/policy.hpp>
#include <sinkstate/core/status.hpp>
#include <sinkstate/model/sink_state.hpp>

namespace sinkstate::testing {

template <class P>
class DeviceState {
 public:
  using OnDevice = Policy<typename P::Rule, Cuda, typename P::Precision, typename P::Compaction,
                          typename P::Sink>;

  // `sink_direction` null without a sink.
  DeviceState(const StateConfig& config, const float* sink_direction);
  DeviceState(const DeviceState&) = delete;
  ~DeviceState();

  // The bytes of a host state of the same policy and configuration.
  void upload(const void* state);
  void download(void* state) const;
  Status step(const Token<float>& token, const float* query, float* output);
  Status compact();

 private:
  SinkStateView<OnDevice> view_;
  std::size_t bytes_ = 0;
  unsigned char* memory_ = nullptr;
  float* vectors_ = nullptr;  // key, value, log decays, query, output
  Status* status_ = nullptr;
  void* scratch_ = nullptr;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace sinkstate::testing
