// Initialisation from a dense matrix by the randomized block SVD: nothing missed, nothing silent.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class T>
using PolicyOf = Policy<Mamba2, Host, std::conditional_t<std::is_same_v<T, float>, Fp32, Fp64>>;

struct Outcome {
  CompactionReport report;
  Matrix keys;
  Matrix values;
  std::vector<double> strengths;
  Matrix stored;  // the state as a dense matrix
  Matrix error;   // stored - given
  double certificate;
};

template <class T, class Method = RandomizedSvd>
Outcome initialize_from(const Matrix& dense, const StateConfig& config, const Method& method = {}) {
  using P = PolicyOf<T>;
  Rows<T> given = dense.cast<T>();
  SinkState<P> state(config);
  HostTeam team(workspace_bytes<P>(config, method));
  const auto view = state.view();
  Outcome outcome;
  REQUIRE(initialize(team, view, view_of(given), method, T(0), &outcome.report) == Status::ok);

  outcome.keys = wide(view.factors.keys());
  outcome.values = wide(view.factors.values());
  for (Index i = 0; i < view.rank(); ++i) {
    outcome.strengths.push_back(static_cast<double>(view.factors.strengths[i]));
  }
  Rows<T> stored(config.d_k, config.d_v);
  T certificate = 0;
  REQUIRE(materialize(team, view, view_of(stored), &certificate) == Status::ok);
  outcome.stored = stored.template cast<double>();
  outcome.error = outcome.stored - given.template cast<double>();
  outcome.certificate = static_cast<double>(certificate);

  // Whatever happened, it was said.
  CHECK(outcome.error.norm() <= outcome.certificate);
  CHECK(outcome.report.rank_after == view.rank());
  CHECK(outcome.report.dense == view.dense());
  const double rounding =
      64 * static_cast<double>(std::numeric_limits<T>::epsilon()) * dense.norm();
  CHECK(std::abs(outcome.error.norm() - outcome.report.dropped) <= rounding);
  CHECK(orthogonality_error(outcome.keys) <= orthogonality_bound<T>);
  CHECK(orthogonality_error(outcome.values) <= orthogonality_bound<T>);
  CHECK(std::is_sorted(outcome.strengths.rbegin(), outcome.strengths.rend()));
  return outcome;
}

StateConfig config_of(Index d_k, Index d_v, double epsilon = 1e-2, bool dense_fallback = false) {
  StateConfig config;
  config.d_k = d_k;
  config.d_v = d_v;
  config.epsilon = epsilon;
  config.dense_fallback = dense_fallback;
  return config;
}

// `strong` values from 1 downwards, then `count` values of `share`.
std::vector<double> cluster(int strong, int count, double share) {
  std::vector<double> values = geometric(strong, 0.1);
  values.insert(values.end(), static_cast<std::size_t>(count), share);
  return values;
}

}  // namespace

TEMPLATE_TEST_CASE("randomized svd: a decaying spectrum, wide and tall", "[randomized_svd]", float,
                   double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const auto& [d_k, d_v] : {std::pair<Index, Index>{48, 80}, {80, 48}}) {
    const Matrix dense = with_singular_values(random, d_k, d_v, geometric(40, 1e-4));
    const Outcome o = initialize_from<TestType>(dense, config_of(d_k, d_v));
    // 1e-2 is the twentieth of forty steps from 1 to 1e-4 (19.5): twenty values are above it.
    REQUIRE(o.strengths.size() == 20);
    const std::vector<double> exact = geometric(40, 1e-4);
    for (std::size_t i = 0; i < 20; ++i) CHECK(std::abs(o.strengths[i] - exact[i]) <= 1e-5);
    CHECK(spectral_norm(o.error) <= 1e-2);
    CHECK_FALSE(o.report.capped);
  }
}

TEMPLATE_TEST_CASE("randomized svd: it agrees with the exact one", "[randomized_svd]", float,
                   double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Matrix dense = with_singular_values(random, 40, 32, geometric(32, 1e-3));
  const Outcome randomized = initialize_from<TestType>(dense, config_of(40, 32));
  const Outcome exact = initialize_from<TestType>(dense, config_of(40, 32), ExactSvd{});
  REQUIRE(randomized.strengths.size() == exact.strengths.size());
  for (std::size_t i = 0; i < exact.strengths.size(); ++i) {
    CHECK(randomized.strengths[i] == Catch::Approx(exact.strengths[i]).margin(1e-5));
  }
  CHECK(spectral_norm(exact.error) <= 1e-2 * (1 + 1e-5));
}

