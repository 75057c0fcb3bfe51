// Benchmarks that run over traces: which, and by which rule.
#pragma once

#include <sinkstate/model/update_rules.hpp>
#include <string>
#include <vector>

#include "replay/trace.hpp"

namespace sinkstate::bench {

/// Those of the command line, after Google Benchmark has taken its own arguments, or else the shipped ones.
inline std::vector<std::string> traces_of(int argc, char** argv) {
  std::vector<std::string> traces(argv + 1, argv + argc);
  if (traces.empty()) {
    for (const char* name : {"gated_delta", "kimi_delta", "mamba2"}) {
      traces.push_back(std::string(SINKSTATE_BENCHMARK_DATA "/") + name + ".safetensors");
    }
  }
  return traces;
}

inline std::string file_name(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

/// visit(rule): with an object of the rule's type.
template <class Visit>
void with_rule(tools::Rule rule, const Visit& visit) {
  switch (rule) {
    case tools::Rule::mamba2:
      return visit(Mamba2{});
    case tools::Rule::gated_delta:
      return visit(GatedDelta{});
    case tools::Rule::kimi_delta:
      return visit(KimiDelta{});
  }
}

}  // namespace sinkstate::bench
