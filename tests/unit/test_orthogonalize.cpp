// Gram-Schmidt on the inputs that break other orthogonalisations. R Q = A holds for a wrong Q too,
// so every case looks at Q Q^T.
#include <algorithm>
#include <cmath>
#include <limits>
#include <sinkstate/algorithm/orthogonalize.hpp>
#include <sinkstate/algorithm/sink_split.hpp>
#include <sinkstate/host/host_team.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class T>
struct Factorization {
  Rows<T> q;
  Rows<T> r;
  Index count;

  Matrix basis() const { return q.topRows(count).template cast<double>(); }
  Matrix product() const { return r.leftCols(count).template cast<double>() * basis(); }
};

template <class T>
Factorization<T> factorize(const Rows<T>& a, Index orthonormal = 0) {
  const Index most = std::min(a.rows(), a.cols());
  Factorization<T> f{a, Rows<T>::Constant(a.rows(), most, T(7)), 0};
  HostTeam team(0);
  std::vector<T> scratch(static_cast<std::size_t>(most));
  f.count = sinkstate::detail::orthogonalize(team, view_of(f.q), orthonormal, view_of(f.r),
                                             scratch.data());
  return f;
}

// Each row against its own norm, so that a small one next to a large one counts.
template <class T>
double largest_row_error(const Factorization<T>& f, const Rows<T>& a) {
  const Matrix exact = a.template cast<double>();
  const Matrix error = f.product() - exact;
  double largest = 0;
  for (Index i = 0; i < a.rows(); ++i) {
    const double norm = exact.row(i).norm();
    const double relative = norm > 0 ? error.row(i).norm() / norm : error.row(i).norm();
    if (!(relative <= largest)) largest = relative;
  }
  return largest;
}

template <class T>
void check(const Matrix& wide_a, Index expected_count) {
  const Rows<T> a = wide_a.cast<T>();
  const Factorization<T> f = factorize(a);
  CHECK(f.count == expected_count);
  CHECK(orthogonality_error(f.basis()) <= orthogonality_bound<T>);
  // A dependent row leaves out up to 10 u of itself.
  CHECK(largest_row_error(f, a) <= 16 * std::numeric_limits<T>::epsilon());
}

}  // namespace

TEMPLATE_TEST_CASE("orthogonalize: ill-conditioned rows", "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const double condition : {1e3, 1e4, 1e6}) {
    CAPTURE(condition);
    check<TestType>(with_singular_values(random, 16, 128, geometric(16, 1 / condition)), 16);
  }
}

TEMPLATE_TEST_CASE("orthogonalize: condition 1e8, past what fp32 can tell from dependence",
                   "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Rows<TestType> a =
      with_singular_values(random, 16, 128, geometric(16, 1e-8)).cast<TestType>();
  const auto f = factorize(a);
  CHECK(f.count >= 12);
  CHECK(orthogonality_error(f.basis()) <= orthogonality_bound<TestType>);
  CHECK(largest_row_error(f, a) <= 16 * std::numeric_limits<TestType>::epsilon());
}

TEMPLATE_TEST_CASE("orthogonalize: dependent rows get no direction of their own", "[orthogonalize]",
                   float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Matrix a = random_rows(random, 16, 128);

  SECTION("pitfall 2: eight equal rows") {
    for (Index i = 9; i < 16; ++i) a.row(i) = a.row(8);
    check<TestType>(a, 9);
  }
  SECTION("pitfall 2: nothing but equal rows") {
    for (Index i = 1; i < 16; ++i) a.row(i) = a.row(0);
    check<TestType>(a, 1);
  }
  SECTION("pitfall 4: eight rows inside the span of the others") {
    a.topRows(8) = orthonormal_rows(random, 8, 128);
    a.bottomRows(8) = random_rows(random, 8, 8) * a.topRows(8);
    // Rounded to fp32 they leave the span by about u, which 10 u has to cover.
    check<TestType>(a, 8);
  }
  SECTION("zero rows, the first among them") {
    for (const Index zero : {0, 5, 6, 15}) a.row(zero).setZero();
    check<TestType>(a, 12);
  }
  SECTION("multiples and opposites") {
    a.row(3) = -2 * a.row(1);
    a.row(9) = 4 * a.row(1);
    check<TestType>(a, 14);
  }
  SECTION("all zero") { check<TestType>(Matrix::Zero(4, 7), 0); }
}

