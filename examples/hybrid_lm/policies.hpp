/// @file
/// The policies of a whole model on a command line.
#pragma once

#include <string>
#include <vector>

#include "model.hpp"
#include "replay/policy_flags.hpp"

namespace sinkstate::hybrid_lm {

/// The flags of replay, and `--gdn`, `--kda` and `--mamba2` with the same flags in quotes for one
/// kind of layer.
class PolicyArguments {
 public:
  explicit PolicyArguments(CLI::App& command);

  /// After parsing.
  /// @throws tools::ToolError
  Policies resolve();
  /// Whether any of the flags was used.
  bool given() const;

 private:
  struct Kind {
    const char* option;
    std::string flags;
  };
  CLI::App& command_;
  Kind kinds_[3] = {{"--gdn", {}}, {"--kda", {}}, {"--mamba2", {}}};
  tools::ReplayOptions common_;
  tools::PolicyFlags flags_;
  std::vector<const CLI::Option*> options_;
};

/// The same flags in one string.
/// @param name  whose flags they are, for errors
/// @throws tools::ToolError
Policies parse_policies(const std::string& name, const std::string& flags);

}  // namespace sinkstate::hybrid_lm
