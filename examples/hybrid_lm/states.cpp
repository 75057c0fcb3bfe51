#include "states.hpp"

#include <algorithm>
#include <sinkstate/model/update_rules.hpp>

#include "replay/any_state.hpp"
#include "replay/dense_step.hpp"
#include "replay/thread_time.hpp"

namespace sinkstate::hybrid_lm {
namespace {

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

tools::Rule rule_of(Mixer mixer) {
  if (mixer == Mixer::gated_delta) return tools::Rule::gated_delta;
  if (mixer == Mixer::kimi_delta) return tools::Rule::kimi_delta;
  return tools::Rule::mamba2;
}

class FactoredStates : public LayerStates {
 public:
  FactoredStates(Mixer mixer, const HeadShape& shape, const ReplayOptions& options,
                 const Matrix& directions, LayerStates* from)
      : shape_(shape), directions_(directions), costs_(shape.heads) {
    for (int h = 0; h < shape.heads; ++h) {
      states_.push_back(tools::make_state(rule_of(mixer), options, shape.d_k, shape.d_v,
                                          options.sink ? directions_.row(h).data() : nullptr));
      if (h == 0) team_ = std::make_unique<HostTeam>(states_[0]->workspace_bytes());
      if (from == nullptr) continue;
      const std::vector<float> dense = from->dense(h);
      RandomizedSvd method;
      method.seed = options.seed;
      require_ok(states_.back()->initialize(
          *team_, MatrixView<const float>{dense.data(), shape.d_k, shape.d_v, shape.d_v}, method,
          0.0f));
    }
  }

  void step(const std::vector<HeadToken>& heads) override {
    const double begin = thread_seconds();
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadToken& token = heads[h];
      require_ok(states_[h]->step(*team_,
                                  {token.key, token.value, token.log_decay, token.write_strength},
                                  token.query, token.output));
    }
    const double stepped = thread_seconds();
    count();
    const double counted = thread_seconds();
    for (auto& state : states_) {
      if (state->due()) require_ok(state->compact(*team_, nullptr));
    }
    costs_.add_seconds(stepped - begin, thread_seconds() - counted);
  }
  std::vector<float> dense(int head) override {
    std::vector<float> matrix(static_cast<std::size_t>(shape_.d_k * shape_.d_v));
    require_ok(states_[static_cast<std::size_t>(head)]->materialize(
        *team_, MatrixView<float>{matrix.data(), shape_.d_k, shape_.d_v, shape_.d_v}, nullptr));
    return matrix;
  }
  StateCosts costs() const override { return costs_.means(); }
  double bytes() const override { return costs_.bytes(); }

 private:
  void count() {
    costs_.begin_token();
    for (std::size_t h = 0; h < states_.size(); ++h) {
      tools::AnyState& state = *states_[h];
      costs_.add_head(h, static_cast<double>(state.bytes().total()),
                      static_cast<double>(state.rank()), state.dense());
    }
  }

  HeadShape shape_;
  Matrix directions_;
  std::vector<std::unique_ptr<tools::AnyState>> states_;
  std::unique_ptr<HostTeam> team_;
  Costs costs_;
};

}  // namespace

std::unique_ptr<LayerStates> make_dense_states(Mixer mixer, const HeadShape& shape,
                                               LayerStates* from) {
  if (mixer == Mixer::gated_delta) return std::make_unique<DenseStates<GatedDelta>>(shape, from);
  if (mixer == Mixer::kimi_delta) return std::make_unique<DenseStates<KimiDelta>>(shape, from);
  return std::make_unique<DenseStates<Mamba2>>(shape, from);
}

std::unique_ptr<LayerStates> make_factored_states(Mixer mixer, const HeadShape& shape,
                                                  const ReplayOptions& options,
                                                  const Matrix& directions, LayerStates* from) {
  return std::make_unique<FactoredStates>(mixer, shape, options, directions, from);
}

}  // namespace sinkstate::hybrid_lm
