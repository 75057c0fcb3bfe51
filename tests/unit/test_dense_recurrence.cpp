// The oracle against numbers worked out on paper. Everything else is tested against the oracle, so
// nothing here may be computed by it.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "support/catch.hpp"

using namespace sinkstate::oracle;

namespace {

using Vector = std::vector<double>;

constexpr double tolerance = 1e-14;
constexpr double infinity = std::numeric_limits<double>::infinity();
const double log_half = std::log(0.5);
const double log_quarter = std::log(0.25);

double largest_difference(const Vector& x, const Vector& y) {
  REQUIRE(x.size() == y.size());
  double largest = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!(std::abs(x[i] - y[i]) <= largest)) largest = std::abs(x[i] - y[i]);  // keeps a NaN
  }
  return largest;
}

DenseRecurrence<double> start_from(RuleTraits rule, int d_k, int d_v, const Vector& state) {
  DenseRecurrence<double> recurrence(rule, d_k, d_v);
  REQUIRE(state.size() == recurrence.state().size());
  recurrence.state() = state;
  return recurrence;
}

void step(DenseRecurrence<double>& recurrence, const Vector& key, const Vector& value,
          const Vector& log_decay, double write_strength) {
  recurrence.step(key.data(), value.data(), log_decay.empty() ? nullptr : log_decay.data(),
                  write_strength);
}

Vector read(const DenseRecurrence<double>& recurrence, const Vector& query, int d_v) {
  Vector output(static_cast<std::size_t>(d_v));
  recurrence.read(query.data(), output.data());
  return output;
}

}  // namespace

TEST_CASE("oracle: rule traits", "[oracle]") {
  CHECK_FALSE(linear_attention.delta);
  CHECK_FALSE(mamba2.delta);
  CHECK_FALSE(gated_linear_attention.delta);
  CHECK(delta_net.delta);
  CHECK(gated_delta.delta);
  CHECK(kimi_delta.delta);

  CHECK(linear_attention.log_decay_count(5) == 0);
  CHECK(mamba2.log_decay_count(5) == 1);
  CHECK(gated_linear_attention.log_decay_count(5) == 5);
  CHECK(delta_net.log_decay_count(5) == 0);
  CHECK(gated_delta.log_decay_count(5) == 1);
  CHECK(kimi_delta.log_decay_count(5) == 5);
}

TEST_CASE("oracle: linear attention, two keys by one value, from zero", "[oracle]") {
  DenseRecurrence<double> recurrence(linear_attention, 2, 1);
  CHECK(recurrence.state() == Vector{0, 0});

  step(recurrence, {1, 2}, {3}, {}, 1);  // u = 3
  CHECK(recurrence.state() == Vector{3, 6});
  CHECK(read(recurrence, {1, 1}, 1) == Vector{9});

  step(recurrence, {0, 1}, {-1}, {}, 2);  // u = 2 * -1 = -2
  CHECK(recurrence.state() == Vector{3, 4});
  CHECK(read(recurrence, {1, -1}, 1) == Vector{-1});
}

