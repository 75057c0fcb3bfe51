// Faults that others shipped (B..: rows of the list of public bug reports), fed to this library.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class P>
void feed(TrackedState<P>& s, Random& random, int tokens, const std::vector<double>& log_decay,
          double write_strength = 0.5) {
  for (int i = 0; i < tokens; ++i) {
    s.step(unit(random, s.config.d_k), unit(random, s.config.d_v), log_decay, write_strength);
  }
}

// No number of the body, sink or buffer in use is subnormal.
template <class P>
bool normal_or_zero(const TrackedState<P>& s) {
  const auto& view = s.view;
  const auto good = [](const auto& rows) {
    for (Index i = 0; i < rows.rows; ++i) {
      for (Index j = 0; j < rows.cols; ++j) {
        if (rows(i, j) != 0 && !std::isnormal(rows(i, j))) return false;
      }
    }
    return true;
  };
  if (view.dense() && !good(view.matrix)) return false;
  for (Index i = 0; i < view.rank(); ++i) {
    if (!std::isnormal(view.factors.strengths[i])) return false;
  }
  return view.dense() || (good(view.factors.keys()) && good(view.factors.values()));
}

}  // namespace

// ---- Decays, gates, keys ---------------------------------------------------------------------

TEMPLATE_TEST_CASE("B01, B05: log decays of -40 and -20 next to 0, buffer half full", "[faults]",
                   Full32<GatedDelta>, Full32<KimiDelta>, Full64<GatedDelta>, Dense32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12));
  feed(s, random, 12, {-0.1});
  s.compact();
  for (const double log_decay : {-0.1, -40.0, -40.0, 0.0, -20.0, 0.0, -5.914}) {
    CAPTURE(log_decay);
    feed(s, random, 1, {log_decay});
    s.check_exact();
    // What is left is right too, not only next to what was there.
    CHECK(s.error() <= 1e-6 * s.wanted().norm());
  }
}

TEMPLATE_TEST_CASE("B02: one channel decays by 6e-12 for 8 tokens", "[faults]", Full32<KimiDelta>,
                   Full32<GatedLinearAttention>, Dense32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12));
  std::vector<double> log_decay(16, -0.05);
  log_decay[5] = std::log(6e-12);
  feed(s, random, 24, log_decay);
  s.check_exact();
  s.compact();
  s.check_factors();
  s.check_exact();
}

TEMPLATE_TEST_CASE("B04: 16 tokens of log decay -5.6", "[faults]", Full32<GatedDelta>,
                   Full32<KimiDelta>, Full32<Mamba2>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12, 0, 16));
  feed(s, random, 16, {-5.6});
  CHECK(s.error() <= 1e-6 * s.wanted().norm());
  s.compact();
  CHECK(s.error() <= 1e-6 * s.wanted().norm());
  s.check_factors();
}

TEMPLATE_TEST_CASE("B07: what is not a log decay is refused, at its borders too", "[faults]",
                   Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>, Full64<Mamba2>,
                   Dense32<GatedDelta>) {
  using T = typename TestType::Compute;
  TrackedState<TestType> s(config_of(8, 6));
  const auto give = [&](double log_decay) {
    const auto before = bytes_of(s.config, s.view);
    const Status status = s.try_advance(axis(8, 1), axis(6, 2), {log_decay});
    if (status != Status::ok) CHECK(bytes_of(s.config, s.view) == before);
    return status;
  };
  CHECK(give(0.9) == Status::positive_log_decay);  // a decay, passed for its logarithm
  CHECK(give(1.0) == Status::positive_log_decay);
  CHECK(give(infinity) == Status::positive_log_decay);
  CHECK(give(static_cast<double>(std::numeric_limits<T>::denorm_min())) ==
        Status::positive_log_decay);
  CHECK(give(std::numeric_limits<double>::quiet_NaN()) == Status::non_finite_input);
  CHECK(give(0.0) == Status::ok);
  CHECK(give(-0.0) == Status::ok);
  CHECK(give(-infinity) == Status::ok);
  CHECK(s.view.buffered() == 3);
}

