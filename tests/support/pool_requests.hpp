// Requests of a pool: their tokens, the tensors that hold them, and bytes to compare.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace sinkstate::testing {

// ---- Bytes -----------------------------------------------------------------------------------

// Memory aligned as pools and snapshots want it.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::size_t size = 0, unsigned char fill = 0)
      : lines_((size + sizeof(Line) - 1) / sizeof(Line)), size_(size) {
    if (size > 0) std::memset(data(), fill, size);
  }

  unsigned char* data() { return reinterpret_cast<unsigned char*>(lines_.data()); }
  const unsigned char* data() const {
    return reinterpret_cast<const unsigned char*>(lines_.data());
  }
  std::size_t size() const { return size_; }
  unsigned char& operator[](std::size_t i) { return data()[i]; }
  operator SnapshotBytes() const { return {data(), size_}; }

  friend bool operator==(const AlignedMemory& a, const AlignedMemory& b) {
    return a.size_ == b.size_ && (a.size_ == 0 || std::memcmp(a.data(), b.data(), a.size_) == 0);
  }
  friend bool operator!=(const AlignedMemory& a, const AlignedMemory& b) { return !(a == b); }

 private:
  struct alignas(Workspace::alignment) Line {
    unsigned char bytes[Workspace::alignment];
  };
  std::vector<Line> lines_;
  std::size_t size_;
};

inline sinkstate::detail::SnapshotHeader header_of(const AlignedMemory& bytes) {
  sinkstate::detail::SnapshotHeader header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof(header));
  return header;
}
// Of bytes that were changed, so that nothing but what they say can be refused.
inline void sign_snapshot(AlignedMemory& bytes) {
  auto header = header_of(bytes);
  header.size = bytes.size();
  std::memcpy(bytes.data(), &header, sizeof(header));
  header.checksum = sinkstate::detail::snapshot_checksum(bytes.data(), bytes.size());
  std::memcpy(bytes.data(), &header, sizeof(header));
}

template <class P>
AlignedMemory snapshot_of(StatePoolView<P> pool, Index slot, const HeadRange& range) {
  AlignedMemory bytes(snapshot_bytes(pool, slot, range), 0xAB);
  const Status status = snapshot(pool, slot, range, bytes.data(), bytes.size());
  if (status != Status::ok) throw std::runtime_error(to_string(status));
  return bytes;
}
template <class P>
AlignedMemory snapshot_of(StatePoolView<P> pool, Index slot) {
  return snapshot_of(pool, slot, {0, pool.config.value_heads});
}

// All that a pool knows, as one number: what is beyond the cursors belongs to nobody.
template <class P>
std::uint64_t image_of(StatePoolView<P> pool) {
  std::string image = std::to_string(*pool.reserve.free);
  for (Index s = 0; s < pool.config.slots; ++s) {
    image += '\n';
    if (!pool.in_use(s)) continue;
    const SlotRecord& record = pool.slot(s);
    image += std::to_string(record.draft) + " " + std::to_string(static_cast<int>(record.blocked)) +
             " " + std::to_string(record.readers) + " " + std::to_string(record.entry);
    if (record.blocked != Status::ok) continue;
    const AlignedMemory bytes = snapshot_of(pool, s);
    image.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return sinkstate::detail::checksum(image.data(), image.size());
}

// ---- Tokens ----------------------------------------------------------------------------------

// In [-1, 1): the same for every pool that sees the same request.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed) {}

  Noise with(std::uint64_t number) const {
    return Noise((state_ ^ number) * 0x9e3779b97f4a7c15ULL + 1);
  }
  double operator()() {
    state_ += 0x9e3779b97f4a7c15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    z ^= z >> 31;
    return std::ldexp(static_cast<double>(z >> 11), -52) - 1.0;
  }

 private:
  std::uint64_t state_;
};

// Which key head of the whole layer each key head of a part of it is.
inline std::vector<Index> key_numbers(const PoolConfig& layer, const PoolConfig& part) {
  std::vector<Index> numbers(static_cast<std::size_t>(part.key_heads));
  for (Index h = 0; h < part.value_heads; ++h) {
    numbers[static_cast<std::size_t>(part.key_head(h))] =
        layer.key_head(part.first_head - layer.first_head + h);
  }
  return numbers;
}

