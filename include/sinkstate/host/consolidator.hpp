/// @file
/// Consolidation on other threads while requests are decoded.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/owner.hpp"
#include "../core/workspace.hpp"
#include "consolidated_layer.hpp"
#include "host_team.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// A result that was swapped in.
struct SwapRecord {
  std::int64_t step = 0;  ///< calls of `Consolidator::swap` before that one
  Index layer = 0;
  Index slot = 0;
  std::int64_t tokens = 0;    ///< that the request had then
  std::uint64_t version = 0;  ///< of the bodies that were replaced
};

struct ConsolidatorStatistics {
  std::int64_t done = 0;    ///< consolidated, with or without anything to swap in
  std::int64_t stale = 0;   ///< dropped, since the bodies had changed meanwhile
  std::int64_t failed = 0;  ///< dropped, since a stage has thrown
  std::int64_t rank_removed = 0;
  Index waiting = 0;    ///< slots of layers that wait for their turn
  Index in_flight = 0;  ///< whose frozen parts are on their way
};

struct ConsolidatorOptions {
  /// That decompose, each a head at a time; one more downloads, and one uploads.
  Index threads = 1;
  /// Slots of layers on their way at once, each with `ConsolidatedLayer::staging_bytes` of the
  /// largest layer. A result takes its place until it is swapped in.
  Index in_flight = 16;
  /// 0: a result is swapped in as soon as it is ready. More: deterministic; work begins in `swap`
  /// alone, and a result is swapped in as many calls later, which waits for it if need be. It has
  /// to come before the next compaction of its slot: less than the period, or all results are
  /// stale.
  Index delay = 0;
  /// The core to which each thread is pinned: the one that downloads, those that decompose, the one
  /// that uploads. Empty: none. (Linux)
  std::vector<int> cores;
  /// Runs what it is given, on any thread, at once or later, each once: the engine's own threads in
  /// the place of ours; `threads` and `cores` mean nothing then. It is called on the thread that
  /// decodes and within tasks, several at a time. If it throws, it has not taken the task, which is
  /// as if the task had thrown; what it runs at once runs, and allocates, within `request` or
  /// `swap`.
  std::function<void(std::function<void()>)> executor;
  /// If not null, what was swapped in: with it another pool can be led the same way, by
  /// `consolidate` at the same places. It grows, which may allocate.
  std::vector<SwapRecord>* log = nullptr;
};

/// Decomposes the frozen terms of requests off the critical path (paper 1, section 4.3), in three
/// stages, download, decomposition and upload, which work on different requests at once.
///
/// What waits is a slot of a layer. First come those whose result was stale, then those that were
/// never consolidated, then the one whose last time is longest ago; among equals, who has waited
/// longest. Who is too late a second time running has had its turn. A result is stale when the
/// bodies of the slot have changed meanwhile, by whatever verb: it is dropped, and stages that have
/// not begun are left out.
///
///     for each step:
///       step ...                                   decode
///       consolidator.swap();                       what is ready and not stale
///       compact ...                                layers that are due
///       consolidator.request(layer, slots, n);     those that were compacted
///
/// One thread calls; it is the one that calls the verbs on the pools, which outlive the
/// consolidator. `request` and `swap` allocate nothing and wait for no stage (but see `delay`). When a result is
/// ready depends on time: outputs are the same bits for the same swaps, which `log` tells.
class Consolidator {
 public:
  /// @param layers  not null
  /// @throws Error for options that cannot be used
  explicit Consolidator(std::vector<std::unique_ptr<ConsolidatedLayer>> layers,
                        ConsolidatorOptions options = {})
      : layers_(std::move(layers)), options_(std::move(options)) {
    check_options();
    std::size_t staging = 0;
    Index units = 0;
    Index heads = 1;
    for (const auto& layer : layers_) {
      first_.push_back(units);
      units += layer->slots();
      if (layer->heads() > heads) heads = layer->heads();
      if (layer->staging_bytes() > staging) staging = layer->staging_bytes();
      if (layer->workspace_bytes() > workspace_) workspace_ = layer->workspace_bytes();
    }
    units_.resize(static_cast<std::size_t>(units));
    for (Index i = 0; i < options_.in_flight; ++i) {
      jobs_.emplace_back();
      jobs_.back().staging = AlignedBytes(staging);
    }
    const std::size_t parts = jobs_.size() * static_cast<std::size_t>(heads);
    tasks_.reserve(parts);
    handing_out_.reserve(parts + 1);
    teams_.reserve(parts + static_cast<std::size_t>(options_.threads) + 2);
    if (!options_.executor) start_threads();
  }
  Consolidator(const Consolidator&) = delete;
  Consolidator& operator=(const Consolidator&) = delete;
  /// Waits for stages that are running, and for tasks that an executor has been given.
  ~Consolidator() { stop(); }

