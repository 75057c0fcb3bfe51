/// @file
/// Processor time of this thread, so that neighbours on the machine do not count.
#pragma once

#include <ctime>

namespace sinkstate::tools {

inline double thread_seconds() {
  std::timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace sinkstate::tools