// The mean values of the heads, one row each.
template <class P>
std::vector<typename P::Compute> sink_rows(const PoolConfig& config, std::uint64_t seed = 7) {
  std::vector<typename P::Compute> rows;
  for (Index h = 0; P::Sink::present && h < config.value_heads; ++h) {
    Noise noise = Noise(seed).with(static_cast<std::uint64_t>(config.first_head + h));
    for (Index j = 0; j < config.state.d_v; ++j) {
      rows.push_back(static_cast<typename P::Compute>(noise() + 0.25));
    }
  }
  return rows;
}

// The tensors of a batch, [tokens][heads][numbers].
template <class P>
class BatchTensors {
 public:
  using T = typename P::Compute;

  BatchTensors(const PoolConfig& config, Index rows) : BatchTensors(config, rows, config) {}
  // @param layer  of which the pool has a part
  BatchTensors(const PoolConfig& config, Index rows, const PoolConfig& layer)
      : config_(config),
        key_numbers_(sinkstate::testing::key_numbers(layer, config)),
        decays_(P::Rule::log_decays(config.state.d_k)),
        keys(size(rows * config.key_heads * config.state.d_k)),
        queries(size(rows * config.key_heads * config.state.d_k)),
        values(size(rows * config.value_heads * config.state.d_v)),
        log_decays(size(rows * config.value_heads * decays_)),
        write_strengths(size(rows * config.value_heads)),
        outputs(size(rows * config.value_heads * config.state.d_v), untouched()) {}

  static T untouched() { return T(-12345); }

  // Token number `token` of a request; decays are slow. Every eighth is strong in heads of odd numbers, all
  // are in the others: states of few terms beside states that turn dense.
  void set(Index row, std::uint64_t request, Index token) {
    const Noise noise = Noise(request).with(static_cast<std::uint64_t>(token) + 1000);
    const Index d_k = config_.state.d_k, d_v = config_.state.d_v;
    for (Index k = 0; k < config_.key_heads; ++k) {
      Noise head = noise.with(static_cast<std::uint64_t>(key_numbers_[size(k)]) + 1);
      unit(head, keys.data() + (row * config_.key_heads + k) * d_k, d_k);
      unit(head, queries.data() + (row * config_.key_heads + k) * d_k, d_k);
    }
    for (Index h = 0; h < config_.value_heads; ++h) {
      Noise head = noise.with(static_cast<std::uint64_t>(config_.first_head + h) + 100);
      const Index place = row * config_.value_heads + h;
      const double scale = token % 8 == 0 || (config_.first_head + h) % 2 == 0 ? 10 : 0.1;
      for (Index j = 0; j < d_v; ++j) values[size(place * d_v + j)] = T(scale * head());
      for (Index i = 0; i < decays_; ++i)
        log_decays[size(place * decays_ + i)] = T(-0.1 * (1 + head()));
      write_strengths[size(place)] = T(0.5 + 0.25 * head());
    }
  }

  // Strides without gaps; slots and counts are the caller's.
  TokenBatch<T> batch(const std::vector<std::int32_t>& slots, Index tokens = 1) {
    const Index d_k = config_.state.d_k, d_v = config_.state.d_v;
    const Index key_heads = config_.key_heads, heads = config_.value_heads;
    TokenBatch<T> batch;
    batch.entries = static_cast<Index>(slots.size());
    batch.slots = slots.data();
    batch.tokens = tokens;
    batch.keys = {keys.data(), key_heads * d_k, d_k};
    batch.queries = {queries.data(), key_heads * d_k, d_k};
    batch.values = {values.data(), heads * d_v, d_v};
    if (decays_ > 0) batch.log_decays = {log_decays.data(), heads * decays_, decays_};
    batch.write_strengths = {write_strengths.data(), heads, 1};
    batch.outputs = {outputs.data(), heads * d_v, d_v};
    return batch;
  }

