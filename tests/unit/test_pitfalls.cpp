// The pitfalls of low-rank recurrent states, through the public verbs. Those of single algorithms
// are in the tests of the algorithms.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

TEMPLATE_TEST_CASE("pitfall 1: terms of the body that are not orthogonal are not trusted",
                   "[pitfalls]", Full32<Mamba2>, Full64<Mamba2>) {
  TrackedState<TestType> s(config_of(12, 10));
  // A body as some other compaction may have left it, and one token.
  *s.view.factors.rank = 2;
  const double body[2][2] = {{1, 0}, {0.8, 0.6}};
  for (Index i = 0; i < 2; ++i) {
    for (Index j = 0; j < 2; ++j) {
      s.view.factors.keys()(i, j) = s.view.factors.values()(i, j) =
          static_cast<typename TestType::Compute>(body[i][j]);
    }
  }
  s.view.factors.strengths[0] = 1;
  s.view.factors.strengths[1] = static_cast<typename TestType::Compute>(0.9);
  REQUIRE(s.try_advance(axis(12, 2), axis(10, 2), {0}, 0.1) == Status::ok);
  s.compact();
  REQUIRE(s.view.rank() == 3);
  s.check_factors();
  CHECK(s.strength(0) == Catch::Approx(1.711).margin(5e-4));
  CHECK(s.strength(1) == Catch::Approx(0.189).margin(5e-4));
  CHECK(s.strength(2) == Catch::Approx(0.1).margin(1e-6));
}

TEMPLATE_TEST_CASE("pitfall 2: eight equal tokens", "[pitfalls]", Full32<Mamba2>,
                   Full32<GatedDelta>, Full32<KimiDelta>, Full64<Mamba2>, Local32<Mamba2>,
                   Local32<KimiDelta>, Fixed32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(20, 16));
  const auto key = unit(random, 20), value = unit(random, 16);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 8; ++i) s.step(key, value, {-0.1}, 0.5);
    const CompactionReport report = s.compact();
    CHECK(report.sweeps < 12);
    CHECK(s.view.rank() == 1);
    CHECK(s.strength(0) == Catch::Approx(s.wanted().norm()).epsilon(1e-6));
    s.check_factors();
    s.check_exact();
  }
}

TEMPLATE_TEST_CASE("pitfall 3: only one side is deficient", "[pitfalls]", Full32<Mamba2>,
                   Full32<GatedDelta>, Full32<KimiDelta>, Local32<Mamba2>, Local32<KimiDelta>,
                   Fixed32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(20, 16));
  const auto key = unit(random, 20), value = unit(random, 16);
  SECTION("same key, different values") {
    for (int i = 0; i < 24; ++i) s.step(key, unit(random, 16), {-0.1}, 0.5);
  }
  SECTION("same value, different keys") {
    // For a rule that corrects, corrections are multiples of the value all the same.
    for (int i = 0; i < 24; ++i) s.step(unit(random, 20), value, {-0.1}, 0.5);
  }
  s.compact();
  CHECK(s.view.rank() == 1);
  s.check_factors();
  s.check_exact();
}

TEMPLATE_TEST_CASE("pitfall 4: a buffer inside the span, near-duplicates, zero tokens, weights",
                   "[pitfalls]", Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>,
                   Local32<Mamba2>, Local32<KimiDelta>, Fixed32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(32, 24));
  std::vector<std::vector<double>> keys, values;
  for (int i = 0; i < 5; ++i) {
    keys.push_back(unit(random, 32));
    values.push_back(unit(random, 24));
    s.step(keys.back(), values.back(), {-0.05}, 0.7);
  }
  s.compact();
  REQUIRE(s.view.rank() == 5);
  const auto near = [&](std::vector<double> x, double distance) {
    for (double& element : x) element += distance * random.normal();
    return x;
  };
  SECTION("inside the span") {
    for (std::size_t i = 0; i < 8; ++i) s.step(keys[i % 5], values[(3 * i) % 5], {-0.05}, 0.7);
    s.compact();
    // Rounded tokens leave the span by about as much as rounding.
    s.check_factors();
    CHECK(s.view.rank() == 5);
  }
  SECTION("near-duplicates") {
    for (const double distance : {1e-3, 1e-5}) {
      for (int i = 0; i < 8; ++i) {
        s.step(near(keys[0], distance), near(values[0], distance), {-0.05}, 0.7);
      }
      s.compact();
      s.check_factors();
    }
  }
  SECTION("zero tokens") {
    for (int i = 0; i < 8; ++i) s.step(keys[0], values[1], {-0.05}, 0);
    s.compact();
    CHECK(s.view.rank() == 5);
    s.check_factors();
  }
  SECTION("weights from 1e4 to 1e-4") {
    for (int i = 0; i < 8; ++i) {
      auto value = unit(random, 24);
      for (double& element : value) element *= std::pow(10.0, 4 - 8 * i / 7.0);
      s.step(unit(random, 32), value, {-0.05}, 0.7);
    }
    s.compact();
    s.check_factors();
  }
  s.check_exact();
}

