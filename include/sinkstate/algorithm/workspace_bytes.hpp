/// @file
/// How much scratch a team needs.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/workspace.hpp"
#include "../model/state_config.hpp"
#include "advance.hpp"
#include "compact.hpp"
#include "consolidate.hpp"
#include "initialize.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Bytes of scratch that a team needs for every verb on states of this policy and configuration,
/// and for initialising them with `method`. A pure function.
/// @throws Error for a configuration or method that cannot be used
template <class Policy, class Method = RandomizedSvd>
std::size_t workspace_bytes(const StateConfig& config, const Method& method = {}) {
  if (!detail::usable(method)) {
    detail::refuse("RandomizedSvd", "block in [1, 4096] and power_iterations in [0, 64]", "others");
  }
  std::size_t most = 0;
  const auto include = [&most](const Workspace& walk) {
    if (walk.used() > most) most = walk.used();
  };
  Workspace stepping;
  detail::StepScratch<Policy>(config.checked(), stepping);
  include(stepping);
  Workspace compacting;
  detail::CompactScratch<Policy>(config, compacting);
  include(compacting);
  if constexpr (detail::freezes<Policy>) {
    Workspace consolidating;
    detail::consolidation_scratch<Policy>(config, consolidating);
    include(consolidating);
  }
  Workspace materializing;
  detail::CurrentTerms<Policy>(config, materializing);
  materializing.take<typename Policy::Compute>(config.d_v);
  include(materializing);
  Workspace initializing;
  detail::InitializeScratch<Policy>(config, method, initializing);
  include(initializing);
  return most;
}

SINKSTATE_NAMESPACE_END
