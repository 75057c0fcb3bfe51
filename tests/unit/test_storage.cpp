// Bodies, sinks and buffers in narrow formats: what is stored, what is refused, and that it is the same everywhere.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/same_state.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

namespace own = sinkstate::detail;
using own::RowRounding;
using own::StoredAs;

template <class Format>
struct OwnedRows {
  OwnedRows(Index rows, Index cols)
      : codes(static_cast<std::size_t>(rows * cols)), scales(static_cast<std::size_t>(rows), 1.0f) {
    view = {{codes.data(), rows, cols, cols}, {scales.data(), rows, 1, 1}};
  }
  std::vector<typename Format::Code> codes;
  std::vector<float> scales;
  NarrowRows<Format> view;
};

// Vectors with small and large entries, of both signs, of many sizes.
std::vector<float> ragged(Random& random, Index n, double size) {
  std::vector<float> x;
  for (Index i = 0; i < n; ++i) {
    x.push_back(static_cast<float>(size * random.normal() * std::pow(10.0, -4 * random.uniform())));
  }
  return x;
}

template <class Format>
std::vector<float> stored(HostTeam& team, const NarrowRows<Format>& rows, Index i,
                          const std::vector<float>& x, const RowRounding& rounding) {
  own::write_row(team, rows, i, x.data(), rounding);
  std::vector<float> y(x.size());
  own::read_row(team, rows, i, y.data());
  return y;
}

RowRounding stochastic(std::uint64_t seed) { return {Rounding::stochastic, Philox{seed}, 1, 0}; }

using Wide = Policy<Mamba2, Host, Fp32, FullSvd>;
template <class Precision, class Rule = Mamba2, class Compaction = FullSvd, class Sink = NoSink>
using Narrow = Policy<Rule, Host, Precision, Compaction, Sink>;

// A state of a matrix, bit by bit what the verbs made of it.
template <class P>
struct Made {
  explicit Made(const StateConfig& sizes, const float* direction = nullptr)
      : state(sizes, direction), view(state.view()), team(workspace_bytes<P>(sizes)) {}
  Status set(const Matrix& dense) {
    const Rows<float> own = dense.cast<float>();
    return initialize(team, view,
                      MatrixView<const float>{own.data(), own.rows(), own.cols(), own.cols()},
                      RandomizedSvd{});
  }
  Matrix matrix() {
    Rows<float> dense(view.config.d_k, view.config.d_v);
    REQUIRE(materialize(team, view, view_of(dense)) == Status::ok);
    return dense.template cast<double>();
  }
  SinkState<P> state;
  SinkStateView<P> view;
  HostTeam team;
};

}  // namespace

TEMPLATE_TEST_CASE("storage: a stored vector is stored again without a change", "[storage]",
                   Float16, BFloat16, Float8E4M3) {
  using Format = TestType;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  HostTeam team(0);
  for (std::uint64_t run = 0; run < 2000; ++run) {
    const Index n = 1 + static_cast<Index>(run % 70);
    // Without a scale only sizes within the format's range make sense.
    const double size = StoredAs<Format>::scaled ? std::pow(10.0, 40 * random.uniform() - 20)
                                                 : std::pow(10.0, 6 * random.uniform() - 3);
    const std::vector<float> x = ragged(random, n, size);
    OwnedRows<Format> rows(1, n);
    const RowRounding rounding = run % 2 == 0 ? RowRounding{} : stochastic(run);
    const std::vector<float> once = stored(team, rows.view, 0, x, rounding);
    INFO("run " << run << ", " << n << " numbers of size " << size);
    CHECK(stored(team, rows.view, 0, once, stochastic(run + 1)) == once);
    CHECK(stored(team, rows.view, 0, once, RowRounding{}) == once);

    // Nothing saturates, and an error is below one step of the format.
    const float largest = *std::max_element(
        x.begin(), x.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
    const float step = std::ldexp(1.0f, -Format::fraction_bits) * (run % 2 == 0 ? 0.5f : 1.0f);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float small = StoredAs<Format>::scaled ? std::abs(largest) * 1e-5f : 6e-8f;
      CHECK(std::abs(once[i] - x[i]) <= step * std::abs(x[i]) + small);
    }
    if (StoredAs<Format>::scaled) {
      int exponent = 0;
      CHECK(std::frexp(rows.scales[0], &exponent) == 0.5f);
    }
  }
}

