// States to measure, one or many in one arena, and the order in which they are stepped.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "arena.hpp"
#include "replay/dense_step.hpp"
#include "support/state_runner.hpp"
#include "support/streams.hpp"

namespace sinkstate::bench {

/// What states touch together in the measurements from memory, far more than a cache holds.
constexpr double in_memory_bytes = 256 << 20;

inline void require_ok(Status status) {
  if (status != Status::ok) std::abort();
}

template <class Rule>
testing::Stream stream_of(Index d_k, Index d_v, int tokens) {
  return testing::realistic(testing::traits_of<Rule>, static_cast<int>(d_k), static_cast<int>(d_v),
                            tokens, testing::test_seed());
}

inline Token<float> token_of(const testing::Stream& stream, int t) {
  return {stream.key_at(t), stream.value_at(t), stream.log_decay_at(t),
          stream.write_strength_at(t)};
}

/// Orthonormal rows, for terms and for subspaces.
inline std::vector<float> orthonormal(HostTeam& team, testing::Random& random, Index rows,
                                      Index length) {
  std::vector<float> numbers(static_cast<std::size_t>(rows * length));
  for (float& x : numbers) x = static_cast<float>(random.normal());
  std::vector<float> z(static_cast<std::size_t>(rows));
  detail::orthogonalize(team, MatrixView<float>{numbers.data(), rows, length, length}, 0,
                        MatrixView<float>{}, z.data());
  return numbers;
}

/// The bytes of a step, rank r and `buffered` tokens before it.
struct StepBytes {
  /// Numbers read or written. One written token counts once, as in docs/performance.md.
  double touched = 0;
  /// Whole lines that come from memory when nothing is cached, those to be written among them.
  double fetched = 0;

  template <class P>
  static StepBytes factored(const StateConfig& config, Index rank, double buffered) {
    const auto row = static_cast<double>(config.d_k + config.d_v + P::Rule::log_decays(config.d_k));
    const auto body = static_cast<double>(rank * (config.d_k + config.d_v));
    const double lines = 64 * (6 + static_cast<double>((rank + 15) / 16));  // counters, strengths
    return {4 * (body + static_cast<double>(rank) + (buffered + 1) * row),
            4 * (body + (buffered + 1) * row) + lines};
  }
  static StepBytes dense(Index d_k, Index d_v) {
    const auto matrix = static_cast<double>(4 * d_k * d_v);
    return {2 * matrix, matrix};
  }
};

/// States side by side, stepped in turn. Phases of the buffer are spread evenly over them.
template <class P>
class States {
 public:
  States(const StateConfig& config, std::size_t count)
      : stride_(state_bytes<P>(config)), arena_(stride_ * count) {
    for (std::size_t i = 0; i < count; ++i) {
      views_.push_back(make_view<P>(arena_.at(i * stride_), stride_, config));
    }
  }

  std::size_t count() const { return views_.size(); }
  const SinkStateView<P>& operator[](std::size_t i) const { return views_[i]; }
  std::size_t after(std::size_t i) const { return i + 1 < views_.size() ? i + 1 : 0; }

  /// The state at `to` becomes equal to that at `from`.
  void copy(std::size_t from, std::size_t to) {
    std::memcpy(arena_.at(to * stride_), arena_.at(from * stride_), stride_);
  }

  /// Before state i is stepped: announces the next, whose sizes have been fetched by then.
  void expect_next(HostTeam& team, std::size_t i) const {
    if (views_.size() == 1) return;
    const SinkStateView<P>& next = views_[after(i)];
    const std::size_t row = sizeof(float);
    const auto expect = [&](const float* numbers, Index count) {
      team.expect(numbers, row * static_cast<std::size_t>(count), P::Rule::corrects ? 2 : 1);
    };
    const Index tokens = next.buffered() + 1;
    expect(next.factors.components, next.rank() * (next.config.d_k + next.config.d_v));
    expect(next.buffer.log_decays.data, tokens * next.buffer.log_decays.cols);
    expect(next.buffer.corrections.data, tokens * next.config.d_v);
    expect(next.buffer.keys.data, tokens * next.config.d_k);  // read first, so the newest
    const SinkStateView<P>& second = views_[after(after(i))];
    tools::fetch(second.factors.rank);
    tools::fetch(second.factors.strengths);
    tools::fetch(second.buffer.count);
    tools::fetch(second.buffer.certificates);
    tools::fetch(second.buffer.masses);
    tools::fetch(second.record);
  }

 private:
  std::size_t stride_;
  Arena arena_;
  std::vector<SinkStateView<P>> views_;
};

}  // namespace sinkstate::bench
