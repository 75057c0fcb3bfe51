/// @file
/// Independent pieces of work on threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace sinkstate::tools {

/// task(0) to task(count - 1), each once, on up to `threads` threads, this one among them. After
/// the first exception no further task begins; it is thrown again here.
template <class Task>
void parallel_for(std::ptrdiff_t count, std::ptrdiff_t threads, const Task& task) {
  std::atomic<std::ptrdiff_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    for (;;) {
      const std::ptrdiff_t i = next++;
      if (i >= count) return;
      try {
        task(i);
      } catch (...) {
        const std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (std::ptrdiff_t i = 1; i < std::min(threads, count); ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // The system has no more threads: those that there are, and this one, do the work.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace sinkstate::tools