  /// Slots of a layer that have just been compacted (those that `StatePoolView::due` named before a
  /// `compact_due`, or all of a layer that was due): they are to be consolidated when their turn
  /// comes. Padding and others that hold no request may be among them.
  /// @param layer  as given to the constructor, 0 for the first
  /// @throws Error for a layer that there is not
  void request(Index layer, const std::int32_t* slots, Index entries) {
    bool started = false;
    detail::in_range(0, static_cast<Index>(layers_.size()) - 1, "layer to be consolidated", layer);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const ConsolidatedLayer& source = *layers_[static_cast<std::size_t>(layer)];
      for (Index i = 0; i < entries; ++i) {
        if (slots[i] < 0 || slots[i] >= source.slots() || !source.ready(slots[i])) continue;
        Unit& unit = this->unit(layer, slots[i]);
        unit.version = source.version(slots[i]);
        if (unit.since == 0) unit.since = ++clock_;
        unit.waiting = true;
      }
      started = options_.delay == 0 && start_jobs();
    }
    if (started) hand_out();
  }

  /// Swaps in what is ready; once a step.
  /// @returns results that were
  /// @throws what a stage has thrown since the last call; what it worked on has been dropped
  Index swap() {
    std::exception_ptr failure;
    Index swapped = 0;
    bool started = false;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (Job* const job = next_result(lock)) swapped += conclude(*job);
      started = start_jobs();
      ++step_;
      std::swap(failure, failure_);
    }
    if (started) hand_out();
    rethrow(failure);
    return swapped;
  }

  /// Calls `swap` until nothing waits and nothing is on its way.
  void drain() {
    for (;;) {
      swap();
      std::unique_lock<std::mutex> lock(mutex_);
      if (in_flight() == 0 && waiting() == 0) return;
      if (options_.delay > 0) continue;
      changed_.wait(lock,
                    [this] { return in_flight() == 0 || first_job(Stage::ready) != nullptr; });
    }
  }

  ConsolidatorStatistics statistics() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    ConsolidatorStatistics now = statistics_;
    now.waiting = waiting();
    now.in_flight = in_flight();
    return now;
  }

 private:
  enum class Stage { idle, download, decompose, upload, ready };
  enum class Outcome { good, nothing, stale, failed };

  /// A slot of a layer.
  struct Unit {
    std::uint64_t version = 0;  // when it was asked for
    std::uint64_t since = 0;    // it has been waiting; 0: it has not since its last turn
    std::uint64_t last = 0;     // time that it had its turn; 0: never
    bool waiting = false;
    bool dropped = false;  // the last result was stale, and the one before was not
  };

  /// A unit on its way.
  struct Job {
    Stage stage = Stage::idle;
    Outcome outcome = Outcome::good;  // so far
    std::exception_ptr failure;
    Index layer = 0;
    Index slot = 0;
    std::uint64_t version = 0;
    std::uint64_t order = 0;  // in which jobs began
    std::int64_t step = 0;    // at which it began
    Index parts = 0;    // of the stage that no thread has taken yet: heads to decompose, or one
    Index running = 0;  // and those that threads are at
    AlignedBytes staging;
  };

  void check_options() const {
    detail::in_range(1, 1024, "ConsolidatorOptions::in_flight", options_.in_flight);
    detail::in_range(0, detail::largest_size, "ConsolidatorOptions::delay", options_.delay);
    for (const auto& layer : layers_) {
      if (!layer) detail::refuse("layer of a Consolidator", "one", "null");
      detail::in_range(1, detail::largest_size, "heads of a ConsolidatedLayer", layer->heads());
    }
    if (options_.executor) return;
    detail::in_range(1, 1024, "ConsolidatorOptions::threads", options_.threads);
    const std::size_t cores = options_.cores.size();
    if (cores != 0 && cores != static_cast<std::size_t>(options_.threads) + 2) {
      detail::refuse(
          "ConsolidatorOptions::cores",
          "none, or one for each of " + std::to_string(options_.threads + 2) + " threads",
          std::to_string(cores));
    }
  }

  // --- with the mutex ---

  Unit& unit(Index layer, Index slot) {
    return units_[static_cast<std::size_t>(first_[static_cast<std::size_t>(layer)] + slot)];
  }
  ConsolidatedLayer& layer_of(const Job& job) {
    return *layers_[static_cast<std::size_t>(job.layer)];
  }

  Index waiting() const {
    Index count = 0;
    for (const Unit& unit : units_) count += unit.waiting ? 1 : 0;
    return count;
  }
  Index in_flight() const {
    Index count = 0;
    for (const Job& job : jobs_) count += job.stage == Stage::idle ? 0 : 1;
    return count;
  }
  bool on_its_way(Index layer, Index slot) const {
    for (const Job& job : jobs_) {
      if (job.stage != Stage::idle && job.layer == layer && job.slot == slot) return true;
    }
    return false;
  }
  /// Of the jobs in a stage with parts that no thread has taken, the one that began first.
  Job* first_job(Stage stage) {
    Job* first = nullptr;
    for (Job& job : jobs_) {
      if (job.stage != stage || job.parts == 0) continue;
      if (first == nullptr || job.order < first->order) first = &job;
    }
    return first;
  }

  static bool comes_before(const Unit& a, const Unit& b) {
    if (a.dropped != b.dropped) return a.dropped;
    if (a.last != b.last) return a.last < b.last;
    return a.since < b.since;
  }

  /// Begins with those whose turn it is, as long as there is a place; O(units) for each place.
  /// @returns whether there is something to do for somebody
  bool start_jobs() {
    bool started = false;
    for (Job& job : jobs_) {
      if (job.stage != Stage::idle) continue;
      Unit* best = nullptr;
      for (std::size_t l = 0; l < layers_.size(); ++l) {
        for (Index slot = 0; slot < layers_[l]->slots(); ++slot) {
          const auto layer = static_cast<Index>(l);
          Unit& unit = this->unit(layer, slot);
          if (!unit.waiting || (best != nullptr && !comes_before(unit, *best))) continue;
          if (on_its_way(layer, slot)) continue;
          if (layers_[l]->version(slot) != unit.version) {
            unit.waiting = false;  // released, or rewritten and not asked for again
            continue;
          }
          best = &unit;
          job.layer = layer;
          job.slot = slot;
        }
      }
      if (best == nullptr) break;
      best->waiting = false;
      best->since = 0;
      job.failure = nullptr;
      job.outcome = Outcome::good;
      job.version = best->version;
      job.order = ++clock_;
      job.step = step_;
      enter(job, Stage::download);
      started = true;
    }
    return started;
  }

  void enter(Job& job, Stage stage) {
    job.stage = stage;
    job.parts = stage == Stage::decompose ? layer_of(job).heads() : 1;
    if (options_.executor && stage != Stage::ready && !ending_) {
      for (Index i = 0; i < job.parts; ++i) tasks_.push_back(&job);
    }
  }

  /// The next result to swap in or drop at this step, in the order in which jobs began.
  Job* next_result(std::unique_lock<std::mutex>& lock) {
    if (options_.delay == 0) return first_job(Stage::ready);
    Job* first = nullptr;
    for (Job& job : jobs_) {
      if (job.stage == Stage::idle || step_ - job.step < options_.delay) continue;
      if (first == nullptr || job.order < first->order) first = &job;
    }
    if (first != nullptr) changed_.wait(lock, [&] { return first->stage == Stage::ready; });
    return first;
  }

  /// Ends a job, which makes its place free. What is good is swapped in, by the thread that decodes.
  /// @returns how many were
  Index conclude(Job& job) {
    ConsolidatedLayer& layer = layer_of(job);
    Unit& unit = this->unit(job.layer, job.slot);
    // Whatever has come of it: whether a thread has looked before the change or behind it shall not
    // matter.
    if (layer.version(job.slot) != job.version) job.outcome = Outcome::stale;
    if (job.outcome == Outcome::good) job.failure = attempt([&] { swap_in(layer, job); });
    if (job.failure != nullptr) {
      if (failure_ == nullptr) failure_ = job.failure;
      if (job.outcome != Outcome::stale) job.outcome = Outcome::failed;
    }
    job.stage = Stage::idle;
    unit.dropped = job.outcome == Outcome::stale && !unit.dropped;
    if (!unit.dropped) unit.last = ++clock_;
    (job.outcome == Outcome::stale    ? statistics_.stale
     : job.outcome == Outcome::failed ? statistics_.failed
                                      : statistics_.done) += 1;
    return job.outcome == Outcome::good ? 1 : 0;
  }

  void swap_in(ConsolidatedLayer& layer, Job& job) {
    if (options_.log != nullptr) {  // before anything changes: it may be short of memory
      options_.log->push_back({step_, job.layer, job.slot, layer.tokens(job.slot), job.version});
    }
    const std::exception_ptr failure =
        attempt([&] { statistics_.rank_removed += layer.swap(job.slot, job.staging.workspace()); });
    if (failure == nullptr) return;
    if (options_.log != nullptr) options_.log->pop_back();
    rethrow(failure);
  }

  /// One part of the stage at which a job is. Leaves the mutex for the work itself.
  void work(Job& job, std::unique_lock<std::mutex>& lock) {
    const Stage stage = job.stage;
    const Index part = --job.parts;
    ConsolidatedLayer& layer = layer_of(job);
    if (job.outcome == Outcome::good && layer.version(job.slot) != job.version) {
      job.outcome = Outcome::stale;
    }
    Outcome outcome = Outcome::good;
    std::exception_ptr failure;
    if (job.outcome == Outcome::good && !ending_) {
      ++job.running;
      std::unique_ptr<HostTeam> team;
      if (!teams_.empty()) {
        team = std::move(teams_.back());
        teams_.pop_back();
      }
      lock.unlock();
      failure = attempt([&] { outcome = run(layer, job, stage, part, team); });
      lock.lock();
      if (team) teams_.push_back(std::move(team));
      --job.running;
    }
    end_part(job, outcome, failure);
  }

  /// Notes what came of a part; behind the last one the job goes on to the next stage, or ends.
  void end_part(Job& job, Outcome outcome, const std::exception_ptr& failure) {
    if (failure != nullptr) {
      outcome = Outcome::failed;
      job.failure = failure;
    }
    if (outcome != Outcome::good) job.outcome = outcome;
    if (job.parts > 0 || job.running > 0) return;
    if (job.outcome == Outcome::good) {
      enter(job, job.stage == Stage::download    ? Stage::decompose
                 : job.stage == Stage::decompose ? Stage::upload
                                                 : Stage::ready);
    } else if (options_.delay > 0) {
      enter(job, Stage::ready);  // its place is free no earlier than if it were good
    } else {
      conclude(job);
      (void)start_jobs();
    }
    changed_.notify_all();
  }

  // --- without it ---

  Outcome run(ConsolidatedLayer& layer, Job& job, Stage stage, Index part,
              std::unique_ptr<HostTeam>& team) const {
    if (!team) team = std::make_unique<HostTeam>(workspace_);
    const Workspace staging = job.staging.workspace();
    if (stage == Stage::download) {
      const auto found = layer.download(*team, job.slot, job.version, staging);
      return found == ConsolidatedLayer::Found::something ? Outcome::good
             : found == ConsolidatedLayer::Found::nothing ? Outcome::nothing
                                                          : Outcome::stale;
    }
    if (stage == Stage::decompose) {
      layer.decompose(*team, part, staging);
    } else {
      layer.upload(*team, staging);
    }
    return Outcome::good;
  }

  /// Wakes the threads, or gives the executor what there is to do. Where it runs tasks at once, what
  /// these leave to do is given to it here, not within them.
  void hand_out() {
    changed_.notify_all();
    std::unique_lock<std::mutex> lock(mutex_);
    const std::thread::id self = std::this_thread::get_id();
    const auto mine = [&] { return std::find(handing_out_.begin(), handing_out_.end(), self); };
    if (mine() != handing_out_.end()) return;
    handing_out_.push_back(self);
    while (!tasks_.empty()) {
      Job* const job = tasks_.front();
      tasks_.erase(tasks_.begin());
      ++outstanding_;
      lock.unlock();
      const std::exception_ptr refused =
          attempt([&] { options_.executor([this, job] { run_task(*job); }); });
      lock.lock();
      if (refused == nullptr) continue;
      --outstanding_;
      --job->parts;
      end_part(*job, Outcome::failed, refused);
    }
    handing_out_.erase(mine());
    changed_.notify_all();
  }

  /// A task of the executor.
  void run_task(Job& job) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work(job, lock);
    }
    hand_out();
    const std::lock_guard<std::mutex> lock(mutex_);
    --outstanding_;
    changed_.notify_all();
  }

  /// One of our own threads.
  void serve(Stage stage) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      changed_.wait(lock, [&] { return ending_ || (job = first_job(stage)) != nullptr; });
      if (ending_) return;
      work(*job, lock);
    }
  }

  void start_threads() {
    const auto start = [this](Stage stage) {
      threads_.emplace_back([this, stage] { serve(stage); });
      if (!options_.cores.empty()) pin(threads_.back(), options_.cores[threads_.size() - 1]);
    };
    const std::exception_ptr failure = attempt([&] {
      start(Stage::download);
      for (Index i = 0; i < options_.threads; ++i) start(Stage::decompose);
      start(Stage::upload);
    });
    if (failure == nullptr) return;
    stop();
    rethrow(failure);
  }

  /// What a task throws, or null.
  template <class Task>
  static std::exception_ptr attempt(const Task& task) {
#if defined(__cpp_exceptions)
    try {
      task();
    } catch (...) {
      return std::current_exception();
    }
#else
    task();
#endif
    return nullptr;
  }
  static void rethrow(const std::exception_ptr& failure) {
#if defined(__cpp_exceptions)
    if (failure != nullptr) std::rethrow_exception(failure);
#else
    (void)failure;
#endif
  }

  static void pin(std::thread& thread, int core) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(core, &set);
    if (pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set) == 0) return;
    const char* const wanted = "cores that this process may run on";
#else
    (void)thread;
    const char* const wanted = "none on this system";
#endif
    detail::refuse("ConsolidatorOptions::cores", wanted, std::to_string(core));
  }

  void stop() {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      ending_ = true;
      tasks_.clear();
      changed_.notify_all();
      changed_.wait(lock, [this] { return outstanding_ == 0; });
    }
    for (std::thread& thread : threads_) thread.join();
  }

  std::vector<std::unique_ptr<ConsolidatedLayer>> layers_;
  ConsolidatorOptions options_;
  std::vector<Index> first_;  // unit of each layer
  std::size_t workspace_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Unit> units_;
  std::vector<Job> jobs_;
  std::vector<Job*> tasks_;  // that the executor has not been given yet
  std::vector<std::thread::id> handing_out_;
  std::vector<std::unique_ptr<HostTeam>> teams_;  // idle
  ConsolidatorStatistics statistics_;
  std::exception_ptr failure_;
  std::uint64_t clock_ = 0;
  std::int64_t step_ = 0;
  std::size_t outstanding_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

SINKSTATE_NAMESPACE_END
