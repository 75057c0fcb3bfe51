/// @file
/// A pool of one policy behind the interface for any. Compiled beside the states of the policy, which
/// the same algorithms work on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sinkstate/sinkstate.hpp>
#include <type_traits>

#include "any_pool.hpp"
#include "policy_of_options.hpp"

namespace sinkstate::tools {

template <class Policy>
class PoolOfPolicy : public AnyPool {
 public:
  PoolOfPolicy(const PoolConfig& config, const MatrixView<const float>& sink_directions)
      : pool_(config, Policy::Sink::present ? sink_directions : MatrixView<const float>{}),
        view_(pool_.view()),
        bytes_(pool_bytes<Policy>(config)) {}

  Status admit(Index slot) override { return sinkstate::admit(view_, slot); }
  Status release(Index slot) override { return sinkstate::release(view_, slot); }
  Status fork(Index from, Index to) override { return sinkstate::fork(view_, from, to); }
  Status step(HostTeams& teams, const TokenBatch<float>& batch) override {
    return sinkstate::step(teams, view_, batch);
  }
  Status compact(HostTeams& teams, const std::int32_t* slots, Index entries,
                 CompactionReport* reports, Index* recompressions) override {
    return sinkstate::compact(teams, view_, slots, entries, nullptr, reports, recompressions);
  }
  Status compact_due(HostTeams& teams, const std::int32_t* slots, Index entries,
                     CompactionReport* reports, Index* recompressions) override {
    return sinkstate::compact_due(teams, view_, slots, entries, nullptr, reports, recompressions);
  }
  Status open_draft(Index slot) override { return sinkstate::open_draft(view_, slot); }
  Status close_draft(Index slot, Index rejected) override {
    return sinkstate::close_draft(view_, slot, rejected);
  }
  std::size_t snapshot_bytes(Index slot) override { return sinkstate::snapshot_bytes(view_, slot); }
  Status snapshot(Index slot, void* memory, std::size_t size) override {
    return sinkstate::snapshot(view_, slot, memory, size);
  }
  Status restore(Index slot, const SnapshotBytes& bytes, Index tokens) override {
    return sinkstate::restore(view_, slot, bytes, tokens);
  }
  std::unique_ptr<ConsolidatedLayer> consolidated() override {
    if constexpr (std::is_same_v<typename Policy::Compaction, LocalSvd>) {
      return sinkstate::consolidated(view_);
    } else {
      return nullptr;
    }
  }
  Status initialize(HostTeams& teams, Index slot, const DenseStates<const float>& dense,
                    Index tokens, const RandomizedSvd& method) override {
    return sinkstate::initialize(teams, view_, slot, dense, tokens, method);
  }
  Status materialize(HostTeams& teams, Index slot, const DenseStates<float>& dense) override {
    return sinkstate::materialize(teams, view_, slot, dense);
  }

  bool dense(Index slot, Index head) override { return view_.state(slot, head).dense(); }
  Index rank(Index slot, Index head) override {
    const auto state = view_.state(slot, head);
    return state.dense() ? state.config.full_rank() : state.rank();
  }
  StateBytes bytes(Index slot, Index head) override { return view_.state(slot, head).bytes(); }
  std::size_t slot_bytes(Index slot) override {
    if (!view_.in_use(slot)) return 0;
    Index rows = 0;
    for (Index h = 0; h < view_.config.value_heads; ++h) rows += *view_.head(slot, h).held;
    return bytes_.slot + static_cast<std::size_t>(rows) * bytes_.row;
  }
  std::size_t workspace_bytes() override {
    return sinkstate::workspace_bytes<Policy>(view_.config.state);
  }

 private:
  StatePool<Policy> pool_;
  StatePoolView<Policy> view_;
  PoolBytes bytes_;
};

using MadePool = std::unique_ptr<AnyPool>;

template <class Precision>
MadePool make_pool_with_rule(Rule rule, const ReplayOptions& options, const PoolConfig& config,
                             const MatrixView<const float>& directions) {
  return with_policy<Host, Precision>(rule, options, [&](auto chosen) -> MadePool {
    return std::make_unique<PoolOfPolicy<typename decltype(chosen)::Policy>>(config, directions);
  });
}

extern template MadePool make_pool_with_rule<Fp32>(Rule, const ReplayOptions&, const PoolConfig&,
                                                   const MatrixView<const float>&);
extern template MadePool make_pool_with_rule<Fp16>(Rule, const ReplayOptions&, const PoolConfig&,
                                                   const MatrixView<const float>&);
extern template MadePool make_pool_with_rule<Bf16>(Rule, const ReplayOptions&, const PoolConfig&,
                                                   const MatrixView<const float>&);
extern template MadePool make_pool_with_rule<Fp8>(Rule, const ReplayOptions&, const PoolConfig&,
                                                  const MatrixView<const float>&);

}  // namespace sinkstate::tools