TEST_CASE("randomized svd: pitfall 12, 80 values at .95 epsilon behind five strong ones",
          "[randomized_svd]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const double epsilon = 1e-2;
  const Matrix dense = with_singular_values(random, 128, 96, cluster(5, 80, 0.95 * epsilon));

  SECTION("room for all: the five are kept, and the error is that of the exact truncation") {
    const Outcome o = initialize_from<float>(dense, config_of(128, 96, epsilon));
    CHECK(o.strengths.size() == 5);
    CHECK(spectral_norm(o.error) <= 1.04 * epsilon);
    CHECK_FALSE(o.report.capped);
  }
  SECTION("a cap stops the search: still the five, and the report says that more was not seen") {
    StateConfig config = config_of(128, 96, epsilon);
    config.rank_cap = 8;
    const Outcome o = initialize_from<float>(dense, config);
    CHECK(o.strengths.size() >= 5);
    CHECK(o.report.capped);
    CHECK(spectral_norm(o.error) <= 1.04 * epsilon);
  }
  SECTION("the search passes the rank that pays: dense, exactly") {
    const Outcome o = initialize_from<float>(dense, config_of(128, 96, epsilon, true));
    CHECK(o.report.dense);
    CHECK(o.error.norm() == 0);
  }
}

TEST_CASE(
    "randomized svd: pitfall 12, a narrow block without power iterations misses, the default does "
    "not",
    "[randomized_svd]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const double epsilon = 1e-2;
  double narrow_block = 0, by_default = 0;
  for (std::uint64_t trial = 0; trial < 4; ++trial) {
    Random random(derived_seed(seed, trial));
    std::vector<double> values = geometric(8, 2 * epsilon);
    values.insert(values.end(), 80, 0.95 * epsilon);
    const Matrix dense = with_singular_values(random, 128, 96, values);
    StateConfig config = config_of(128, 96, epsilon);
    config.rank_cap = 8;
    const auto error = [&](RandomizedSvd options) {
      options.seed = trial;
      return spectral_norm(initialize_from<float>(dense, config, options).error) / epsilon;
    };
    narrow_block = std::max(narrow_block, error(RandomizedSvd{8, 0, 0}));
    by_default = std::max(by_default, error(RandomizedSvd{}));
  }
  CHECK(narrow_block > 1.5);  // initialize_from has checked that the certificate knows
  CHECK(by_default <= 1.04);
}

TEST_CASE("randomized svd: pitfall 12, 34 values just above epsilon are all found",
          "[randomized_svd]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Matrix dense = with_singular_values(random, 128, 96, cluster(3, 34, 1.02e-2));
  for (const Index block : {8, 16}) {
    CAPTURE(block);
    const Outcome o = initialize_from<float>(dense, config_of(128, 96), RandomizedSvd{block, 2, 0});
    CHECK(o.strengths.size() == 37);
    CHECK(o.error.norm() <= 1e-5);
  }
}

TEMPLATE_TEST_CASE("randomized svd: pitfall 12, vectors of different blocks are orthogonal",
                   "[randomized_svd]", float, double) {
  // initialize_from checks both bases; a block of 4 makes ten blocks of forty terms.
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Matrix dense = with_singular_values(random, 64, 56, geometric(40, 2e-2));
  const Outcome o = initialize_from<TestType>(dense, config_of(64, 56), RandomizedSvd{4, 2, 0});
  CHECK(o.strengths.size() == 40);
}

TEMPLATE_TEST_CASE(
    "randomized svd: pitfall 12 and B75, exactly rank-deficient, rank below the block",
    "[randomized_svd]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Matrix dense = Matrix::Zero(64, 48);
  SECTION("a block of three among zeros") {
    dense.block(10, 20, 3, 3) = 2 * orthonormal_rows(random, 3, 3);
    const Outcome o = initialize_from<TestType>(dense, config_of(64, 48, 0));
    CHECK(o.strengths.size() == 3);
    CHECK(o.error.norm() <= orthogonality_bound<TestType>);
  }
  SECTION("one entry") {
    dense(63, 0) = -5;
    const Outcome o = initialize_from<TestType>(dense, config_of(64, 48, 0));
    CHECK(o.strengths == std::vector<double>{5});
    CHECK(o.error.norm() == 0);
  }
  SECTION("nothing") {
    const Outcome o = initialize_from<TestType>(dense, config_of(64, 48, 0));
    CHECK(o.strengths.empty());
    CHECK(o.certificate == 0);
  }
  SECTION("two blocks exhausted in the third") {
    dense = with_singular_values(random, 64, 48, std::vector<double>(20, 1.0));
    const Outcome o =
        initialize_from<TestType>(dense, config_of(64, 48, 0), RandomizedSvd{8, 2, 0});
    CHECK(o.strengths.size() >= 20);
    CHECK(o.error.norm() <= 10 * orthogonality_bound<TestType>);
  }
}