// One token on the same 2 x 2 state under every rule:
//   S0 = | 4  8|   v = (3, 5)   b = .5   a = .5, or (.5, .25) per channel
//        |12 16|
TEST_CASE("oracle: one token, two by two, by hand for every rule", "[oracle]") {
  const Vector start{4, 8, 12, 16};
  const Vector value{3, 5};

  SECTION("without the delta correction: k = (1, 2), u = .5 v = (1.5, 2.5)") {
    const Vector key{1, 2};

    SECTION("linear attention: S0 + k u^T") {
      auto recurrence = start_from(linear_attention, 2, 2, start);
      step(recurrence, key, value, {}, 0.5);
      CHECK(recurrence.state() == Vector{5.5, 10.5, 15, 21});
      CHECK(read(recurrence, {2, -1}, 2) == Vector{-4, 0});  // 11 - 15, 21 - 21
    }
    SECTION("Mamba-2: rows halved to (2, 4), (6, 8)") {
      auto recurrence = start_from(mamba2, 2, 2, start);
      step(recurrence, key, value, {log_half}, 0.5);
      CHECK(largest_difference(recurrence.state(), {3.5, 6.5, 9, 13}) <= tolerance);
      CHECK(largest_difference(read(recurrence, {2, -1}, 2), {-2, 0}) <= tolerance);
    }
    SECTION("gated linear attention: rows (2, 4), (3, 4)") {
      auto recurrence = start_from(gated_linear_attention, 2, 2, start);
      step(recurrence, key, value, {log_half, log_quarter}, 0.5);
      CHECK(largest_difference(recurrence.state(), {3.5, 6.5, 6, 9}) <= tolerance);
      CHECK(largest_difference(read(recurrence, {2, -1}, 2), {1, 4}) <= tolerance);
    }
  }

  SECTION("with the delta correction: k = (.6, .8)") {
    const Vector key{0.6, 0.8};

    // S0^T k = (2.4 + 9.6, 4.8 + 12.8) = (12, 17.6);  u = .5 (3 - 12, 5 - 17.6) = (-4.5, -6.3)
    SECTION("DeltaNet") {
      auto recurrence = start_from(delta_net, 2, 2, start);
      step(recurrence, key, value, {}, 0.5);
      CHECK(largest_difference(recurrence.state(), {1.3, 4.22, 8.4, 10.96}) <= tolerance);
      // Half way from the old read-out to the value: (12 + 3) / 2, (17.6 + 5) / 2.
      CHECK(largest_difference(read(recurrence, key, 2), {7.5, 11.3}) <= tolerance);
    }
    // Rows (2, 4), (6, 8);  prediction (6, 8.8);  u = .5 (-3, -3.8) = (-1.5, -1.9)
    SECTION("gated delta") {
      auto recurrence = start_from(gated_delta, 2, 2, start);
      step(recurrence, key, value, {log_half}, 0.5);
      CHECK(largest_difference(recurrence.state(), {1.1, 2.86, 4.8, 6.48}) <= tolerance);
      CHECK(largest_difference(read(recurrence, key, 2), {4.5, 6.9}) <= tolerance);
    }
    // Rows (2, 4), (3, 4);  prediction (1.2 + 2.4, 2.4 + 3.2) = (3.6, 5.6);  u = (-.3, -.3)
    SECTION("Kimi delta") {
      auto recurrence = start_from(kimi_delta, 2, 2, start);
      step(recurrence, key, value, {log_half, log_quarter}, 0.5);
      CHECK(largest_difference(recurrence.state(), {1.82, 3.82, 2.76, 3.76}) <= tolerance);
      CHECK(largest_difference(read(recurrence, {1, 1}, 2), {4.58, 7.58}) <= tolerance);
    }
  }
}

TEST_CASE("oracle: step_read reads the token's own write", "[oracle]") {
  auto recurrence = start_from(gated_delta, 2, 2, {4, 8, 12, 16});
  const Vector key{0.6, 0.8}, value{3, 5};
  Vector output(2);
  recurrence.step_read(key.data(), value.data(), &log_half, 0.5, key.data(), output.data());
  CHECK(largest_difference(output, {4.5, 6.9}) <= tolerance);
}

// fla-org/flash-linear-attention#885: S = k v0^T, a = .5, v0 = (1, 2), v = (3, -1), the same key.
TEST_CASE("oracle: the decay comes before the delta correction", "[oracle][B16]") {
  const Vector key{0.6, 0.8}, value{3, -1};
  const Vector start{0.6, 1.2, 0.8, 1.6};  // k v0^T
  auto recurrence = start_from(gated_delta, 2, 2, start);

  SECTION("b = 1 replaces what the key read: exactly v") {
    step(recurrence, key, value, {log_half}, 1);
    CHECK(largest_difference(read(recurrence, key, 2), value) <= tolerance);
  }
  // The prediction is .5 v0: u = .5 (3 - .5, -1 - 1) = (1.25, -1); read-out .5 v0 + u. Against an
  // undecayed prediction it would be (1.5, -.5).
  SECTION("b = .5 goes half way from .5 v0 to v") {
    step(recurrence, key, value, {log_half}, 0.5);
    CHECK(largest_difference(read(recurrence, key, 2), {1.75, 0}) <= tolerance);
  }
}

