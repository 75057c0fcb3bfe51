// What a decode step costs on a CUDA device: dense states against the factored ones of the library.
//
//   nvcc -std=c++17 -O3 -arch=native --split-compile 0 -I include benchmarks/cuda_decode.cu -o cuda_decode
//
// A layer is one decode step of a batch of requests, inputs and outputs in bf16. Layers take turns,
// in one graph, so that no state is found in the cache again.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_dense.cuh"
#include "cuda_workloads.cuh"
#if __has_include(<sinkstate/sinkstate_cuda.cuh>)
#include "cuda_factored.cuh"
#define SINKSTATE_BENCH_FACTORED 1
#else
#define SINKSTATE_BENCH_FACTORED 0
#endif

namespace sinkstate::bench {
namespace {

struct Options {
  std::string workloads = "ABCD";
  std::vector<int> batches = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024};
  int repeats = 25;
  int trial_repeats = 9;  ///< of each dense kernel, before the best is measured
  int most_layers = 256;
  int warps = 0;      ///< of a factored state
  std::string dense;  ///< the one dense kernel to measure; empty: all
  bool candidates = false;
  const char* csv = nullptr;
};

[[noreturn]] void usage(const std::string& complaint) {
  std::fprintf(stderr,
               "%s\nusage: cuda_decode [--workload A,B,C,D] [--batch 1,2,...] [--quick] "
               "[--csv FILE] [--most-layers N] [--warps 1|4] [--dense NAME] [--candidates]\n"
               "  --most-layers  that take turns (256); fewer may fit the cache at small batches\n"
               "  --warps        that work on a factored state (as the library chooses)\n"
               "  --dense        measure this dense kernel only, as the tables name it\n"
               "  --candidates   print the time of every dense kernel, not only of the best\n",
               complaint.c_str());
  std::exit(2);
}

int positive(const std::string& text) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number < 1 || number > 65535) {
    usage("wanted a number in [1, 65535], given " + text);
  }
  return static_cast<int>(number);
}

Options parse(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string option = arguments[i];
    const auto value = [&]() -> std::string {
      if (++i == count) usage(option + " wants a value");
      return arguments[i];
    };
    if (option == "--workload") {
      options.workloads.clear();
      for (const char letter : value()) {
        if (letter == ',') continue;
        if (letter < 'A' || letter > 'D') usage("workloads are A, B, C and D");
        options.workloads += letter;
      }
    } else if (option == "--batch") {
      options.batches.clear();
      const std::string list = value() + ",";
      for (std::size_t from = 0, to = 0; (to = list.find(',', from)) < list.size(); from = to + 1) {
        options.batches.push_back(positive(list.substr(from, to - from)));
      }
    } else if (option == "--quick") {
      options.batches = {1, 16, 128, 1024};
      options.trial_repeats = 5;
    } else if (option == "--csv") {
      value();
      options.csv = arguments[i];
    } else if (option == "--most-layers") {
      options.most_layers = positive(value());
    } else if (option == "--warps") {
      options.warps = positive(value());
      if (options.warps != 1 && options.warps != 4) usage("--warps is 1 or 4");
    } else if (option == "--dense") {
      options.dense = value();
    } else if (option == "--candidates") {
      options.candidates = true;
    } else {
      usage("unknown option " + option);
    }
  }
  return options;
}

/// One number of the tables.
struct Measured {
  double microseconds = 0;  ///< a step of a layer
  double bytes = 0;         ///< that it must move
  int layers = 0;
  double resident = 0;  ///< bytes that the layers touch in turn
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    if (options.csv != nullptr) {
      csv_ = std::fopen(options.csv, "w");
      if (csv_ == nullptr) throw std::runtime_error(std::string("cannot write ") + options.csv);
      std::fprintf(csv_,
                   "workload,batch,kind,kernel,layers,resident_bytes,microseconds,bytes,"
                   "percent_of_copy,dense_over_this\n");
    }
    bandwidth_ = copy_bandwidth(stream_, 20);
    std::printf("%s, %d multiprocessors, L2 %.0f MB\n", device_.name.c_str(), device_.processors,
                device_.cache_bytes / 1e6);
    std::printf("copy of 4 GiB, read + write: %.1f GB/s = 100 %%\n", bandwidth_ / 1e3);
    std::printf(
        "dense kernels: rows in flight x passes / warps a block, s = streaming. "
        "* : layers touch less than 4 x L2 in turn.\n"
        "factored bytes of a step = rows (d_k + d_v) code + 4 a strength + 4 (3.5 buffered + 1 "
        "written) (d_k a key head + (d_v + log decays) a value head) + inputs + outputs; dense "
        "bodies d_k d_v code.\nSteps are means over buffers of 0 to 7 tokens.\n");
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() {
    if (csv_ != nullptr) std::fclose(csv_);
  }

