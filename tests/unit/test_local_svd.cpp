// LocalSvd: what is decomposed, what stays frozen, and when everything is taken apart.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <tuple>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// Few active terms and no recompression of its own accord.
StateConfig local_config(Index d_k, Index d_v, Index active, double epsilon = 0) {
  StateConfig config = config_of(d_k, d_v, epsilon);
  config.active = active;
  config.recompress_growth = 0;
  config.tail_share = 1;
  config.dense_fallback = false;
  return config;
}

// A body as earlier compactions may have left it: strengths falling, vectors of length 1.
struct BodyTerm {
  double strength;
  std::vector<double> key, value;
};
template <class P>
void set_body(TrackedState<P>& s, const std::vector<BodyTerm>& body) {
  using T = typename P::Compute;
  *s.view.factors.rank = static_cast<std::int32_t>(body.size());
  s.view.record->settled_rank = static_cast<std::int64_t>(body.size());
  for (Index i = 0; i < s.view.rank(); ++i) {
    const BodyTerm& term = body[static_cast<std::size_t>(i)];
    s.view.factors.strengths[i] = static_cast<T>(term.strength);
    const auto key = narrow<T>(term.key), value = narrow<T>(term.value);
    std::copy(key.begin(), key.end(), s.view.factors.keys().row(i));
    std::copy(value.begin(), value.end(), s.view.factors.values().row(i));
    for (Index a = 0; a < s.config.d_k; ++a) {
      for (Index b = 0; b < s.config.d_v; ++b) {
        s.exact.state()[static_cast<std::size_t>(a * s.config.d_v + b)] +=
            term.strength * static_cast<double>(key[static_cast<std::size_t>(a)]) *
            static_cast<double>(value[static_cast<std::size_t>(b)]);
      }
    }
  }
  s.view.buffer.masses[0] = 10;
  s.view.buffer.certificates[0] = T(1e-5);
  s.largest = oracle::frobenius_norm(s.exact.state());
}

template <class P>
std::vector<typename P::Compute> row_of(const TrackedState<P>& s, Index i) {
  const auto* const row = s.view.factors.components + i * (s.config.d_k + s.config.d_v);
  return {row, row + s.config.d_k + s.config.d_v};
}

}  // namespace

TEMPLATE_TEST_CASE("local svd, pitfall 1: active terms that are not orthogonal are not trusted",
                   "[local_svd]", Local32<Mamba2>, Local64<Mamba2>) {
  TrackedState<TestType> s(local_config(12, 10, 2));
  auto leaning_key = axis(12, 0, 0.8), leaning_value = axis(10, 0, 0.8);
  leaning_key[1] = leaning_value[1] = 0.6;
  set_body(s, {{1, axis(12, 0), axis(10, 0)},
               {0.9, leaning_key, leaning_value},
               {0.05, axis(12, 0), axis(10, 5)}});
  REQUIRE(s.try_advance(axis(12, 2), axis(10, 2), {0}, 0.1) == Status::ok);
  const auto frozen = row_of(s, 2);
  const CompactionReport report = s.compact();
  CHECK(report.decomposed == 3);
  REQUIRE(s.view.rank() == 4);
  CHECK(s.strength(0) == Catch::Approx(1.711).margin(5e-4));
  CHECK(s.strength(1) == Catch::Approx(0.189).margin(5e-4));
  CHECK(s.strength(2) == Catch::Approx(0.1).margin(1e-6));
  CHECK(s.strength(3) == Catch::Approx(0.05).margin(1e-6));
  CHECK(row_of(s, 3) == frozen);
  CHECK(std::abs(wide(s.view.factors.keys()).row(0).dot(wide(s.view.factors.keys()).row(1))) <
        1e-6);
}