TEST_CASE("B07: one bad channel among many is found", "[faults]") {
  TrackedState<Full32<KimiDelta>> s(config_of(37, 5));
  for (const std::size_t channel : {0U, 15U, 16U, 36U}) {
    std::vector<double> log_decay(37, -0.5);
    log_decay[channel] = 0.25;
    CHECK(s.try_advance(axis(37, 0), axis(5, 0), log_decay) == Status::positive_log_decay);
    log_decay[channel] = std::numeric_limits<double>::quiet_NaN();
    CHECK(s.try_advance(axis(37, 0), axis(5, 0), log_decay) == Status::non_finite_input);
  }
  CHECK(s.view.buffered() == 0);
}

TEMPLATE_TEST_CASE("B09: decay 1 throughout, and at every other token", "[faults]", Full32<Mamba2>,
                   Full32<GatedDelta>, Full32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12));
  feed(s, random, 20, {0});
  s.check_exact();
  for (int i = 0; i < 10; ++i) {
    feed(s, random, 1, {0});
    feed(s, random, 1, {-0.7});
  }
  s.check_exact();
}

TEMPLATE_TEST_CASE("B10: the first token of a buffer decays by exp(-1000)", "[faults]",
                   Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>, Dense32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12));
  feed(s, random, 8, {-0.1});
  s.compact();
  const auto key = unit(random, 16), value = unit(random, 12);
  s.step(key, value, {-1000});
  // Nothing else is left, to the last bit.
  const Matrix alone = s.stored();
  s.compact();
  CHECK((s.stored() - alone).norm() <= 1e-6);
  CHECK((s.view.dense() || s.view.rank() == 1));
  CHECK(s.error() <= 1e-6);
}

TEMPLATE_TEST_CASE("B13: a zero key is a pure decay, a NaN in a key is reported", "[faults]",
                   Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>, Dense32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12));
  feed(s, random, 12, {-0.1});
  const Matrix before = s.stored();
  s.step(std::vector<double>(16, 0.0), unit(random, 12), {std::log(0.5)}, 2);
  CHECK((s.stored() - 0.5 * before).norm() <= 1e-6 * before.norm());
  auto key = unit(random, 16);
  key[9] = std::numeric_limits<double>::quiet_NaN();
  CHECK(s.try_advance(key, unit(random, 12), {-0.1}) == Status::non_finite_input);
  s.compact();
  s.check_exact();
}

TEMPLATE_TEST_CASE("B14: keys of norm 10 for 30 steps follow the growing recurrence", "[faults]",
                   Full64<GatedDelta>, Full64<DeltaNet>, Full64<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(8, 6));
  // Two directions that overlap, so that every token multiplies part of what is there by 1 - 100.
  const auto a = axis(8, 0), b = std::vector<double>{0.8, 0.6, 0, 0, 0, 0, 0, 0};
  for (int i = 0; i < 30; ++i) {
    auto key = i % 2 == 0 ? a : b;
    for (double& element : key) element *= 10;
    s.step(key, unit(random, 6), {0});
  }
  CHECK(s.largest > 1e40);
  CHECK(s.error() <= 1e-12 * s.largest);
  s.compact();
  CHECK(s.error() <= 1e-12 * s.largest);
  s.check_certificate();
}

TEST_CASE("B14: growth past the range is reported, and the state stays as it was", "[faults]") {
  TrackedState<Full32<GatedDelta>> s(config_of(8, 6));
  Status status = Status::ok;
  for (int i = 0; i < 30 && status == Status::ok; ++i) {
    if (s.view.due()) s.compact();
    const auto before = bytes_of(s.config, s.view);
    status = s.try_advance(axis(8, 0, 10), axis(6, 0));
    if (status != Status::ok) CHECK(bytes_of(s.config, s.view) == before);
  }
  CHECK(status == Status::overflow);
}