  bool failed() const { return failed_; }

  template <class W>
  void run(char letter, const char* what) {
    std::printf(
        "\n%c. %s: %d key heads, %d value heads, %d x %d, dense step %.0f bytes a request\n",
        letter, what, W::key_heads, W::value_heads, W::key_size, W::value_size, W::dense_bytes);
    std::vector<DenseKernel> kernels = dense_kernels<W>();
    if (!options_.dense.empty()) {
      kernels.erase(
          std::remove_if(kernels.begin(), kernels.end(),
                         [&](const auto& kernel) { return kernel.name != options_.dense; }),
          kernels.end());
      if (kernels.empty()) throw std::runtime_error("no dense kernel " + options_.dense);
    }
    check_dense<W>(kernels);
#if SINKSTATE_BENCH_FACTORED
    const RankSummary ranks = RankSummary::of<W>(2, 128, 4);
    std::printf("ranks: mean %.2f, above %d kept dense (%.1f %% of states)\n", ranks.mean,
                W::paying_rank, 100 * ranks.dense_share);
    check_factored<W, Fp32>("fp32");
    check_factored<W, Fp16>("fp16");
    measure_host<W>();
#endif
    if (failed_) return;
    print_head();
    trials_.clear();
    for (const int batch : options_.batches) {
      const std::optional<Measured> dense = measure_dense<W>(letter, kernels, batch);
      if (!dense) {
        std::printf("%5d | does not fit\n", batch);
        continue;
      }
#if SINKSTATE_BENCH_FACTORED
      measure_factored<W, Fp32>(letter, batch, *dense, "fp32");
      measure_factored<W, Fp16>(letter, batch, *dense, "fp16");
#endif
      std::printf("\n");
      std::fflush(stdout);
    }
    print_trials(kernels);
  }

 private:
  static constexpr int check_slots = 6;
  static constexpr int check_entries = 5;  // the last is padding
  static constexpr double tolerance = 1e-4;

  void require(bool right) { failed_ = failed_ || !right; }

  /// Every dense kernel against the host.
  template <class W>
  void check_dense(const std::vector<DenseKernel>& kernels) {
    const LayerTokens<W> tokens(stream_, 1, check_entries, check_slots, 1);
    const DenseLayers<W> states(stream_, 1, check_slots);
    const std::vector<float> before = states.download();
    std::vector<double> wanted_states(before.begin(), before.end());
    std::vector<double> wanted_outputs(check_entries * W::value_heads * W::value_size);
    tokens.step_on_host(wanted_states, wanted_outputs);
    double worst_state = 0;
    double worst_output = 0;
    int spills = 0;
    for (const DenseKernel& kernel : kernels) {
      states.fill(stream_);
      // An output that a kernel leaves out must not pass.
      check(cudaMemsetAsync(tokens.layer(0).outputs, 0xFF, wanted_outputs.size() * 2, stream_),
            "cudaMemset");
      kernel.launch(tokens.layer(0), states.layer(0), stream_);
      stream_.wait();
      const double state =
          state_error<W>(states.download(), wanted_states, tokens.slots(), check_slots);
      const double output = output_error<W>(tokens.outputs(), wanted_outputs, tokens.slots());
      if (!(state < tolerance && output < tolerance)) {
        std::printf("dense kernel %s is wrong: state %.1e, output %.1e\n", kernel.name.c_str(),
                    state, output);
      }
      worst_state = std::max(worst_state, state);
      worst_output = std::max(worst_output, output);
      spills += kernel.spilled > 0 ? 1 : 0;
    }
    const bool right = worst_state < tolerance && worst_output < tolerance;
    require(right);
    std::printf(
        "check of %zu dense kernels against fp64: states %.1e, outputs beyond rounding "
        "%.1e: %s; %d use local memory\n",
        kernels.size(), worst_state, worst_output, right ? "ok" : "FAILED", spills);
  }

  struct Trial {
    int batch;
    std::vector<double> microseconds;  ///< of each kernel
  };

