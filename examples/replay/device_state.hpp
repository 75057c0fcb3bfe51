/// @file
/// States on a CUDA device, between sources that see no CUDA header and sources that see no Eigen.
#pragma once

#include <memory>
#include <sinkstate/model/state_config.hpp>

#include "any_state.hpp"
#include "replay.hpp"
#include "trace.hpp"

namespace sinkstate::tools {

/// Refuses a backend that cannot do what the options ask for, that was not built in, or that finds
/// no device.
/// @throws ToolError
void check_backend(const ReplayOptions& options);

// The sources in cuda/ define these two; a build without CUDA has such as refuse.

/// @throws ToolError when there is no device
void require_device();

/// An empty state in device memory, stored in fp32.
/// @param sink_direction  d_v numbers that outlive it; used with `options.sink`
/// @throws ToolError when CUDA fails, here and in the verbs
std::unique_ptr<AnyState> make_device_state(Rule rule, const ReplayOptions& options,
                                            const StateConfig& config, const float* sink_direction);

}  // namespace sinkstate::tools