TEST_CASE("storage: zeros, one entry, and the largest and least float in fp8", "[storage]") {
  HostTeam team(0);
  OwnedRows<Float8E4M3> rows(2, 3);
  for (const std::vector<float>& x : std::vector<std::vector<float>>{
           {0, 0, 0}, {0, 448, 0}, {0, -449, 0}, {224, 0, 0}, {0, 0, 1}, {1e-30f, 0, 0}}) {
    const std::vector<float> y = stored(team, rows.view, 1, x, {});
    for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(y[i] - x[i]) <= std::abs(x[i]) / 16);
  }
  const float most = std::ldexp(1.75f, 127);
  const float more[3] = {0, std::nextafter(most, INFINITY), 0};
  CHECK(own::fits<Float8E4M3>(team, 3, more) == false);
  CHECK(own::fits<Float8E4M3>(team, 1, &most));
  CHECK(stored(team, rows.view, 0, {0, most, 0}, {}) == std::vector<float>{0, most, 0});
}

TEST_CASE("storage: stochastic rounding is the same everywhere", "[storage]") {
  // Codes from an independent implementation of Philox 4x32-10 and of the formats.
  HostTeam team(0);
  const std::vector<float> x{0.1f, -0.2f, 0.3f, -0.4f, 0.5f, -0.6f, 0.7f, -0.8f};
  OwnedRows<Float8E4M3> rows(1, 8);
  const RowRounding rounding{Rounding::stochastic, Philox{42}, 3, 5};
  stored(team, rows.view, 0, x, rounding);
  CHECK(rows.scales[0] == std::ldexp(1.0f, -9));
  CHECK(rows.codes == std::vector<std::uint8_t>{0x65, 0xED, 0x71, 0xF5, 0x78, 0xFA, 0x7B, 0xFD});
  // In parts, each a whole number of blocks, as a team of several hands would do it.
  std::vector<std::uint8_t> parts(8);
  rounding(Float8E4M3{}, 4, 8, 512.0f, x.data(), parts.data());
  rounding(Float8E4M3{}, 0, 4, 512.0f, x.data(), parts.data());
  CHECK(parts == rows.codes);
}

TEST_CASE("storage: a term keeps the product that its rounded vectors fit best", "[storage]") {
  // (0.6, 0.8) in e4m3, times 256: 153.6 becomes 160 and 204.8 becomes 208. The share of the key is
  // (96 + 166.4) / (0.390625 + 0.66015625) / 256 = 0.97546..., of the exact value e0 it is 1.
  StateConfig config = config_of(2, 2);
  config.dense_fallback = false;
  Made<Narrow<Fp8>> made(config);
  Matrix dense(2, 2);
  dense << 6, 0, 8, 0;
  REQUIRE(made.set(dense) == Status::ok);
  REQUIRE(made.view.rank() == 1);
  const double k0 = 160.0 / 256, k1 = 208.0 / 256;
  const double share = (0.6 * k0 + 0.8 * k1) / (k0 * k0 + k1 * k1);
  CHECK(std::abs(made.view.factors.keys()(0, 0)) == 0.625f);
  CHECK(std::abs(made.view.factors.keys()(0, 1)) == 0.8125f);
  CHECK(made.view.factors.strengths[0] == Catch::Approx(10 * share).epsilon(1e-6));
  const double error = (made.matrix() - dense).norm();
  CHECK(made.view.certificate() >= error);
  CHECK(made.view.certificate() <= 1.001 * error);
}