TEMPLATE_TEST_CASE("local svd: decays of the whole head leave frozen rows bit-equal", "[local_svd]",
                   Local32<Mamba2>, Local32<GatedDelta>, Local64<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(local_config(20, 16, 2));
  for (int i = 0; i < 8; ++i) s.step(unit(random, 20), unit(random, 16), {-0.1}, std::pow(.7, i));
  s.compact();
  REQUIRE(s.view.rank() == 8);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::vector<typename TestType::Compute>> frozen;
    for (Index i = 2; i < s.view.rank(); ++i) frozen.push_back(row_of(s, i));
    const double weakest = s.strength(s.view.rank() - 1);
    s.step(unit(random, 20), unit(random, 16), {-0.25}, 0.5);
    s.step(unit(random, 20), unit(random, 16), {-0.5}, 0.5);
    const CompactionReport report = s.compact();
    CHECK(report.decomposed == 4);
    CHECK(report.rank_before == s.view.rank());
    Index found = 0;
    for (Index i = 0; i < s.view.rank(); ++i) {
      if (std::find(frozen.begin(), frozen.end(), row_of(s, i)) != frozen.end()) ++found;
    }
    CHECK(found == static_cast<Index>(frozen.size()));
    CHECK(s.strength(s.view.rank() - 1) == Catch::Approx(weakest * std::exp(-0.75)).epsilon(1e-6));
    s.check_exact();
  }
}

TEMPLATE_TEST_CASE("local svd, pitfall 11: decays of channels renormalise and re-sort the frozen",
                   "[local_svd]", Local32<KimiDelta>, Local32<GatedLinearAttention>,
                   Local64<KimiDelta>) {
  TrackedState<TestType> s(local_config(12, 10, 1));
  auto mixed = axis(12, 2, 0.6);
  mixed[3] = 0.8;
  set_body(s, {{4, axis(12, 0), axis(10, 0)},
               {3, axis(12, 1), axis(10, 1)},
               {2, mixed, axis(10, 2)},
               {1, axis(12, 5), axis(10, 3)}});
  std::vector<double> log_decay(12, 0.0);
  log_decay[0] = std::log(0.125);  // the active term is the weakest now
  log_decay[1] = std::log(0.25);
  log_decay[3] = -infinity;
  s.step(axis(12, 7), axis(10, 7), log_decay, 1.5);
  const CompactionReport report = s.compact();
  CHECK(report.decomposed == 2);
  REQUIRE(s.view.rank() == 5);
  const double strengths[] = {1.5, 1.2, 1, 0.75, 0.5};
  const Index axes[] = {7, 2, 5, 1, 0};
  for (Index i = 0; i < 5; ++i) {
    CHECK(s.strength(i) == Catch::Approx(strengths[i]).epsilon(1e-6));
    CHECK(std::abs(static_cast<double>(s.view.factors.keys()(i, axes[i]))) ==
          Catch::Approx(1).epsilon(1e-6));
  }
  s.check_exact();
}

TEMPLATE_TEST_CASE("local svd, pitfall 4: a buffer in the span of active and frozen terms",
                   "[local_svd]", Local32<Mamba2>, Local32<GatedDelta>, Local32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(local_config(32, 24, 2));
  std::vector<std::vector<double>> keys, values;
  for (std::size_t i = 0; i < 6; ++i) {
    keys.push_back(unit(random, 32));
    values.push_back(unit(random, 24));
    s.step(keys[i], values[i], {-0.05}, 0.7);
  }
  s.compact();
  for (int round = 0; round < 3; ++round) {
    for (std::size_t i = 0; i < 8; ++i) {
      auto key = keys[i % 6];
      const double distance = round == 0 ? 0 : round == 1 ? 1e-3 : 1e-5;
      for (double& element : key) element += distance * random.normal();
      s.step(key, values[(5 * i) % 6], {-0.05}, 0.7);
    }
    s.compact();
    s.check_exact();
  }
}

