// One-sided Jacobi against Eigen.
#include <algorithm>
#include <cmath>
#include <limits>
#include <sinkstate/algorithm/small_svd.hpp>
#include <sinkstate/host/host_team.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class T>
constexpr double epsilon = std::numeric_limits<T>::epsilon();

template <class T>
struct Outcome {
  Rows<T> g;
  Rows<T> y;
  std::vector<T> s;
  int sweeps;
  bool converged;
};

template <class T>
Outcome<T> run(const Rows<T>& g, bool want_rotations = true,
               int cap = sinkstate::detail::most_sweeps) {
  const Index n = g.rows();
  Outcome<T> o{g, Rows<T>(n, n), std::vector<T>(static_cast<std::size_t>(n)), 0, false};
  HostTeam team(0);
  const auto jacobi = sinkstate::detail::one_sided_jacobi(
      team, view_of(o.g), want_rotations ? view_of(o.y) : MatrixView<T>{}, o.s.data(),
      sinkstate::detail::unit_roundoff<T>, cap);
  o.sweeps = jacobi.sweeps;
  o.converged = jacobi.converged;
  return o;
}

// Directions of the rows that are above rounding.
template <class T>
Matrix directions(const Outcome<T>& o) {
  const T largest = *std::max_element(o.s.begin(), o.s.end());
  Matrix kept(0, o.g.cols());
  for (Index i = 0; i < o.g.rows(); ++i) {
    const T s = o.s[static_cast<std::size_t>(i)];
    const T noise = sinkstate::detail::negligible * sinkstate::detail::unit_roundoff<T> * largest;
    if (!(s > noise)) continue;
    kept.conservativeResize(kept.rows() + 1, Eigen::NoChange);
    kept.row(kept.rows() - 1) = o.g.row(i).template cast<double>() / static_cast<double>(s);
  }
  return kept;
}

template <class T>
void check(const Matrix& wide_g) {
  const Rows<T> g = wide_g.cast<T>();
  const Matrix exact = g.template cast<double>();
  const Outcome<T> o = run(g);
  CHECK(o.converged);
  CHECK(o.sweeps <= 12);
  CHECK(orthogonality_error(o.y.template cast<double>()) <= orthogonality_bound<T>);
  CHECK(orthogonality_error(directions(o)) <= orthogonality_bound<T>);

  const Matrix product = o.y.template cast<double>().transpose() * o.g.template cast<double>();
  CHECK((product - exact).norm() <= 40 * epsilon<T> * exact.norm());

  std::vector<T> sorted = o.s;
  std::sort(sorted.rbegin(), sorted.rend());
  const Eigen::VectorXd wanted = singular_values(exact);
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    CHECK(std::abs(static_cast<double>(sorted[i]) - wanted(static_cast<Index>(i))) <=
          20 * epsilon<T> * wanted(0));
  }
}

}  // namespace

TEMPLATE_TEST_CASE("jacobi: random cores", "[small_svd]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const Index n : {3, 5, 8, 16, 24}) {
    CAPTURE(n);
    check<TestType>(random_rows(random, n, n) / 4);
    check<TestType>(random_rows(random, n, 2 * n) / 4);
  }
}

TEMPLATE_TEST_CASE("jacobi: B86, sweeps that run out leave rotations that are orthogonal",
                   "[small_svd]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Rows<TestType> g = random_rows(random, 12, 20).cast<TestType>();
  for (const int cap : {0, 1, 2}) {
    const Outcome<TestType> o = run(g, true, cap);
    CHECK(!o.converged);
    CHECK(o.sweeps == cap);
    const Matrix y = o.y.template cast<double>(), rotated = o.g.template cast<double>();
    CHECK(orthogonality_error(y) <= orthogonality_bound<TestType>);
    CHECK((y.transpose() * rotated - g.template cast<double>()).norm() <=
          40 * epsilon<TestType> * rotated.norm());
    for (Index i = 0; i < 12; ++i) {
      CHECK(static_cast<double>(o.s[static_cast<std::size_t>(i)]) ==
            Catch::Approx(rotated.row(i).norm()).epsilon(1e-6));
    }
  }
}

