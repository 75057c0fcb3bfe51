// Verbs in any order with any numbers, by libFuzzer: what is not ok changes no bit, what is ok stays
// finite and within its certificate of the exact recurrence.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "fuzz_input.hpp"
#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "support/same_state.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using Oracle = oracle::DenseRecurrence<double>;
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr double smallest = 100.0 * std::numeric_limits<float>::min();  // of some products
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

class Input : public FuzzBytes {
 public:
  using FuzzBytes::FuzzBytes;

  int below(int limit) { return byte() % limit; }

  float number() {
    constexpr float special[] = {0.0f,   -0.0f, 1.0f,   -1.0f,    0.5f,      2.0f,        1e4f,
                                 -1e-4f, 1e10f, -1e20f, 1e-20f,   1e38f,     -3e38f,      1e-38f,
                                 1e-45f, 1e-7f, -1e7f,  infinity, -infinity, not_a_number};
    constexpr int count = sizeof special / sizeof special[0];
    const int code = byte();
    return code < count ? special[code] : static_cast<float>(code - 138) / 40.0f;
  }
  // A row of ordinary numbers of one magnitude, or of anything.
  std::vector<float> row(Index size) {
    std::vector<float> numbers(static_cast<std::size_t>(size));
    const int mode = byte();
    constexpr float magnitudes[] = {1.0f, 0.0f, 1e-3f, 1e3f, 1e-12f, 1e12f, 1e-30f, 1e30f};
    const float magnitude = magnitudes[mode % 8];
    // A few directions only, so that terms repeat.
    std::uint32_t random = static_cast<std::uint32_t>(mode / 8 % 8) * 2654435761u + 12345u;
    for (float& number : numbers) {
      random = random * 1664525u + 1013904223u;
      number = mode < 224 ? magnitude * (static_cast<float>(random >> 8) / 8388608.0f - 1.0f)
                          : this->number();
    }
    return numbers;
  }
  std::vector<float> log_decays(Index size) {
    std::vector<float> numbers(static_cast<std::size_t>(size));
    constexpr float special[] = {0.0f,    -1e-8f, -0.01f,    -0.7f,        -40.0f, -90.0f,
                                 -150.0f, -1e30f, -infinity, not_a_number, 0.1f,   infinity};
    const int mode = byte();
    for (float& number : numbers) {
      number = mode < 128 ? -static_cast<float>(mode) / 64.0f : special[(mode + byte()) % 12];
    }
    return numbers;
  }
  float strength() {
    const int code = byte();
    return code < 192 ? static_cast<float>(code) / 96.0f : number();
  }
};

struct OwnedToken {
  std::vector<float> key, value, log_decay;
  float strength;

  OwnedToken(Input& input, const StateConfig& config, Index decays)
      : key(input.row(config.d_k)),
        value(input.row(config.d_v)),
        log_decay(input.log_decays(decays)),
        strength(input.strength()) {}
  Token<float> view() const { return {key.data(), value.data(), log_decay.data(), strength}; }
};

StateConfig read_config(Input& input) {
  StateConfig config;
  config.d_k = 1 + input.below(9);
  config.d_v = 1 + input.below(9);
  config.buffer = 1 + input.below(6);
  config.draft = input.below(4);
  constexpr double epsilons[] = {0, 1e-3, 1e-2, 0.3};
  config.epsilon = epsilons[input.below(4)];
  config.rank_cap = input.below(8);
  config.dense_fallback = input.below(3) > 0;
  config.dense_retry = 1 + input.below(3);
  config.active = input.below(5);
  constexpr double growths[] = {1.15, 0, 1, 4};
  config.recompress_growth = growths[input.below(4)];
  config.recompress_slack = input.below(4);
  config.tail_share = input.below(3) * 0.5;
  config.tail_period = input.below(3);
  config.seed = input.byte();
  config.rounding = config.seed % 2 == 1 ? Rounding::stochastic : Rounding::nearest;
  return config;
}

template <class P>
class Run {
 public:
  explicit Run(Input& input)
      : input_(input),
        config_(read_config(input)),
        direction_(P::Sink::present ? read_direction() : std::vector<float>()),
        state_(config_, P::Sink::present ? direction_.data() : nullptr),
        team_(all_workspace_bytes<P>(config_)),
        exact_(1, Oracle(traits_of<typename P::Rule>, static_cast<int>(config_.d_k),
                         static_cast<int>(config_.d_v))),
        output_(static_cast<std::size_t>(config_.d_v)) {}

