/// @file
/// Threads with a team each: who works on the states of a pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "host_team.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// A number of teams, the first on the thread that asks, the others on threads of their own that
/// sleep in between. Verbs on pools take it, or anything else with `for_each`: an engine may give
/// them its own threads.
class HostTeams {
 public:
  /// @param threads          the caller's included, 1 to 1024; when the system has fewer left,
  ///                         `threads()` says how many there are
  /// @param workspace_bytes  of each team
  explicit HostTeams(Index threads, std::size_t workspace_bytes) {
    detail::in_range(1, 1024, "threads of HostTeams", threads);
    for (Index i = 0; i < threads; ++i) teams_.emplace_back(workspace_bytes);
#if defined(__cpp_exceptions)
    try {
      start();
    } catch (const std::system_error&) {
      // Those that there are do the work.
    }
#else
    start();
#endif
  }
  HostTeams(const HostTeams&) = delete;
  HostTeams& operator=(const HostTeams&) = delete;
  ~HostTeams() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    begin_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  Index threads() const { return static_cast<Index>(helpers_.size()) + 1; }

  /// task(team, 0) to task(team, count - 1), each once, in any order and on any thread, all before
  /// this returns. Tasks throw nothing and call no `for_each` themselves. Allocates nothing. One
  /// thread at a time may call it.
  template <class Task>
  void for_each(Index count, const Task& task) {
    if (helpers_.empty() || count <= 1) {
      for (Index i = 0; i < count; ++i) task(teams_.front(), i);
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // Neighbours lie side by side in memory: a thread takes a run of them, of which there are
      // enough that none waits long for the last.
      const Index run = count / (threads() * 8);
      run_ = run < 1 ? 1 : run > 16 ? 16 : run;
      count_ = count;
      task_ = &task;
      call_ = [](HostTeam& team, const void* tasks, Index first, Index last) {
        for (Index i = first; i < last; ++i) (*static_cast<const Task*>(tasks))(team, i);
      };
      next_.store(0, std::memory_order_relaxed);
      working_ = helpers_.size();
      ++round_;
    }
    begin_.notify_all();
    work(teams_.front());
    std::unique_lock<std::mutex> lock(mutex_);
    end_.wait(lock, [this] { return working_ == 0; });
  }

 private:
  void start() {
    for (std::size_t i = 1; i < teams_.size(); ++i) {
      helpers_.emplace_back([this, i] { serve(teams_[i]); });
    }
  }

  void work(HostTeam& team) {
    for (;;) {
      const Index first = next_.fetch_add(run_, std::memory_order_relaxed);
      if (first >= count_) return;
      call_(team, task_, first, first + run_ < count_ ? first + run_ : count_);
    }
  }

  void serve(HostTeam& team) {
    std::size_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      begin_.wait(lock, [&] { return ending_ || round_ != seen; });
      if (ending_) return;
      seen = round_;
      lock.unlock();
      work(team);
      lock.lock();
      if (--working_ == 0) end_.notify_one();
    }
  }

  std::deque<HostTeam> teams_;
  std::vector<std::thread> helpers_;
  std::mutex mutex_;
  std::condition_variable begin_;
  std::condition_variable end_;
  std::size_t round_ = 0;
  std::size_t working_ = 0;
  bool ending_ = false;
  Index count_ = 0;
  Index run_ = 1;
  const void* task_ = nullptr;
  void (*call_)(HostTeam&, const void*, Index, Index) = nullptr;
  alignas(64) std::atomic<Index> next_{0};
};

SINKSTATE_NAMESPACE_END
