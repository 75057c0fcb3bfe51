// Device memory, graphs and the clock of the CUDA benchmarks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sinkstate::bench {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

/// Numbers in device memory, uninitialised.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t count) : count_(count) {
    check(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& numbers) : DeviceArray(numbers.size()) {
    upload(numbers);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  std::size_t count() const { return count_; }
  void upload(const std::vector<T>& numbers) const {
    check(cudaMemcpy(data_, numbers.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
          "copy to the device");
    // Streams that do not wait for the default one may read them next.
    check(cudaStreamSynchronize(nullptr), "copy to the device");
  }
  std::vector<T> download() const {
    std::vector<T> numbers(count_);
    check(cudaMemcpy(numbers.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
          "copy from the device");
    return numbers;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }

  operator cudaStream_t() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "work on the stream"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// What `work` enqueues on a stream, captured once.
class Graph {
 public:
  template <class Work>
  Graph(const Stream& stream, const Work& work) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin of a capture");
    work();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "end of a capture");
    const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    check(made, "instantiation of a graph");
    check(cudaGraphUpload(graph_, stream), "upload of a graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(graph_); }

  void launch(const Stream& stream) const {
    check(cudaGraphLaunch(graph_, stream), "launch of a graph");
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "an event"); }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Median time of what `enqueue` enqueues, in microseconds.
///
/// All repeats are enqueued before the first is waited for, so that the host's part is hidden
/// behind those before.
template <class Enqueue>
double median_microseconds(const Stream& stream, int repeats, const Enqueue& enqueue) {
  constexpr int warm_up = 3;
  for (int i = 0; i < warm_up; ++i) enqueue();
  std::vector<Event> events(static_cast<std::size_t>(repeats) + 1);
  check(cudaEventRecord(events[0], stream), "an event");
  for (int i = 0; i < repeats; ++i) {
    enqueue();
    check(cudaEventRecord(events[static_cast<std::size_t>(i) + 1], stream), "an event");
  }
  stream.wait();
  std::vector<float> milliseconds(static_cast<std::size_t>(repeats));
  for (std::size_t i = 0; i < milliseconds.size(); ++i) {
    check(cudaEventElapsedTime(&milliseconds[i], events[i], events[i + 1]), "an event's time");
  }
  const auto middle = milliseconds.begin() + repeats / 2;
  std::nth_element(milliseconds.begin(), middle, milliseconds.end());
  return 1e3 * static_cast<double>(*middle);
}
inline double median_microseconds(const Stream& stream, int repeats, const Graph& graph) {
  return median_microseconds(stream, repeats, [&] { graph.launch(stream); });
}

/// Median time that the host takes to launch a graph, in microseconds.
inline double host_microseconds(const Stream& stream, int repeats, const Graph& graph) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = Clock::now();
    graph.launch(stream);
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    stream.wait();
  }
  const auto middle = times.begin() + repeats / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

/// What is measured on.
struct Device {
  std::string name;
  int processors = 0;
  double cache_bytes = 0;

  static Device current() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "properties of the device");
    return {properties.name, properties.multiProcessorCount,
            static_cast<double>(properties.l2CacheSize)};
  }
};

inline double free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<double>(free);
}

/// Bytes read and written by copies between two buffers of 4 GiB, a microsecond.
inline double copy_bandwidth(const Stream& stream, int repeats) {
  auto bytes = std::size_t{4} << 30;
  while (2.2 * static_cast<double>(bytes) > free_bytes()) bytes /= 2;
  const DeviceArray<unsigned char> from(bytes);
  const DeviceArray<unsigned char> to(bytes);
  check(cudaMemsetAsync(from.data(), 1, bytes, stream), "cudaMemset");
  const double time = median_microseconds(stream, repeats, [&] {
    check(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, stream),
          "copy on the device");
  });
  return 2 * static_cast<double>(bytes) / time;
}

}  // namespace sinkstate::bench
