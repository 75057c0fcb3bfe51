#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <sinkstate/algorithm/advance.hpp>
#include <sinkstate/algorithm/compact.hpp>
#include <sinkstate/algorithm/workspace_bytes.hpp>
#include <sinkstate/cuda/warp_team.cuh>

#include "device_state.hpp"
#include "policies.hpp"

namespace sinkstate::testing {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class P>
__global__ void step_one(SinkStateView<P> state, Token<float> token, const float* query,
                         float* output, void* scratch, std::size_t size, Status* status) {
  WarpTeam team(scratch, size);
  *status = step(team, state, token, query, output);
}

template <class P>
__global__ void compact_one(SinkStateView<P> state, void* scratch, std::size_t size,
                            Status* status) {
  WarpTeam team(scratch, size);
  *status = compact(team, state);
}

Status result_of(const Status* status) {
  check(cudaGetLastError());
  Status result{};
  check(cudaMemcpy(&result, status, sizeof result, cudaMemcpyDeviceToHost));
  return result;
}

}  // namespace

template <class P>
DeviceState<P>::DeviceState(const StateConfig& config, const float* sink_direction)
    : bytes_(state_bytes<OnDevice>(config)), scratch_bytes_(workspace_bytes<OnDevice>(config)) {
  const auto d_v = static_cast<std::size_t>(config.d_v);
  const auto width = 3 * static_cast<std::size_t>(config.d_k) + 3 * d_v;
  check(cudaMalloc(&memory_, bytes_));
  check(cudaMalloc(&vectors_, width * sizeof(float)));
  check(cudaMalloc(&status_, sizeof(Status)));
  check(cudaMalloc(&scratch_, scratch_bytes_));
  // What is read before it is written must not pass for anything.
  check(cudaMemset(scratch_, 0xFF, scratch_bytes_));
  float* const direction = vectors_ + width - d_v;
  if (sink_direction != nullptr) {
    check(cudaMemcpy(direction, sink_direction, d_v * sizeof(float), cudaMemcpyHostToDevice));
  }
  Workspace walk(memory_, bytes_);
  view_ =
      SinkStateView<OnDevice>::carve(walk, config, sink_direction == nullptr ? nullptr : direction);
}

template <class P>
DeviceState<P>::~DeviceState() {
  for (void* memory : {static_cast<void*>(memory_), static_cast<void*>(vectors_),
                       static_cast<void*>(status_), scratch_}) {
    cudaFree(memory);
  }
}

template <class P>
void DeviceState<P>::upload(const void* state) {
  check(cudaMemcpy(memory_, state, bytes_, cudaMemcpyHostToDevice));
}
template <class P>
void DeviceState<P>::download(void* state) const {
  check(cudaMemcpy(state, memory_, bytes_, cudaMemcpyDeviceToHost));
}

template <class P>
Status DeviceState<P>::step(const Token<float>& token, const float* query, float* output) {
  const auto d_k = static_cast<std::size_t>(view_.config.d_k);
  const auto d_v = static_cast<std::size_t>(view_.config.d_v);
  float* next = vectors_;
  const auto send = [&next](const float* x, std::size_t n) {
    float* const here = next;
    if (n != 0) check(cudaMemcpy(here, x, n * sizeof(float), cudaMemcpyHostToDevice));
    next += n;
    return here;
  };
  Token<float> sent = token;
  sent.key = send(token.key, d_k);
  sent.value = send(token.value, d_v);
  sent.log_decay =
      send(token.log_decay, static_cast<std::size_t>(P::Rule::log_decays(view_.config.d_k)));
  const float* const asked = send(query, d_k);
  step_one<<<1, WarpTeam::lanes>>>(view_, sent, asked, next, scratch_, scratch_bytes_, status_);
  const Status status = result_of(status_);
  if (status == Status::ok) {
    check(cudaMemcpy(output, next, d_v * sizeof(float), cudaMemcpyDeviceToHost));
  }
  return status;
}

template <class P>
Status DeviceState<P>::compact() {
  compact_one<<<1, WarpTeam::lanes>>>(view_, scratch_, scratch_bytes_, status_);
  return result_of(status_);
}

#define SINKSTATE_INSTANTIATE(...) template class DeviceState<__VA_ARGS__>;
SINKSTATE_FOR_DEVICE_POLICIES(SINKSTATE_INSTANTIATE)

}  // namespace sinkstate::testing