// NeuraLegion/shainet#170: the second token must see the first one decayed once, not twice.
//   token 1: S = 2 k1
//   token 2: S = k1, prediction k1 . k2 = .7, u = 3 - .7 = 2.3;  S = k1 + 2.3 k2
TEST_CASE("oracle: two tokens with k1 . k2 = .7", "[oracle][B17]") {
  const Vector key_1{1, 0}, key_2{0.7, std::sqrt(0.51)};
  DenseRecurrence<double> recurrence(gated_delta, 2, 1);
  step(recurrence, key_1, {2}, {log_half}, 1);
  step(recurrence, key_2, {3}, {log_half}, 1);
  CHECK(largest_difference(recurrence.state(), {2.61, 2.3 * std::sqrt(0.51)}) <= tolerance);
  CHECK(largest_difference(read(recurrence, key_1, 1), {2.61}) <= tolerance);
  CHECK(largest_difference(read(recurrence, key_2, 1), {3}) <= tolerance);
}

// S = (1, 2)^T, k = (.6, .8): the key reads 2.2, the orthogonal direction (-.8, .6) reads .4.
TEST_CASE("oracle: write strengths 0, 1 and 2", "[oracle]") {
  const Vector key{0.6, 0.8}, orthogonal{-0.8, 0.6};
  auto recurrence = start_from(delta_net, 2, 1, {1, 2});

  SECTION("0 writes nothing") {
    step(recurrence, key, {5}, {}, 0);
    CHECK(recurrence.state() == Vector{1, 2});
  }
  SECTION("1 replaces the read-out") {
    step(recurrence, key, {5}, {}, 1);
    CHECK(largest_difference(read(recurrence, key, 1), {5}) <= tolerance);
    CHECK(largest_difference(read(recurrence, orthogonal, 1), {0.4}) <= tolerance);
  }
  // u = 2 (0 - 2.2) = -4.4;  S = (1 - 2.64, 2 - 3.52)
  SECTION("2 with a zero value is a reflection") {
    step(recurrence, key, {0}, {}, 2);
    CHECK(largest_difference(recurrence.state(), {-1.64, -1.52}) <= tolerance);
    CHECK(largest_difference(read(recurrence, key, 1), {-2.2}) <= tolerance);
    CHECK(largest_difference(read(recurrence, orthogonal, 1), {0.4}) <= tolerance);
    CHECK(std::abs(frobenius_norm(recurrence.state()) - std::sqrt(5.0)) <= tolerance);
    step(recurrence, key, {0}, {}, 2);
    CHECK(largest_difference(recurrence.state(), {1, 2}) <= tolerance);
  }
}

// |k| = 10, b = 1: the read-out is multiplied by 1 - 100 at every step. The oracle follows.
TEST_CASE("oracle: a key that is not a unit vector makes the state grow", "[oracle][B14]") {
  auto recurrence = start_from(delta_net, 2, 1, {6, 8});  // = k
  step(recurrence, {6, 8}, {0}, {}, 1);
  CHECK(recurrence.state() == Vector{-594, -792});
  step(recurrence, {6, 8}, {0}, {}, 1);
  CHECK(recurrence.state() == Vector{58806, 78408});
}

TEST_CASE("oracle: a zero key is a pure decay", "[oracle][B13]") {
  const Vector start{4, 8, 12, 16};
  for (const RuleTraits rule : all_rules) {
    INFO(rule_name(rule));
    auto recurrence = start_from(rule, 2, 2, start);
    const Vector log_decay{log_half, log_quarter};
    recurrence.step(Vector{0, 0}.data(), Vector{3, 5}.data(), log_decay.data(), 1.0);
    const Vector expected = rule.decay == RuleTraits::Decay::none     ? start
                            : rule.decay == RuleTraits::Decay::scalar ? Vector{2, 4, 6, 8}
                                                                      : Vector{2, 4, 3, 4};
    CHECK(largest_difference(recurrence.state(), expected) <= tolerance);
  }
}