TEMPLATE_TEST_CASE("B15: small keys are used as they are", "[faults]", Full64<GatedDelta>,
                   Full32<GatedDelta>, Full32<KimiDelta>, Full32<Mamba2>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const double norm : {1e-2, 1e-3, 1e-4, 0.0}) {
    CAPTURE(norm);
    Random random(seed);
    TrackedState<TestType> s(config_of(8, 6));
    for (int i = 0; i < 12; ++i) {
      auto key = unit(random, 8);
      for (double& element : key) element *= norm;
      s.step(key, unit(random, 6), {-0.1});
    }
    CHECK(s.wanted().norm() <= 4 * norm);
    s.check_exact();
    s.compact();
    s.check_exact();
  }
}

TEMPLATE_TEST_CASE("B16: the decay comes before the correction", "[faults]", Full32<GatedDelta>,
                   Full64<KimiDelta>, Dense32<GatedDelta>) {
  TrackedState<TestType> s(config_of(4, 3));
  s.step(axis(4, 1), {4, 8, 16}, {0});
  const bool compacted = GENERATE(false, true);
  if (compacted) s.compact();
  // b = 1 replaces what the key recalls. With the decay last, half of the new value would be lost.
  s.step(axis(4, 1), {1, 2, 3}, {std::log(0.5)});
  const std::vector<double> read = s.read(axis(4, 1));
  for (std::size_t j = 0; j < 3; ++j)
    CHECK(read[j] == Catch::Approx(static_cast<double>(j + 1)).epsilon(1e-6));
  // b = 1/2 shows what was predicted: 1/2 (alpha v0) + 1/2 v.
  s.step(axis(4, 1), {0, 0, 0}, {std::log(0.5)}, 0.5);
  CHECK(s.read(axis(4, 1))[2] == Catch::Approx(0.75).epsilon(1e-6));
}

TEMPLATE_TEST_CASE("B17, B29: tokens at once are bit-equal to tokens one by one", "[faults]",
                   Full32<GatedDelta>, Full32<KimiDelta>, Full32<Mamba2>, Dense32<GatedDelta>) {
  using T = typename TestType::Compute;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(8, 6)), one(config_of(8, 6));
  for (int i = 0; i < 4; ++i) {  // half full
    const auto key = unit(random, 8), value = unit(random, 6);
    s.step(key, value, {-0.2}, 0.5);
    one.step(key, value, {-0.2}, 0.5);
  }
  // Neighbours overlap by .7 and decay by one half: a form that decays twice shows.
  Rows<T> keys = Rows<T>::Zero(4, 8);
  for (Index t = 0; t < 4; ++t) {
    keys(t, t) = static_cast<T>(0.7);
    keys(t, t + 1) = static_cast<T>(std::sqrt(0.51));
  }
  Rows<T> values = random_rows(random, 4, 6).cast<T>();
  const Index channels = TestType::Rule::log_decays(8);
  Rows<T> log_decays = Rows<T>::Constant(4, channels, static_cast<T>(std::log(0.5)));
  const std::vector<T> strengths(4, T(1));
  const Tokens<T> tokens{view_of(keys), view_of(values), view_of(log_decays), strengths.data(), 1};
  REQUIRE(advance(s.team, s.view, tokens) == Status::ok);
  for (Index t = 0; t < 4; ++t) REQUIRE(advance(one.team, one.view, tokens[t]) == Status::ok);
  CHECK(bytes_of(s.config, s.view) == bytes_of(one.config, one.view));
  CHECK(s.view.buffered() == 8);
  for (Index t = 0; t < 4; ++t) {
    s.exact.step(keys.row(t).data(), values.row(t).data(), log_decays.row(t).data(), T(1));
  }
  s.check_exact();
}

// ---- Layout, heads, boundaries, initial state ------------------------------------------------

TEMPLATE_TEST_CASE("B21, B22: a rectangular state keeps rows for keys and columns for values",
                   "[faults]", Full32<Mamba2>, Full32<KimiDelta>, Full64<GatedDelta>,
                   Dense32<Mamba2>) {
  using T = typename TestType::Compute;
  TrackedState<TestType> s(config_of(64, 128));
  Rows<T> dense = Rows<T>::Zero(64, 128);
  dense(0, 1) = 1;  // e1 e2^T
  dense(63, 127) = 3;
  REQUIRE(initialize(s.team, s.view, view_of(dense)) == Status::ok);
  CHECK((s.stored() - dense.template cast<double>()).norm() <= 1e-6);
  CHECK(s.read(axis(64, 0))[1] == Catch::Approx(1.0).epsilon(1e-6));
  CHECK(s.read(axis(64, 1))[0] == 0);
  CHECK(s.read(axis(64, 63))[127] == Catch::Approx(3.0).epsilon(1e-6));
}

