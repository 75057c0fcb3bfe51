// One head of a Gated DeltaNet layer: a token in, an output out, and a compaction now and then.
// README.md shows the part between the marks.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sinkstate/core/random.hpp>
#include <vector>

// [quickstart]
#include <sinkstate/sinkstate.hpp>
namespace ss = sinkstate;
using Policy = ss::Policy<ss::GatedDelta, ss::Host, ss::Fp32, ss::LocalSvd>;

struct Head {
  ss::StateConfig config{128, 128};  // d_k, d_v; epsilon, buffer and the rest have defaults
  ss::SinkState<Policy> state{config};
  ss::HostTeam team{ss::workspace_bytes<Policy>(config)};  // one a thread, big enough

  // output = S^T query after S <- exp(log_decay) (I - beta k k^T) S + beta k v^T
  ss::Status decode(const float* key, const float* value, float log_decay, float beta,
                    const float* query, float* output) {
    const ss::Token<float> token{key, value, &log_decay, beta};
    const ss::Status status = ss::step(team, state.view(), token, query, output);
    if (status != ss::Status::ok || !state.view().due()) return status;
    return ss::compact(team, state.view());  // every 8 tokens, before the next
  }
};
// [quickstart]

int main() {
  // Tokens from a few directions, as trained layers have them.
  constexpr int directions = 6;
  const ss::Philox philox{7};
  std::uint64_t drawn = 0;
  const auto draw = [&] { return philox.normal(drawn++); };
  std::vector<float> basis(directions * 256);
  for (float& x : basis) x = draw() / 16;

  Head head;
  std::vector<float> key(128), value(128), output(128);
  for (int token = 0; token < 512; ++token) {
    key.assign(128, 0.0f);
    value.assign(128, 0.0f);
    float squares = 0;
    for (int d = 0; d < directions; ++d) {
      const float a = draw();
      for (std::size_t i = 0; i < 128; ++i) {
        key[i] += a * basis[static_cast<std::size_t>(d) * 256 + i];
        value[i] += a * basis[static_cast<std::size_t>(d) * 256 + 128 + i];
      }
    }
    for (const float k : key) squares += k * k;
    for (float& k : key) k /= std::sqrt(squares);
    const ss::Status status =
        head.decode(key.data(), value.data(), -0.05f, 0.5f, key.data(), output.data());
    if (status != ss::Status::ok) {
      std::fprintf(stderr, "quickstart: token %d: %s\n", token, ss::to_string(status));
      return EXIT_FAILURE;
    }
  }
  const auto view = head.state.view();
  std::printf("512 tokens: %d terms, %zu bytes (dense: %d), error at most %.1e\n",
              static_cast<int>(view.rank()), view.bytes().total(), 4 * 128 * 128,
              static_cast<double>(view.certificate()));
}
