// The same layer on a CUDA device: a step, and the compactions due in it, captured once. README.md
// shows the part between the marks.

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

// [quickstart]
#include <sinkstate/sinkstate_cuda.cuh>
namespace ss = sinkstate;
using Policy = ss::Policy<ss::Mamba2, ss::Cuda, ss::Fp16>;

// In device memory, [requests, heads, numbers], bf16 as engines have them; -1 is padding.
struct Tokens {
  std::int32_t* slots;
  std::uint16_t *keys, *queries, *values, *outputs;
  float *log_decays, *dt;
};

// What a captured graph repeats with other slots, ranks and cursors each time.
cudaError_t decode(ss::CudaTeams teams, ss::StatePoolView<Policy> pool, const Tokens& tokens,
                   ss::Index requests, ss::Status* statuses) {
  ss::TokenBatch<float, ss::BFloat16> batch;
  batch.entries = requests;
  batch.slots = tokens.slots;
  batch.keys = {tokens.keys, 2 * 64, 64};
  batch.queries = {tokens.queries, 2 * 64, 64};
  batch.values = {tokens.values, 8 * 32, 32};
  batch.log_decays = {tokens.log_decays, 8, 1};
  batch.write_strengths = {tokens.dt, 8, 1};
  batch.outputs = {tokens.outputs, 8 * 32, 32};
  const cudaError_t error = ss::step(teams, pool, batch, statuses, ss::SlotCheck::distinct);
  if (error != cudaSuccess) return error;
  return ss::compact_due(teams, pool, tokens.slots, requests);
}
// [quickstart]

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

template <class T>
T* on_device(const std::vector<T>& numbers) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, numbers.size() * sizeof(T)), "cudaMalloc");
  check(cudaMemcpy(memory, numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  return static_cast<T*>(memory);
}

void run() {
  ss::PoolConfig config;
  config.state = {64, 32};
  config.slots = 4;
  config.key_heads = 2;
  config.value_heads = 8;

  cudaStream_t stream{};
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const std::vector<unsigned char> scratch(ss::cuda_scratch_bytes<Policy>(config.state, 8));
  const ss::CudaTeams teams(stream, on_device(scratch), scratch.size());
  const std::vector<unsigned char> memory(ss::pool_bytes<Policy>(config).total);
  const auto pool = ss::make_pool<Policy>(teams, on_device(memory), memory.size(), config);

  // Two requests and a place that is free; 1 and 0.5 in bf16.
  const std::uint16_t one = 0x3F80;
  const std::uint16_t half = 0x3F00;
  Tokens tokens{};
  tokens.slots = on_device<std::int32_t>({2, -1, 0});
  tokens.keys = on_device(std::vector<std::uint16_t>(3 * 2 * 64, one));
  tokens.queries = on_device(std::vector<std::uint16_t>(3 * 2 * 64, half));
  tokens.values = on_device(std::vector<std::uint16_t>(3 * 8 * 32, one));
  tokens.outputs = on_device(std::vector<std::uint16_t>(3 * 8 * 32, 0));
  tokens.log_decays = on_device(std::vector<float>(3 * 8, -0.5f));
  tokens.dt = on_device(std::vector<float>(3 * 8, 0.25f));
  auto* const statuses = on_device(std::vector<ss::Status>(3, ss::Status::ok));
  check(ss::admit(teams, pool, on_device<std::int32_t>({0, 2}), 2), "admit");

  cudaGraph_t graph{};
  cudaGraphExec_t program{};
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  check(decode(teams, pool, tokens, 3, statuses), "decode");
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
  for (int token = 0; token < 100; ++token) check(cudaGraphLaunch(program, stream), "graph");

  std::uint16_t output = 0;
  ss::Status status{};
  check(cudaMemcpyAsync(&output, tokens.outputs, 2, cudaMemcpyDeviceToHost, stream), "copy");
  check(cudaMemcpyAsync(&status, statuses, sizeof status, cudaMemcpyDeviceToHost, stream), "copy");
  check(cudaStreamSynchronize(stream), "decode");
  // Each token adds 0.25 * 64 * 0.5 = 8 and decays by exp(-0.5): 8 / (1 - exp(-0.5)) = 20.33.
  std::printf("output %.2f after 100 tokens: %s\n", ss::widen<ss::BFloat16>(output),
              ss::to_string(status));
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("quickstart_device: no CUDA device here\n");
    return EXIT_SUCCESS;
  }
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "quickstart_device: %s\n", error.what());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