TEMPLATE_TEST_CASE("B24, B25: each value head reads the keys of its key head, under both maps",
                   "[faults]", Full32<Mamba2>, Local32<GatedDelta>, Fixed32<KimiDelta>,
                   Dense32<GatedDelta>) {
  // Keys are handed over by pointer: heads of one group share them without a copy, and a wrong
  // pairing is seen because the keys of heads differ.
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const auto map : {oracle::HeadMap::interleaved, oracle::HeadMap::tiled}) {
    for (const int key_heads : {2, 8}) {
      const int value_heads = 2 * key_heads;
      Random random(seed);
      std::vector<std::vector<double>> keys;
      for (int h = 0; h < key_heads; ++h) keys.push_back(unit(random, 16));
      for (int h = 0; h < value_heads; ++h) {
        CAPTURE(key_heads, h);
        const auto group =
            static_cast<std::size_t>(oracle::key_head(map, h, key_heads, value_heads));
        TrackedState<TestType> s(config_of(16, 4));
        s.step(keys[group], axis(4, 0, h + 1), {-0.1});
        s.compact();
        for (std::size_t g = 0; g < keys.size(); ++g) {
          double overlap = 0;
          for (std::size_t i = 0; i < 16; ++i) overlap += keys[group][i] * keys[g][i];
          CHECK(s.read(keys[g])[0] == Catch::Approx(overlap * (h + 1)).margin(1e-5));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("B26: a prompt of one token and the rest, from a given state", "[faults]",
                   Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>, Dense32<GatedDelta>) {
  using T = typename TestType::Compute;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(24, 20));
  Rows<T> dense = with_singular_values(random, 24, 20, {4, 2, 1}).cast<T>();
  REQUIRE(initialize(s.team, s.view, view_of(dense)) == Status::ok);
  for (Index i = 0; i < dense.size(); ++i) {
    s.exact.state()[static_cast<std::size_t>(i)] = static_cast<double>(dense.data()[i]);
  }
  s.largest = dense.template cast<double>().norm();
  feed(s, random, 1, {-0.1});
  s.compact();
  s.check_exact();
  feed(s, random, 11, {-0.1});
  s.check_exact();
}

TEMPLATE_TEST_CASE("B27: two sequences of 5 and 11 tokens share nothing", "[faults]",
                   Full32<GatedDelta>, Full32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> first(config_of(12, 10)), second(config_of(12, 10));
  // Interleaved, so that scratch or decay sums left over from the other would show.
  for (int i = 0; i < 11; ++i) {
    if (i < 5) feed(first, random, 1, {-0.3});
    feed(second, random, 1, {-0.05 * i});
  }
  first.check_exact();
  second.check_exact();

  // One memory, used for the one and then for the other, gives the same bits as fresh memory.
  Random again(seed), fresh(seed);
  reset(first.view);
  first.exact = typename TrackedState<TestType>::Oracle(traits_of<typename TestType::Rule>, 12, 10);
  TrackedState<TestType> third(config_of(12, 10));
  feed(first, again, 11, {-0.1});
  feed(third, fresh, 11, {-0.1});
  CHECK(first.stored() == third.stored());
  CHECK(first.view.certificate() == third.view.certificate());
}

TEST_CASE("B30: a state knows how many tokens it has seen", "[faults]") {
  TrackedState<Full32<GatedDelta>> s(config_of(6, 5));
  Random random(test_seed());
  feed(s, random, 11, {-0.1});
  CHECK(s.view.record->tokens == 11);
  REQUIRE(roll_back(s.view, 2) == Status::ok);
  CHECK(s.view.record->tokens == 9);
  CHECK(s.try_advance(axis(6, 0), axis(5, 0), {0.5}) == Status::positive_log_decay);
  CHECK(s.view.record->tokens == 9);
  s.compact();
  CHECK(s.view.record->tokens == 9);
  CHECK(s.view.record->compactions == 2);
  SinkState<Full32<GatedDelta>> snapshot = s.state;
  feed(s, random, 1, {-0.1});
  CHECK(snapshot.view().record->tokens == 9);
  CHECK(s.view.record->tokens == 10);
}

TEMPLATE_TEST_CASE("B44: odd strides and addresses aligned to a number only", "[faults]",
                   Full32<KimiDelta>, Full64<KimiDelta>, Dense32<KimiDelta>) {
  using T = typename TestType::Compute;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  constexpr Index d_k = 20, d_v = 33, stride = 37;
  constexpr T guard = -77;
  TrackedState<TestType> s(config_of(d_k, d_v)), straight(config_of(d_k, d_v));

  std::vector<T> memory(1 + d_k * stride, guard);
  const MatrixView<T> odd{memory.data() + 1, d_k, d_v, stride};
  Rows<T> dense = with_singular_values(random, d_k, d_v, {3, 2, 1}).cast<T>();
  for (Index i = 0; i < d_k; ++i) std::copy_n(&dense(i, 0), d_v, odd.row(i));
  REQUIRE(initialize(s.team, s.view, odd) == Status::ok);
  REQUIRE(initialize(straight.team, straight.view, view_of(dense)) == Status::ok);
  CHECK(bytes_of(s.config, s.view) == bytes_of(straight.config, straight.view));

  std::vector<T> token(1 + d_k + d_v + d_k + d_k + d_v);
  for (T& number : token) number = static_cast<T>(-std::abs(random.normal()));
  T* const key = token.data() + 1;
  T* const value = key + d_k;
  T* const log_decay = value + d_v;
  T* const query = log_decay + d_k;
  T* const output = query + d_k;
  REQUIRE(step(s.team, s.view, Token<T>{key, value, log_decay, T(1)}, query, output) == Status::ok);

  const std::vector<T> k(key, key + d_k), v(value, value + d_v), g(log_decay, log_decay + d_k),
      q(query, query + d_k);
  std::vector<T> y(d_v);
  REQUIRE(step(straight.team, straight.view, Token<T>{k.data(), v.data(), g.data(), T(1)}, q.data(),
               y.data()) == Status::ok);
  CHECK(std::equal(y.begin(), y.end(), output));
  CHECK(bytes_of(s.config, s.view) == bytes_of(straight.config, straight.view));

  REQUIRE(materialize(s.team, s.view, odd) == Status::ok);
  CHECK(wide(odd) == straight.stored());
  for (Index i = 0; i < d_k; ++i) {
    for (Index j = d_v; j < stride; ++j) CHECK(odd.row(i)[j] == guard);
  }
}

// ---- Decompositions --------------------------------------------------------------------------

TEST_CASE("B69: a rank-1 state of 4 x 4 in float, and its transpose", "[faults]") {
  StateConfig config = config_of(4, 4);
  config.dense_fallback = false;
  const std::vector<double> a{0.1, 0.7, -0.3, 0.9}, b{0.3, -0.2, 0.6, 0.1};
  for (const bool transposed : {false, true}) {
    TrackedState<Full32<Mamba2>> s(config);
    for (int i = 0; i < 4; ++i) s.step(transposed ? b : a, transposed ? a : b, {0});
    s.compact();
    CHECK(s.view.rank() == 1);
    s.check_factors();
    s.check_exact();
  }
}

TEMPLATE_TEST_CASE("B72, B73: a dense matrix with one NaN or infinity is refused", "[faults]",
                   Full32<Mamba2>, Full64<Mamba2>, Dense32<Mamba2>) {
  using T = typename TestType::Compute;
  TrackedState<TestType> s(config_of(3, 3));
  s.step(axis(3, 0), axis(3, 1), {0});
  const auto before = bytes_of(s.config, s.view);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), infinity, -infinity}) {
    for (Index at = 0; at < 9; ++at) {
      CAPTURE(bad, at);
      Rows<T> dense = Rows<T>::Constant(3, 3, T(1));
      dense.data()[at] = static_cast<T>(bad);
      CHECK(initialize(s.team, s.view, view_of(dense)) == Status::non_finite_input);
      CHECK(bytes_of(s.config, s.view) == before);
    }
  }
}