// In blocks of sixteen, each row with the scale that is its own.
TEMPLATE_TEST_CASE("storage: a read-out is the product with the matrix, over several blocks",
                   "[storage]", (Narrow<Fp8, Mamba2, LocalSvd, MeanValueSink>),
                   (Narrow<Fp8, Mamba2, DenseBuffered, MeanValueSink>),
                   (Narrow<Precision<float, Float8E4M3, BFloat16>, KimiDelta>),
                   (Narrow<Precision<float, Float16, Float16>, GatedDelta, DenseBuffered>)) {
  using P = TestType;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = config_of(40, 36, 1e-3, 24);
  config.dense_fallback = false;
  TrackedState<P> s(config, P::Sink::present ? unit(random, 36) : std::vector<double>{});
  for (int t = 0; t < 24 + 20; ++t) {
    // Sizes that differ, so that no two rows have the same scale by chance.
    s.step(unit(random, 40), unit(random, 36), {-0.01}, std::pow(0.8, t % 24));
  }
  REQUIRE((s.view.dense() || s.view.rank() > 16));
  REQUIRE(s.view.buffered() > 16);
  const std::vector<double> query = unit(random, 40);
  const std::vector<double> read = s.read(query);
  const Matrix wanted = Eigen::Map<const Matrix>(query.data(), 1, 40) * s.stored();
  const Matrix got = Eigen::Map<const Matrix>(read.data(), 1, 36);
  CHECK((got - wanted).norm() <= 1e-5 * s.largest);
}

TEMPLATE_TEST_CASE("storage: what rounding changes is bounded, and not by much", "[storage]", Fp16,
                   Bf16, Fp8) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    StateConfig config = config_of(24, 20, 0, 8);
    config.rounding = rounding;
    config.dense_fallback = false;
    TrackedState<Narrow<TestType>> s(config);
    feed(s, random, 8);
    const Matrix before = s.stored();
    const CompactionReport report = s.compact();
    REQUIRE(s.view.rank() == 8);
    const double change = (s.stored() - before).norm();
    CHECK(change <= report.rounded);
    CHECK(report.rounded <= 2 * change);
    s.check_certificate();
  }
}

TEMPLATE_TEST_CASE("storage: frozen terms are rounded once", "[storage]", Fp16, Bf16, Fp8) {
  for (const Rounding rounding : {Rounding::nearest, Rounding::stochastic}) {
    StateConfig config = config_of(16, 16, 1e-3, 1);
    config.active = 1;
    config.recompress_growth = 0;
    config.dense_fallback = false;
    config.rounding = rounding;
    TrackedState<Narrow<TestType, Mamba2, LocalSvd>> s(config);
    // Five terms that later ones leave alone: the strongest alone is decomposed with each token.
    const std::uint64_t seed = test_seed();
    INFO(seed_note(seed));
    Random random(seed);
    for (int i = 0; i < 5; ++i) s.step(unit(random, 16), unit(random, 16), {0}, std::pow(0.5, i));
    s.compact();
    const auto term = [&](Index i) {
      std::vector<float> numbers;
      for (Index j = 0; j < 16; ++j) {
        numbers.push_back(s.view.factors.keys()(i, j));
        numbers.push_back(s.view.factors.values()(i, j));
      }
      return numbers;
    };
    const std::vector<float> weakest = term(s.view.rank() - 1);
    const float strength = s.view.factors.strengths[s.view.rank() - 1];
    for (int i = 0; i < 50; ++i) {
      s.step(unit(random, 16), unit(random, 16), {i == 0 ? std::log(0.5) : 0}, 1e-7);
      const CompactionReport report = s.compact();
      REQUIRE(report.decomposed == 2);
    }
    CHECK(term(s.view.rank() - 1) == weakest);
    CHECK(s.view.factors.strengths[s.view.rank() - 1] == strength / 2);
    s.check_certificate();
  }
}

