// Whose turn it is, what is dropped, and who does the work: the consolidator over layers that only write down what is
// asked of them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <sinkstate/sinkstate.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include "support/catch.hpp"

using namespace sinkstate;

namespace {

// What layers were asked to do, in order, by any thread.
class Diary {
 public:
  void write(const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lines_.push_back(line);
  }
  std::vector<std::string> lines() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lines_;
  }
  // Those that begin with a word.
  std::vector<std::string> lines(const std::string& word) const {
    std::vector<std::string> some;
    for (const std::string& line : lines()) {
      if (line.compare(0, word.size(), word) == 0) some.push_back(line.substr(word.size() + 1));
    }
    return some;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

class FakeLayer : public ConsolidatedLayer {
 public:
  FakeLayer(std::string name, Diary& diary, Index slots = 1, Index heads = 1)
      : name_(std::move(name)),
        diary_(diary),
        heads_(heads),
        versions_(static_cast<std::size_t>(slots)) {}

  Index slots() const override { return static_cast<Index>(versions_.size()); }
  Index heads() const override { return heads_; }
  std::size_t staging_bytes() const override { return 64; }
  std::size_t workspace_bytes() const override { return 64; }
  bool ready(Index) const override { return is_ready; }
  std::uint64_t version(Index slot) const override { return at(slot).load(); }
  std::int64_t tokens(Index) const override { return 8; }
  Found download(HostTeam&, Index slot, std::uint64_t version, Workspace) override {
    act("download", slot);
    return version != this->version(slot) ? Found::stale : found;
  }
  void decompose(HostTeam&, Index head, Workspace) override { act("decompose", head); }
  void upload(HostTeam&, Workspace) override { act("upload", 0); }
  Index swap(Index slot, Workspace) override {
    write("swap", slot);
    if (fails == "swap") throw std::runtime_error("swap of " + name_);
    ++at(slot);
    return 2;
  }

  void compact(Index slot = 0) { ++at(slot); }

  Found found = Found::something;
  bool is_ready = true;
  std::string fails;                        // the stage that throws
  std::function<void()> meanwhile = [] {};  // in each stage that others than the caller do

 private:
  std::atomic<std::uint64_t>& at(Index slot) const {
    return versions_[static_cast<std::size_t>(slot)];
  }
  void write(const std::string& stage, Index number) {
    diary_.write(stage + " " + name_ + (number == 0 ? "" : " " + std::to_string(number)));
  }
  void act(const std::string& stage, Index number) {
    write(stage, number);
    meanwhile();
    if (fails == stage) throw std::runtime_error(stage + " of " + name_);
  }

  std::string name_;
  Diary& diary_;
  Index heads_;
  mutable std::deque<std::atomic<std::uint64_t>> versions_;
};

// An executor that does nothing until it is told to.
class Crank {
 public:
  std::function<void(std::function<void()>)> executor() {
    return [this](std::function<void()> task) { tasks_.push_back(std::move(task)); };
  }
  void turn() {
    REQUIRE_FALSE(tasks_.empty());
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    task();
  }
  void turn_all() {
    while (!tasks_.empty()) turn();
  }
  std::size_t tasks() const { return tasks_.size(); }

 private:
  std::deque<std::function<void()>> tasks_;
};

// Some layers, named L1, L2, ..., and their consolidator.
class Layers {
 public:
  explicit Layers(Index count, ConsolidatorOptions options, Index slots = 1, Index heads = 1) {
    std::vector<std::unique_ptr<ConsolidatedLayer>> owned;
    for (Index l = 0; l < count; ++l) {
      auto layer = std::make_unique<FakeLayer>("L" + std::to_string(l + 1), diary, slots, heads);
      layers_.push_back(layer.get());
      owned.push_back(std::move(layer));
    }
    consolidator = std::make_unique<Consolidator>(std::move(owned), std::move(options));
  }
  Layers(Index count, Crank& crank, Index in_flight = 1, Index slots = 1, Index heads = 1)
      : Layers(count, cranked(crank, in_flight), slots, heads) {
    crank_ = &crank;
  }
  // A consolidator waits for the tasks that it has given away, also where a test has failed.
  ~Layers() {
    if (crank_ != nullptr) crank_->turn_all();
  }
  FakeLayer& operator[](Index layer) { return *layers_[static_cast<std::size_t>(layer)]; }
  void request(Index layer, std::int32_t slot = 0) { consolidator->request(layer, &slot, 1); }
  void compact(Index layer, std::int32_t slot = 0) {
    (*this)[layer].compact(slot);
    request(layer, slot);
  }
  ConsolidatorStatistics statistics() const { return consolidator->statistics(); }

  Diary diary;
  std::unique_ptr<Consolidator> consolidator;

 private:
  static ConsolidatorOptions cranked(Crank& crank, Index in_flight) {
    ConsolidatorOptions options;
    options.executor = crank.executor();
    options.in_flight = in_flight;
    return options;
  }
  std::vector<FakeLayer*> layers_;
  Crank* crank_ = nullptr;
};

using Lines = std::vector<std::string>;

std::string error_of(const std::function<void()>& build) {
  try {
    build();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

template <class Condition>
bool comes_true(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace

TEST_CASE("consolidator: the four layers of the paper", "[consolidator]") {
  // SinkState, section 4.3, figure 7(b). Two layers compact at each step: L1 and L2 at steps 1, 3,
  // 5, L3 and L4 at steps 2, 4, 6.
  Crank crank;
  Layers layers(4, crank);
  const auto swaps = [&] { return layers.diary.lines("swap"); };

  // Step 1. L1 is downloaded first, consolidated and uploaded.
  layers.consolidator->swap();
  layers.compact(0);
  layers.compact(1);
  crank.turn_all();
  CHECK(layers.diary.lines() == Lines{"download L1", "decompose L1", "upload L1"});

  // Step 2. Its result still matches.
  CHECK(layers.consolidator->swap() == 1);
  CHECK(swaps() == Lines{"L1"});
  layers.compact(2);
  layers.compact(3);
  crank.turn();
  CHECK(layers.diary.lines().back() == "download L2");

  // Step 3 compacts L2, whose decomposition has not ended: it is dropped, and L3 begins at once.
  CHECK(layers.consolidator->swap() == 0);
  layers[0].compact();
  layers[1].compact();
  crank.turn();
  CHECK(layers.statistics().stale == 1);
  crank.turn();
  CHECK(layers.diary.lines().back() == "download L3");
  layers.request(0);
  layers.request(1);
  CHECK(layers.statistics().waiting == 3);  // L4, L1, L2
  crank.turn_all();

  // Step 4. L3 is swapped in before its next compaction; L2 has failed before, so it comes first.
  CHECK(layers.consolidator->swap() == 1);
  CHECK(swaps() == Lines{"L1", "L3"});
  layers.compact(2);
  layers.compact(3);
  CHECK(layers.statistics().waiting == 3);  // L4, L1, L3
  crank.turn_all();
  CHECK(layers.diary.lines("download") == Lines{"L1", "L2", "L3", "L2"});

  // Step 5. L4 has never been consolidated.
  CHECK(layers.consolidator->swap() == 1);
  layers.compact(0);
  layers.compact(1);
  crank.turn_all();
  CHECK(layers.diary.lines("download") == Lines{"L1", "L2", "L3", "L2", "L4"});

  // Step 6. L4 is in time, and L1's last time is longest ago.
  CHECK(layers.consolidator->swap() == 1);
  CHECK(swaps() == Lines{"L1", "L3", "L2", "L4"});
  layers.compact(2);
  layers.compact(3);
  crank.turn();
  CHECK(layers.diary.lines("download").back() == "L1");
  CHECK(layers.statistics().done == 4);
  CHECK(layers.statistics().stale == 1);
  CHECK(layers.statistics().rank_removed == 8);
  crank.turn_all();
}

TEST_CASE("consolidator, B55, pitfall 10: a result of bodies that have changed is never swapped in",
          "[consolidator]") {
  // Whenever they change: before the download, behind each stage, and when the result is ready.
  for (int stages = 0; stages <= 3; ++stages) {
    CAPTURE(stages);
    Crank crank;
    Layers layers(1, crank);
    layers.compact(0);
    for (int i = 0; i < stages; ++i) crank.turn();
    layers[0].compact();
    crank.turn_all();
    CHECK(layers.consolidator->swap() == 0);
    CHECK(layers.diary.lines("swap").empty());
    CHECK(layers.diary.lines().size() == static_cast<std::size_t>(stages));  // none began after it
    CHECK(layers.statistics().stale == 1);
    CHECK(layers.statistics().done == 0);
    CHECK(layers.statistics().in_flight == 0);
    // It is not tried again unless it is asked for.
    CHECK(layers.statistics().waiting == 0);
    layers.request(0);
    crank.turn_all();
    CHECK(layers.consolidator->swap() == 1);
  }
}

TEST_CASE("consolidator: who waits and changes meanwhile is as new; who is gone is forgotten",
          "[consolidator]") {
  Crank crank;
  Layers layers(1, crank, 1, 4);
  layers.compact(0, 0);  // takes the only place
  layers.compact(0, 1);
  layers.compact(0, 2);
  layers.compact(0, 1);  // once more, while it waits
  layers[0].compact(2);  // released
  CHECK(layers.statistics().waiting == 2);
  crank.turn_all();
  CHECK(layers.consolidator->swap() == 1);
  crank.turn_all();
  CHECK(layers.consolidator->swap() == 1);
  CHECK(layers.diary.lines("swap") == Lines{"L1", "L1 1"});
  CHECK(layers.statistics().stale == 0);
  CHECK(layers.statistics().waiting == 0);
  CHECK(crank.tasks() == 0);
}

TEST_CASE("consolidator: padding and slots out of range are passed over", "[consolidator]") {
  Crank crank;
  Layers layers(1, crank, 1, 2);
  const std::int32_t slots[] = {-1, 2, 1000000, 1};
  layers.consolidator->request(0, slots, 4);
  crank.turn_all();
  layers.consolidator->swap();
  CHECK(layers.diary.lines("swap") == Lines{"L1 1"});
  CHECK_THAT(error_of([&] { layers.request(1); }), Catch::Contains("given 1"));
  CHECK_THAT(error_of([&] { layers.request(-1); }), Catch::Contains("given -1"));
}

TEST_CASE("consolidator: an executor gets a task for each head, and the upload follows the last",
          "[consolidator]") {
  Crank crank;
  Layers layers(1, crank, 1, 1, 3);
  layers.compact(0);
  CHECK(crank.tasks() == 1);
  crank.turn();
  CHECK(crank.tasks() == 3);
  crank.turn();
  crank.turn();
  CHECK(layers.diary.lines("upload").empty());
  crank.turn();
  CHECK(crank.tasks() == 1);
  Lines heads = layers.diary.lines("decompose");
  std::sort(heads.begin(), heads.end());
  CHECK(heads == Lines{"L1", "L1 1", "L1 2"});
  crank.turn();
  CHECK(layers.consolidator->swap() == 1);
}

TEST_CASE("consolidator: stages of different slots overlap, as many as may be on their way",
          "[consolidator]") {
  Crank crank;
  Layers layers(4, crank, 3);
  for (Index l = 0; l < 4; ++l) layers.compact(l);
  CHECK(layers.statistics().in_flight == 3);
  CHECK(layers.statistics().waiting == 1);
  crank.turn_all();
  CHECK(layers.diary.lines("download") == Lines{"L1", "L2", "L3"});
  CHECK(layers.consolidator->swap() == 3);
  crank.turn_all();
  CHECK(layers.consolidator->swap() == 1);
}

TEST_CASE("consolidator: one slot of a layer is on its way once at a time", "[consolidator]") {
  Crank crank;
  Layers layers(1, crank, 3);
  layers.compact(0);
  layers.compact(0);
  layers.request(0);
  CHECK(layers.statistics().in_flight == 1);
  CHECK(layers.statistics().waiting == 1);
  crank.turn_all();
  CHECK(layers.consolidator->swap() == 1);
  CHECK(layers.statistics().stale == 1);
  CHECK(layers.statistics().waiting == 0);
}

TEST_CASE("consolidator: nothing to merge is done, and nothing is swapped", "[consolidator]") {
  Crank crank;
  Layers layers(1, crank);
  layers[0].found = ConsolidatedLayer::Found::nothing;
  layers.compact(0);
  crank.turn_all();
  CHECK(layers.consolidator->swap() == 0);
  CHECK(layers.diary.lines() == Lines{"download L1"});
  CHECK(layers.statistics().done == 1);
  CHECK(layers.statistics().stale == 0);
}

TEST_CASE("consolidator: deterministic, it does not matter when a thread has looked",
          "[consolidator]") {
  ConsolidatorOptions options;
  options.delay = 2;
  Layers layers(1, options);
  layers[0].found = ConsolidatedLayer::Found::nothing;
  layers.compact(0);
  layers.consolidator->swap();
  REQUIRE(comes_true([&] { return layers.diary.lines("download").size() == 1; }));
  layers[0].compact();
  layers.consolidator->swap();
  layers.consolidator->swap();
  CHECK(layers.statistics().stale == 1);
  CHECK(layers.statistics().done == 0);
}

TEST_CASE("consolidator: deterministic, a result, a result comes so many calls after it began",
          "[consolidator]") {
  ConsolidatorOptions options;
  std::vector<SwapRecord> log;
  options.delay = 3;
  options.in_flight = 2;
  options.log = &log;
  Layers layers(3, options);
  std::atomic<int> slow{0};
  // However long a stage takes.
  for (Index l = 0; l < 3; ++l) {
    layers[l].meanwhile = [&] {
      if (slow++ % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    };
  }
  for (Index l = 0; l < 3; ++l) layers.compact(l);
  CHECK(layers.statistics().in_flight == 0);  // work begins in `swap`
  std::vector<Index> swaps;
  for (int step = 0; step < 8; ++step) swaps.push_back(layers.consolidator->swap());
  CHECK(swaps == std::vector<Index>{0, 0, 0, 2, 0, 0, 1, 0});
  REQUIRE(log.size() == 3);
  CHECK(log[0].step == 3);
  CHECK(log[0].layer == 0);
  CHECK(log[1].layer == 1);
  CHECK(log[2].step == 6);
  CHECK(log[2].layer == 2);
  CHECK(log[2].tokens == 8);
  CHECK(log[2].version == 1);

  // A stale one keeps its place as long, so that what begins when depends on no clock.
  layers.compact(0);
  layers.compact(1);
  layers.consolidator->swap();
  layers[0].compact();
  layers.compact(2);
  swaps.clear();
  for (int step = 0; step < 7; ++step) swaps.push_back(layers.consolidator->swap());
  CHECK(swaps == std::vector<Index>{0, 0, 1, 0, 0, 1, 0});
  CHECK(layers.statistics().stale == 1);
}

TEST_CASE("consolidator: what a stage throws comes back once, and the others go on",
          "[consolidator]") {
  for (const std::string stage : {"download", "decompose", "upload", "swap"}) {
    for (const bool threads : {false, true}) {
      CAPTURE(stage, threads);
      Crank crank;
      std::vector<SwapRecord> log;
      ConsolidatorOptions options;
      options.log = &log;
      if (!threads) {
        options.executor = crank.executor();
        options.in_flight = 1;
      }
      const auto made = std::make_unique<Layers>(2, options, 1, 2);
      Layers& layers = *made;
      layers[0].fails = stage;
      layers.compact(0);
      layers.compact(1);
      std::vector<std::string> said;
      REQUIRE(comes_true([&] {
        crank.turn_all();
        try {
          layers.consolidator->swap();
        } catch (const std::runtime_error& error) {
          said.push_back(error.what());
        }
        return layers.statistics().done == 1 && layers.statistics().failed == 1;
      }));
      CHECK(said == Lines{stage + " of L1"});
      CHECK(log.size() == 1);
      CHECK(layers.statistics().rank_removed == 2);
      CHECK(layers.statistics().stale == 0);
      layers[0].fails.clear();
      layers.compact(0);
      crank.turn_all();
      layers.consolidator->drain();
      CHECK(layers.diary.lines("swap").back() == "L1");
      CHECK(log.size() == 2);
    }
  }
}

TEST_CASE("consolidator: its destructor waits for what is running, and nothing begins after it",
          "[consolidator]") {
  std::atomic<bool> began{false};
  std::atomic<bool> ended{false};
  const auto busy = [&] {
    began = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ended = true;
  };
  SECTION("on its own threads") {
    Layers layers(1, {}, 8);
    layers[0].meanwhile = busy;
    for (std::int32_t s = 0; s < 8; ++s) layers.compact(0, s);
    REQUIRE(comes_true([&] { return began.load(); }));
    layers.consolidator.reset();
    CHECK(ended);
    CHECK(layers.diary.lines("download").size() < 8);
  }
  SECTION("on those of an executor") {
    std::vector<std::thread> threads;
    {
      ConsolidatorOptions options;
      options.executor = [&](std::function<void()> task) { threads.emplace_back(std::move(task)); };
      options.in_flight = 1;
      Layers layers(1, options);
      layers[0].meanwhile = busy;
      layers.compact(0);
      REQUIRE(comes_true([&] { return began.load(); }));
      layers.consolidator.reset();
      CHECK(ended);
      CHECK(layers.diary.lines() == Lines{"download L1"});
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST_CASE("consolidator: who is always too late keeps nobody from their turn", "[consolidator]") {
  // As many as there are places compact again before a result can come.
  ConsolidatorOptions options;
  options.delay = 8;
  options.in_flight = 2;
  Layers layers(4, options);
  for (int step = 0; step < 200; ++step) {
    layers.consolidator->swap();
    if (step % 4 == 0) layers.compact(0);
    if (step % 4 == 2) layers.compact(1);
    if (step % 50 == 1) layers.compact(2);
    if (step % 50 == 1) layers.compact(3);
  }
  CHECK(layers.diary.lines("swap").size() == 8);
  CHECK(layers.statistics().stale > 10);
}

TEST_CASE("consolidator: who has failed has had its turn", "[consolidator]") {
  Crank crank;
  Layers layers(3, crank);
  layers.compact(1);
  crank.turn_all();
  layers.consolidator->swap();
  layers[0].fails = "decompose";
  layers.compact(0);
  crank.turn_all();
  CHECK_THROWS_WITH(layers.consolidator->swap(), "decompose of L1");
  layers.compact(2);  // takes the only place
  layers.compact(0);
  layers.compact(1);
  crank.turn_all();
  layers.consolidator->swap();
  crank.turn();
  CHECK(layers.diary.lines("download") == Lines{"L2", "L1", "L3", "L2"});
}

TEST_CASE("consolidator: slots that hold nothing to consolidate are passed over",
          "[consolidator]") {
  Crank crank;
  Layers layers(1, crank);
  layers[0].is_ready = false;
  layers.compact(0);
  CHECK(crank.tasks() == 0);
  CHECK(layers.statistics().waiting == 0);
}

TEST_CASE("consolidator: a place in the queue is kept until its turn", "[consolidator]") {
  // L2 compacts while it waits, and before it asks again the queue is looked at.
  Crank crank;
  Layers layers(4, crank);
  for (Index l = 0; l < 4; ++l) layers.compact(l);
  layers[1].compact();
  layers[0].compact();
  crank.turn();  // L1 is dropped, and L3 begins
  layers.request(1);
  for (int i = 0; i < 3; ++i) {
    crank.turn_all();
    layers.consolidator->swap();
  }
  CHECK(layers.diary.lines("swap") == Lines{"L3", "L2", "L4"});
}

TEST_CASE("consolidator: deterministic, also when stages fail of what has changed",
          "[consolidator]") {
  // Whether the stage threw before the change or was left out behind it.
  for (const bool before : {true, false}) {
    CAPTURE(before);
    Crank crank;
    ConsolidatorOptions options;
    options.executor = crank.executor();
    options.delay = 2;
    options.in_flight = 1;
    Layers layers(1, options);
    layers[0].fails = "download";
    layers.compact(0);
    layers.consolidator->swap();
    if (before) crank.turn_all();
    layers[0].compact();
    crank.turn_all();
    layers.consolidator->swap();
    try {
      layers.consolidator->swap();
      CHECK_FALSE(before);
    } catch (const std::runtime_error&) {
      CHECK(before);
    }
    CHECK(layers.statistics().stale == 1);
    CHECK(layers.statistics().failed == 0);
  }
}

TEST_CASE("consolidator: an executor that refuses a task drops what it belongs to",
          "[consolidator]") {
  for (const Index delay : {0, 2}) {
    for (int refused = 0; refused < 6; ++refused) {
      CAPTURE(delay, refused);
      int given = 0;
      ConsolidatorOptions options;
      options.delay = delay;
      options.in_flight = 1;
      options.executor = [&](const std::function<void()>& task) {
        if (given++ == refused) throw std::runtime_error("no thread is free");
        task();
      };
      Layers layers(1, options, 1, 2);  // four tasks
      std::string said;
      for (int step = 0; step < 8; ++step) {
        if (step == 0 || step == 4) layers.compact(0);
        try {
          layers.consolidator->swap();
        } catch (const std::runtime_error& error) {
          said += error.what();
        }
      }
      CHECK(said == "no thread is free");
      CHECK(layers.statistics().failed == 1);
      CHECK(layers.statistics().done == 1);
      CHECK(layers.statistics().in_flight == 0);
    }
  }
}

TEST_CASE("consolidator: an executor that runs tasks at once is not called within them",
          "[consolidator]") {
  int depth = 0, deepest = 0;
  ConsolidatorOptions options;
  options.executor = [&](const std::function<void()>& task) {
    deepest = std::max(deepest, ++depth);
    task();
    --depth;
  };
  options.in_flight = 1;
  Layers layers(1, options, 100000);
  layers[0].found = ConsolidatedLayer::Found::nothing;
  std::vector<std::int32_t> slots(1000);
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int32_t>(i);
  layers.consolidator->request(0, slots.data(), 1000);
  CHECK(layers.statistics().done == 1000);
  CHECK(deepest == 1);
}

TEST_CASE("consolidator: an executor may run tasks at once", "[consolidator]") {
  ConsolidatorOptions options;
  options.executor = [](const std::function<void()>& task) { task(); };
  Layers layers(3, options, 2, 2);
  for (int step = 0; step < 10; ++step) {
    layers.consolidator->swap();
    layers.compact(step % 3, step % 2);
  }
  layers.consolidator->drain();
  CHECK(layers.statistics().done == 10);
  CHECK(layers.statistics().stale == 0);
}

TEST_CASE("consolidator: options that cannot be used name the wanted and the given value",
          "[consolidator]") {
  using Catch::Contains;
  const auto with = [](const std::function<void(ConsolidatorOptions&)>& change) {
    return error_of([&] {
      ConsolidatorOptions options;
      change(options);
      Layers layers(1, options);
    });
  };
  CHECK(with([](auto&) {}) == "none");
  CHECK_THAT(with([](auto& o) { o.threads = 0; }),
             Contains("ConsolidatorOptions::threads") && Contains("given 0"));
  CHECK_THAT(with([](auto& o) { o.in_flight = 0; }), Contains("in_flight") && Contains("given 0"));
  CHECK_THAT(with([](auto& o) { o.delay = -1; }), Contains("delay") && Contains("given -1"));
  CHECK(with([](auto& o) {
          o.executor = [](const std::function<void()>& task) { task(); };
          o.threads = 0;
          o.cores = {0};
        }) == "none");
  CHECK_THAT(error_of([] { Layers layers(1, ConsolidatorOptions{}, 1, 0); }),
             Contains("heads of a ConsolidatedLayer") && Contains("given 0"));
  CHECK_THAT(with([](auto& o) { o.cores = {0}; }),
             Contains("one for each of 3 threads") && Contains("given 1"));
  CHECK_THAT(with([](auto& o) { o.cores = {-1, -1, -1}; }), Contains("given -1"));
  CHECK_THAT(with([](auto& o) {
               o.cores = {1000000, 1000000, 1000000};
             }),
             Contains("given 1000000"));
  CHECK_THAT(error_of([] {
               std::vector<std::unique_ptr<ConsolidatedLayer>> layers(1);
               Consolidator consolidator(std::move(layers));
             }),
             Contains("given null"));
}

#if defined(__linux__)
TEST_CASE("consolidator: threads run on the cores they are given", "[consolidator]") {
  cpu_set_t allowed;
  REQUIRE(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  int core = 0;
  while (!CPU_ISSET(core, &allowed)) ++core;
  ConsolidatorOptions options;
  options.threads = 2;
  options.cores = {core, core, core, core};
  Layers layers(1, options, 1, 4);
  std::atomic<int> elsewhere{0};
  layers[0].meanwhile = [&] {
    cpu_set_t mine;
    const bool known = sched_getaffinity(0, sizeof(mine), &mine) == 0;
    if (!known || CPU_COUNT(&mine) != 1 || !CPU_ISSET(core, &mine)) ++elsewhere;
  };
  layers.compact(0);
  REQUIRE(comes_true([&] { return layers.consolidator->swap() == 1; }));
  layers[0].meanwhile = [] {};
  CHECK(elsewhere == 0);
}
#endif
