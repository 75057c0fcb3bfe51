#include "device_pool.hpp"

#include <cuda_runtime.h>

#include <sinkstate/sinkstate_cuda.cuh>
#include <stdexcept>
#include <string>

#include "policies.hpp"

namespace sinkstate::testing {
namespace {

void check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("CUDA, ") + doing + ": " + cudaGetErrorString(error));
}

// Everything goes over one stream a pool, and nothing over the stream of the device: several pools may
// be at work on threads of their own, one of them in a capture.
class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  Stream(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }

  void wait(const char* doing) const {
    check(cudaGetLastError(), doing);
    check(cudaStreamSynchronize(stream_), doing);
  }
  void send(void* to, const void* from, std::size_t size, const char* what) const {
    check(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, stream_), what);
    wait(what);
  }
  void receive(void* to, const void* from, std::size_t size, const char* what) const {
    check(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToHost, stream_), what);
    wait(what);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// Device memory that grows.
class DeviceBytes {
 public:
  explicit DeviceBytes(const Stream& stream) : stream_(stream) {}
  DeviceBytes(const DeviceBytes&) = delete;
  ~DeviceBytes() { cudaFree(data_); }

  unsigned char* sized(std::size_t size) {
    if (size > size_) {
      check(cudaFree(data_), "cudaFree");
      data_ = nullptr;
      size_ = 0;
      check(cudaMalloc(&data_, size), "cudaMalloc");
      size_ = size;
      // What is read before it is written must not pass for anything.
      check(cudaMemsetAsync(data_, 0xFF, size_, stream_), "cudaMemset");
      stream_.wait("cudaMemset");
    }
    return data_;
  }
  unsigned char* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Null for an empty vector.
  template <class T>
  T* send(const std::vector<T>& numbers) {
    if (numbers.empty()) return nullptr;
    unsigned char* const place = sized(numbers.size() * sizeof(T));
    stream_.send(place, numbers.data(), numbers.size() * sizeof(T), "sending an array");
    return reinterpret_cast<T*>(place);
  }
  template <class T>
  void receive(std::vector<T>& numbers) const {
    if (numbers.empty()) return;
    stream_.receive(numbers.data(), data_, numbers.size() * sizeof(T), "receiving an array");
  }

 private:
  const Stream& stream_;
  unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
};

// The arrays of a batch in other memory, as far from its beginning.
template <class Number>
TokenBatch<float, Number> moved(const TokenBatch<float, Number>& batch, const void* from,
                                void* to) {
  TokenBatch<float, Number> there = batch;
  const auto move = [&](auto*& array) {
    if (array == nullptr) return;
    const auto distance =
        reinterpret_cast<std::uintptr_t>(array) - reinterpret_cast<std::uintptr_t>(from);
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(
        reinterpret_cast<std::uintptr_t>(to) + distance);
  };
  move(there.slots);
  move(there.write_slots);
  move(there.counts);
  move(there.starts);
  move(there.keys.data);
  move(there.queries.data);
  move(there.values.data);
  move(there.log_decays.data);
  move(there.write_strengths.data);
  move(there.outputs.data);
  return there;
}

// No verb of the library writes this.
constexpr int nothing_said = -1;

}  // namespace

// The same policy on a device. At namespace scope, since it names kernels.
template <class P>
using OnDevice =
    Policy<typename P::Rule, Cuda, typename P::Precision, typename P::Compaction, typename P::Sink>;

template <class P>
struct DevicePool<P>::Implementation {
  Implementation(const PoolConfig& config, const float* directions, Index teams)
      : bytes(pool_bytes<OnDevice<P>>(config).total) {
    scratch.sized(cuda_scratch_bytes<OnDevice<P>>(config.state, teams));
    MatrixView<const float> rows;
    if (directions != nullptr) {
      const Index heads = config.value_heads;
      const Index d_v = config.state.d_v;
      const std::vector<float> numbers(directions, directions + heads * d_v);
      rows = {direction_bytes.send(numbers), heads, d_v, d_v};
    }
    // Whatever the memory held.
    unsigned char* const memory = pool_memory.sized(bytes);
    view = make_pool<OnDevice<P>>(teams_now(), memory, bytes, config, rows);
    stream.wait("make_pool");
  }
  ~Implementation() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
  }

  CudaTeams teams_now() const { return CudaTeams(stream, scratch.data(), scratch.size()); }

  // @param launch  launch(statuses): on the stream
  template <class Launch>
  Statuses answered(std::size_t entries, const char* verb, const Launch& launch) {
    Statuses statuses(entries, static_cast<Status>(nothing_said));
    Status* const there = status_bytes.send(statuses);
    check(launch(there), verb);
    stream.wait(verb);
    status_bytes.receive(statuses);
    return statuses;
  }

  std::size_t bytes;
  Stream stream;
  DeviceBytes pool_memory{stream}, direction_bytes{stream}, scratch{stream}, status_bytes{stream};
  DeviceBytes first_list{stream}, second_list{stream}, dense_bytes{stream};
  DeviceBytes certificate_bytes{stream}, token_bytes{stream}, batch_bytes{stream};
  DeviceBytes graph_bytes{stream}, graph_statuses{stream};
  StatePoolView<OnDevice<P>> view;
  cudaGraphExec_t executable = nullptr;
  Index graph_entries = 0;
};

