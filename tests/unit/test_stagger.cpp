// Compactions spread over steps, and how many of them may decompose everything.
#include <algorithm>
#include <cstdint>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/pool_requests.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

TEST_CASE("stagger: at each step within one of the mean, and every layer once a period",
          "[stagger]") {
  for (Index layers = 1; layers <= 50; ++layers) {
    for (Index period = 1; period <= 20; ++period) {
      CAPTURE(layers, period);
      const Stagger stagger{layers, period};
      std::vector<Index> times(static_cast<std::size_t>(layers));
      for (std::int64_t step = 1000; step < 1000 + period; ++step) {
        Index due = 0;
        for (Index l = 0; l < layers; ++l) {
          if (!stagger.due(l, step)) continue;
          ++due;
          ++times[static_cast<std::size_t>(l)];
        }
        REQUIRE(due == stagger.due_count(step));
        REQUIRE(due >= layers / period);
        REQUIRE(due <= (layers + period - 1) / period);
      }
      REQUIRE(std::all_of(times.begin(), times.end(), [](Index n) { return n == 1; }));
    }
  }
  CHECK(Stagger{24, 8}.due_count(5) == 3);
  CHECK(Stagger{24, 8}.checked().layers == 24);
  using Catch::Contains;
  CHECK_THROWS_WITH((Stagger{24, 0}.checked()), Contains("Stagger::period") && Contains("given 0"));
  CHECK_THROWS_WITH((Stagger{0, 8}.checked()), Contains("Stagger::layers") && Contains("given 0"));
}

namespace {

using P = Policy<GatedDelta>;

PoolConfig growing() {
  PoolConfig config = pool_of(32, 32, 6, 1, 3);
  config.state.active = 2;
  config.state.epsilon = 0.05;
  config.state.recompress_growth = 1;
  config.state.recompress_slack = 0;
  config.state.dense_fallback = false;
  return config;
}

struct Compaction {
  Index entry = 0;
  Index overgrowth = 0;  // before
  bool fits = true;      // whatever is decomposed
  CompactionReport report;
};

// A compaction of all six requests, each a few tokens on.
class Decoding {
 public:
  explicit Decoding(const PoolConfig& config = growing(), Index threads = 1)
      : runner_(config, threads) {
    for (Index s = 0; s < config.slots; ++s) runner_.admit(s);
  }
  std::vector<Compaction> next(Index* recompressions) {
    const PoolConfig& config = runner_.config();
    const auto pool = runner_.view();
    std::vector<std::int32_t> slots;
    std::vector<Compaction> done;
    for (Index s = 0; s < config.slots; ++s) {
      const auto request = static_cast<std::uint64_t>(s);
      for (Index t = 0; t < config.state.buffer; ++t) runner_.step(s, request, tokens_ + t);
      slots.push_back(static_cast<std::int32_t>(config.slots - 1 - s));
    }
    tokens_ += config.state.buffer;
    for (const std::int32_t s : slots) {
      for (Index h = 0; h < config.value_heads; ++h) {
        const auto state = pool.state(s, h);
        Compaction compaction;
        compaction.overgrowth = sinkstate::detail::overgrowth(state);
        compaction.fits =
            state.rank() + state.buffered() <= SinkStateView<P>::rank_capacity(config.state);
        done.push_back(compaction);
      }
    }
    std::vector<CompactionReport> reports(done.size());
    PoolRunner<P>::require(compact(runner_.teams(), pool, slots.data(), config.slots, nullptr,
                                   reports.data(), recompressions));
    for (std::size_t i = 0; i < done.size(); ++i) done[i].report = reports[i];
    return done;
  }
  StatePoolView<P> view() const { return runner_.view(); }

 private:
  PoolRunner<P> runner_;
  Index tokens_ = 0;
};

}  // namespace

