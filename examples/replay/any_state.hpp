/// @file
/// A state whose policy is chosen at run time, by the options of a command line.
#pragma once

#include <cstddef>
#include <memory>
#include <sinkstate/algorithm/keep.hpp>
#include <sinkstate/algorithm/randomized_svd.hpp>
#include <sinkstate/core/backend.hpp>
#include <sinkstate/model/sink_state.hpp>

#include "replay.hpp"
#include "trace.hpp"

namespace sinkstate::tools {

/// The verbs of the library on one state, as they are documented there. A state on a device brings
/// the team that works on it, and leaves the one that it is given alone.
class AnyState {
 public:
  virtual ~AnyState() = default;

  virtual Status step(HostTeam& team, const Token<float>& token, const float* query,
                      float* output) = 0;
  /// Of a device, the report says no more than ranks and whether the body is dense.
  virtual Status compact(HostTeam& team, CompactionReport* report) = 0;
  virtual Status initialize(HostTeam& team, const MatrixView<const float>& dense,
                            const RandomizedSvd& method, float certificate) = 0;
  virtual Status materialize(HostTeam& team, const MatrixView<float>& dense,
                             float* certificate) = 0;

  virtual bool due() = 0;
  virtual bool dense() = 0;
  /// Stored terms; a dense body counts as min(d_k, d_v).
  virtual Index rank() = 0;
  virtual StateBytes bytes() = 0;
  /// With the policy's own rank cap and active terms in the place of zeros.
  virtual StateConfig config() = 0;
  /// Of a team that works on such states.
  virtual std::size_t workspace_bytes() = 0;
};

/// What the options say of a state of this shape.
StateConfig config_of(const ReplayOptions& options, Index d_k, Index d_v);

/// An empty state.
/// @param sink_direction  d_v numbers that outlive it; used with `options.sink`
/// @throws ToolError for a backend that is not at hand (`check_backend`)
std::unique_ptr<AnyState> make_state(Rule rule, const ReplayOptions& options, Index d_k, Index d_v,
                                     const float* sink_direction);

}  // namespace sinkstate::tools