TEST_CASE("storage: stochastic rounding has no bias and nearest does not look at the seed",
          "[storage]") {
  using P = Narrow<Bf16, Mamba2, DenseBuffered>;
  StateConfig config = config_of(4, 5);
  const Matrix dense = Matrix::Constant(4, 5, 1.0 + 0.3 / 128);  // 0.3 of a step above 1
  constexpr int seeds = 2000;
  double sum = 0;
  for (int seed = 0; seed < seeds; ++seed) {
    config.rounding = Rounding::stochastic;
    config.seed = static_cast<std::uint64_t>(seed);
    Made<P> made(config);
    REQUIRE(made.set(dense) == Status::ok);
    sum += (made.matrix().array() - 1.0).sum() * 128 / 20;
    config.rounding = Rounding::nearest;
    Made<P> nearest(config);
    REQUIRE(nearest.set(dense) == Status::ok);
    CHECK(nearest.matrix() == Matrix::Constant(4, 5, 1.0));
  }
  // 40,000 draws of mean 0.3: five standard deviations.
  CHECK(sum / seeds == Catch::Approx(0.3).margin(5 * std::sqrt(0.21 / (20 * seeds))));
}

TEMPLATE_TEST_CASE("storage: the same arguments give the same bits, another seed others",
                   "[storage]", (Narrow<Fp8, KimiDelta, LocalSvd>),
                   (Narrow<Bf16, GatedDelta, DenseBuffered>), (Narrow<Fp16, Mamba2, FixedRank>)) {
  using P = TestType;
  const auto run = [](std::uint64_t seed, TrackedState<P>& s) {
    (void)seed;
    Random random(7);
    for (int i = 0; i < 5; ++i) {
      feed(s, random, 8);
      s.compact();
    }
  };
  StateConfig config = config_of(12, 10, 1e-3);
  config.rounding = Rounding::stochastic;
  config.rank_cap = 12;
  TrackedState<P> a(config), b(config);
  run(0, a);
  run(0, b);
  CHECK(same_state(a.view, b.view));
  config.seed = 1;
  TrackedState<P> c(config);
  run(1, c);
  CHECK_FALSE(same_state(a.view, c.view));
}

TEST_CASE("B48: the sizes of terms are not narrow, and vectors are scaled", "[storage]") {
  Made<Narrow<Fp16>> half(config_of(3, 4));
  Made<Narrow<Fp8>> eighth(config_of(3, 4));
  for (const double size : {1e-4, 1e3, 1e6, 1e30}) {
    Matrix dense = Matrix::Zero(3, 4);
    dense(2, 3) = size;
    CHECK(half.set(dense) == Status::ok);
    CHECK((half.matrix() - dense).norm() <= 1e-6 * size);
    CHECK(eighth.set(dense) == Status::ok);
    CHECK((eighth.matrix() - dense).norm() <= 1e-6 * size);
  }
}