TEST_CASE("recompressions: no more than the cap in a step, those that have grown most first",
          "[stagger]") {
  for (const Index cap : {0, 1, 2, 5, 100}) {
    CAPTURE(cap);
    Decoding decoding;
    Index most_wanted = 0;
    Index all = 0;
    for (int step = 0; step < 60; ++step) {
      Index left = cap;
      const std::vector<Compaction> compactions = decoding.next(&left);
      Index wanted = 0, granted = 0, least = 1000, passed_over = 0, forced = 0;
      Index last_granted = -1, first_passed = 1000;
      for (std::size_t i = 0; i < compactions.size(); ++i) {
        const Compaction& now = compactions[i];
        wanted += now.overgrowth > 0 ? 1 : 0;
        if (now.report.recompressed && !now.fits) ++forced;
        if (!now.fits) continue;
        if (now.report.recompressed) {
          REQUIRE(now.overgrowth > 0);
          CHECK(now.report.decomposed >= now.report.rank_before - 4);  // zeros may be left out
          ++granted;
          least = std::min(least, now.overgrowth);
        } else if (now.overgrowth > 0) {
          passed_over = std::max(passed_over, now.overgrowth);
        }
      }
      for (std::size_t i = 0; i < compactions.size(); ++i) {
        const Compaction& now = compactions[i];
        if (!now.fits || now.overgrowth != least || least != passed_over) continue;
        const auto place = static_cast<Index>(i);
        if (now.report.recompressed) {
          last_granted = place;
        } else {
          first_passed = std::min(first_passed, place);
        }
      }
      CHECK(granted <= cap);
      CHECK(least >= passed_over);
      CHECK(last_granted < first_passed);
      CHECK(left == std::max(Index{0}, cap - wanted));
      if (forced == 0) CHECK(granted == std::min(cap, wanted));
      most_wanted = std::max(most_wanted, wanted);
      all += granted;
    }
    if (cap < 3) CHECK(most_wanted > cap);  // else there would be nothing to cap
    CHECK((all > 0) == (cap > 0));
  }
}

TEST_CASE("recompressions: what is carried over comes to its turn", "[stagger]") {
  Decoding decoding;
  std::vector<int> waits(18);
  int longest = 0;
  for (int step = 0; step < 100; ++step) {
    Index left = 6;
    const std::vector<Compaction> compactions = decoding.next(&left);
    for (std::size_t i = 0; i < compactions.size(); ++i) {
      const bool waiting = compactions[i].overgrowth > 0 && !compactions[i].report.recompressed;
      waits[i] = waiting ? waits[i] + 1 : 0;
      longest = std::max(longest, waits[i]);
    }
  }
  CHECK(longest > 0);
  CHECK(longest < 18);  // as long as it takes to serve each of the others alone
}

TEST_CASE(
    "recompressions: layers of a step share what there is; without a cap, or with room, all is as "
    "ever",
    "[stagger]") {
  Decoding capped, free, roomy, threads(growing(), 3);
  for (int step = 0; step < 30; ++step) {
    Index left = 1000;
    (void)roomy.next(&left);
    (void)free.next(nullptr);
    REQUIRE(image_of(free.view()) == image_of(roomy.view()));
    Index few = 2, same = 2;
    (void)capped.next(&few);
    (void)threads.next(&same);
    REQUIRE(few == same);
    REQUIRE(image_of(capped.view()) == image_of(threads.view()));
  }
  CHECK(image_of(free.view()) != image_of(capped.view()));

  Decoding first, second;
  Index granted = 0;
  for (int step = 0; step < 30; ++step) {
    Index left = 4;
    for (Decoding* layer : {&first, &second}) {
      for (const Compaction& now : layer->next(&left)) {
        granted += now.fits && now.report.recompressed ? 1 : 0;
      }
    }
    CHECK(granted <= 4);
    granted = 0;
  }
}

TEST_CASE("recompressions: a state that does not fit otherwise is decomposed whole, cap or not",
          "[stagger]") {
  Decoding decoding;
  Index forced = 0;
  for (int step = 0; step < 60; ++step) {
    Index none = 0;
    for (const Compaction& now : decoding.next(&none)) {
      if (!now.report.recompressed) continue;
      CHECK_FALSE(now.fits);
      ++forced;
    }
  }
  CHECK(forced > 0);
}
