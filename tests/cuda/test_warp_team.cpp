// A warp against a host thread, compaction by compaction from equal states: outputs, ranks, the
// state and its certificate. Without Catch2: a machine with a device may lack it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "device_state.hpp"
#include "policies.hpp"

namespace {

using namespace sinkstate;

int failures = 0;

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    squares += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(squares / (norm > 0 ? norm : 1));
}

template <class P>
void compare(const char* name, Index d_k, Index d_v, unsigned seed) {
  StateConfig config;
  config.d_k = d_k;
  config.d_v = d_v;
  config.epsilon = 0.03;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> direction(static_cast<std::size_t>(d_v));
  for (float& x : direction) x = normal(random);
  const float* const sink = P::Sink::present ? direction.data() : nullptr;

  AlignedBytes memory(state_bytes<P>(config));
  AlignedBytes copy(memory.size());
  void* const bytes = memory.workspace().take<unsigned char>(static_cast<Index>(memory.size()));
  void* const other = copy.workspace().take<unsigned char>(static_cast<Index>(copy.size()));
  const auto state = make_view<P>(bytes, memory.size(), config, sink);
  const auto twin = make_view<P>(other, copy.size(), config, sink);
  HostTeam team(workspace_bytes<P>(config));
  testing::DeviceState<P> device(config, sink);
  device.upload(bytes);

  const auto sized = [](Index n) { return std::vector<float>(static_cast<std::size_t>(n)); };
  auto key = sized(d_k), value = sized(d_v), query = sized(d_k), output = sized(d_v),
       read = sized(d_v), decays = sized(P::Rule::log_decays(d_k));
  auto dense = sized(d_k * d_v), dense_read = dense;
  double worst_output = 0, worst_state = 0, worst_certificate = 0;
  int ranks_differ = 0, refusals = 0;
  Index largest_rank = 0;
  for (int t = 0; t < 400; ++t) {
    // A few directions that come back, and noise.
    double norm = 0;
    for (Index i = 0; i < d_k; ++i) {
      const auto n = static_cast<std::size_t>(i);
      key[n] = 0.2f * normal(random) + std::sin(static_cast<float>(i * (t % 5 + 1)));
      query[n] = normal(random);
      norm += static_cast<double>(key[n] * key[n]);
    }
    for (float& x : key) x /= static_cast<float>(std::sqrt(norm));
    for (float& x : value) x = normal(random);
    for (float& x : decays) x = -0.1f * std::abs(normal(random));
    const Token<float> token{key.data(), value.data(), decays.data(), 0.7f};
    const Status expected = step(team, state, token, query.data(), output.data());
    const Status got = device.step(token, query.data(), read.data());
    refusals += expected != Status::ok || got != Status::ok ? 1 : 0;
    worst_output = std::fmax(worst_output, distance(read, output));
    if (!state.due()) continue;
    refusals += compact(team, state) != Status::ok || device.compact() != Status::ok ? 1 : 0;
    device.download(other);
    ranks_differ += twin.rank() != state.rank() || twin.dense() != state.dense() ? 1 : 0;
    largest_rank = state.rank() > largest_rank ? state.rank() : largest_rank;
    refusals +=
        materialize(team, state, MatrixView<float>{dense.data(), d_k, d_v, d_v}) != Status::ok ||
                materialize(team, twin, MatrixView<float>{dense_read.data(), d_k, d_v, d_v}) !=
                    Status::ok
            ? 1
            : 0;
    worst_state = std::fmax(worst_state, distance(dense_read, dense));
    worst_certificate =
        std::fmax(worst_certificate, std::abs(static_cast<double>(twin.certificate()) /
                                                  static_cast<double>(state.certificate()) -
                                              1));
    device.upload(bytes);
  }
  // Of a narrow body the two may round a number to either side.
  const bool narrow = sizeof(typename detail::StoredAs<typename P::Stored>::Code) < sizeof(float);
  const double limit = narrow ? 2e-3 : 1e-5;
  const bool passed = refusals == 0 && ranks_differ == 0 && worst_output < 1e-5 &&
                      worst_state < limit && worst_certificate < (narrow ? 1e-3 : 1e-5);
  failures += passed ? 0 : 1;
  std::printf("%-62s %3dx%-3d rank %2d  output %.1e  state %.1e  certificate %.1e  ranks %d%s\n",
              name, static_cast<int>(d_k), static_cast<int>(d_v), static_cast<int>(largest_rank),
              worst_output, worst_state, worst_certificate, ranks_differ, passed ? "" : "  FAILED");
}

}  // namespace

int main() {
  constexpr unsigned seed = 20261203;
  std::printf("seed %u\n", seed);
#define SINKSTATE_COMPARE(...)                       \
  compare<__VA_ARGS__>(#__VA_ARGS__, 128, 80, seed); \
  compare<__VA_ARGS__>(#__VA_ARGS__, 33, 65, seed + 1);
  SINKSTATE_FOR_DEVICE_POLICIES(SINKSTATE_COMPARE)
  return failures == 0 ? 0 : 1;
}
