// A layer of an engine that serves requests as they come and go: 4 slots, 8 value heads over 2 key
// heads. README.md shows the part between the marks.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sinkstate/core/random.hpp>
#include <vector>

// [quickstart]
#include <sinkstate/sinkstate.hpp>
namespace ss = sinkstate;
using Policy = ss::Policy<ss::Mamba2, ss::Host, ss::Fp16>;  // states stored in 16 bits

ss::PoolConfig layer() {
  ss::PoolConfig config;
  config.state = {64, 32};  // d_k, d_v
  config.state.draft = 4;   // tokens that a speculative draft may take back
  config.slots = 4;
  config.key_heads = 2;
  config.value_heads = 8;
  config.quota = 12;     // rows that each state is sure of, for a term each
  config.reserve = 256;  // rows for those that need more
  return config;
}

struct Layer {
  std::size_t bytes = ss::pool_bytes<Policy>(layer()).total;  // known before anything is allocated
  ss::StatePool<Policy> owner{layer()};                       // or make_pool over your own memory
  ss::StatePoolView<Policy> pool = owner.view();
  ss::HostTeams teams{2, ss::workspace_bytes<Policy>(layer().state)};

  // One token of each request in the batch: [entries, heads, numbers], contiguous here, any
  // strides.
  ss::Status decode(const std::vector<std::int32_t>& slots, const float* keys, const float* queries,
                    const float* values, const float* log_decays, const float* dt, float* outputs) {
    ss::TokenBatch<float> batch;
    batch.entries = static_cast<ss::Index>(slots.size());
    batch.slots = slots.data();  // -1 is padding
    batch.keys = {keys, 2 * 64, 64};
    batch.queries = {queries, 2 * 64, 64};
    batch.values = {values, 8 * 32, 32};
    batch.log_decays = {log_decays, 8, 1};
    batch.write_strengths = {dt, 8, 1};
    batch.outputs = {outputs, 8 * 32, 32};
    const ss::Status status = ss::step(teams, pool, batch);
    if (status != ss::Status::ok) return status;
    return ss::compact_due(teams, pool, batch.slots, batch.entries);
  }
};
// [quickstart]

namespace {

void require(ss::Status status, const char* what) {
  if (status == ss::Status::ok) return;
  std::fprintf(stderr, "quickstart_pool: %s: %s\n", what, ss::to_string(status));
  std::exit(EXIT_FAILURE);
}

}  // namespace

int main() {
  Layer layer;
  const ss::Philox philox{7};
  std::uint64_t drawn = 0;
  std::vector<float> basis(3 * 64), keys(3 * 128), values(3 * 256), decays(24, -0.1f), dt(24, 1.0f);
  std::vector<float> outputs(3 * 256);
  for (float& x : basis) x = philox.normal(drawn++) / 8;
  require(admit(layer.pool, 0), "admit");
  require(admit(layer.pool, 2), "admit");
  for (int token = 0; token < 100; ++token) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      keys[i] = basis[static_cast<std::size_t>(token % 3) * 64 + i % 64];
    }
    for (float& x : values) x = philox.normal(drawn++);
    require(layer.decode({2, -1, 0}, keys.data(), keys.data(), values.data(), decays.data(),
                         dt.data(), outputs.data()),
            "decode");
  }
  require(fork(layer.pool, 0, 1), "fork");
  require(open_draft(layer.pool, 1), "open_draft");
  require(layer.decode({1}, keys.data(), keys.data(), values.data(), decays.data(), dt.data(),
                       outputs.data()),
          "a drafted token");
  require(close_draft(layer.pool, 1, 1), "close_draft");  // not accepted
  require(release(layer.pool, 0), "release");
  const ss::PoolReport now = report(layer.pool);
  std::printf("%d requests: %zu bytes of %zu, %d rows, error at most %.1e\n",
              static_cast<int>(now.slots), now.bytes, layer.bytes, static_cast<int>(now.rows),
              now.certificate);
}
