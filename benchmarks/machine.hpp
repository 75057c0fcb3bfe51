// What the figures were measured on, for the head of the output.
#pragma once

#include <benchmark/benchmark.h>

#include <fstream>
#include <string>

namespace sinkstate::bench {

/// The instruction sets that the compiler was allowed to use.
inline std::string instruction_sets() {
  std::string names;
#if defined(__AVX512F__)
  names += " AVX512F";
#endif
#if defined(__AVX2__)
  names += " AVX2";
#endif
#if defined(__FMA__)
  names += " FMA";
#endif
#if defined(__SSE2__)
  names += " SSE2";
#endif
#if defined(__ARM_NEON)
  names += " NEON";
#endif
#if defined(__ARM_FEATURE_SVE)
  names += " SVE";
#endif
  return names.empty() ? "none" : names.substr(1);
}

/// The rest of the first line that begins so.
inline std::string line_of(const char* file, const std::string& beginning) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.compare(0, beginning.size(), beginning) == 0) return line.substr(beginning.size());
  }
  return "unknown";
}

inline const bool machine_stated = [] {
  benchmark::AddCustomContext("cpu", line_of("/proc/cpuinfo", "model name\t: "));
  benchmark::AddCustomContext("compiler", __VERSION__);
  benchmark::AddCustomContext("instruction sets", instruction_sets());
  benchmark::AddCustomContext("huge pages",
                              line_of("/sys/kernel/mm/transparent_hugepage/enabled", ""));
  return true;
}();

}  // namespace sinkstate::bench
