/// @file
/// A pool of states whose policy is chosen at run time, by the options of a command line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sinkstate/algorithm/keep.hpp>
#include <sinkstate/algorithm/pool_dense.hpp>
#include <sinkstate/algorithm/pool_snapshot.hpp>
#include <sinkstate/algorithm/pool_step.hpp>
#include <sinkstate/algorithm/randomized_svd.hpp>
#include <sinkstate/host/consolidated_layer.hpp>
#include <sinkstate/host/host_teams.hpp>
#include <sinkstate/model/pool_config.hpp>
#include <sinkstate/model/sink_state.hpp>

#include "replay.hpp"
#include "trace.hpp"

namespace sinkstate::tools {

/// The verbs of the library on a pool, as they are documented there.
class AnyPool {
 public:
  virtual ~AnyPool() = default;

  virtual Status admit(Index slot) = 0;
  virtual Status release(Index slot) = 0;
  virtual Status fork(Index from, Index to) = 0;
  virtual Status step(HostTeams& teams, const TokenBatch<float>& batch) = 0;
  virtual Status compact(HostTeams& teams, const std::int32_t* slots, Index entries,
                         CompactionReport* reports, Index* recompressions) = 0;
  virtual Status compact_due(HostTeams& teams, const std::int32_t* slots, Index entries,
                             CompactionReport* reports = nullptr,
                             Index* recompressions = nullptr) = 0;
  virtual Status open_draft(Index slot) = 0;
  virtual Status close_draft(Index slot, Index rejected) = 0;
  virtual std::size_t snapshot_bytes(Index slot) = 0;
  virtual Status snapshot(Index slot, void* memory, std::size_t size) = 0;
  virtual Status restore(Index slot, const SnapshotBytes& bytes, Index tokens) = 0;
  /// For a consolidator, which the pool outlives; null unless the policy is LocalSvd.
  virtual std::unique_ptr<ConsolidatedLayer> consolidated() = 0;
  virtual Status initialize(HostTeams& teams, Index slot, const DenseStates<const float>& dense,
                            Index tokens, const RandomizedSvd& method) = 0;
  virtual Status materialize(HostTeams& teams, Index slot, const DenseStates<float>& dense) = 0;

  // Of one state.
  virtual bool dense(Index slot, Index head) = 0;
  /// Stored terms; a dense body counts as min(d_k, d_v).
  virtual Index rank(Index slot, Index head) = 0;
  virtual StateBytes bytes(Index slot, Index head) = 0;

  /// What a request takes of the pool: its slot and the component rows that it holds.
  virtual std::size_t slot_bytes(Index slot) = 0;

  /// Of each team that works on such states.
  virtual std::size_t workspace_bytes() = 0;
};

/// A pool without requests, of states as `make_state` makes them.
/// @param config           its `state` has d_k, d_v and draft; the rest of that is what the options
///                         say
/// @param sink_directions  value_heads x d_v numbers that outlive it; used with `options.sink`
std::unique_ptr<AnyPool> make_pool(Rule rule, const ReplayOptions& options, PoolConfig config,
                                   const MatrixView<const float>& sink_directions);

}  // namespace sinkstate::tools