TEST_CASE("oracle: log decays from 0 to -inf", "[oracle][B01][B02][B07][B10]") {
  const Vector start{4, 8, 12, 16};
  const Vector key{0.6, 0.8}, value{3, 5};
  const Vector written{1.8, 3, 2.4, 4};  // k v^T

  for (const RuleTraits rule : {mamba2, gated_linear_attention, gated_delta, kimi_delta}) {
    INFO(rule_name(rule));
    const auto all = [&](double log_decay) {
      return Vector(static_cast<std::size_t>(rule.log_decay_count(2)), log_decay);
    };

    auto kept = start_from(rule, 2, 2, start);
    step(kept, key, value, all(0), 0);
    CHECK(kept.state() == start);

    auto forgotten = start_from(rule, 2, 2, start);
    step(forgotten, key, value, all(-infinity), 0);
    CHECK(forgotten.state() == Vector{0, 0, 0, 0});

    // Nothing is left to predict from, so both kinds of rule write k v^T.
    for (const double log_decay : {-150.0, -1000.0, -infinity}) {
      INFO("log decay " << log_decay);
      auto recurrence = start_from(rule, 2, 2, start);
      for (int repetition = 0; repetition < 16; ++repetition) {
        step(recurrence, key, value, all(log_decay), 1);
        REQUIRE(largest_difference(recurrence.state(), written) <= tolerance);
      }
    }
  }

  // exp(-150) = 7.175e-66 is a number in double and nothing in float.
  auto faint = start_from(mamba2, 1, 1, {1});
  step(faint, {0}, {0}, {-150}, 1);
  CHECK(std::abs(faint.state()[0] - 7.175095973164411e-66) <= 1e-80);
  DenseRecurrence<float> single(mamba2, 1, 1);
  single.state() = {1.0F};
  const float zero = 0.0F, log_decay = -150.0F;
  single.step(&zero, &zero, &log_decay, 1.0F);
  CHECK(single.state()[0] == 0.0F);
}

// a = 1, .5, 0 on a 3 x 1 state (2, 2, 2): rows (2, 1, 0). k = (.6, 0, .8) predicts 1.2, so
// u = 5 - 1.2 = 3.8 and S = (2 + 2.28, 1, 3.04). Without the correction u = 5, S = (5, 1, 4).
TEST_CASE("oracle: per-channel decays that differ", "[oracle]") {
  const Vector key{0.6, 0, 0.8}, log_decay{0, log_half, -infinity};

  auto with_delta = start_from(kimi_delta, 3, 1, {2, 2, 2});
  step(with_delta, key, {5}, log_decay, 1);
  CHECK(largest_difference(with_delta.state(), {4.28, 1, 3.04}) <= tolerance);

  auto without_delta = start_from(gated_linear_attention, 3, 1, {2, 2, 2});
  step(without_delta, key, {5}, log_decay, 1);
  CHECK(largest_difference(without_delta.state(), {5, 1, 4}) <= tolerance);
}

// alpha = 1 on every other token: 8 -> 8 + 1 -> 4.5 + 1 -> 5.5 + 1 -> 3.25 + 1
TEST_CASE("oracle: decays of one between decays of a half", "[oracle][B09]") {
  auto recurrence = start_from(mamba2, 1, 1, {8});
  const Vector after{9, 5.5, 6.5, 4.25};
  for (std::size_t token = 0; token < after.size(); ++token) {
    step(recurrence, {1}, {1}, {token % 2 == 0 ? 0.0 : log_half}, 1);
    CHECK(std::abs(recurrence.state()[0] - after[token]) <= tolerance);
  }
}

