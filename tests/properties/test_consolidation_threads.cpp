// Pools under random requests while a consolidator works on other threads: what comes out is, to the bit, what a
// reference gets that replays the log of swaps on one thread.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/pool_requests.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using Layers =
    std::tuple<Policy<GatedDelta, Host, Fp32, LocalSvd>,
               Policy<KimiDelta, Host, Fp16, LocalSvd, MeanValueSink>,
               Policy<Mamba2, Host, Fp8, LocalSvd>, Policy<DeltaNet, Host, Fp64, LocalSvd>>;

template <class P>
PoolConfig layer_of(std::uint64_t seed) {
  PoolConfig config = pool_of(24, 20 + static_cast<Index>(seed % 2) * 12, 5, 1, 3);
  config.state.draft = 2;
  config.state.active = 1 + static_cast<Index>(seed % 3);
  config.state.epsilon = 0.04;
  config.state.recompress_growth = seed % 4 < 2 ? 0 : 1.15;
  config.state.dense_fallback = seed % 5 == 0;
  config.state.rounding = seed % 3 == 0 ? Rounding::stochastic : Rounding::nearest;
  if (seed % 6 == 1) {  // rows run short
    config.quota = 6;
    config.reserve = 12;
  }
  return config;
}

// The verbs of a layer, and one number for all that came out.
class AnyLayer {
 public:
  virtual ~AnyLayer() = default;
  // One of the things that an engine does, a function of the seed alone. @returns the slots compacted
  virtual std::vector<std::int32_t> act(std::uint64_t seed, std::int64_t step) = 0;
  virtual std::unique_ptr<ConsolidatedLayer> consolidated() = 0;
  // A swap that was logged: whether it finds what it found then.
  virtual bool replay(const SwapRecord& swap) = 0;
  virtual std::uint64_t image() = 0;
};

template <class P>
class LayerOf : public AnyLayer {
 public:
  explicit LayerOf(std::uint64_t seed)
      : runner_(layer_of<P>(seed)),
        requests_(static_cast<std::size_t>(runner_.config().slots)),
        kept_(requests_.size()) {}