  void all() {
    for (int operation = 0; operation < 200 && !input_.empty(); ++operation) {
      SinkState<P> before = state_;
      const Status status = one();
      if (status != Status::ok) {
        require(same_state(before.view(), state_.view()), "a refused verb changed the state");
      }
      check();
    }
  }

 private:
  std::vector<float> read_direction() {
    std::vector<float> direction = input_.row(config_.d_v);
    for (float& number : direction) {
      // What the library takes as a direction: docs/numerics.md.
      if (!(std::abs(number) <= 1e6f)) number = 1.0f;
      if (std::abs(number) < 1e-6f) number = 0.0f;
    }
    return direction;
  }

  Status one() {
    switch (input_.below(11)) {
      case 0:
      case 1:
        return token(true);
      case 2:
        return token(false);
      case 3:
        return several();
      case 4:
        return read();
      case 5:
        return take_back(input_.below(8) - 1);
      case 6:
      case 7:
        return fold();
      case 8:
        reset(state_.view());
        forget_tokens();
        exact_[0].state().assign(exact_[0].state().size(), 0.0);
        return Status::ok;
      case 9:
        return again();
      default:
        return replace();
    }
  }

  Status token(bool reads) {
    const OwnedToken token(input_, config_, P::Rule::log_decays(config_.d_k));
    const std::vector<float> query = input_.row(config_.d_k);
    const Status status =
        reads ? step(team_, state_.view(), token.view(), query.data(), output_.data())
              : advance(team_, state_.view(), token.view());
    if (status == Status::ok) {
      follow(token);
      if (reads) require_finite(output_);
    }
    return status;
  }
  Status several() {
    const Index count = 1 + input_.below(4), decays = P::Rule::log_decays(config_.d_k);
    std::vector<OwnedToken> tokens;
    std::vector<float> keys, values, log_decays, strengths;
    for (Index t = 0; t < count; ++t) {
      tokens.emplace_back(input_, config_, decays);
      const OwnedToken& token = tokens.back();
      keys.insert(keys.end(), token.key.begin(), token.key.end());
      values.insert(values.end(), token.value.begin(), token.value.end());
      log_decays.insert(log_decays.end(), token.log_decay.begin(), token.log_decay.end());
      strengths.push_back(token.strength);
    }
    const auto rows = [&](const std::vector<float>& numbers, Index cols) {
      return MatrixView<const float>{numbers.data(), count, cols, cols};
    };
    const Status status = advance(team_, state_.view(),
                                  Tokens<float>{rows(keys, config_.d_k), rows(values, config_.d_v),
                                                rows(log_decays, decays), strengths.data(), 1});
    for (const OwnedToken& token : tokens) {
      if (status == Status::ok) follow(token);
    }
    return status;
  }
  Status read() {
    const std::vector<float> query = input_.row(config_.d_k);
    const Status status = read_out(team_, state_.view(), query.data(), output_.data());
    if (status == Status::ok) require_finite(output_);
    return status;
  }
  Status take_back(int tokens) {
    const Status status = roll_back(state_.view(), tokens);
    for (int i = 0; status == Status::ok && i < tokens; ++i) {
      exact_.pop_back();
      underflow_.pop_back();
    }
    return status;
  }
  Status fold() {
    const Status status = compact(team_, state_.view());
    if (status == Status::ok) forget_tokens();
    return status;
  }
  // Dense form and back: a further prompt.
  Status again() {
    std::vector<float> dense;
    float certificate = 0;
    const Status status = to_dense(dense, certificate);
    return status == Status::ok ? from_dense(dense, certificate) : status;
  }
  // A state from elsewhere.
  Status replace() {
    std::vector<float> dense;
    for (Index i = 0; i < config_.d_k; ++i) {
      const std::vector<float> row = input_.row(config_.d_v);
      dense.insert(dense.end(), row.begin(), row.end());
    }
    const Status status = from_dense(dense, 0.0f);
    if (status == Status::ok) exact_[0].state().assign(dense.begin(), dense.end());
    return status;
  }