TEST_CASE("B75: a randomized block with more columns than the state has rank", "[faults]") {
  TrackedState<Full32<Mamba2>> s(config_of(32, 24));
  Rows<float> dense = Rows<float>::Zero(32, 24);
  dense(3, 4) = 2;
  REQUIRE(initialize(s.team, s.view, view_of(dense)) == Status::ok);
  CHECK(s.view.rank() == 1);
  s.check_factors();
  CHECK(s.stored() == dense.cast<double>());
}

TEMPLATE_TEST_CASE("B76, B77: states of a batch share a team and nothing else", "[faults]",
                   Local32<KimiDelta>, Full32<Mamba2>, Fixed32<GatedDelta>, Dense32<GatedDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  StateConfig config = config_of(24, 20, 1e-2);
  config.active = 3;
  config.rank_cap = TestType::Compaction::adaptive ? 0 : 6;
  using Tracked = TrackedState<TestType>;
  Tracked alone(config), one(config), ill(config);
  Random stream(seed);
  auto bad = axis(20, 3);
  bad[7] = std::numeric_limits<double>::quiet_NaN();
  for (int i = 0; i < 40; ++i) {
    const auto key = unit(stream, 24), value = unit(stream, 20);
    for (Tracked* s : {&alone, &one, &ill}) {
      HostTeam& team = s == &alone ? alone.team : one.team;
      if (s->view.due()) REQUIRE(compact(team, s->view) == Status::ok);
      const auto k = narrow<float>(key), v = narrow<float>(value);
      const std::vector<float> g(24, -0.1f);
      REQUIRE(advance(team, s->view, Token<float>{k.data(), v.data(), g.data(), 0.5f}) ==
              Status::ok);
    }
    // A third state of the batch is given a token that is refused, between the two others.
    if (ill.view.due()) continue;
    CHECK(ill.try_advance(key, bad, {-0.1}) == Status::non_finite_input);
  }
  CHECK(bytes_of(config, one.view) == bytes_of(config, alone.view));
  CHECK(bytes_of(config, ill.view) == bytes_of(config, alone.view));
}