  std::vector<std::int32_t> act(std::uint64_t seed, std::int64_t step) override {
    const auto pool = runner_.view();
    Random random(seed);
    std::vector<std::int32_t> busy;
    for (Index s = 0; s < pool.config.slots; ++s) {
      if (pool.in_use(s)) busy.push_back(static_cast<std::int32_t>(s));
    }
    // A token of every request; what does not fit is refused in both pools alike. Sometimes one forks
    // on the way, and takes the place of another.
    if (!busy.empty()) {
      std::vector<std::int32_t> entries = busy, targets;
      if (random.uniform() < 0.15) {
        const auto target = static_cast<std::int32_t>(random.uniform() * 5);
        entries.erase(std::remove(entries.begin() + 1, entries.end(), target), entries.end());
        targets = entries;
        targets[0] = target;
        requests_[place(target)] = seed + 1;
      }
      auto tensors = runner_.tensors(static_cast<Index>(entries.size()));
      for (std::size_t b = 0; b < entries.size(); ++b) {
        const std::int32_t s = entries[b];
        tensors.set(static_cast<Index>(b), requests_[place(s)], pool.slot(s).tokens);
      }
      std::vector<Status> statuses(entries.size());
      auto batch = tensors.batch(entries);
      if (!targets.empty()) batch.write_slots = targets.data();
      (void)step_pool(batch, statuses.data());
      note(tensors.outputs.data(), tensors.outputs.size() * sizeof(tensors.outputs[0]));
      note(statuses.data(), statuses.size() * sizeof(Status));
    }
    const auto slot = static_cast<Index>(random.uniform() * 5), other = (slot + 1) % 5;
    const double choice = random.uniform();
    if (choice < 0.10) {
      note(admit(pool, slot));
      requests_[place(slot)] = seed;
    } else if (choice < 0.14) {
      note(release(pool, slot));
    } else if (choice < 0.20) {
      note(fork(pool, slot, other));
      requests_[place(other)] = seed;
    } else if (choice < 0.26) {
      note(roll_back(pool, slot, 1));
    } else if (choice < 0.28) {
      note(reset(pool, slot));
    } else if (choice < 0.31) {
      note(open_draft(pool, slot));
    } else if (choice < 0.38) {
      note(close_draft(pool, slot, 1));
    } else if (choice < 0.42 && pool.in_use(slot) && pool.slot(slot).blocked == Status::ok) {
      kept_[place(slot)] = snapshot_of(pool, slot);
    } else if (choice < 0.48 && kept_[place(slot)].size() > 0) {
      const AlignedMemory& bytes = kept_[place(slot)];
      note(restore(pool, slot, bytes, header_of(bytes).tokens));
      requests_[place(slot)] = seed;
    } else if (choice < 0.52) {
      const Index d_k = pool.config.state.d_k, d_v = pool.config.state.d_v;
      using T = typename P::Compute;
      std::vector<T> dense(static_cast<std::size_t>(3 * d_k * d_v));
      for (T& x : dense) x = static_cast<T>(random.uniform() < 0.05 ? random.normal() : 0);
      note(initialize(runner_.teams(), pool, slot,
                      DenseStates<const T>::keys_by_values(dense.data(), d_k, d_v),
                      static_cast<Index>(step)));
    }
    // Layers take turns, some compact before they are full.
    const bool due_only = random.uniform() < 0.7;
    std::vector<std::int32_t> slots;
    for (const std::int32_t s : busy) {
      if (pool.in_use(s) && (due_only ? pool.due(s) : step % 4 == s % 4)) slots.push_back(s);
    }
    std::vector<Status> statuses(slots.size());
    Index recompressions = 4;
    (void)compact(runner_.teams(), pool, slots.data(), static_cast<Index>(slots.size()),
                  statuses.data(), nullptr, &recompressions);
    note(statuses.data(), statuses.size() * sizeof(Status));
    return slots;
  }
  std::unique_ptr<ConsolidatedLayer> consolidated() override {
    return sinkstate::consolidated(runner_.view());
  }
  bool replay(const SwapRecord& swap) override {
    const auto pool = runner_.view();
    return pool.slot(swap.slot).bodies.now() == swap.version &&
           pool.slot(swap.slot).tokens == swap.tokens &&
           consolidate(runner_.teams(), pool, swap.slot) == Status::ok;
  }
  std::uint64_t image() override { return digest_ ^ image_of(runner_.view()); }

 private:
  static std::size_t place(Index slot) { return static_cast<std::size_t>(slot); }
  Status step_pool(const TokenBatch<typename P::Compute>& batch, Status* statuses) {
    return step(runner_.teams(), runner_.view(), batch, statuses);
  }
  void note(const void* bytes, std::size_t size) {
    digest_ = digest_ * 31 + sinkstate::detail::checksum(bytes, size);
  }
  void note(Status status) { note(&status, sizeof(status)); }

  PoolRunner<P> runner_;
  std::vector<std::uint64_t> requests_;
  std::vector<AlignedMemory> kept_;
  std::uint64_t digest_ = 0;
};

template <class... P>
std::vector<std::unique_ptr<AnyLayer>> make_layers(std::uint64_t seed, std::tuple<P...>*) {
  std::vector<std::unique_ptr<AnyLayer>> layers;
  (layers.push_back(std::make_unique<LayerOf<P>>(seed + layers.size())), ...);
  return layers;
}

struct Outcome {
  ConsolidatorStatistics statistics;
  std::size_t swaps = 0;
};

