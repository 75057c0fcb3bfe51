#include "states.hpp"

#include <algorithm>
#include <sinkstate/sinkstate.hpp>

#include "replay/dense_step.hpp"
#include "replay/thread_time.hpp"

namespace sinkstate::hybrid_lm {
namespace {

using tools::Compaction;
using tools::ReplayOptions;
using tools::thread_seconds;

/// Sums over tokens; the means are taken when asked for.
class Costs {
 public:
  explicit Costs(int heads)
      : rank_(static_cast<std::size_t>(heads)), dense_(static_cast<std::size_t>(heads)) {}

  void begin_token() {
    ++tokens_;
    bytes_ = 0;
  }
  void add_head(std::size_t head, double bytes, double rank, bool dense) {
    bytes_ += bytes;
    sums_.bytes_mean += bytes;
    rank_[head] += rank;
    dense_[head] += dense ? 1 : 0;
  }
  double bytes() const { return bytes_; }
  void add_seconds(double step, double compaction) {
    sums_.step_seconds += step;
    sums_.compaction_seconds += compaction;
  }
  StateCosts means() const {
    StateCosts costs = sums_;
    const double tokens = std::max(1.0, tokens_);
    costs.bytes_mean /= tokens;
    for (const double rank : rank_) costs.rank_mean.push_back(rank / tokens);
    for (const double dense : dense_) costs.dense_fallback.push_back(dense / tokens);
    return costs;
  }

 private:
  double tokens_ = 0;
  double bytes_ = 0;
  std::vector<double> rank_, dense_;
  StateCosts sums_;
};

template <class Rule>
class DenseStates : public LayerStates {
 public:
  DenseStates(const HeadShape& shape, LayerStates* from)
      : shape_(shape),
        heads_(static_cast<std::size_t>(shape.heads), tools::DenseStep<Rule>(shape.d_k, shape.d_v)),
        costs_(shape.heads) {
    for (int h = 0; h < shape.heads && from != nullptr; ++h) {
      heads_[static_cast<std::size_t>(h)].state() = from->dense(h);
    }
  }

  void step(const std::vector<HeadToken>& heads) override {
    const double begin = thread_seconds();
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadToken& token = heads[h];
      heads_[h](token.key, token.value, token.log_decay, token.write_strength, token.query,
                token.output);
    }
    costs_.add_seconds(thread_seconds() - begin, 0);
    costs_.begin_token();
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      costs_.add_head(h, 4.0 * shape_.d_k * shape_.d_v, std::min(shape_.d_k, shape_.d_v), true);
    }
  }
  std::vector<float> dense(int head) override {
    return heads_[static_cast<std::size_t>(head)].state();
  }
  StateCosts costs() const override { return costs_.means(); }
  double bytes() const override { return costs_.bytes(); }

 private:
  HeadShape shape_;
  std::vector<tools::DenseStep<Rule>> heads_;
  Costs costs_;
};

void require_ok(Status status) {
  if (status != Status::ok) {
    throw tools::ToolError(std::string("a recurrent state: ") + to_string(status));
  }
}

template <class Policy>
class FactoredStates : public LayerStates {
 public:
  FactoredStates(const HeadShape& shape, const ReplayOptions& options, const Matrix& directions,
                 LayerStates* from)
      : config_(config_of(shape, options)),
        directions_(directions),
        team_(workspace_bytes<Policy>(config_)),
        costs_(shape.heads) {
    for (int h = 0; h < shape.heads; ++h) {
      states_.emplace_back(config_, Policy::Sink::present ? directions_.row(h).data() : nullptr);
      if (from == nullptr) continue;
      const std::vector<float> dense = from->dense(h);
      RandomizedSvd method;
      method.seed = options.seed;
      require_ok(initialize(team_, states_.back().view(),
                            MatrixView<const float>{dense.data(), shape.d_k, shape.d_v, shape.d_v},
                            method));
    }
  }

