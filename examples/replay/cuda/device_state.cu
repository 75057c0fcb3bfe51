#include "replay/device_state.hpp"

#include <cuda_runtime_api.h>

#include <string>

#include "replay/policy_of_options.hpp"

namespace sinkstate::tools {

/// state_on_device.cuh, which only what is made of states.cu.in includes: each policy takes nvcc a
/// while.
template <class OnDevice>
std::unique_ptr<AnyState> make_state_on_device(const StateConfig& config,
                                               const float* sink_direction);

void require_device() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  throw ToolError("--backend: cuda wants a CUDA device, found none (" +
                  std::string(cudaGetErrorString(error)) + ")");
}

std::unique_ptr<AnyState> make_device_state(Rule rule, const ReplayOptions& options,
                                            const StateConfig& config,
                                            const float* sink_direction) {
  return with_policy<Cuda, Fp32>(rule, options, [&](auto chosen) {
    return make_state_on_device<typename decltype(chosen)::Policy>(config, sink_direction);
  });
}

}  // namespace sinkstate::tools