TEMPLATE_TEST_CASE("pitfall 5: an empty state has no columns to keep", "[pitfalls]", Full32<Mamba2>,
                   Full32<GatedDelta>, Full32<KimiDelta>, Local32<Mamba2>, Local32<KimiDelta>,
                   Fixed32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const double epsilon : {0.0, 1e-2}) {
    CAPTURE(epsilon);
    TrackedState<TestType> s(config_of(8, 8, epsilon));
    for (int i = 0; i < 8; ++i) s.step(unit(random, 8), std::vector<double>(8, 0.0), {-0.1});
    CHECK(s.compact().rank_after == 0);
    CHECK(s.stored().isZero(0));
    CHECK(s.view.certificate() == 0);
  }
}

TEMPLATE_TEST_CASE("pitfall 5: more terms than the state has dimensions", "[pitfalls]",
                   Full32<Mamba2>, Full32<GatedDelta>, Full64<KimiDelta>, Local32<GatedDelta>,
                   Fixed32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = config_of(8, 8, 0, 16);
  config.dense_fallback = false;
  TrackedState<TestType> s(config);
  for (int i = 0; i < 64; ++i) s.step(unit(random, 8), unit(random, 8), {-0.1}, 0.5);
  s.compact();
  CHECK(s.view.rank() == 8);
  s.check_factors();
  s.check_exact();
}

TEMPLATE_TEST_CASE("pitfall 6: values of 1e-25 and 1e+25", "[pitfalls]", Full32<Mamba2>,
                   Full32<GatedDelta>, Full32<KimiDelta>, Dense32<GatedDelta>, Local32<Mamba2>,
                   Local32<KimiDelta>, Fixed32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const double scale : {1e-25, 1e+25}) {
    CAPTURE(scale);
    Random random(seed);
    StateConfig config = config_of(24, 20);
    config.rank_cap = 20;
    TrackedState<TestType> s(config);
    for (int i = 0; i < 24; ++i) {
      auto value = unit(random, 20);
      for (double& element : value) element *= scale;
      s.step(unit(random, 24), value, {-0.1}, 0.5);
    }
    s.compact();
    s.check_factors();
    s.check_exact();
  }
}

TEMPLATE_TEST_CASE("pitfall 7: decay 1 and random tokens do not let the rank grow", "[pitfalls]",
                   Full32<Mamba2>, Full32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = config_of(16, 16);
  const auto feed = [&](TrackedState<TestType>& s) {
    for (int i = 0; i < 400; ++i) s.step(unit(random, 16), unit(random, 16), {0}, 0.5);
    s.compact();
  };
  SECTION("dense when the rank no longer pays") {
    TrackedState<TestType> s(config);
    feed(s);
    CHECK(s.view.dense());
    s.check_exact();
  }
  SECTION("at most min(d_k, d_v) terms without the fallback") {
    config.dense_fallback = false;
    TrackedState<TestType> s(config);
    feed(s);
    CHECK(s.view.rank() == 16);
    s.check_factors();
    s.check_exact(100);
  }
  SECTION("a cap is never silent") {
    config.dense_fallback = false;
    config.rank_cap = 6;
    TrackedState<TestType> s(config);
    double dropped = 0;
    for (int i = 0; i < 400; ++i) {
      if (s.view.due()) {
        const double before = static_cast<double>(s.view.certificate());
        const CompactionReport report = s.compact();
        CHECK(report.capped);
        CHECK(report.rank_after == 6);
        CHECK(report.dropped > 0);
        CHECK(static_cast<double>(s.view.certificate()) >= before + report.dropped);
        dropped += report.dropped;
      }
      s.step(unit(random, 16), unit(random, 16), {0}, 0.5);
      s.check_certificate();
    }
    CHECK(s.error() > 0.01 * s.wanted().norm());  // the cap did cost something
    CHECK(static_cast<double>(s.view.certificate()) <= 1.01 * dropped + 1e-2);
  }
}

TEMPLATE_TEST_CASE("pitfall 9: what is fed by less than epsilon a compaction is never learnt",
                   "[pitfalls]", Full32<Mamba2>, Full64<Mamba2>) {
  // 8 tokens of weight w against a threshold of .01: .0088 is dropped every time, .0104 is kept.
  const auto learn = [](double weight) {
    TrackedState<TestType> s(config_of(12, 10, 1e-2));
    s.step(axis(12, 0), axis(10, 0));
    s.compact();
    for (int i = 0; i < 800; ++i) s.step(axis(12, 1), axis(10, 1), {0}, weight);
    s.compact();
    CHECK(s.wanted()(1, 1) == Catch::Approx(800 * weight).epsilon(1e-6));
    s.check_certificate();
    return s.stored()(1, 1);
  };
  CHECK(learn(0.0011) == 0);
  CHECK(learn(0.0013) == Catch::Approx(1.04).epsilon(1e-5));
}