  template <class W>
  std::optional<Measured> measure_dense(char letter, const std::vector<DenseKernel>& kernels,
                                        int batch) {
    const double state_bytes = 4.0 * batch * W::value_heads * W::state_size;
    const int layers = layers_for(device_, state_bytes, 1.05 * state_bytes, options_.most_layers);
    if (layers == 0) return std::nullopt;
    const LayerTokens<W> tokens(stream_, layers, batch, batch);
    const DenseLayers<W> states(stream_, layers, batch);
    // Enough for the ends of a graph not to show, no more.
    const int passes = layers * state_bytes > 2e9 ? 2 : 8;
    const auto time = [&](const DenseKernel& kernel, int repeats) {
      const Graph graph(stream_, [&] {
        for (int pass = 0; pass < passes; ++pass) {
          for (int layer = 0; layer < layers; ++layer) {
            kernel.launch(tokens.layer(layer), states.layer(layer), stream_);
          }
        }
      });
      return median_microseconds(stream_, repeats, graph) / (passes * layers);
    };
    Trial trial{batch, {}};
    for (const DenseKernel& kernel : kernels) {
      trial.microseconds.push_back(time(kernel, options_.trial_repeats));
      write_csv(letter, batch, "dense candidate", kernel.name,
                {trial.microseconds.back(), batch * W::dense_bytes, layers, layers * state_bytes},
                0);
    }
    const auto& times = trial.microseconds;
    const auto best =
        static_cast<std::size_t>(std::min_element(times.begin(), times.end()) - times.begin());
    // Measured again, since the smallest of many medians flatters.
    const Measured dense{time(kernels[best], options_.repeats), batch * W::dense_bytes, layers,
                         layers * state_bytes};
    trials_.push_back(std::move(trial));
    std::printf("%5d | %8.2f %5.1f%s %-7s", batch, dense.microseconds, percent(dense), mark(dense),
                kernels[best].name.c_str());
    write_csv(letter, batch, "dense", kernels[best].name, dense, 1);
    return dense;
  }

#if SINKSTATE_BENCH_FACTORED
  /// A few steps of factored states against those of the same matrices on the host.
  template <class W, class Precision>
  void check_factored(const char* precision) {
    constexpr int steps = 3;
    const LayerTokens<W> tokens(stream_, 1, check_entries, check_slots, 1);
    FactoredLayers<W, Precision> layers(stream_, 1, check_slots);
    const std::vector<float> before = layers.expand();
    std::vector<double> states(before.begin(), before.end());
    std::vector<double> outputs(check_entries * W::value_heads * W::value_size);
    bool right = true;
    double worst = 0;
    for (int i = 0; i < steps; ++i) {
      layers.step(0, tokens.layer(0));
      stream_.wait();
      for (const Status status : layers.statuses()) {
        if (status == Status::ok) continue;
        std::printf("step of factored states: %s\n", to_string(status));
        right = false;
        break;
      }
      tokens.step_on_host(states, outputs);
      worst = std::max(worst, output_error<W>(tokens.outputs(), outputs, tokens.slots()));
    }
    right = right && worst < tolerance;
    require(right);
    std::printf("check of %d factored steps, %s, against fp64: outputs beyond rounding %.1e: %s\n",
                steps, precision, worst, right ? "ok" : "FAILED");
  }

  /// What a decode step of a whole model costs the host that replays it as a graph: a kernel a layer.
  template <class W>
  void measure_host() {
    constexpr int layers = 24;
    const LayerTokens<W> tokens(stream_, layers, 1, 1);
    FactoredLayers<W, Fp32> states(stream_, layers, 1);
    const Graph step(stream_, [&] {
      for (int layer = 0; layer < layers; ++layer) states.step(layer, tokens.layer(layer));
    });
    std::printf("host: %.1f us a replay of a graph with the steps of %d layers\n",
                host_microseconds(stream_, 101, step), layers);
  }

