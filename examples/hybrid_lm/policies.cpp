#include "policies.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <iterator>

namespace sinkstate::hybrid_lm {
namespace {

/// Parses `flags` with what `add` adds to an application, and resolves that.
template <class Parsed>
auto parse(const std::string& name, const std::string& flags, CLI::App& app, Parsed& parsed) {
  try {
    app.parse(flags, false);
    return parsed.resolve();
  } catch (const std::exception& error) {
    throw tools::ToolError(name + ": " + error.what());
  }
}

}  // namespace

PolicyArguments::PolicyArguments(CLI::App& command) : command_(command), flags_(command, common_) {
  for (Kind& kind : kinds_) {
    command.add_option(
        kind.option, kind.flags,
        "instead of all common flags, for these layers, in quotes: \"--policy full-svd "
        "--epsilon 0.1\"");
  }
  for (const CLI::Option* const option : command.get_options()) options_.push_back(option);
}

bool PolicyArguments::given() const {
  return std::any_of(options_.begin(), options_.end(),
                     [](const CLI::Option* option) { return option->count() > 0; });
}

Policies PolicyArguments::resolve() {
  flags_.resolve();
  Policies policies{common_, common_, common_};
  tools::ReplayOptions* const targets[] = {&policies.gated_delta, &policies.kimi_delta,
                                           &policies.mamba2};
  for (std::size_t i = 0; i < std::size(kinds_); ++i) {
    if (command_.count(kinds_[i].option) == 0) continue;
    if (kinds_[i].flags.find_first_not_of(" \t") == std::string::npos)
      tools::refuse(kinds_[i].option, "policy flags", "none");
    CLI::App app;
    app.set_help_flag();
    tools::ReplayOptions own;
    tools::PolicyFlags flags(app, own);
    parse(kinds_[i].option, kinds_[i].flags, app, flags);
    *targets[i] = own;
  }
  return policies;
}

Policies parse_policies(const std::string& name, const std::string& flags) {
  CLI::App app;
  app.set_help_flag();
  PolicyArguments arguments(app);
  return parse(name, flags, app, arguments);
}

}  // namespace sinkstate::hybrid_lm