TEMPLATE_TEST_CASE("jacobi: B83, cores of one and of two rows", "[small_svd]", float, double) {
  check<TestType>(Matrix::Constant(1, 1, -0.75));
  check<TestType>(Matrix::Constant(1, 5, 0.5));
  Matrix g(2, 2);
  g << 0.6, 0.8, -0.8, 0.6;
  check<TestType>(g);
  g << 1, 1, 0, 1e-3;
  check<TestType>(g);
  g << 0, 1, 0, 0;
  check<TestType>(g);
}

TEST_CASE("jacobi: B69, a float matrix of rank 1 and its transpose", "[small_svd]") {
  Matrix column(4, 1);
  column << 0.1, 0.7, -0.3, 0.9;
  Matrix row(1, 4);
  row << 0.3, -0.2, 0.6, 0.1;
  check<float>(column * row);
  check<float>((column * row).transpose());
}

TEMPLATE_TEST_CASE("jacobi: pitfall 12, all singular values equal", "[small_svd]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  check<TestType>(0.7 * Matrix::Identity(16, 16));
  check<TestType>(0.7 * orthonormal_rows(random, 16, 16));
  check<TestType>(0.7 * orthonormal_rows(random, 8, 16));
}

TEMPLATE_TEST_CASE("jacobi: pitfall 14, small singular values keep their vectors", "[small_svd]",
                   float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  for (const double ratio : {3e-3, 1e-4, 1e-6}) {
    CAPTURE(ratio);
    check<TestType>(with_singular_values(random, 16, 16, geometric(16, ratio)));
  }
}

TEMPLATE_TEST_CASE("jacobi: pitfall 2, rank-deficient cores end", "[small_svd]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  Matrix g = random_rows(random, 16, 16) / 4;
  SECTION("equal rows") {
    for (Index i = 9; i < 16; ++i) g.row(i) = g.row(8);
  }
  SECTION("near-duplicates") {
    for (Index i = 9; i < 16; ++i) g.row(i) = g.row(8) + 1e-5 * g.row(i);
  }
  SECTION("B75, blocks of zeros") {
    g.bottomRows(8).setZero();
    g.leftCols(5).setZero();
  }
  SECTION("one entry") {
    g.setZero();
    g(7, 3) = 0.5;
  }
  check<TestType>(g);
}

TEST_CASE("jacobi: the zero matrix", "[small_svd]") {
  const auto o = run<float>(Rows<float>::Zero(4, 6));
  CHECK(o.converged);
  CHECK(o.s == std::vector<float>(4, 0.0F));
  CHECK(o.y == Rows<float>::Identity(4, 4));
}

TEMPLATE_TEST_CASE("jacobi: rotations need not be wanted", "[small_svd]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Rows<TestType> g = (random_rows(random, 6, 9) / 4).cast<TestType>();
  const auto with = run(g);
  const auto without = run(g, false);
  CHECK(with.s == without.s);
  CHECK(with.g == without.g);
}

TEMPLATE_TEST_CASE("jacobi: B72, B73, one NaN or infinity anywhere, and the sweeps end",
                   "[small_svd]", float, double) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity()}) {
    for (Index at = 0; at < 9; ++at) {
      CAPTURE(bad, at);
      Rows<TestType> g(3, 3);
      g << 0.5, 0.25, 0.125, 0.25, 0.5, 0.25, 0.125, 0.25, 0.5;
      g.data()[at] = static_cast<TestType>(bad);
      const auto o = run(g);
      CHECK(o.sweeps <= 30);
      // It shows in the strength of its row: no success with made-up numbers.
      CHECK_FALSE(std::isfinite(o.s[static_cast<std::size_t>(at / 3)]));
    }
  }
}