TEMPLATE_TEST_CASE("B80: one token on a zero state, no rank to speak of, room for one term",
                   "[faults]", Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>,
                   Local32<Mamba2>, Local32<KimiDelta>) {
  SECTION("the first token") {
    TrackedState<TestType> s(config_of(16, 12));
    s.step(axis(16, 3), axis(12, 4), {-1});
    s.compact();
    CHECK(s.view.rank() == 1);
    CHECK(s.strength(0) == 1);
    s.check_exact();
  }
  SECTION("everything below the threshold of the sink") {
    using S = Full32<typename TestType::Rule, MeanValueSink>;
    TrackedState<S> s(config_of(16, 12, 0.1), axis(12, 0));
    auto value = axis(12, 0);
    value[1] = 0.05;
    s.step(axis(16, 3), value, {0});
    const CompactionReport report = s.compact();
    CHECK(s.view.rank() == 0);
    CHECK(report.dropped == Catch::Approx(0.05).epsilon(1e-5));
    CHECK(s.error() == Catch::Approx(0.05).epsilon(1e-5));
    s.check_certificate();
  }
  SECTION("room for one term") {
    StateConfig config = config_of(16, 12);
    config.rank_cap = 1;
    config.dense_fallback = false;
    TrackedState<TestType> s(config);
    s.step(axis(16, 0), axis(12, 0, 3), {0});
    s.step(axis(16, 1), axis(12, 1, 2), {0});
    const CompactionReport report = s.compact();
    CHECK(report.capped);
    CHECK(s.view.rank() == 1);
    CHECK(s.strength(0) == Catch::Approx(3.0).epsilon(1e-6));
    CHECK(report.dropped >= 2);
    CHECK(report.dropped == Catch::Approx(2.0).epsilon(1e-5));
    s.check_certificate();
  }
  SECTION("one number, one row, one column") {
    const std::uint64_t seed = test_seed();
    INFO(seed_note(seed));
    const auto [d_k, d_v] = GENERATE(std::pair<Index, Index>{1, 1}, std::pair<Index, Index>{1, 7},
                                     std::pair<Index, Index>{7, 1});
    CAPTURE(d_k, d_v);
    StateConfig config = config_of(d_k, d_v);
    config.dense_fallback = GENERATE(false, true);
    Random random(seed);
    TrackedState<TestType> s(config);
    feed(s, random, 20, {-0.1});
    s.compact();
    s.check_factors();
    s.check_exact();
  }
}

