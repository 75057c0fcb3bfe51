/// @file
/// From the words of the command line to the types of the library. Each precision is compiled in a
/// source file of its own.
#pragma once

#include <memory>
#include <sinkstate/sinkstate.hpp>

#include "any_state.hpp"

namespace sinkstate::tools {

template <class Policy>
class StateOfPolicy : public AnyState {
 public:
  StateOfPolicy(const StateConfig& config, const float* sink_direction)
      : state_(config, Policy::Sink::present ? sink_direction : nullptr), view_(state_.view()) {}
  StateOfPolicy(const StateOfPolicy&) = delete;  // the view looks into the state

  Status step(HostTeam& team, const Token<float>& token, const float* query,
              float* output) override {
    return sinkstate::step(team, view_, token, query, output);
  }
  Status compact(HostTeam& team, CompactionReport* report) override {
    return sinkstate::compact(team, view_, report);
  }
  Status initialize(HostTeam& team, const MatrixView<const float>& dense,
                    const RandomizedSvd& method, float certificate) override {
    return sinkstate::initialize(team, view_, dense, method, certificate);
  }
  Status materialize(HostTeam& team, const MatrixView<float>& dense, float* certificate) override {
    return sinkstate::materialize(team, view_, dense, certificate);
  }

  bool due() override { return view_.due(); }
  bool dense() override { return view_.dense(); }
  Index rank() override { return view_.dense() ? view_.config.full_rank() : view_.rank(); }
  StateBytes bytes() override { return view_.bytes(); }
  StateConfig config() override {
    StateConfig config = view_.config;
    config.rank_cap = SinkStateView<Policy>::rank_capacity(config);
    config.active = SinkStateView<Policy>::active(config);
    return config;
  }
  std::size_t workspace_bytes() override {
    return sinkstate::workspace_bytes<Policy>(view_.config);
  }

 private:
  SinkState<Policy> state_;
  SinkStateView<Policy> view_;
};

using MadeState = std::unique_ptr<AnyState>;

template <class Precision, class RuleTag, class CompactionTag>
MadeState make_state_with_sink(const ReplayOptions& options, const StateConfig& config,
                               const float* direction) {
  using Without = Policy<RuleTag, Host, Precision, CompactionTag, NoSink>;
  using With = Policy<RuleTag, Host, Precision, CompactionTag, MeanValueSink>;
  if (options.sink) return std::make_unique<StateOfPolicy<With>>(config, direction);
  return std::make_unique<StateOfPolicy<Without>>(config, direction);
}

template <class Precision, class RuleTag>
MadeState make_state_with_compaction(const ReplayOptions& options, const StateConfig& config,
                                     const float* direction) {
  switch (options.compaction) {
    case Compaction::local_svd:
      return make_state_with_sink<Precision, RuleTag, LocalSvd>(options, config, direction);
    case Compaction::full_svd:
      return make_state_with_sink<Precision, RuleTag, FullSvd>(options, config, direction);
    case Compaction::fixed_rank:
      return make_state_with_sink<Precision, RuleTag, FixedRank>(options, config, direction);
    case Compaction::dense_buffered:
      return make_state_with_sink<Precision, RuleTag, DenseBuffered>(options, config, direction);
  }
  return nullptr;
}

template <class Precision>
MadeState make_state_with_rule(Rule rule, const ReplayOptions& options, const StateConfig& config,
                               const float* direction) {
  switch (rule) {
    case Rule::mamba2:
      return make_state_with_compaction<Precision, Mamba2>(options, config, direction);
    case Rule::gated_delta:
      return make_state_with_compaction<Precision, GatedDelta>(options, config, direction);
    case Rule::kimi_delta:
      return make_state_with_compaction<Precision, KimiDelta>(options, config, direction);
  }
  return nullptr;
}

extern template MadeState make_state_with_rule<Fp32>(Rule, const ReplayOptions&, const StateConfig&,
                                                     const float*);
extern template MadeState make_state_with_rule<Fp16>(Rule, const ReplayOptions&, const StateConfig&,
                                                     const float*);
extern template MadeState make_state_with_rule<Bf16>(Rule, const ReplayOptions&, const StateConfig&,
                                                     const float*);
extern template MadeState make_state_with_rule<Fp8>(Rule, const ReplayOptions&, const StateConfig&,
                                                    const float*);

}  // namespace sinkstate::tools