template <class P>
DevicePool<P>::DevicePool(const PoolConfig& config, const float* directions, Index teams)
    : own_(std::make_unique<Implementation>(config, directions, teams)) {}
template <class P>
DevicePool<P>::~DevicePool() = default;

template <class P>
std::size_t DevicePool<P>::size() const {
  return own_->bytes;
}
template <class P>
void DevicePool<P>::upload(const void* image) {
  own_->stream.send(own_->pool_memory.data(), image, own_->bytes, "upload");
}
template <class P>
void DevicePool<P>::download(void* image) const {
  own_->stream.receive(image, own_->pool_memory.data(), own_->bytes, "download");
}

// A verb on a list of slots.
#define SINKSTATE_VERB(NAME)                                                          \
  template <class P>                                                                  \
  Statuses DevicePool<P>::NAME(const Slots& slots) {                                  \
    const auto entries = static_cast<Index>(slots.size());                            \
    const std::int32_t* const list = own_->first_list.send(slots);                    \
    return own_->answered(slots.size(), #NAME, [&](Status* statuses) {                \
      return sinkstate::NAME(own_->teams_now(), own_->view, list, entries, statuses); \
    });                                                                               \
  }
// And with a number for each, or another slot.
#define SINKSTATE_VERB_OF_TWO(NAME)                                                               \
  template <class P>                                                                              \
  Statuses DevicePool<P>::NAME(const Slots& slots, const Slots& others) {                         \
    const auto entries = static_cast<Index>(slots.size());                                        \
    const std::int32_t* const list = own_->first_list.send(slots);                                \
    const std::int32_t* const other_list = own_->second_list.send(others);                        \
    return own_->answered(slots.size(), #NAME, [&](Status* statuses) {                            \
      return sinkstate::NAME(own_->teams_now(), own_->view, list, other_list, entries, statuses); \
    });                                                                                           \
  }
SINKSTATE_VERB(admit)
SINKSTATE_VERB(reset)
SINKSTATE_VERB(release)
SINKSTATE_VERB(open_draft)
SINKSTATE_VERB(compact)
SINKSTATE_VERB(compact_due)
SINKSTATE_VERB_OF_TWO(fork)
SINKSTATE_VERB_OF_TWO(roll_back)
SINKSTATE_VERB_OF_TWO(close_draft)

template <class P>
Statuses DevicePool<P>::copy_to(DevicePool& pool, const Slots& from, const Slots& to) const {
  const auto entries = static_cast<Index>(from.size());
  const std::int32_t* const from_list = own_->first_list.send(from);
  const std::int32_t* const to_list = own_->second_list.send(to);
  return own_->answered(from.size(), "copy", [&](Status* statuses) {
    return sinkstate::copy(own_->teams_now(), own_->view, from_list, pool.own_->view, to_list,
                           entries, statuses);
  });
}

template <class P>
Statuses DevicePool<P>::initialize(const Slots& slots, const DenseNumbers& dense) {
  const StateConfig& config = own_->view.config.state;
  const auto entries = static_cast<Index>(slots.size());
  const std::int32_t* const list = own_->first_list.send(slots);
  const float* const states = own_->dense_bytes.send(dense.states);
  const float* const certificates = own_->certificate_bytes.send(dense.certificates);
  const std::int64_t* const tokens = own_->token_bytes.send(dense.tokens);
  const DenseBatch<const float> batch{
      DenseStates<const float>::keys_by_values(states, config.d_k, config.d_v),
      own_->view.config.value_heads * config.d_k * config.d_v};
  return own_->answered(slots.size(), "initialize", [&](Status* statuses) {
    return sinkstate::initialize(own_->teams_now(), own_->view, list, entries, batch, tokens,
                                 RandomizedSvd{}, certificates, statuses);
  });
}

template <class P>
Statuses DevicePool<P>::materialize(const Slots& slots, DenseNumbers& dense) {
  const StateConfig& config = own_->view.config.state;
  const auto entries = static_cast<Index>(slots.size());
  const std::int32_t* const list = own_->first_list.send(slots);
  float* const states = own_->dense_bytes.send(dense.states);
  float* const certificates = own_->certificate_bytes.send(dense.certificates);
  const DenseBatch<float> batch{DenseStates<float>::keys_by_values(states, config.d_k, config.d_v),
                                own_->view.config.value_heads * config.d_k * config.d_v};
  Statuses statuses = own_->answered(slots.size(), "materialize", [&](Status* answers) {
    return sinkstate::materialize(own_->teams_now(), own_->view, list, entries, batch, certificates,
                                  answers);
  });
  own_->dense_bytes.receive(dense.states);
  own_->certificate_bytes.receive(dense.certificates);
  return statuses;
}

