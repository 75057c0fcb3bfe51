// The layers of a model between two steps: compactions that are staggered, recompressions that are
// capped, and frozen terms consolidated on other threads. README.md shows the part between the marks.

#include <cstdio>
#include <cstdlib>
#include <sinkstate/core/random.hpp>
#include <vector>

// [quickstart]
#include <memory>
#include <sinkstate/sinkstate.hpp>
namespace ss = sinkstate;
using Policy = ss::Policy<ss::GatedDelta>;

struct Model {
  std::vector<ss::StatePoolView<Policy>> pools;    // of each layer, as above
  std::unique_ptr<ss::Consolidator> consolidator;  // over consolidated(pool) of each; ends first
  ss::HostTeams& teams;
  ss::Stagger stagger{static_cast<ss::Index>(pools.size()), 8};
  std::int64_t step = 0;

  // Behind `ss::step` of all layers.
  ss::Status between_steps(const std::vector<std::int32_t>& slots) {
    consolidator->swap();          // what is ready, and not too late
    ss::Index recompressions = 4;  // expensive ones in this step, in all layers
    for (ss::Index i = 0; i < stagger.layers; ++i) {
      const ss::Index layer = (i + step / stagger.period) % stagger.layers;  // in turns
      const auto pool = pools[static_cast<std::size_t>(layer)];
      std::vector<std::int32_t> due;
      for (const std::int32_t slot : slots) {
        const bool draft = pool.slot(slot).draft >= 0;  // may still be taken back
        if (pool.due(slot) || (stagger.due(layer, step) && !draft)) due.push_back(slot);
      }
      const auto count = static_cast<ss::Index>(due.size());
      const ss::Status status =
          ss::compact(teams, pool, due.data(), count, nullptr, nullptr, &recompressions);
      if (status != ss::Status::ok) return status;
      consolidator->request(layer, due.data(), count);
    }
    ++step;
    return ss::Status::ok;
  }
};
// [quickstart]

namespace {

void require(ss::Status status, const char* what) {
  if (status == ss::Status::ok) return;
  std::fprintf(stderr, "quickstart_consolidator: %s: %s\n", what, ss::to_string(status));
  std::exit(EXIT_FAILURE);
}

}  // namespace

int main() {
  constexpr int layers = 12, d = 32;
  ss::PoolConfig config;
  config.state = {d, d};
  config.state.epsilon = 0.05;
  config.state.active = 4;
  config.state.dense_fallback = false;
  config.slots = 2;
  std::vector<std::unique_ptr<ss::StatePool<Policy>>> owners;
  std::vector<ss::StatePoolView<Policy>> pools;
  std::vector<std::unique_ptr<ss::ConsolidatedLayer>> sources;
  for (int l = 0; l < layers; ++l) {
    owners.push_back(std::make_unique<ss::StatePool<Policy>>(config));
    pools.push_back(owners.back()->view());
    for (int slot = 0; slot < 2; ++slot) require(admit(pools.back(), slot), "admit");
    sources.push_back(ss::consolidated(pools.back()));
  }
  ss::HostTeams teams(1, ss::workspace_bytes<Policy>(config.state));
  ss::ConsolidatorOptions options;
  options.delay = 1;  // so that every run prints the same
  Model model{pools, std::make_unique<ss::Consolidator>(std::move(sources), options), teams};

  const ss::Philox philox{7};
  std::uint64_t drawn = 0;
  const std::vector<std::int32_t> slots{0, 1};
  std::vector<float> keys(2 * d), values(2 * d), outputs(2 * d), decays(2, -0.05f);
  for (int token = 0; token < 200; ++token) {
    for (const auto& pool : pools) {
      for (float& x : keys) x = philox.normal(drawn++) / 6;
      for (float& x : values) x = philox.normal(drawn++);
      ss::TokenBatch<float> batch;
      batch.entries = 2;
      batch.slots = slots.data();
      batch.keys = {keys.data(), d, d};
      batch.queries = {keys.data(), d, d};
      batch.values = {values.data(), d, d};
      batch.log_decays = {decays.data(), 1, 1};
      batch.outputs = {outputs.data(), d, d};
      require(ss::step(teams, pool, batch), "step");
    }
    require(model.between_steps(slots), "between_steps");
  }
  const ss::ConsolidatorStatistics done = model.consolidator->statistics();
  std::printf("%d consolidated, %d too late, %d terms fewer\n", static_cast<int>(done.done),
              static_cast<int>(done.stale), static_cast<int>(done.rank_removed));
}