TEMPLATE_TEST_CASE("local svd, pitfall 5: less than the active terms, more than the dimensions",
                   "[local_svd]", Local32<Mamba2>, Local32<GatedDelta>, Local64<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const auto [d_k, d_v, active] =
      GENERATE(std::tuple<Index, Index, Index>{8, 8, 16}, std::tuple<Index, Index, Index>{8, 8, 2},
               std::tuple<Index, Index, Index>{1, 9, 4});
  CAPTURE(d_k, d_v, active);
  TrackedState<TestType> s(local_config(d_k, d_v, active));
  for (int i = 0; i < 80; ++i) {
    s.step(unit(random, d_k), unit(random, d_v), {-0.1}, 0.5);
    CHECK(s.view.rank() <= std::min(d_k, d_v));
  }
  s.compact();
  s.check_exact();
}

TEMPLATE_TEST_CASE("local svd, pitfall 7: at the cap all terms are decomposed, none is dropped",
                   "[local_svd]", Local32<Mamba2>, Local32<GatedDelta>, Local32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  SECTION("min(d_k, d_v) terms hold everything") {
    TrackedState<TestType> s(local_config(16, 16, 4));
    Index recompressed = 0;
    for (int i = 0; i < 400; ++i) {
      if (s.view.due()) {
        const CompactionReport report = s.compact();
        CHECK_FALSE(report.capped);
        CHECK(report.rank_after <= 16);
        if (report.decomposed == report.rank_before) ++recompressed;
      }
      s.step(unit(random, 16), unit(random, 16), {0}, 0.5);
    }
    CHECK(recompressed > 40);
    s.check_exact(100);
  }
  SECTION("dense in mid-decode, exactly") {
    StateConfig config = local_config(16, 16, 4);
    config.dense_fallback = true;
    TrackedState<TestType> s(config);
    for (int i = 0; i < 400; ++i) s.step(unit(random, 16), unit(random, 16), {0}, 0.5);
    s.compact();
    CHECK(s.view.dense());
    s.check_exact(100);
  }
  SECTION("a cap of the user's drops, and says what") {
    StateConfig config = local_config(16, 16, 2);
    config.rank_cap = 6;
    TrackedState<TestType> s(config);
    for (int i = 0; i < 200; ++i) {
      if (s.view.due()) {
        const double before = static_cast<double>(s.view.certificate());
        const CompactionReport report = s.compact();
        CHECK(report.capped);
        CHECK(report.rank_after == 6);
        CHECK(static_cast<double>(s.view.certificate()) >= before + report.dropped);
      }
      s.step(unit(random, 16), unit(random, 16), {0}, 0.5);
      s.check_certificate();
    }
  }
}

TEMPLATE_TEST_CASE("local svd, pitfall 8: frozen terms in one direction add up and go to the front",
                   "[local_svd]", Local32<Mamba2>, Local64<Mamba2>, Local32<KimiDelta>) {
  StateConfig config = local_config(12, 10, 1);
  config.tail_period = GENERATE(0, 1, 2);
  CAPTURE(config.tail_period);
  TrackedState<TestType> s(config);
  set_body(s, {{0.6, axis(12, 0), axis(10, 0)},
               {0.5, axis(12, 1), axis(10, 1)},
               {0.5, axis(12, 1), axis(10, 1)}});
  s.step(axis(12, 3), axis(10, 3), {0}, 0.3);
  const CompactionReport report = s.compact();
  if (config.tail_period == 1) {
    CHECK(report.tail == 3);  // and the new term, which is not active
    REQUIRE(s.view.rank() == 3);
    CHECK(s.strength(0) == Catch::Approx(1.0).epsilon(1e-6));
    CHECK(s.strength(1) == Catch::Approx(0.6).epsilon(1e-6));
    CHECK(s.strength(2) == Catch::Approx(0.3).epsilon(1e-6));
    s.check_factors();
  } else {
    CHECK(report.tail == 0);
    REQUIRE(s.view.rank() == 4);
    CHECK(s.strength(0) == Catch::Approx(0.6).epsilon(1e-6));
  }
  CHECK(spectral_norm(s.stored()) == Catch::Approx(1.0).epsilon(1e-6));
  s.check_exact();
}