template <class P>
template <class Number>
Statuses DevicePool<P>::step(const TokenBatch<float, Number>& batch, const BatchBytes& bytes,
                             StepPath path) {
  Statuses result;
  if constexpr (std::is_same_v<Number, float> || takes_narrow_inputs<P>) {
    unsigned char* const there = own_->batch_bytes.sized(bytes.size);
    own_->stream.send(there, bytes.sent, bytes.size, "sending a batch");
    const auto on_device = moved(batch, bytes.sent, there);
    const auto entries = static_cast<std::size_t>(batch.entries);
    result = own_->answered(entries, "step", [&](Status* statuses) {
      const CudaTeams teams = own_->teams_now();
      if (path == StepPath::usual) return sinkstate::step(teams, own_->view, on_device, statuses);
      if (path == StepPath::distinct) {
        return sinkstate::step(teams, own_->view, on_device, statuses, SlotCheck::distinct);
      }
      const cudaError_t error = detail::claim_slots(teams.stream, own_->view, on_device, statuses);
      if (error != cudaSuccess) return error;
      return detail::launch_step(teams.stream, own_->view, on_device, statuses, true,
                                 path == StepPath::one_warp ? 1 : 4);
    });
    own_->stream.receive(bytes.received, there, bytes.size, "outputs");
  } else {
    throw std::runtime_error("step: no kernels for inputs of 16 bits were compiled");
  }
  return result;
}

template <class P>
void DevicePool<P>::capture(const TokenBatch<float>& batch, const BatchBytes& bytes) {
  if (own_->executable != nullptr) check(cudaGraphExecDestroy(own_->executable), "old graph");
  own_->executable = nullptr;
  own_->graph_entries = batch.entries;
  unsigned char* const there = own_->graph_bytes.sized(bytes.size);
  own_->stream.send(there, bytes.sent, bytes.size, "sending a batch");
  auto* const statuses = reinterpret_cast<Status*>(
      own_->graph_statuses.sized(2 * static_cast<std::size_t>(batch.entries) * sizeof(Status)));
  const auto on_device = moved(batch, bytes.sent, there);
  const CudaTeams teams = own_->teams_now();
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(teams.stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  const cudaError_t stepped = sinkstate::step(teams, own_->view, on_device, statuses);
  const cudaError_t compacted = sinkstate::compact_due(
      teams, own_->view, on_device.slots, on_device.entries, statuses + on_device.entries);
  check(cudaStreamEndCapture(teams.stream, &graph), "end capture");
  check(stepped, "step in a capture");
  check(compacted, "compact_due in a capture");
  check(cudaGraphInstantiate(&own_->executable, graph, 0), "instantiate");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  own_->stream.wait("after a capture");
}

template <class P>
Statuses DevicePool<P>::replay(const BatchBytes& bytes) {
  const cudaStream_t stream = own_->stream;
  unsigned char* const there = own_->graph_bytes.data();
  Statuses statuses(2 * static_cast<std::size_t>(own_->graph_entries),
                    static_cast<Status>(nothing_said));
  const std::size_t size = statuses.size() * sizeof(Status);
  void* const said = own_->graph_statuses.data();
  check(cudaMemcpyAsync(there, bytes.sent, bytes.size, cudaMemcpyHostToDevice, stream), "sending");
  check(cudaMemcpyAsync(said, statuses.data(), size, cudaMemcpyHostToDevice, stream), "sending");
  check(cudaGraphLaunch(own_->executable, stream), "a replay");
  check(cudaMemcpyAsync(bytes.received, there, bytes.size, cudaMemcpyDeviceToHost, stream),
        "outputs");
  check(cudaMemcpyAsync(statuses.data(), said, size, cudaMemcpyDeviceToHost, stream), "statuses");
  check(cudaStreamSynchronize(stream), "a replay");
  return statuses;
}

#define SINKSTATE_INSTANTIATE_STEP(NUMBER, ...)                                     \
  template Statuses DevicePool<__VA_ARGS__>::step(const TokenBatch<float, NUMBER>&, \
                                                  const BatchBytes&, StepPath);
#define SINKSTATE_INSTANTIATE(...)                 \
  template class DevicePool<__VA_ARGS__>;          \
  SINKSTATE_INSTANTIATE_STEP(float, __VA_ARGS__)   \
  SINKSTATE_INSTANTIATE_STEP(Float16, __VA_ARGS__) \
  SINKSTATE_INSTANTIATE_STEP(BFloat16, __VA_ARGS__)
SINKSTATE_FOR_DEVICE_POOLS(SINKSTATE_INSTANTIATE)

}  // namespace sinkstate::testing