  template <class W, class Precision>
  void measure_factored(char letter, int batch, const Measured& dense, const char* precision) {
    using Layers = FactoredLayers<W, Precision>;
    const double touched = Layers::touched_bytes(batch);
    const auto allocated = static_cast<double>(Layers::layer_bytes(batch));
    const int layers = layers_for(device_, touched, 1.05 * allocated, options_.most_layers);
    if (layers == 0) {
      std::printf(" | does not fit");
      return;
    }
    const LayerTokens<W> tokens(stream_, layers, batch, batch);
    Layers::warps = options_.warps;
    Layers states(stream_, layers, batch);
    for (int i = 0; i < cycle; ++i) {
      for (int layer = 0; layer < layers; ++layer) states.step(layer, tokens.layer(layer));
    }
    // Steps that refuse their tokens would be fast.
    for (int layer = 0; layer < layers; ++layer) {
      if (!states.in_step(layer, cycle)) {
        std::printf(" | states did not step\n");
        failed_ = true;
        return;
      }
    }
    const auto rewind = [&] {
      for (int layer = 0; layer < layers; ++layer) states.rewind(layer);
    };
    rewind();
    const Graph rewinds(stream_, rewind);
    const Graph steps(stream_, [&] {
      for (int i = 0; i < cycle; ++i) {
        for (int layer = 0; layer < layers; ++layer) states.step(layer, tokens.layer(layer));
      }
      rewind();
    });
    const double all = median_microseconds(stream_, options_.repeats, steps);
    const double apart = median_microseconds(stream_, options_.repeats, rewinds);
    const Measured factored{(all - apart) / (cycle * layers), Layers::step_bytes(layers, batch),
                            layers, layers * touched};
    const double ratio = dense.microseconds / factored.microseconds;
    std::printf(" | %8.2f %8.2f %5.1f%s %5.2f", factored.microseconds, factored.bytes / 1e6,
                percent(factored), mark(factored), ratio);
    write_csv(letter, batch, precision, "", factored, ratio);
  }
#endif

  double percent(const Measured& measured) const {
    return 100 * measured.bytes / measured.microseconds / bandwidth_;
  }
  const char* mark(const Measured& measured) const {
    return measured.resident < 4 * device_.cache_bytes ? "*" : " ";
  }

  static void print_head() {
    std::printf("    B | dense us  %%copy kernel ");
#if SINKSTATE_BENCH_FACTORED
    for (const char* precision : {"fp32", "fp16"}) {
      std::printf(" |  %s us       MB  %%copy ratio", precision);
    }
#endif
    std::printf("\n");
  }

  /// The dense kernels at a small, a middle and a large batch.
  void print_trials(const std::vector<DenseKernel>& kernels) const {
    if (trials_.empty()) return;
    std::vector<const Trial*> shown;
    for (const Trial& trial : trials_) {
      if (trial.batch == 1 || trial.batch == 128 || trial.batch == 1024) shown.push_back(&trial);
    }
    std::vector<std::size_t> order;
    for (std::size_t k = 0; k < kernels.size(); ++k) order.push_back(k);
    const auto& last = trials_.back().microseconds;
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return last[a] < last[b]; });
    if (!options_.candidates && order.size() > 6) order.resize(6);
    std::printf("dense kernels by the largest batch (registers, KB in flight a multiprocessor):");
    for (const Trial* trial : shown) std::printf(" us at %d", trial->batch);
    std::printf("\n");
    for (const std::size_t k : order) {
      std::printf("  %-8s %3d %4d ", kernels[k].name.c_str(), kernels[k].registers,
                  kernels[k].bytes_in_flight / 1024);
      for (const Trial* trial : shown) std::printf(" %8.2f", trial->microseconds[k]);
      std::printf("\n");
    }
    std::fflush(stdout);
  }

  void write_csv(char letter, int batch, const char* kind, const std::string& kernel,
                 const Measured& measured, double ratio) const {
    if (csv_ == nullptr) return;
    std::fprintf(csv_, "%c,%d,%s,%s,%d,%.0f,%.3f,%.0f,%.2f,%.3f\n", letter, batch, kind,
                 kernel.c_str(), measured.layers, measured.resident, measured.microseconds,
                 measured.bytes, percent(measured), ratio);
    std::fflush(csv_);
  }

  Options options_;
  Stream stream_;
  Device device_ = Device::current();
  double bandwidth_ = 0;
  std::FILE* csv_ = nullptr;
  bool failed_ = false;
  std::vector<Trial> trials_;
};

}  // namespace
}  // namespace sinkstate::bench

int main(int count, char** arguments) {
  using namespace sinkstate::bench;
  const Options options = parse(count, arguments);
  try {
    Bench bench(options);
    for (const char letter : options.workloads) {
      if (letter == 'A') bench.run<WorkloadA>(letter, "Mamba-2 of Nemotron-3-Nano-4B");
      if (letter == 'B') bench.run<WorkloadB>(letter, "Gated DeltaNet of Qwen3.5-9B");
      if (letter == 'C') bench.run<WorkloadC>(letter, "Kimi Delta Attention of Kimi-Linear");
      if (letter == 'D') bench.run<WorkloadD>(letter, "Mamba-2 of Nemotron-3-Super");
    }
    return bench.failed() ? 1 : 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "\n%s\n", error.what());
    return 1;
  }
}