TEMPLATE_TEST_CASE("local svd, pitfall 9: weak terms wait for a recompression", "[local_svd]",
                   Local32<Mamba2>) {
  // Two buffers of .6 epsilon, one after the other: apart from each other below epsilon, together
  // above it.
  const double share = GENERATE(1.0, 0.5);
  CAPTURE(share);
  StateConfig config = local_config(12, 10, 1, 1e-2);
  config.tail_share = share;
  TrackedState<TestType> s(config);
  set_body(s, {{1, axis(12, 0), axis(10, 0)}, {0.5, axis(12, 1), axis(10, 1)}});
  for (int round = 0; round < 2; ++round) {
    s.step(axis(12, 2), axis(10, 2), {0}, 0.006);
    s.compact();
  }
  CHECK(s.view.rank() == (share == 1 ? 2 : 4));
  // Whoever decomposes all terms finds the sum.
  TrackedState<TestType> all(config_of(12, 10, 1e-2));
  Rows<float> dense = s.stored_own();
  REQUIRE(initialize(all.team, all.view, MatrixView<const float>(view_of(dense)), ExactSvd{}) ==
          Status::ok);
  CHECK(all.view.rank() == (share == 1 ? 2 : 3));
  s.check_certificate();
}

TEMPLATE_TEST_CASE("local svd: the trigger", "[local_svd]", Local32<Mamba2>) {
  StateConfig config = local_config(64, 48, 2);
  config.recompress_growth = 1.5;
  config.recompress_slack = 3;
  TrackedState<TestType> s(config);
  Index next = 0;
  const auto add_terms = [&](int count) {
    for (int i = 0; i < count; ++i, ++next) s.step(axis(64, next), axis(48, next), {0}, 0.5);
    return s.compact();
  };
  const auto all = [](const CompactionReport& r) { return r.decomposed == r.rank_before; };
  CHECK(all(add_terms(4)));  // nothing else to decompose
  CHECK(s.view.record->settled_rank == 4);
  CHECK_FALSE(all(add_terms(5)));  // 4 <= 1.5 * 4 + 3
  CHECK(s.view.rank() == 9);
  CHECK(s.view.record->settled_rank == 4);
  CHECK_FALSE(all(add_terms(1)));  // 9 <= 9
  CHECK(all(add_terms(1)));        // 10 > 9
  CHECK(s.view.rank() == 11);
  CHECK(s.view.record->settled_rank == 11);
  // A state that fades settles lower without being decomposed.
  s.step(axis(64, 0), axis(48, 0), {-infinity});
  s.step(axis(64, 1), axis(48, 1), {0});
  CHECK_FALSE(all(s.compact()));
  CHECK(s.view.rank() == 2);
  CHECK(s.view.record->settled_rank == 2);
  s.check_exact();

  SECTION("initialisation settles too") {
    Rows<float> dense = s.stored_own();
    REQUIRE(initialize(s.team, s.view, MatrixView<const float>(view_of(dense))) == Status::ok);
    CHECK(s.view.record->settled_rank == 2);
    reset(s.view);
    CHECK(s.view.record->settled_rank == 0);
  }
}

TEST_CASE("local svd: per-rule defaults", "[local_svd]") {
  StateConfig config = config_of(32, 32);
  CHECK(SinkStateView<Local32<Mamba2>>::active(config) == 8);
  CHECK(SinkStateView<Local32<GatedDelta>>::active(config) == 8);
  CHECK(SinkStateView<Local32<KimiDelta>>::active(config) == 16);
  CHECK(SinkStateView<Local32<GatedLinearAttention>>::active(config) == 16);
  config.active = 5;
  CHECK(SinkStateView<Local32<KimiDelta>>::active(config) == 5);
}