  void step(const std::vector<HeadToken>& heads) override {
    const double begin = thread_seconds();
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadToken& token = heads[h];
      require_ok(sinkstate::step(
          team_, states_[h].view(),
          Token<float>{token.key, token.value, token.log_decay, token.write_strength}, token.query,
          token.output));
    }
    const double stepped = thread_seconds();
    count();
    const double counted = thread_seconds();
    for (auto& state : states_) {
      if (state.view().due()) require_ok(compact(team_, state.view()));
    }
    costs_.add_seconds(stepped - begin, thread_seconds() - counted);
  }
  std::vector<float> dense(int head) override {
    std::vector<float> matrix(static_cast<std::size_t>(config_.d_k * config_.d_v));
    require_ok(
        materialize(team_, states_[static_cast<std::size_t>(head)].view(),
                    MatrixView<float>{matrix.data(), config_.d_k, config_.d_v, config_.d_v}));
    return matrix;
  }
  StateCosts costs() const override { return costs_.means(); }
  double bytes() const override { return costs_.bytes(); }

 private:
  static StateConfig config_of(const HeadShape& shape, const ReplayOptions& options) {
    StateConfig config;
    config.d_k = shape.d_k;
    config.d_v = shape.d_v;
    tools::apply(options, config);
    return config;
  }
  void count() {
    costs_.begin_token();
    for (std::size_t h = 0; h < states_.size(); ++h) {
      const auto view = states_[h].view();
      const auto rank = static_cast<double>(view.dense() ? config_.full_rank() : view.rank());
      costs_.add_head(h, static_cast<double>(view.bytes().total()), rank, view.dense());
    }
  }

  StateConfig config_;
  Matrix directions_;
  std::vector<SinkState<Policy>> states_;
  HostTeam team_;
  Costs costs_;
};

using Made = std::unique_ptr<LayerStates>;

template <class Rule, class CompactionTag>
Made make_sink(const HeadShape& shape, const ReplayOptions& options, const Matrix& directions,
               LayerStates* from) {
  using Without = FactoredStates<Policy<Rule, Host, Fp32, CompactionTag, NoSink>>;
  using With = FactoredStates<Policy<Rule, Host, Fp32, CompactionTag, MeanValueSink>>;
  if (options.sink) return std::make_unique<With>(shape, options, directions, from);
  return std::make_unique<Without>(shape, options, directions, from);
}

template <class Rule>
Made make_compaction(const HeadShape& shape, const ReplayOptions& options, const Matrix& directions,
                     LayerStates* from) {
  switch (options.compaction) {
    case Compaction::local_svd:
      return make_sink<Rule, LocalSvd>(shape, options, directions, from);
    case Compaction::full_svd:
      return make_sink<Rule, FullSvd>(shape, options, directions, from);
    case Compaction::fixed_rank:
      return make_sink<Rule, FixedRank>(shape, options, directions, from);
    case Compaction::dense_buffered:
      return make_sink<Rule, DenseBuffered>(shape, options, directions, from);
  }
  return nullptr;
}

/// Calls make(rule) with the library's word for a mixer.
template <class Make>
Made with_rule(Mixer mixer, const Make& make) {
  if (mixer == Mixer::gated_delta) return make(GatedDelta{});
  if (mixer == Mixer::kimi_delta) return make(KimiDelta{});
  return make(Mamba2{});
}

}  // namespace

Made make_dense_states(Mixer mixer, const HeadShape& shape, LayerStates* from) {
  return with_rule(mixer, [&](auto rule) -> Made {
    return std::make_unique<DenseStates<decltype(rule)>>(shape, from);
  });
}

Made make_factored_states(Mixer mixer, const HeadShape& shape, const ReplayOptions& options,
                          const Matrix& directions, LayerStates* from) {
  return with_rule(mixer, [&](auto rule) {
    return make_compaction<decltype(rule)>(shape, options, directions, from);
  });
}

}  // namespace sinkstate::hybrid_lm