TEMPLATE_TEST_CASE("randomized svd: pitfall 12, all singular values equal", "[randomized_svd]",
                   float, double) {
  const Matrix dense = 3 * Matrix::Identity(24, 24);
  SECTION("dense, because no rank that pays is enough") {
    const Outcome o = initialize_from<TestType>(dense, config_of(24, 24, 1e-2, true));
    CHECK(o.report.dense);
    CHECK(o.error.norm() == 0);
  }
  SECTION("all of them without the fallback") {
    const Outcome o = initialize_from<TestType>(dense, config_of(24, 24));
    REQUIRE(o.strengths.size() == 24);
    CHECK(o.strengths.front() - o.strengths.back() <= 3 * orthogonality_bound<TestType>);
    CHECK(o.error.norm() <= 10 * orthogonality_bound<TestType>);
  }
  SECTION("a cap takes what it may and says so") {
    StateConfig config = config_of(24, 24);
    config.rank_cap = 10;
    const Outcome o = initialize_from<TestType>(dense, config);
    CHECK(o.strengths.size() == 10);
    CHECK(o.report.capped);
    CHECK(o.report.dropped == Catch::Approx(3 * std::sqrt(14.0)).epsilon(1e-5));
  }
}

TEST_CASE("randomized svd: pitfall 12, a rank above the break-even goes dense",
          "[randomized_svd]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = config_of(48, 32, 1e-2, true);
  const Index pays = config.paying_rank();
  REQUIRE(pays == 19);  // 19 * 80 < 48 * 32 = 1536 < 20 * 80
  for (const auto& [rank, dense] : {std::pair<Index, bool>{pays, false}, {pays + 1, true}}) {
    CAPTURE(rank);
    const Matrix given = with_singular_values(random, 48, 32, geometric(rank, 0.1));
    // The last block must reach past the rank, or the search ends at the capacity in doubt.
    const Outcome o = initialize_from<float>(given, config, RandomizedSvd{rank + 4, 2, 0});
    CHECK(o.report.dense == dense);
  }
}

TEMPLATE_TEST_CASE("randomized svd: pitfall 6, values of 1e-25 and 1e+25", "[randomized_svd]",
                   float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const double scale : {1e-25, 1e+25}) {
    CAPTURE(scale);
    Random random(seed);
    const Matrix dense = scale * with_singular_values(random, 40, 32, geometric(12, 3e-2));
    const Outcome o = initialize_from<TestType>(dense, config_of(40, 32));
    CHECK(o.strengths.size() == 12);
    CHECK(o.error.norm() <= orthogonality_bound<TestType> * scale);
  }
}

TEST_CASE("randomized svd: the seed chooses the sketch, the bits follow from it",
          "[randomized_svd]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Matrix dense = with_singular_values(random, 40, 32, geometric(32, 1e-4));
  const auto run = [&](std::uint64_t sketch) {
    return initialize_from<float>(dense, config_of(40, 32), RandomizedSvd{4, 1, sketch});
  };
  const Outcome a = run(1), again = run(1), b = run(2);
  CHECK(a.stored == again.stored);
  CHECK(a.stored != b.stored);
  CHECK(a.strengths.size() == b.strengths.size());
}

TEMPLATE_TEST_CASE("randomized svd: states of one number, one row and one column",
                   "[randomized_svd]", float, double) {
  for (const bool fallback : {false, true}) {
    CAPTURE(fallback);
    for (const auto& [d_k, d_v] : {std::pair<Index, Index>{1, 1}, {1, 9}, {9, 1}, {2, 2}, {3, 2}}) {
      CAPTURE(d_k, d_v);
      const Matrix dense = Matrix::Constant(d_k, d_v, 0.75);
      const Outcome o = initialize_from<TestType>(dense, config_of(d_k, d_v, 1e-2, fallback));
      CHECK(o.error.norm() <= 4 * orthogonality_bound<TestType>);
    }
  }
}