TEMPLATE_TEST_CASE("local svd: what goes is reported, frozen or new", "[local_svd]",
                   Local32<Mamba2>, Local64<Mamba2>) {
  StateConfig config = local_config(12, 10, 1, 1e-2);
  SECTION("a frozen term that has become weak") {
    TrackedState<TestType> s(config);
    set_body(s, {{1, axis(12, 0), axis(10, 0)},
                 {0.5, axis(12, 1), axis(10, 1)},
                 {0.02, axis(12, 5), axis(10, 5)}});
    s.step(axis(12, 2), axis(10, 2), {0}, 10);
    const CompactionReport report = s.compact();
    CHECK(report.decomposed == 2);
    CHECK(s.view.rank() == 3);
    CHECK(report.dropped == Catch::Approx(0.02).epsilon(1e-2));
    CHECK(report.dropped >= 0.02);
    s.check_certificate();
  }
  SECTION("a new term that is weak beside a frozen one") {
    TrackedState<TestType> s(config);
    set_body(s, {{1, axis(12, 0), axis(10, 0)}, {0.5, axis(12, 1), axis(10, 1)}});
    s.step(axis(12, 0), axis(10, 0, -1));  // takes the active term away
    s.step(axis(12, 2), axis(10, 2), {0}, 0.003);
    const CompactionReport report = s.compact();
    CHECK(report.decomposed == 3);
    CHECK(s.view.rank() == 1);
    CHECK(report.dropped == Catch::Approx(0.003).epsilon(1e-2));
    s.check_certificate();
  }
  SECTION("a tail that cancels") {
    config.tail_share = 0.3;
    config.tail_period = 1;
    TrackedState<TestType> s(config);
    set_body(s, {{1, axis(12, 0), axis(10, 0)},
                 {0.02, axis(12, 1), axis(10, 1)},
                 {0.016, axis(12, 1), axis(10, 1, -1)}});
    s.step(axis(12, 2), axis(10, 2), {0}, 0.5);
    const CompactionReport report = s.compact();
    CHECK(report.tail == 3);
    CHECK(s.view.rank() == 2);
    CHECK(report.dropped == Catch::Approx(0.004).epsilon(1e-2));
    s.check_certificate();
  }
}

TEMPLATE_TEST_CASE("local svd: the certificate counts the rounding of the tail", "[local_svd]",
                   Local32<Mamba2>) {
  double before_mass = 0;
  const auto certificate = [&](Index period) {
    StateConfig config = local_config(12, 10, 1);
    config.tail_period = period;
    TrackedState<TestType> s(config);
    set_body(s, {{1, axis(12, 0), axis(10, 0)},
                 {0.5, axis(12, 1), axis(10, 1)},
                 {0.5, axis(12, 1), axis(10, 1)}});
    s.step(axis(12, 2), axis(10, 2), {0}, 0.3);
    before_mass = static_cast<double>(s.view.buffer.masses[1]);
    s.compact();
    return static_cast<double>(s.view.certificate());
  };
  // (N6) of docs/numerics.md for 3 terms; D(12) = D(10) = 5.
  const double counted = 8 * 3 + 2 * (5 + 5) + 20;
  const double unit_roundoff = std::numeric_limits<float>::epsilon() / 2;
  const double with_tail = certificate(1);
  CHECK(with_tail - certificate(0) >= 0.99 * counted * unit_roundoff * before_mass);
}

TEMPLATE_TEST_CASE("local svd: a merged tail settles the rank", "[local_svd]", Local32<Mamba2>) {
  StateConfig config = local_config(40, 30, 1);
  config.tail_period = 1;
  config.recompress_growth = 1.15;
  config.recompress_slack = 2;
  TrackedState<TestType> s(config);
  std::vector<BodyTerm> body{{1, axis(40, 0), axis(30, 0)}};
  for (int i = 0; i < 9; ++i) body.push_back({0.1, axis(40, 1), axis(30, 1)});
  set_body(s, body);
  s.step(axis(40, 2), axis(30, 2), {0}, 0.5);
  s.compact();
  CHECK(s.view.rank() == 3);
  CHECK(s.view.record->settled_rank == 3);
  for (Index i = 0; i < 3; ++i) s.step(axis(40, 3 + i), axis(30, 3 + i), {0}, 0.3);
  CHECK(s.compact().decomposed == 4);  // 3 <= 1.15 * 3 + 2
  for (Index i = 0; i < 3; ++i) s.step(axis(40, 6 + i), axis(30, 6 + i), {0}, 0.3);
  CHECK(s.compact().decomposed == 9);  // 6 > 1.15 * 3 + 2
}

