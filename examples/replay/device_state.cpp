#include "device_state.hpp"

#include <string>

namespace sinkstate::tools {

void check_backend(const ReplayOptions& options) {
  if (options.backend == Backend::host) return;
  if (options.storage != Storage::fp32) {
    throw ToolError("--backend: cuda replays fp32 storage in this tool, given " +
                    std::string(to_string(options.storage)));
  }
  require_device();
}

#ifndef SINKSTATE_REPLAY_CUDA

void require_device() {
  throw ToolError(
      "--backend: this replay was built without CUDA: configure with -DSINKSTATE_ENABLE_CUDA=ON");
}

std::unique_ptr<AnyState> make_device_state(Rule, const ReplayOptions&, const StateConfig&,
                                            const float*) {
  require_device();
  return nullptr;
}

#endif

}  // namespace sinkstate::tools
