/// @file
/// A state of one policy behind the interface for any. Each precision is compiled in a source file of
/// its own.
#pragma once

#include <memory>
#include <sinkstate/sinkstate.hpp>

#include "any_state.hpp"
#include "policy_of_options.hpp"

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

template <class Precision>
MadeState make_state_with_rule(Rule rule, const ReplayOptions& options, const StateConfig& config,
                               const float* direction) {
  return with_policy<Host, Precision>(rule, options, [&](auto chosen) -> MadeState {
    return std::make_unique<StateOfPolicy<typename decltype(chosen)::Policy>>(config, direction);
  });
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