TEMPLATE_TEST_CASE("orthogonalize: nearly dependent rows", "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const double distance : {1e-3, 1e-5}) {
    CAPTURE(distance);
    Matrix a = random_rows(random, 16, 128);
    for (Index i = 9; i < 16; ++i) a.row(i) = a.row(8) + distance * a.row(i);
    check<TestType>(a, 16);
  }
}

TEMPLATE_TEST_CASE("orthogonalize: rows of an earlier decomposition that are not orthogonal",
                   "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Matrix a = orthonormal_rows(random, 16, 128);
  for (Index i = 1; i < 8; ++i) a.row(i) = (a.row(0) + 0.5 * a.row(i)).normalized();
  check<TestType>(a, 16);
}

TEMPLATE_TEST_CASE("orthogonalize: row norms from 1e4 to 1e-4", "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Matrix a = random_rows(random, 16, 128);
  for (Index i = 0; i < 16; ++i) a.row(i) *= std::pow(10.0, 4 - 8 * static_cast<double>(i) / 15);
  SECTION("falling") { check<TestType>(a, 16); }
  SECTION("rising") { check<TestType>(a.colwise().reverse(), 16); }
}

TEMPLATE_TEST_CASE("orthogonalize: more rows than dimensions", "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  check<TestType>(random_rows(random, 16, 8), 8);
  check<TestType>(random_rows(random, 5, 1), 1);
  check<TestType>(random_rows(random, 1, 1), 1);
}

TEMPLATE_TEST_CASE("orthogonalize: coefficients are lower triangular and fully written",
                   "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Rows<TestType> a = random_rows(random, 6, 9).cast<TestType>();
  const auto f = factorize(a);
  for (Index j = 0; j < 6; ++j) {
    CHECK(f.r(j, j) > 0);
    for (Index i = j + 1; i < 6; ++i) CHECK(f.r(j, i) == 0);
  }
}

TEMPLATE_TEST_CASE("orthogonalize: an orthonormal beginning keeps its bits", "[orthogonalize]",
                   float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Rows<TestType> a(12, 40);
  a.topRows(5) = orthonormal_rows(random, 5, 40).cast<TestType>();
  a.bottomRows(7) = random_rows(random, 7, 40).cast<TestType>();
  a.row(8) = a.row(2);  // found already
  const auto f = factorize(a, 5);
  CHECK(f.count == 11);
  CHECK(f.q.topRows(5) == a.topRows(5));
  CHECK((f.r.topRows(5).array() == TestType(7)).all());  // not touched
  CHECK(orthogonality_error(f.basis()) <= orthogonality_bound<TestType>);
}

TEMPLATE_TEST_CASE(
    "orthogonalize: a row with NaN or infinity gets no direction, others keep theirs",
    "[orthogonalize]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity()}) {
    CAPTURE(bad);
    Random random(seed);
    Rows<TestType> a = random_rows(random, 6, 20).cast<TestType>();
    a(2, 11) = static_cast<TestType>(bad);
    const auto f = factorize(a);
    CHECK(f.count == 5);
    CHECK(orthogonality_error(f.basis()) <= orthogonality_bound<TestType>);
  }
}

// A value that is nearly the direction: what one pass leaves along it is as large as the rest.
TEMPLATE_TEST_CASE("sink split: the rest is orthogonal to the direction", "[orthogonalize]", float,
                   double) {
  using T = TestType;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  HostTeam team(0);
  for (int run = 0; run < 50; ++run) {
    const Rows<T> rows = random_rows(random, 2, 40).template cast<T>();
    std::vector<T> value(40);
    for (Index j = 0; j < 40; ++j) {
      value[static_cast<std::size_t>(j)] =
          3 * rows(0, j) + 8 * std::numeric_limits<T>::epsilon() * rows(1, j);
    }
    sinkstate::detail::SinkSplit<T> split;
    split.prepare(team, 40, rows.data());
    const T omega = split.split(team, value.data());
    CHECK(std::abs(omega - 3) <= 100 * std::numeric_limits<T>::epsilon());
    const T along = team.dot(40, value.data(), rows.data()) / team.norm(40, rows.data());
    CHECK(std::abs(along) <= 0.01 * team.norm(40, value.data()));
  }
}
