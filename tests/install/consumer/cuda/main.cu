#include <cstdio>
#include <cstring>
#include <sinkstate/sinkstate_cuda.cuh>

const char* version_seen_by_second_file();

__global__ void squares(const float* x, int n, float* result) {
  const sinkstate::WarpTeam team(nullptr, 0);
  *result = team.dot(n, x, x);
}

// Compiled and linked; launched only where there is a device.
int main() {
  std::printf("sinkstate %s\n", sinkstate::version);
  float* memory = nullptr;
  if (cudaMalloc(&memory, 2 * sizeof(float)) == cudaSuccess) {
    const float two = 2;
    float four = 0;
    cudaMemcpy(memory, &two, sizeof two, cudaMemcpyHostToDevice);
    squares<<<1, sinkstate::WarpTeam::lanes>>>(memory, 1, memory + 1);
    cudaMemcpy(&four, memory + 1, sizeof four, cudaMemcpyDeviceToHost);
    cudaFree(memory);
    if (four != 4) return 1;
  }
  return std::strcmp(sinkstate::version, version_seen_by_second_file());
}