 private:
  static std::size_t size(Index count) { return static_cast<std::size_t>(count); }
  static void unit(Noise& noise, T* x, Index count) {
    double square = 0;
    std::vector<double> numbers(size(count));
    for (double& number : numbers) {
      number = noise();
      square += number * number;
    }
    for (Index i = 0; i < count; ++i) x[i] = static_cast<T>(numbers[size(i)] / std::sqrt(square));
  }

  PoolConfig config_;
  std::vector<Index> key_numbers_;
  Index decays_;

 public:
  std::vector<T> keys, queries, values, log_decays, write_strengths, outputs;
};

// ---- A pool to feed --------------------------------------------------------------------------

inline PoolConfig pool_of(Index d_k, Index d_v, Index slots, Index key_heads = 1,
                          Index value_heads = 1, Index buffer = 4) {
  PoolConfig config;
  config.state.d_k = d_k;
  config.state.d_v = d_v;
  config.state.buffer = buffer;
  config.state.seed = 3;
  config.slots = slots;
  config.key_heads = key_heads;
  config.value_heads = value_heads;
  return config;
}

// A pool with its sink directions and teams. Helpers throw: a verb that refuses good input fails the test
// wherever it is called from.
template <class PolicyType>
class PoolRunner {
 public:
  using P = PolicyType;
  using T = typename P::Compute;

  explicit PoolRunner(const PoolConfig& config, Index threads = 1)
      : PoolRunner(config, config, threads) {}
  PoolRunner(const PoolConfig& config, const PoolConfig& layer, Index threads = 1)
      : config_(config),
        layer_(layer),
        directions_(sink_rows<P>(config)),
        pool_(config, sink_directions()),
        teams_(threads, workspace_bytes<P>(config.state)) {}
  PoolRunner(const PoolRunner&) = delete;
  PoolRunner& operator=(const PoolRunner&) = delete;

  StatePoolView<P> view() const { return pool_.view(); }
  HostTeams& teams() { return teams_; }
  const PoolConfig& config() const { return config_; }
  MatrixView<const T> sink_directions() const {
    const Index rows = P::Sink::present ? config_.value_heads : 0;
    return {P::Sink::present ? directions_.data() : nullptr, rows, config_.state.d_v,
            config_.state.d_v};
  }
  BatchTensors<P> tensors(Index rows) const { return {config_, rows, layer_}; }

  void admit(Index slot) { require(sinkstate::admit(view(), slot)); }
  // Tokens [first, first + count) of a request at once. @returns their outputs
  std::vector<T> step(Index slot, std::uint64_t request, Index first, Index count = 1) {
    BatchTensors<P> tensors = this->tensors(count);
    for (Index t = 0; t < count; ++t) tensors.set(t, request, first + t);
    const std::vector<std::int32_t> slots{static_cast<std::int32_t>(slot)};
    require(sinkstate::step(teams_, view(), tensors.batch(slots, count)));
    return tensors.outputs;
  }
  void compact_due(Index slot) {
    const auto number = static_cast<std::int32_t>(slot);
    const Status status = sinkstate::compact_due(teams_, view(), &number, 1);
    if (status != Status::truncated) require(status);
  }
  // One by one, compacted where due. @returns all outputs
  std::vector<T> run(Index slot, std::uint64_t request, Index first, Index count) {
    std::vector<T> outputs;
    for (Index t = first; t < first + count; ++t) {
      const std::vector<T> some = step(slot, request, t);
      outputs.insert(outputs.end(), some.begin(), some.end());
      compact_due(slot);
    }
    return outputs;
  }
  // The state of a head, decays applied.
  std::vector<T> dense(Index slot) {
    const Index d_k = config_.state.d_k, d_v = config_.state.d_v;
    std::vector<T> matrices(static_cast<std::size_t>(config_.value_heads * d_k * d_v));
    require(materialize(teams_, view(), slot,
                        DenseStates<T>::keys_by_values(matrices.data(), d_k, d_v)));
    return matrices;
  }

  static void require(Status status) {
    if (status != Status::ok) throw std::runtime_error(to_string(status));
  }

 private:
  PoolConfig config_;
  PoolConfig layer_;
  std::vector<T> directions_;
  StatePool<P> pool_;
  HostTeams teams_;
};

}  // namespace sinkstate::testing