  MatrixView<float> matrix(std::vector<float>& dense) {
    return {dense.data(), config_.d_k, config_.d_v, config_.d_v};
  }
  Status to_dense(std::vector<float>& dense, float& certificate) {
    dense.resize(static_cast<std::size_t>(config_.d_k * config_.d_v));
    return materialize(team_, state_.view(), matrix(dense), &certificate);
  }
  Status from_dense(std::vector<float>& dense, float certificate) {
    const Status status =
        input_.below(2) == 0
            ? initialize(team_, state_.view(), MatrixView<const float>(matrix(dense)), ExactSvd{},
                         certificate)
            : initialize(team_, state_.view(), MatrixView<const float>(matrix(dense)),
                         RandomizedSvd{4, 2, 1}, certificate);
    if (status == Status::ok) forget_tokens();
    return status;
  }

  void follow(const OwnedToken& token) {
    exact_.push_back(exact_.back());
    exact_.back().step(token.key.data(), token.value.data(), token.log_decay.data(),
                       token.strength);
    // Certificates count roundings, not underflows (docs/numerics.md, section 6): a product that is
    // no normal number is off by up to the smallest one, and later tokens may enlarge that.
    const double key = 1 + oracle::frobenius_norm(token.key);
    const double write = 1 + std::abs(static_cast<double>(token.strength)) * key;
    underflow_.push_back(underflow_.back() * write * key +
                         smallest * write * (key + oracle::frobenius_norm(token.value)));
  }
  void forget_tokens() {
    exact_.erase(exact_.begin(), exact_.end() - 1);
    underflow_.erase(underflow_.begin(), underflow_.end() - 1);
    underflow_[0] += smallest;
  }
  static void require_finite(const std::vector<float>& numbers) {
    for (const float number : numbers) require(std::isfinite(number), "an output is not finite");
  }

  void check() {
    const auto view = state_.view();
    require(view.buffered() == static_cast<Index>(exact_.size()) - 1, "tokens are miscounted");
    require(view.rank() <= SinkStateView<P>::rank_capacity(config_), "the rank is above its cap");
    for (Index i = 0; i < view.rank(); ++i) {
      const float strength = view.factors.strengths[i];
      require(strength > 0 && std::isfinite(strength), "a strength is not positive");
      const bool narrow = sinkstate::detail::StoredAs<typename P::Stored>::narrow;
      require(narrow || i == 0 || strength <= view.factors.strengths[i - 1],
              "strengths do not fall");
    }
    std::vector<float> dense;
    float certificate = 0;
    if (to_dense(dense, certificate) != Status::ok) return;  // too large to be written down
    require_finite(dense);
    require(certificate >= 0, "a certificate is not a bound");
    require(oracle::frobenius_distance(dense, exact_.back().state()) <=
                static_cast<double>(certificate) + underflow_.back(),
            "the error is above its certificate");
  }

  Input& input_;
  StateConfig config_;
  std::vector<float> direction_;
  SinkState<P> state_;
  HostTeam team_;
  std::vector<Oracle> exact_;  // [j]: after j buffered tokens
  std::vector<double> underflow_{0.0};
  std::vector<float> output_;
};

template <class Rule>
void run_rule(Input& input) {
  const int wanted = input.below(8);
  int policy = 0;
  for_each_policy<Rule, Fp32>([&](auto tag) {
    if (policy++ == wanted) Run<typename decltype(tag)::type>(input).all();
  });
}

void run_narrow(Input& input) {
  switch (input.below(4)) {
    case 0:
      return Run<Policy<Mamba2, Host, Fp8, LocalSvd, MeanValueSink>>(input).all();
    case 1:
      return Run<Policy<GatedDelta, Host, Precision<float, Float16, Float16>, FixedRank>>(input)
          .all();
    case 2:
      return Run<Policy<KimiDelta, Host, Precision<float, Float8E4M3, BFloat16>, LocalSvd>>(input)
          .all();
    default:
      return Run<Policy<GatedDelta, Host, Fp16, DenseBuffered, MeanValueSink>>(input).all();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const int first = input.byte();
  if (first / 3 == 84) {
    run_narrow(input);
    return 0;
  }
  switch (first % 3) {
    case 0:
      run_rule<Mamba2>(input);
      break;
    case 1:
      run_rule<GatedDelta>(input);
      break;
    default:
      run_rule<KimiDelta>(input);
  }
  return 0;
}
