// The example's language model with dense states, held against reading its weights: as many bytes
// per second as bandwidth over weights is what a program that reads them once a byte can reach.

#include <benchmark/benchmark.h>

#include <cstddef>
#include <string>
#include <vector>

#include "hybrid_lm/model.hpp"

namespace {

using namespace sinkstate::hybrid_lm;

const Model& model() {
  static const Model loaded = load_model(SINKSTATE_HYBRID_LM_MODEL);
  return loaded;
}

/// Of all matrices, as they lie in memory: fp32.
std::ptrdiff_t weight_bytes() {
  Eigen::Index numbers = model().embedding.size();
  for (const LayerWeights& layer : model().layers) {
    for (const Matrix* const matrix :
         {&layer.gate, &layer.up, &layer.down, &layer.q, &layer.k, &layer.v, &layer.out, &layer.z,
          &layer.z_first, &layer.decay, &layer.decay_first, &layer.strength}) {
      numbers += matrix->size();
    }
  }
  return 4 * numbers;
}

/// One sum over as many bytes as the weights have.
void read_weights(benchmark::State& bench) {
  const Vector numbers = Vector::Ones(weight_bytes() / 4);
  for (auto _ : bench) benchmark::DoNotOptimize(numbers.sum());
  bench.SetBytesProcessed(bench.iterations() * weight_bytes());
  bench.SetItemsProcessed(bench.iterations());
}

/// items_per_second: bytes of text.
void decode_dense(benchmark::State& bench) {
  const std::string text = "The harbour lay quiet in the early light. ";
  Decoder decoder(model());
  std::size_t i = 0;
  for (auto _ : bench) {
    benchmark::DoNotOptimize(decoder.read(static_cast<std::uint8_t>(text[i])).data());
    i = (i + 1) % text.size();
  }
  bench.SetBytesProcessed(bench.iterations() * weight_bytes());
  bench.SetItemsProcessed(bench.iterations());
}

BENCHMARK(read_weights)->Unit(benchmark::kMicrosecond)->Iterations(300)->Repetitions(5);
BENCHMARK(decode_dense)->Unit(benchmark::kMicrosecond)->Iterations(500)->Repetitions(5);

}  // namespace