TEMPLATE_TEST_CASE("pitfall 11: log decay -inf on a channel", "[pitfalls]", Full32<KimiDelta>,
                   Full64<KimiDelta>, Full32<GatedLinearAttention>, Dense32<KimiDelta>,
                   Local32<KimiDelta>, Fixed32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 20));
  std::vector<double> log_decay(16, -0.1);
  for (int i = 0; i < 20; ++i) {
    log_decay[3] = i % 3 == 0 ? -infinity : -0.2;
    log_decay[7] = -infinity;
    s.step(unit(random, 16), unit(random, 20), log_decay, 0.6);
    s.check_exact();
  }
  // What the last token forgot before it wrote is gone to the last bit.
  s.step(axis(16, 0), unit(random, 20), log_decay, 0.6);
  CHECK(s.stored().row(7).isZero(0));
  s.compact();
  s.check_factors();
  s.check_exact();
}

TEMPLATE_TEST_CASE("pitfall 11: log decay -6 for 16 tokens", "[pitfalls]", Full32<KimiDelta>,
                   Full32<GatedDelta>, Full32<Mamba2>, Dense32<KimiDelta>, Local32<Mamba2>,
                   Local32<KimiDelta>, Fixed32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12, 0, 16));
  for (int i = 0; i < 16; ++i) s.step(unit(random, 16), unit(random, 12));
  s.compact();
  for (int i = 0; i < 16; ++i) s.step(unit(random, 16), unit(random, 12), {-6}, 0.5);
  // Relative to what is left, not to what was there.
  CHECK(s.error() <= 1e-6 * s.wanted().norm());
  s.check_certificate();
  s.compact();
  CHECK(s.error() <= 1e-6 * s.wanted().norm());
  s.check_factors();
  s.check_certificate();
}

TEMPLATE_TEST_CASE("pitfall 11: per-channel decays leave stored strengths true", "[pitfalls]",
                   Full32<KimiDelta>, Full32<GatedLinearAttention>, Local32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(24, 20, 1e-2));
  std::vector<double> log_decay(24);
  for (std::size_t c = 0; c < 24; ++c) log_decay[c] = c % 4 == 0 ? -0.22 : -0.01;
  for (int i = 0; i < 64; ++i) {
    s.step(unit(random, 24), unit(random, 20), log_decay, 0.5);
    if (i % 8 != 7) continue;
    s.compact();
    if (s.view.dense()) continue;
    const double true_strength = spectral_norm(s.wanted());
    CHECK(s.strength(0) >= 0.998 * true_strength);
    CHECK(s.strength(0) <= 1.000001 * true_strength + static_cast<double>(s.view.certificate()));
    s.check_factors();
    s.check_certificate();
  }
  CHECK(s.view.record->compactions >= 8);
}

TEMPLATE_TEST_CASE("pitfall 14: terms of 3e-3 keep their vectors orthogonal", "[pitfalls]",
                   Full32<Mamba2>, Full64<Mamba2>, Local32<Mamba2>, Fixed32<Mamba2>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(32, 24, 1e-3));
  const std::vector<double> weights = geometric(8, 3e-3);
  for (const double weight : weights) s.step(unit(random, 32), unit(random, 24), {0}, weight);
  s.compact();
  CHECK(s.view.rank() == 8);
  s.check_factors();
}

TEMPLATE_TEST_CASE("pitfall 15: a token with NaN or infinity leaves no trace", "[pitfalls]",
                   Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>, Dense32<GatedDelta>,
                   Local32<Mamba2>, Local32<KimiDelta>, Fixed32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const double bad = GENERATE(std::numeric_limits<double>::quiet_NaN(), infinity, -infinity);
  CAPTURE(bad);
  Random random(seed);
  TrackedState<TestType> s(config_of(12, 20));
  const auto feed = [&] {
    for (int i = 0; i < 11; ++i) s.step(unit(random, 12), unit(random, 20), {-0.1}, 0.5);
  };
  feed();

  const auto before = bytes_of(s.config, s.view);
  auto key = unit(random, 12), value = unit(random, 20);
  double write_strength = 1;
  SECTION("in the key") { key[11] = bad; }
  SECTION("in the value") { value[19] = bad; }
  SECTION("in the write strength") { write_strength = bad; }
  CHECK(s.try_advance(key, value, {-0.1}, write_strength) == Status::non_finite_input);
  CHECK(bytes_of(s.config, s.view) == before);

  feed();
  s.compact();
  s.check_exact();
}