// SinkState, section 4.2. The paper prints only the first row of its 4 x 4 state, but without the
// delta correction every value channel evolves alone, so that row is a complete 4 x 1 example.
//   y1 = .9 (1.18 + .78) + .52 (.74 + 1.04)                               = 2.6896  (printed 2.73)
//   y2 = .8 (.9 (1.18 + .84) + .52 (.74 + .52)) + .48 (1.68 + .64)        = 3.09216 (printed 3.08)
// The printed outputs come from factors that dropped a strength of .06: they may differ by
// decay * .06 * |q|, and by the rounding of two-digit inputs.
TEST_CASE("oracle: the worked example of the SinkState paper, first value channel", "[oracle]") {
  auto recurrence = start_from(mamba2, 4, 1, {1.18, 0.84, 0.81, 0.78});
  const double dropped = 0.06 * std::sqrt(2.0), rounding = 0.02;

  step(recurrence, {0.74, 0.52, 1.48, 1.04}, {0.52}, {std::log(0.9)}, 1);
  const double y1 = read(recurrence, {1, 0, 0, 1}, 1)[0];
  CHECK(std::abs(y1 - 2.6896) <= tolerance);
  CHECK(std::abs(y1 - 2.73) <= 0.9 * dropped + rounding);

  step(recurrence, {1.68, 0.64, -0.64, -0.72}, {0.48}, {std::log(0.8)}, 1);
  const double y2 = read(recurrence, {1, 1, 0, 0}, 1)[0];
  CHECK(std::abs(y2 - 3.09216) <= tolerance);
  CHECK(std::abs(y2 - 3.08) <= 0.9 * 0.8 * dropped + rounding);
}

// The other way to write the recurrence: S_t = (I - theta b k k^T) L S + b k v^T, as matrices.
TEST_CASE("oracle: equals the explicit matrix product", "[oracle]") {
  std::mt19937_64 generator(20240229);
  const auto uniform = [&] {  // in [-1, 1)
    return std::ldexp(static_cast<double>(generator() >> 11), -52) - 1;
  };
  const auto random_vector = [&](std::size_t count) {
    Vector x(count);
    std::generate(x.begin(), x.end(), uniform);
    return x;
  };

  const int shapes[][2] = {{1, 1}, {1, 4}, {4, 1}, {3, 2}, {4, 5}};
  for (const RuleTraits rule : all_rules) {
    for (const auto& shape : shapes) {
      const auto d_k = static_cast<std::size_t>(shape[0]);
      const auto d_v = static_cast<std::size_t>(shape[1]);
      INFO(rule_name(rule) << ", d_k " << d_k << ", d_v " << d_v);
      Vector expected = random_vector(d_k * d_v);
      auto recurrence = start_from(rule, shape[0], shape[1], expected);

      for (int token = 0; token < 20; ++token) {
        const Vector key = random_vector(d_k), value = random_vector(d_v);
        const double b = uniform() + 1;
        Vector log_decay(d_k, 0.0);
        if (rule.decay == RuleTraits::Decay::scalar) {
          log_decay.assign(d_k, uniform() - 1);
        } else if (rule.decay == RuleTraits::Decay::per_channel) {
          for (double& g : log_decay) g = uniform() - 1;
        }

        Vector transition(d_k * d_k);  // (I - theta b k k^T) L
        for (std::size_t i = 0; i < d_k; ++i) {
          for (std::size_t l = 0; l < d_k; ++l) {
            const double reflected = (i == l ? 1 : 0) - (rule.delta ? b * key[i] * key[l] : 0);
            transition[i * d_k + l] = reflected * std::exp(log_decay[l]);
          }
        }
        Vector next(d_k * d_v);
        for (std::size_t i = 0; i < d_k; ++i) {
          for (std::size_t j = 0; j < d_v; ++j) {
            next[i * d_v + j] = b * key[i] * value[j];
            for (std::size_t l = 0; l < d_k; ++l) {
              next[i * d_v + j] += transition[i * d_k + l] * expected[l * d_v + j];
            }
          }
        }
        expected = next;

        recurrence.step(key.data(), value.data(), log_decay.data(), b);
        // Keys longer than 1 let the state grow, so the error is measured against its size.
        REQUIRE(relative_error(recurrence.state(), expected) <= 1e-12);
      }
    }
  }
}

