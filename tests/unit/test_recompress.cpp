// The decomposition of a list of terms against Eigen: product, strengths and both bases.
#include <cmath>
#include <cstddef>
#include <limits>
#include <sinkstate/algorithm/recompress.hpp>
#include <sinkstate/core/owner.hpp>
#include <sinkstate/host/host_team.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// sum_i weights_i keys_i values_i^T
struct Terms {
  Matrix keys;
  Matrix values;
  std::vector<double> weights;

  Matrix sum() const {
    const Eigen::Map<const Eigen::VectorXd> w(weights.data(), keys.rows());
    return keys.transpose() * w.asDiagonal() * values;
  }
};

Terms random_terms(Random& random, Index count, Index d_k, Index d_v) {
  return {random_rows(random, count, d_k), random_rows(random, count, d_v),
          std::vector<double>(static_cast<std::size_t>(count), 1.0)};
}

// Eight orthonormal terms of an earlier decomposition and eight tokens: what a compaction sees.
Terms body_and_buffer(Random& random, Index d_k = 48, Index d_v = 40) {
  Terms terms = random_terms(random, 16, d_k, d_v);
  terms.keys.topRows(8) = orthonormal_rows(random, 8, d_k);
  terms.values.topRows(8) = orthonormal_rows(random, 8, d_v);
  for (std::size_t i = 0; i < 8; ++i) terms.weights[i] = 40 / static_cast<double>(i + 1);
  return terms;
}

// What is above rounding, formed.
struct Svd {
  Matrix keys;
  Matrix values;
  Eigen::VectorXd strengths;
  int sweeps;

  Matrix product() const { return keys.transpose() * strengths.asDiagonal() * values; }
};

template <class T>
Terms rounded(const Terms& terms) {
  Terms r = terms;
  r.keys = terms.keys.cast<T>().template cast<double>();
  r.values = terms.values.cast<T>().template cast<double>();
  for (double& w : r.weights) w = static_cast<double>(static_cast<T>(w));
  return r;
}

template <class T>
Svd decompose(const Terms& terms) {
  const Index count = terms.keys.rows(), d_k = terms.keys.cols(), d_v = terms.values.cols();
  Workspace size;
  sinkstate::detail::TermList<T>::carve(size, count, d_k, d_v);
  AlignedBytes bytes(size.used());
  Workspace memory = bytes.workspace();
  auto list = sinkstate::detail::TermList<T>::carve(memory, count, d_k, d_v);
  list.count = count;
  for (Index i = 0; i < count; ++i) {
    for (Index j = 0; j < d_k; ++j) list.keys(i, j) = static_cast<T>(terms.keys(i, j));
    for (Index j = 0; j < d_v; ++j) list.values(i, j) = static_cast<T>(terms.values(i, j));
    list.weights[i] = static_cast<T>(terms.weights[static_cast<std::size_t>(i)]);
  }
  HostTeam team(0);
  const auto d = sinkstate::detail::decompose(team, list);
  const Index rank = d.above(T(0));
  Rows<T> keys(rank, d_k), values(rank, d_v);
  Eigen::VectorXd strengths(rank);
  for (Index i = 0; i < rank; ++i) {
    d.form(team, i, &keys(i, 0), &values(i, 0));
    strengths(i) = static_cast<double>(d.strength(i));
  }
  return {keys.template cast<double>(), values.template cast<double>(), strengths, d.sweeps};
}

template <class T>
void check_bases(const Svd& svd) {
  CHECK(svd.sweeps <= 12);
  CHECK(orthogonality_error(svd.keys) <= orthogonality_bound<T>);
  CHECK(orthogonality_error(svd.values) <= orthogonality_bound<T>);
  for (Index i = 0; i < svd.strengths.size(); ++i) {
    CHECK(svd.strengths(i) > 0);
    if (i > 0) CHECK(svd.strengths(i) <= svd.strengths(i - 1));
  }
}

