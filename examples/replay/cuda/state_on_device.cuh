/// @file
/// A state of one policy on a device behind the interface for any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sinkstate/sinkstate_cuda.cuh>
#include <vector>

#include "device_memory.cuh"
#include "replay/any_state.hpp"

namespace sinkstate::tools {

/// The one head of the one slot of a pool in device memory. A verb copies what it is given to the
/// device, waits, and copies back what became of it; what is asked of the state is read from a copy
/// of the pool's bytes, which a host pool views.
template <class OnDevice>
class StateOnDevice : public AnyState {
  using OnHost = Policy<typename OnDevice::Rule, Host, typename OnDevice::Precision,
                        typename OnDevice::Compaction, typename OnDevice::Sink>;
  static constexpr bool has_sink = OnDevice::Sink::present;

 public:
  StateOnDevice(const StateConfig& config, const float* sink_direction)
      : config_(one_state(config)),
        image_bytes_(pool_bytes<OnHost>(config_).total),
        image_(image_bytes_.workspace().take<unsigned char>(size())),
        image_view_(view_pool<OnHost>(image_, image_bytes_.size(), config_,
                                      has_sink ? direction_at(sink_direction) : no_direction())),
        pool_(image_bytes_.size()),
        scratch_(scratch_bytes()),
        slot_(1),
        status_(1),
        direction_(channels(config.d_v)),
        token_(token_numbers()),
        output_(channels(config.d_v)),
        dense_(channels(config.d_k * config.d_v)),
        certificate_(1),
        sent_(token_numbers()),
        received_(channels(config.d_v)) {
    const std::int32_t slot = 0;
    stream_.upload(&slot, slot_.data(), 1);
    if (has_sink) stream_.upload(sink_direction, direction_.data(), channels(config.d_v));
    view_ = make_pool<OnDevice>(teams(), pool_.data(), image_bytes_.size(), config_,
                                has_sink ? direction_at(direction_.data()) : no_direction());
    check_cuda(admit(teams(), view_, slot_.data(), 1, status_.data()), "admit");
    if (const Status status = outcome(); status != Status::ok) throw ToolError(to_string(status));
  }
  StateOnDevice(const StateOnDevice&) = delete;

  Status step(HostTeam&, const Token<float>& token, const float* query, float* output) override {
    const StateConfig& config = config_.state;
    float* next = sent_.data();
    const auto send = [&](const float* x, Index n) {
      std::copy(x, x + n, next);
      const HeadVectors<const float> there{token_.data() + (next - sent_.data()), 0, 0};
      next += padded(n);
      return there;
    };
    TokenBatch<float> batch;
    batch.entries = 1;
    batch.slots = slot_.data();
    batch.keys = send(token.key, config.d_k);
    batch.queries = send(query, config.d_k);
    batch.values = send(token.value, config.d_v);
    batch.log_decays = send(token.log_decay, OnDevice::Rule::log_decays(config.d_k));
    batch.write_strengths = send(&token.write_strength, 1);
    batch.outputs = {output_.data(), 0, 0};
    stream_.upload(sent_.data(), token_.data(), sent_.size());
    check_cuda(sinkstate::step(teams(), view_, batch, status_.data()), "step");
    stream_.download(output_.data(), received_.data(), received_.size());
    const Status status = outcome();
    if (status == Status::ok) std::copy(received_.begin(), received_.end(), output);
    return status;
  }

  Status compact(HostTeam&, CompactionReport* report) override {
    const auto before = image();
    const Index terms = before.rank() + before.buffered();
    check_cuda(sinkstate::compact(teams(), view_, slot_.data(), 1, status_.data()), "compact");
    const Status status = outcome();
    if (report != nullptr && status == Status::ok) {
      *report = CompactionReport{};
      report->rank_before = terms;
      report->rank_after = image().rank();
      report->dense = image().dense();
    }
    return status;
  }

  Status initialize(HostTeam&, const MatrixView<const float>& dense, const RandomizedSvd& method,
                    float certificate) override {
    const StateConfig& config = config_.state;
    std::vector<float> matrix;
    for (Index i = 0; i < config.d_k; ++i) {
      matrix.insert(matrix.end(), dense.row(i), dense.row(i) + config.d_v);
    }
    stream_.upload(matrix.data(), dense_.data(), matrix.size());
    stream_.upload(&certificate, certificate_.data(), 1);
    check_cuda(sinkstate::initialize(teams(), view_, slot_.data(), 1, dense_at<const float>(),
                                     nullptr, method, certificate_.data(), status_.data()),
               "initialize");
    return outcome();
  }