TEST_CASE("storage: what does not fit a format is refused and nothing is changed", "[storage]") {
  SECTION("a dense body") {
    using P = Narrow<Fp16, Mamba2, DenseBuffered>;
    TrackedState<P> s(config_of(3, 4));
    s.step(axis(3, 0), axis(4, 1, 60000.0));
    s.compact();
    s.step(axis(3, 0), axis(4, 1, 6000.0));
    const auto before = bytes_of(s.config, s.view);
    CHECK(compact(s.team, s.view) == Status::overflow);
    CHECK(bytes_of(s.config, s.view) == before);
    Matrix dense = Matrix::Zero(3, 4);
    dense(2, 3) = -65505;
    Made<P> made(s.config);
    CHECK(made.set(dense) == Status::overflow);
    CHECK(made.matrix() == Matrix::Zero(3, 4));
    dense(2, 3) = -65504;
    CHECK(made.set(dense) == Status::ok);
    CHECK(made.matrix() == dense);
  }
  SECTION("a sink") {
    using P = Narrow<Fp16, Mamba2, LocalSvd, MeanValueSink>;
    TrackedState<P> s(config_of(3, 4), {1e-4, 0, 0, 0});
    s.step(axis(3, 0), axis(4, 0, 10.0));  // a coefficient of 1e5
    const auto before = bytes_of(s.config, s.view);
    CHECK(compact(s.team, s.view) == Status::overflow);
    CHECK(bytes_of(s.config, s.view) == before);
    Matrix dense = Matrix::Zero(3, 4);
    dense(1, 0) = 10;
    const Rows<float> own = dense.cast<float>();
    CHECK(initialize(s.team, s.view, MatrixView<const float>{own.data(), 3, 4, 4}) ==
          Status::overflow);
    CHECK(bytes_of(s.config, s.view) == before);
  }
  SECTION("a buffered token") {
    using P = Narrow<Precision<float, Float16, Float16>>;
    TrackedState<P> s(config_of(3, 4));
    s.step(axis(3, 0), axis(4, 1));
    const Matrix before = s.stored();
    CHECK(s.try_advance(axis(3, 1, 7e4), axis(4, 1)) == Status::overflow);
    CHECK(s.try_advance(axis(3, 1), axis(4, 1, 7e4)) == Status::overflow);
    CHECK(s.try_advance(axis(3, 1), axis(4, 1, 700), {}, 100) == Status::overflow);
    CHECK(s.view.buffered() == 1);
    CHECK(s.view.record->tokens == 1);
    CHECK(s.stored() == before);
    s.check_certificate();
    CHECK(s.try_advance(axis(3, 1, 65504), axis(4, 1)) == Status::ok);
  }
}

TEST_CASE("storage: keys of an engine's own format are buffered exactly, corrections to nearest",
          "[storage]") {
  using P = Narrow<Precision<float, float, BFloat16>, GatedDelta>;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<P> s(config_of(10, 6, 0, 16));
  for (int t = 0; t < 16; ++t) {
    std::vector<double> key = unit(random, 10);
    for (double& x : key) {
      x = static_cast<double>(widen<BFloat16>(round_to_nearest<BFloat16>(static_cast<float>(x))));
    }
    s.step(key, unit(random, 6), {-0.05}, 0.7);
    for (Index i = 0; i < 10; ++i) {
      CHECK(static_cast<double>(s.view.buffer.keys(t, i)) == key[static_cast<std::size_t>(i)]);
    }
    s.check_certificate();
  }
  // Of corrections of norm at most 0.7 (1 + ...), a 256th each at most.
  CHECK(s.error() > 1e-5);
  CHECK(s.view.certificate() <= 16 * 2.0 / 256);
}

TEST_CASE("storage: step is advance and read_out, and a rollback restores a narrow buffer",
          "[storage]") {
  using P = Narrow<Precision<float, Float8E4M3, Float16>, KimiDelta, LocalSvd, MeanValueSink>;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const std::vector<double> direction = unit(random, 9);
  TrackedState<P> a(config_of(11, 9, 1e-2), direction), b(config_of(11, 9, 1e-2), direction);
  for (int t = 0; t < 40; ++t) {
    const auto key = narrow<float>(unit(random, 11)), value = narrow<float>(unit(random, 9)),
               query = narrow<float>(unit(random, 11));
    const std::vector<float> decays(11, -0.1f);
    const Token<float> token{key.data(), value.data(), decays.data(), 0.6f};
    std::vector<float> read(9), stepped(9);
    REQUIRE(advance(a.team, a.view, token) == Status::ok);
    REQUIRE(roll_back(a.view, 1) == Status::ok);
    REQUIRE(same_state(a.view, b.view));
    REQUIRE(advance(a.team, a.view, token) == Status::ok);
    REQUIRE(read_out(a.team, a.view, query.data(), read.data()) == Status::ok);
    REQUIRE(step(b.team, b.view, token, query.data(), stepped.data()) == Status::ok);
    CHECK(same_state(a.view, b.view));
    for (std::size_t j = 0; j < 9; ++j) {
      CHECK(std::abs(read[j] - stepped[j]) <= 1e-5f);
    }
    if (!a.view.due()) continue;
    a.compact();
    b.compact();
  }
}