// Errors are relative to the leading strength.
template <class T>
Svd check(const Terms& given, Index expected_rank) {
  constexpr double bound = std::is_same_v<T, float> ? 5e-6 : 1e-14;
  const Terms terms = rounded<T>(given);
  const Svd svd = decompose<T>(terms);
  check_bases<T>(svd);
  CHECK(svd.strengths.size() == expected_rank);

  const Matrix exact = terms.sum();
  const Eigen::VectorXd wanted = singular_values(exact);
  const double leading = wanted(0);
  CHECK((svd.product() - exact).norm() <= bound * leading);
  for (Index i = 0; i < svd.strengths.size(); ++i) {
    CHECK(std::abs(svd.strengths(i) - wanted(i)) <= bound * leading);
  }
  return svd;
}

}  // namespace

TEMPLATE_TEST_CASE("recompress: a body and a buffer", "[recompress]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  check<TestType>(body_and_buffer(random), 16);
  check<TestType>(body_and_buffer(random, 40, 48), 16);
}

TEMPLATE_TEST_CASE("recompress: pitfall 1, terms of the body that are not orthogonal",
                   "[recompress]", float, double) {
  // The product alone is right even for a decomposition that trusts them: s would be 1, .9, .1.
  Terms terms;
  terms.keys = Matrix::Zero(3, 5);
  terms.keys(0, 0) = 1;
  terms.keys(1, 0) = 0.8;
  terms.keys(1, 1) = 0.6;
  terms.keys(2, 2) = 1;
  terms.values = terms.keys;
  terms.weights = {1, 0.9, 0.1};
  const Svd svd = check<TestType>(terms, 3);
  CHECK(svd.strengths(0) == Catch::Approx(1.711).margin(5e-4));
  CHECK(svd.strengths(1) == Catch::Approx(0.189).margin(5e-4));
  CHECK(svd.strengths(2) == Catch::Approx(0.1).margin(1e-6));
}

TEMPLATE_TEST_CASE("recompress: pitfall 8, weak terms of one direction add up and go to the front",
                   "[recompress]", float, double) {
  Terms terms;
  terms.keys = Matrix::Zero(3, 4);
  terms.keys(0, 0) = terms.keys(1, 1) = terms.keys(2, 1) = 1;
  terms.values = terms.keys;
  terms.weights = {0.6, 0.5, 0.5};
  const Svd svd = check<TestType>(terms, 2);
  CHECK(svd.strengths(0) == Catch::Approx(1.0).margin(1e-6));
  CHECK(std::abs(svd.keys(0, 1)) == Catch::Approx(1.0).margin(1e-6));  // B84: vectors follow
  CHECK(std::abs(svd.keys(1, 0)) == Catch::Approx(1.0).margin(1e-6));
}

TEMPLATE_TEST_CASE("recompress: B84, strengths given in rising order", "[recompress]", float,
                   double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Terms terms;
  terms.keys = orthonormal_rows(random, 8, 20);
  terms.values = orthonormal_rows(random, 8, 30);
  for (int i = 0; i < 8; ++i) terms.weights.push_back(i + 1);
  check<TestType>(terms, 8);
}