TEMPLATE_TEST_CASE("B81, B83: an exact duplicate adds no column; cores of one and two", "[faults]",
                   Full32<Mamba2>, Local32<Mamba2>, Fixed32<Mamba2>) {
  TrackedState<TestType> s(config_of(16, 12, 0, 1));
  s.step(axis(16, 2, 0.5), axis(12, 3, 3), {0});
  s.compact();
  CHECK(s.view.rank() == 1);
  s.step(axis(16, 2, 0.5), axis(12, 3, 3), {0});
  s.compact();
  CHECK(s.view.rank() == 1);
  CHECK(s.strength(0) == 3);
  s.step(axis(16, 4), axis(12, 1), {0});
  s.compact();
  CHECK(s.view.rank() == 2);
  s.check_factors();
  s.check_exact(1);
}

TEMPLATE_TEST_CASE("B84: a new token stronger than the body goes to the front with its vectors",
                   "[faults]", Full32<Mamba2>, Local32<Mamba2>, Fixed32<Mamba2>) {
  TrackedState<TestType> s(config_of(16, 12));
  s.step(axis(16, 0), axis(12, 0, -1), {0});
  s.compact();
  s.step(axis(16, 1), axis(12, 1, 5), {0});
  s.step(axis(16, 2), axis(12, 2, 3), {0});
  s.compact();
  REQUIRE(s.view.rank() == 3);
  const double strengths[] = {5, 3, 1}, signs[] = {1, 1, -1};
  const Index axes[] = {1, 2, 0};
  for (Index i = 0; i < 3; ++i) {
    const auto key = s.view.factors.keys().row(i), value = s.view.factors.values().row(i);
    CHECK(s.strength(i) == Catch::Approx(strengths[i]).epsilon(1e-6));
    CHECK(static_cast<double>(key[axes[i]] * value[axes[i]]) ==
          Catch::Approx(signs[i]).epsilon(1e-6));
  }
}

TEMPLATE_TEST_CASE("B87: a state that fades away ends at zero, without subnormal numbers",
                   "[faults]", Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>,
                   Dense32<Mamba2>, Local32<Mamba2>, Local32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<TestType> s(config_of(16, 12));
  feed(s, random, 8, {0});
  int subnormal_at = 0;
  for (int i = 1; i <= 2000; ++i) {
    s.step(unit(random, 16), unit(random, 12), {std::log(0.9)}, 0);
    if (subnormal_at == 0 && !normal_or_zero(s)) subnormal_at = i;
  }
  s.compact();
  CHECK(subnormal_at == 0);
  CHECK(s.stored().isZero(0));
  CHECK(s.view.rank() == 0);
  s.check_certificate();
}

TEMPLATE_TEST_CASE("a term decayed to the smallest numbers beside a fresh one", "[faults]",
                   Full32<Mamba2>, Full32<KimiDelta>, Local32<Mamba2>, Local32<KimiDelta>) {
  // exp(-87) is a normal number, its product with the rest of a term need not be one.
  for (const double log_decay : {-60.0, -70.0, -80.0, -84.0, -86.0, -87.0}) {
    CAPTURE(log_decay);
    TrackedState<TestType> s(config_of(8, 8));
    s.step(axis(8, 0, 0.1), axis(8, 0, 0.1), {0});
    s.step(axis(8, 1), axis(8, 1), {log_decay});
    s.compact();
    CHECK(s.view.rank() == 1);
    CHECK(s.stored().allFinite());
    s.check_factors();
    s.check_exact();
  }
}