// @param drain  every so often, so that results in plenty are swapped in however slow the threads are
Outcome run(std::uint64_t seed, int steps, ConsolidatorOptions options, bool drain) {
  auto served = make_layers(seed, static_cast<Layers*>(nullptr));
  auto replayed = make_layers(seed, static_cast<Layers*>(nullptr));
  std::vector<SwapRecord> log;
  options.log = &log;
  std::vector<std::unique_ptr<ConsolidatedLayer>> sources;
  for (const auto& layer : served) sources.push_back(layer->consolidated());
  Consolidator consolidator(std::move(sources), options);
  const auto at = [&](std::size_t layer, std::int64_t step) {
    return derived_seed(seed, static_cast<std::uint64_t>(step) * 16 + layer);
  };
  std::size_t next = 0;  // of the log, to replay
  for (std::int64_t step = 0; step < steps; ++step) {
    // A step's swaps come before its verbs.
    if (drain && step % 8 == 7) {
      consolidator.drain();
    } else {
      consolidator.swap();
    }
    for (std::size_t l = 0; l < served.size(); ++l) {
      auto slots = served[l]->act(at(l, step), step);
      // And any others, in use or not.
      if (step % 3 == 0) slots.insert(slots.end(), {-1, 0, 1, 2, 3, 4, 5});
      consolidator.request(static_cast<Index>(l), slots.data(), static_cast<Index>(slots.size()));
    }
    for (; next < log.size(); ++next) {
      const SwapRecord& swap = log[next];
      INFO("step " << step << ", layer " << swap.layer << ", slot " << swap.slot);
      REQUIRE(replayed[static_cast<std::size_t>(swap.layer)]->replay(swap));
    }
    for (std::size_t l = 0; l < served.size(); ++l) replayed[l]->act(at(l, step), step);
    for (std::size_t l = 0; l < served.size(); ++l) {
      INFO("step " << step << ", layer " << l);
      REQUIRE(served[l]->image() == replayed[l]->image());
    }
  }
  return {consolidator.statistics(), log.size()};
}

}  // namespace

TEST_CASE("consolidation: any schedule is the one that its log replays, to the bit",
          "[consolidation]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  std::int64_t removed = 0, stale = 0;
  std::size_t swaps = 0;
  for (std::uint64_t run = 0; run < 12 * static_cast<std::uint64_t>(test_scale()); ++run) {
    CAPTURE(run);
    ConsolidatorOptions options;
    options.threads = 1 + static_cast<Index>(run % 3);
    options.in_flight = 1 + static_cast<Index>(run % 4);
    const Outcome outcome = ::run(derived_seed(seed, run), 120, options, run % 2 == 0);
    removed += outcome.statistics.rank_removed;
    stale += outcome.statistics.stale;
    swaps += outcome.swaps;
    CHECK(outcome.statistics.failed == 0);
  }
  CHECK(swaps > 100);
  CHECK(removed > 100);
  CHECK(stale > 0);
}

TEST_CASE("consolidation: deterministic, two runs are the same to the bit", "[consolidation]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Outcome outcomes[2];
  for (int i = 0; i < 2; ++i) {
    ConsolidatorOptions options;
    options.threads = 1 + i;
    options.delay = 2;
    options.in_flight = 6;
    outcomes[i] = run(derived_seed(seed, 77), 150, options, false);
  }
  CHECK(outcomes[0].swaps > 20);
  CHECK(outcomes[0].swaps == outcomes[1].swaps);
  CHECK(outcomes[0].statistics.done == outcomes[1].statistics.done);
  CHECK(outcomes[0].statistics.stale == outcomes[1].statistics.stale);
  CHECK(outcomes[0].statistics.rank_removed == outcomes[1].statistics.rank_removed);
}

TEST_CASE("consolidation: an engine's executor, which has a thread for each task",
          "[consolidation]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  std::vector<std::thread> threads;
  std::mutex mutex;
  ConsolidatorOptions options;
  options.executor = [&](std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex);
    threads.emplace_back(std::move(task));
  };
  CHECK(run(derived_seed(seed, 99), 24, options, true).swaps > 0);
  for (std::thread& thread : threads) thread.join();
}