TEMPLATE_TEST_CASE("recompress: pitfalls 2, 3, 4 and B81, dependent on both sides or on one",
                   "[recompress]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Terms terms = body_and_buffer(random);
  auto keys = terms.keys.bottomRows(8);
  auto values = terms.values.bottomRows(8);
  SECTION("eight equal tokens") {
    keys.rowwise() = keys.row(0).eval();
    values.rowwise() = values.row(0).eval();
    check<TestType>(terms, 9);
  }
  SECTION("same key, different values") {
    keys.rowwise() = keys.row(0).eval();
    check<TestType>(terms, 9);
  }
  SECTION("same value, different keys") {
    values.rowwise() = values.row(0).eval();
    check<TestType>(terms, 9);
  }
  SECTION("near-duplicates, 1e-3") {
    keys = keys.row(0).eval().replicate(8, 1) + 1e-3 * random_rows(random, 8, 48);
    values = values.row(0).eval().replicate(8, 1) + 1e-3 * random_rows(random, 8, 40);
    check<TestType>(terms, decompose<TestType>(rounded<TestType>(terms)).strengths.size());
  }
  SECTION("near-duplicates, 1e-5") {
    keys = keys.row(0).eval().replicate(8, 1) + 1e-5 * random_rows(random, 8, 48);
    values = values.row(0).eval().replicate(8, 1) + 1e-5 * random_rows(random, 8, 40);
    check<TestType>(terms, decompose<TestType>(rounded<TestType>(terms)).strengths.size());
  }
  SECTION("buffer inside the span of the body") {
    keys = random_rows(random, 8, 8) * terms.keys.topRows(8);
    values = random_rows(random, 8, 8) * terms.values.topRows(8);
    check<TestType>(terms, 8);
  }
  SECTION("zero tokens") {
    keys.row(0).setZero();
    values.row(3).setZero();
    terms.weights[15] = 0;
    check<TestType>(terms, 13);
  }
  SECTION("weights from 1e4 to 1e-4") {
    for (int i = 0; i < 8; ++i) {
      terms.weights[static_cast<std::size_t>(8 + i)] = std::pow(10.0, 4 - 8 * i / 7.0);
    }
    // The weakest are at the limit of fp32 next to the strongest: not all need survive.
    check<TestType>(terms, decompose<TestType>(rounded<TestType>(terms)).strengths.size());
  }
}

TEMPLATE_TEST_CASE("recompress: condition 1e3 to 1e8", "[recompress]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const double condition : {1e3, 1e4, 1e6, 1e8}) {
    CAPTURE(condition);
    Terms terms = body_and_buffer(random);
    terms.keys = with_singular_values(random, 16, 48, geometric(16, 1 / condition));
    const Svd svd = decompose<TestType>(rounded<TestType>(terms));
    CHECK(svd.strengths.size() >= 8);
    check<TestType>(terms, svd.strengths.size());
  }
}

TEMPLATE_TEST_CASE("recompress: pitfall 5, more terms than dimensions", "[recompress]", float,
                   double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  check<TestType>(random_terms(random, 16, 8, 8), 8);
  check<TestType>(random_terms(random, 16, 3, 8), 3);
  check<TestType>(random_terms(random, 16, 8, 3), 3);
  check<TestType>(random_terms(random, 9, 1, 1), 1);
}

TEMPLATE_TEST_CASE("recompress: pitfall 5, nothing at all", "[recompress]", float, double) {
  Terms terms{Matrix::Zero(4, 6), Matrix::Zero(4, 5), {1, 1, 1, 1}};
  CHECK(decompose<TestType>(terms).strengths.size() == 0);
  terms.weights = {0, 0, 0, 0};
  terms.keys.setOnes();
  terms.values.setOnes();
  CHECK(decompose<TestType>(terms).strengths.size() == 0);
}

TEMPLATE_TEST_CASE("recompress: B83, one term and two", "[recompress]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  check<TestType>(random_terms(random, 1, 12, 7), 1);
  check<TestType>(random_terms(random, 2, 12, 7), 2);
  check<TestType>(random_terms(random, 1, 1, 1), 1);
}

TEST_CASE("recompress: B69, rank 1 in 4 x 4, both ways round", "[recompress]") {
  Terms terms{Matrix::Zero(4, 4), Matrix::Zero(4, 4), {1, 1, 1, 1}};
  const double value[] = {0.3, -0.2, 0.6, 0.1};
  for (Index i = 0; i < 4; ++i) {
    terms.keys(i, i) = 1;
    for (Index j = 0; j < 4; ++j) terms.values(i, j) = static_cast<double>(i + 1) * value[j];
  }
  check<float>(terms, 1);
  std::swap(terms.keys, terms.values);
  check<float>(terms, 1);
}