TEST_CASE("oracle: float tokens enter the double recurrence exactly", "[oracle]") {
  const std::vector<float> key{0.1F, 0.7F}, value{0.3F, -1.1F, 1e-30F}, log_decay{-0.2F, -3e-8F};
  const Vector wide_key(key.begin(), key.end()), wide_value(value.begin(), value.end()),
      wide_log_decay(log_decay.begin(), log_decay.end());
  const float write_strength = 0.9F;

  DenseRecurrence<double> narrow(kimi_delta, 2, 3), wide(kimi_delta, 2, 3);
  DenseRecurrence<float> single(kimi_delta, 2, 3);
  Vector narrow_output(3), wide_output(3);
  std::vector<float> single_output(3);
  for (int token = 0; token < 4; ++token) {
    narrow.step_read(key.data(), value.data(), log_decay.data(), write_strength, key.data(),
                     narrow_output.data());
    wide.step_read(wide_key.data(), wide_value.data(), wide_log_decay.data(),
                   static_cast<double>(write_strength), wide_key.data(), wide_output.data());
    single.step_read(key.data(), value.data(), log_decay.data(), write_strength, key.data(),
                     single_output.data());
  }
  CHECK(narrow.state() == wide.state());
  CHECK(narrow_output == wide_output);
  CHECK(relative_error(single.state(), wide.state()) <= 1e-6);
  CHECK(relative_error(single_output, wide_output) <= 1e-6);
}

// sgl-project/sglang#36722: Hk = 2 key heads (1, 0) and (0, 1) serve Hv = 4 value heads 1, 2, 3, 4.
// Equal head counts could not tell the two maps apart.
TEST_CASE("oracle: head maps", "[oracle][B24]") {
  const int key_heads = 2, value_heads = 4;
  const Vector keys[] = {{1, 0}, {0, 1}};
  const auto states = [&](HeadMap map) {
    std::vector<Vector> result;
    for (int head = 0; head < value_heads; ++head) {
      DenseRecurrence<double> recurrence(gated_delta, 2, 1);
      step(recurrence, keys[key_head(map, head, key_heads, value_heads)], {head + 1.0}, {0}, 1);
      result.push_back(recurrence.state());
    }
    return result;
  };
  CHECK(states(HeadMap::interleaved) == std::vector<Vector>{{1, 0}, {2, 0}, {0, 3}, {0, 4}});
  CHECK(states(HeadMap::tiled) == std::vector<Vector>{{1, 0}, {0, 2}, {3, 0}, {0, 4}});
}

TEST_CASE("oracle: norms", "[oracle]") {
  CHECK(frobenius_norm(Vector{3, -4}) == 5);
  CHECK(std::abs(frobenius_norm(std::vector<float>{3e25F, 4e25F}) / 5e25 - 1) <= 1e-6);
  CHECK(std::abs(frobenius_norm(std::vector<float>{3e-25F, 4e-25F}) / 5e-25 - 1) <= 1e-6);
  CHECK(frobenius_distance(Vector{1, 2}, Vector{4, 6}) == 5);
  CHECK(relative_error(Vector{3, 4.5}, Vector{3, 4}) == 0.1);
  CHECK(relative_error(Vector{3, 4.5}, Vector{3, 4}, 50) == 0.01);
  CHECK(relative_error(Vector{0, 0}, Vector{0, 0}) == 0);
  CHECK(relative_error(Vector{1, 0}, Vector{0, 0}) == infinity);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_FALSE(relative_error(Vector{nan}, Vector{1}) <= 1e300);
  CHECK_FALSE(relative_error(Vector{nan}, Vector{0}) <= 1e300);
}