  Status materialize(HostTeam&, const MatrixView<float>& dense, float* certificate) override {
    const StateConfig& config = config_.state;
    check_cuda(sinkstate::materialize(teams(), view_, slot_.data(), 1, dense_at<float>(),
                                      certificate_.data(), status_.data()),
               "materialize");
    std::vector<float> matrix(channels(config.d_k * config.d_v));
    float bound = 0;
    stream_.download(dense_.data(), matrix.data(), matrix.size());
    stream_.download(certificate_.data(), &bound, 1);
    const Status status = outcome();
    if (status != Status::ok) return status;
    for (Index i = 0; i < config.d_k; ++i) {
      const auto row = matrix.begin() + i * config.d_v;
      std::copy(row, row + config.d_v, dense.row(i));
    }
    if (certificate != nullptr) *certificate = bound;
    return status;
  }

  bool due() override { return image().due(); }
  bool dense() override { return image().dense(); }
  Index rank() override { return image().dense() ? config_.state.full_rank() : image().rank(); }
  StateBytes bytes() override { return image().bytes(); }
  StateConfig config() override {
    StateConfig config = config_.state;
    config.rank_cap = SinkStateView<OnHost>::rank_capacity(config);
    config.active = SinkStateView<OnHost>::active(config);
    return config;
  }
  std::size_t workspace_bytes() override { return 0; }

 private:
  static PoolConfig one_state(const StateConfig& config) {
    PoolConfig pool;
    pool.state = config;
    pool.slots = 1;
    return pool;
  }
  static std::size_t channels(Index count) { return static_cast<std::size_t>(count); }
  /// So that vectors which lie one behind the other can be loaded by fours.
  static Index padded(Index count) { return (count + 3) / 4 * 4; }
  static MatrixView<const float> no_direction() { return {}; }
  MatrixView<const float> direction_at(const float* numbers) const {
    return {numbers, 1, config_.state.d_v, config_.state.d_v};
  }
  template <class T>
  DenseBatch<T> dense_at() const {
    const StateConfig& config = config_.state;
    return {DenseStates<T>::keys_by_values(dense_.data(), config.d_k, config.d_v), 0};
  }

  Index size() const { return static_cast<Index>(image_bytes_.size()); }
  std::size_t scratch_bytes() const { return cuda_scratch_bytes<OnDevice>(config_.state, 1); }
  /// Key, query, value, log decays and write strength.
  std::size_t token_numbers() const {
    const StateConfig& config = config_.state;
    return channels(2 * padded(config.d_k) + padded(config.d_v) +
                    padded(OnDevice::Rule::log_decays(config.d_k)) + padded(1));
  }
  CudaTeams teams() const { return CudaTeams(stream_.get(), scratch_.data(), scratch_bytes()); }

  /// Waits for the verb that was launched last, and all copies behind it.
  Status outcome() {
    Status status = Status::ok;
    stream_.download(status_.data(), &status, 1);
    stream_.wait();
    image_is_old_ = true;
    return status;
  }
  SinkStateView<OnHost> image() {
    if (image_is_old_) {
      stream_.download(pool_.data(), image_, image_bytes_.size());
      stream_.wait();
      image_is_old_ = false;
    }
    return image_view_.state(0, 0);
  }

  PoolConfig config_;
  AlignedBytes image_bytes_;
  unsigned char* image_;
  StatePoolView<OnHost> image_view_;
  bool image_is_old_ = true;

  DeviceStream stream_;
  DeviceArray<unsigned char> pool_;
  DeviceArray<unsigned char> scratch_;
  DeviceArray<std::int32_t> slot_;
  DeviceArray<Status> status_;
  DeviceArray<float> direction_;
  DeviceArray<float> token_;
  DeviceArray<float> output_;
  DeviceArray<float> dense_;
  DeviceArray<float> certificate_;
  StatePoolView<OnDevice> view_;
  std::vector<float> sent_;
  std::vector<float> received_;
};

/// @param sink_direction  d_v numbers that outlive it; used where the policy has a sink
template <class OnDevice>
std::unique_ptr<AnyState> make_state_on_device(const StateConfig& config,
                                               const float* sink_direction) {
  return std::make_unique<StateOnDevice<OnDevice>>(config, sink_direction);
}

}  // namespace sinkstate::tools