TEMPLATE_TEST_CASE("local svd: a tail's own decomposition leaves active terms as they are",
                   "[local_svd]", (Local32<Mamba2, MeanValueSink>),
                   (Local64<GatedDelta, MeanValueSink>)) {
  // Beside a sink of 100 all terms are between tail_share epsilon and epsilon: the tail is cut at
  // epsilon, which has seen all of it, the active terms are not.
  StateConfig config = local_config(12, 10, 2, 1e-2);
  config.tail_share = 0.3;
  config.tail_period = 2;  // the second compaction: in the first nothing is frozen
  TrackedState<TestType> s(config, axis(10, 9));
  set_body(s, {{0.8, axis(12, 1), axis(10, 1)},
               {0.7, axis(12, 2), axis(10, 2)},
               {0.6, axis(12, 3), axis(10, 3)},
               {0.5, axis(12, 4), axis(10, 4)}});
  s.view.sink(0, 0) = 100;
  s.view.record->compactions = 1;
  s.exact.state()[9] = 100;  // row 0, the direction
  s.view.buffer.masses[0] = 200;
  s.step(axis(12, 5), axis(10, 5), {0}, 0.55);
  const CompactionReport report = s.compact();
  CHECK(report.tail == 3);
  CHECK(s.view.rank() == 2);
  CHECK(s.strength(0) == Catch::Approx(0.8).epsilon(1e-6));
  CHECK(s.strength(1) == Catch::Approx(0.7).epsilon(1e-6));
  s.check_certificate();
}

TEMPLATE_TEST_CASE("local svd: a state that returns from the dense form has a settled rank",
                   "[local_svd]", Local32<Mamba2>, Local32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = local_config(24, 20, 2, 1e-2);
  config.dense_fallback = true;
  config.dense_retry = 1;
  TrackedState<TestType> s(config);
  for (int i = 0; i < 40; ++i) s.step(unit(random, 24), unit(random, 20), {0}, 0.5);
  s.compact();
  REQUIRE(s.view.dense());
  // Beside these four everything else is below epsilon.
  const double heavy[] = {2000, 1900, 1800, 1700};
  for (Index i = 0; i < 4; ++i) s.step(axis(24, i), axis(20, i, heavy[i]), {0});
  s.compact();
  REQUIRE_FALSE(s.view.dense());
  CHECK(s.view.rank() == 4);
  CHECK(s.view.record->settled_rank == 4);
  s.check_certificate();
}

TEMPLATE_TEST_CASE("local svd: sums beyond the range keep terms apart or are refused",
                   "[local_svd]", Local32<Mamba2>) {
  StateConfig config = local_config(12, 10, 1);
  config.tail_period = 1;
  TrackedState<TestType> s(config);
  set_body(s, {{3e38, axis(12, 0), axis(10, 0)},
               {2.5e38, axis(12, 1), axis(10, 1)},
               {2.5e38, axis(12, 1), axis(10, 1)}});
  REQUIRE(s.try_advance(axis(12, 3), axis(10, 3, 1e37), {0}) == Status::ok);
  SECTION("the tail cannot be merged: its terms stay") {
    const CompactionReport report = s.compact();
    CHECK(report.tail == 0);
    CHECK(s.view.rank() == 4);
  }
  SECTION("the update overflows: the state stays as it was") {
    REQUIRE(s.try_advance(axis(12, 0), axis(10, 0, 3e38), {0}) == Status::ok);
    const auto before = bytes_of(s.config, s.view);
    CHECK(compact(s.team, s.view) == Status::overflow);
    CHECK(bytes_of(s.config, s.view) == before);
  }
}
