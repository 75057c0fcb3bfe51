/// @file
/// From the words of the command line to the types of the library.
#pragma once

#include <sinkstate/core/policy.hpp>
#include <sinkstate/model/update_rules.hpp>

#include "replay.hpp"
#include "trace.hpp"

namespace sinkstate::tools {

/// Names a policy, where a value is wanted.
template <class PolicyType>
struct Chosen {
  using Policy = PolicyType;
};

template <class BackendTag, class Precision, class RuleTag, class CompactionTag, class Make>
auto with_sink(const ReplayOptions& options, const Make& make) {
  if (options.sink) {
    return make(Chosen<Policy<RuleTag, BackendTag, Precision, CompactionTag, MeanValueSink>>{});
  }
  return make(Chosen<Policy<RuleTag, BackendTag, Precision, CompactionTag, NoSink>>{});
}

template <class BackendTag, class Precision, class RuleTag, class Make>
auto with_compaction(const ReplayOptions& options, const Make& make) {
  switch (options.compaction) {
    case Compaction::full_svd:
      return with_sink<BackendTag, Precision, RuleTag, FullSvd>(options, make);
    case Compaction::fixed_rank:
      return with_sink<BackendTag, Precision, RuleTag, FixedRank>(options, make);
    case Compaction::dense_buffered:
      return with_sink<BackendTag, Precision, RuleTag, DenseBuffered>(options, make);
    case Compaction::local_svd:
      break;
  }
  return with_sink<BackendTag, Precision, RuleTag, LocalSvd>(options, make);
}

/// make(Chosen<Policy>{}) of the policy that the options ask for, on this backend and in this
/// precision.
template <class BackendTag, class Precision, class Make>
auto with_policy(Rule rule, const ReplayOptions& options, const Make& make) {
  switch (rule) {
    case Rule::gated_delta:
      return with_compaction<BackendTag, Precision, GatedDelta>(options, make);
    case Rule::kimi_delta:
      return with_compaction<BackendTag, Precision, KimiDelta>(options, make);
    case Rule::mamba2:
      break;
  }
  return with_compaction<BackendTag, Precision, Mamba2>(options, make);
}

}  // namespace sinkstate::tools