TEMPLATE_TEST_CASE("recompress: pitfall 6, values of 1e-25 and 1e+25", "[recompress]", float,
                   double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const double scale = GENERATE(1e-25, 1e+25);
  CAPTURE(scale);
  Random random(seed);
  Terms terms = body_and_buffer(random);
  SECTION("on the values") { terms.values *= scale; }
  SECTION("on the keys") { terms.keys *= scale; }
  SECTION("on the weights") {
    for (double& w : terms.weights) w *= scale;
  }
  SECTION("on either side, cancelling") {
    terms.keys *= scale;
    terms.values /= scale;
  }
  check<TestType>(terms, 16);
}

TEMPLATE_TEST_CASE("recompress: pitfall 12, all singular values equal", "[recompress]", float,
                   double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Terms terms{orthonormal_rows(random, 12, 20), orthonormal_rows(random, 12, 16),
              std::vector<double>(12, 3.0)};
  check<TestType>(terms, 12);
}

TEMPLATE_TEST_CASE("recompress: pitfall 14, strengths down to 3e-3 of the first keep their vectors",
                   "[recompress]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Matrix dense = with_singular_values(random, 16, 24, geometric(16, 3e-3));
  check<TestType>(Terms{Matrix::Identity(16, 16), dense, std::vector<double>(16, 1.0)}, 16);
}

TEMPLATE_TEST_CASE("recompress: terms of every magnitude the type has", "[recompress]", float,
                   double) {
  // A decay of -87 leaves a term of 1e-38 beside a fresh one: its direction must not become 1 / 0.
  const double smallest = static_cast<double>(std::numeric_limits<TestType>::min());
  for (const double weight : {1e10 * smallest, smallest, smallest / 64, smallest / 4096}) {
    CAPTURE(weight);
    Terms terms{Matrix::Identity(2, 3), Matrix::Identity(2, 3), {1.0, weight}};
    check<TestType>(terms, 1);
    terms.weights = {weight, 1.0};
    check<TestType>(terms, 1);
  }
}

TEMPLATE_TEST_CASE("recompress: B72, B73, NaN and infinity end", "[recompress]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const double bad =
      GENERATE(std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
               -std::numeric_limits<double>::infinity());
  CAPTURE(bad);
  Random random(seed);
  Terms terms = random_terms(random, 6, 8, 7);
  SECTION("in a key") { terms.keys(2, 3) = bad; }
  SECTION("in a value") { terms.values(2, 3) = bad; }
  SECTION("in a weight") { terms.weights[2] = bad; }
  CHECK(decompose<TestType>(terms).sweeps <= 30);
}

TEST_CASE("recompress: B86, the norm of a tail does not need finished sweeps", "[recompress]") {
  // No finite input is known that exhausts the sweeps. The norm needs the rotations only, which stay orthogonal.
  const float strengths[] = {5, 3, 4};
  const Index order[] = {0, 2, 1};
  sinkstate::detail::Decomposition<float> d;
  d.strengths = strengths;
  d.order = order;
  d.count = 3;
  d.exponent = 2;
  CHECK(d.strength(1) == 16);
  CHECK(d.norm_from(1) == 20);
  CHECK(d.norm_from(3) == 0);
}

TEST_CASE("recompress: above keeps what equals the threshold and nothing below rounding",
          "[recompress]") {
  const float strengths[] = {1.0F, 0.5F, 1e-9F};
  const Index order[] = {0, 1, 2};
  sinkstate::detail::Decomposition<float> d;
  CHECK(d.above(0.0F) == 0);
  d.strengths = strengths;
  d.order = order;
  d.count = 3;
  CHECK(d.above(0.0F) == 2);
  CHECK(d.above(0.5F) == 2);
  CHECK(d.above(0.50001F) == 1);
  CHECK(d.above(2.0F) == 0);
}
