// The operations of a team against plain loops, at every size around its vector width.
#include <cmath>
#include <cstddef>
#include <limits>
#include <sinkstate/host/host_team.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

constexpr Index most = 70;

template <class T>
constexpr double epsilon = std::numeric_limits<T>::epsilon();

template <class T>
std::vector<T> draw(Random& random, Index count) {
  std::vector<T> x;
  for (Index i = 0; i < count; ++i) x.push_back(static_cast<T>(random.normal()));
  return x;
}

template <class T>
double at(const std::vector<T>& x, Index i) {
  return static_cast<double>(x[static_cast<std::size_t>(i)]);
}

// A vector one number off its alignment, between two numbers that nobody may touch.
template <class T>
class Guarded {
 public:
  explicit Guarded(const std::vector<T>& x) : bytes_(x.size() + 2, guard) {
    std::copy(x.begin(), x.end(), data());
  }
  ~Guarded() {
    CHECK(bytes_.front() == guard);
    CHECK(bytes_.back() == guard);
  }
  T* data() { return bytes_.data() + 1; }
  double operator[](Index i) { return static_cast<double>(data()[i]); }

 private:
  static constexpr T guard = T(-12345);
  std::vector<T> bytes_;
};

}  // namespace

TEMPLATE_TEST_CASE("host team: dot and norm", "[host_team]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const HostTeam team(0);
  for (Index n = 0; n <= most; ++n) {
    CAPTURE(n);
    const auto x = draw<TestType>(random, n), y = draw<TestType>(random, n);
    double dot = 0, magnitude = 0, square = 0;
    for (Index i = 0; i < n; ++i) {
      dot += at(x, i) * at(y, i);
      magnitude += std::abs(at(x, i) * at(y, i));
      square += at(x, i) * at(x, i);
    }
    CHECK(std::abs(static_cast<double>(team.dot(n, x.data(), y.data())) - dot) <=
          8 * epsilon<TestType> * magnitude);
    CHECK(std::abs(static_cast<double>(team.norm(n, x.data())) - std::sqrt(square)) <=
          8 * epsilon<TestType> * std::sqrt(square));
  }
}

TEMPLATE_TEST_CASE("host team: pitfall 6, norms whose squares leave the range", "[host_team]",
                   float, double) {
  const HostTeam team(0);
  const TestType smallest = std::numeric_limits<TestType>::denorm_min();
  const TestType largest = std::numeric_limits<TestType>::max();
  for (const TestType scale : {smallest, TestType(1e-30), TestType(1e+30), largest / 16,
                               std::numeric_limits<TestType>::min()}) {
    CAPTURE(scale);
    std::vector<TestType> x(25, TestType(0));
    x[3] = 3 * scale;
    x[20] = -4 * scale;
    CHECK(team.norm(25, x.data()) == Catch::Approx(5 * static_cast<double>(scale)).epsilon(1e-6));
  }
  const std::vector<TestType> zero(25, TestType(0));
  CHECK(team.norm(25, zero.data()) == 0);
}

TEMPLATE_TEST_CASE("host team: norms of NaN and infinity are not numbers to go on with",
                   "[host_team]", float, double) {
  const HostTeam team(0);
  for (const TestType bad :
       {std::numeric_limits<TestType>::quiet_NaN(), std::numeric_limits<TestType>::infinity(),
        -std::numeric_limits<TestType>::infinity()}) {
    for (const Index place : {0, 15, 16, 18}) {
      CAPTURE(bad, place);
      std::vector<TestType> x(19, TestType(1));
      CHECK(team.finite(19, x.data()));
      x[static_cast<std::size_t>(place)] = bad;
      CHECK_FALSE(team.finite(19, x.data()));
      CHECK_FALSE(std::isfinite(team.norm(19, x.data())));
      CHECK_FALSE(std::isfinite(team.max_abs(19, x.data())));
    }
  }
}

TEMPLATE_TEST_CASE("host team: max_abs sees a NaN behind an infinity", "[host_team]", float,
                   double) {
  const HostTeam team(0);
  const TestType x[] = {1, std::numeric_limits<TestType>::infinity(),
                        std::numeric_limits<TestType>::quiet_NaN(), 2};
  CHECK(std::isnan(team.max_abs(4, x)));
  const TestType y[] = {1, -3, 2};
  CHECK(team.max_abs(3, y) == 3);
  CHECK(team.max_abs(0, y) == 0);
}

TEMPLATE_TEST_CASE("host team: project and add_combination, strided", "[host_team]", float,
                   double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const HostTeam team(0);
  for (Index n = 0; n <= most; ++n) {
    for (const Index rows : {0, 1, 3, 4, 7}) {
      CAPTURE(n, rows);
      const Index stride = n + 3;
      const auto a = draw<TestType>(random, rows * stride);
      const auto x = draw<TestType>(random, n), z = draw<TestType>(random, rows),
                 y = draw<TestType>(random, n);
      const MatrixView<const TestType> view{a.data(), rows, n, stride};

      Guarded<TestType> projected(std::vector<TestType>(static_cast<std::size_t>(rows)));
      team.project(view, x.data(), projected.data());
      for (Index r = 0; r < rows; ++r) {
        double dot = 0, magnitude = 0;
        for (Index i = 0; i < n; ++i) {
          dot += at(a, r * stride + i) * at(x, i);
          magnitude += std::abs(at(a, r * stride + i) * at(x, i));
        }
        CHECK(std::abs(projected[r] - dot) <= 8 * epsilon<TestType> * magnitude);
      }

      Guarded<TestType> combined(y);
      team.add_combination(view, z.data(), combined.data());
      for (Index i = 0; i < n; ++i) {
        double sum = at(y, i), magnitude = std::abs(sum);
        for (Index r = 0; r < rows; ++r) {
          sum += at(z, r) * at(a, r * stride + i);
          magnitude += std::abs(at(z, r) * at(a, r * stride + i));
        }
        CHECK(std::abs(combined[i] - sum) <= 8 * epsilon<TestType> * magnitude);
      }
    }
  }
}

TEMPLATE_TEST_CASE("host team: element by element", "[host_team]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const HostTeam team(0);
  for (Index n = 0; n <= most; ++n) {
    CAPTURE(n);
    const auto x = draw<TestType>(random, n), w = draw<TestType>(random, n);
    Guarded<TestType> scaled(x), product(x), sum(x), copied(w), filled(w);
    team.scale(n, TestType(-3), scaled.data(), scaled.data());
    team.multiply(n, product.data(), w.data(), product.data());
    team.add(n, w.data(), sum.data());
    team.copy(n, x.data(), copied.data());
    team.fill(n, TestType(5), filled.data());
    for (Index i = 0; i < n; ++i) {
      const auto k = static_cast<std::size_t>(i);
      CHECK(scaled.data()[i] == TestType(-3) * x[k]);
      CHECK(product.data()[i] == x[k] * w[k]);
      CHECK(sum.data()[i] == x[k] + w[k]);
      CHECK(copied.data()[i] == x[k]);
      CHECK(filled.data()[i] == TestType(5));
    }
  }
}

TEMPLATE_TEST_CASE("host team: rotate", "[host_team]", float, double) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const HostTeam team(0);
  const double s = 0.6, c = 0.8;
  const auto sine = static_cast<TestType>(s), tau = static_cast<TestType>(s / (1 + c));
  for (Index n = 0; n <= most; ++n) {
    CAPTURE(n);
    const auto x = draw<TestType>(random, n), y = draw<TestType>(random, n);
    Guarded<TestType> a(x), b(y);
    team.rotate(n, sine, tau, a.data(), b.data());
    for (Index i = 0; i < n; ++i) {
      const double magnitude = std::abs(at(x, i)) + std::abs(at(y, i));
      CHECK(std::abs(a[i] - (c * at(x, i) - s * at(y, i))) <= 4 * epsilon<TestType> * magnitude);
      CHECK(std::abs(b[i] - (s * at(x, i) + c * at(y, i))) <= 4 * epsilon<TestType> * magnitude);
    }
  }
}

TEMPLATE_TEST_CASE("host team: a decay is its exponential, or exactly 0, and never subnormal",
                   "[host_team]", float, double) {
  using Limits = std::numeric_limits<TestType>;
  const HostTeam team(0);
  const double smallest_log =
      std::log(static_cast<double>(Limits::min()) / static_cast<double>(Limits::epsilon()));
  std::vector<TestType> logs{TestType(0),         TestType(-1e-8), TestType(-1),
                             -Limits::infinity(), -Limits::max(),  -Limits::denorm_min()};
  for (int i = -50; i <= 50; ++i) logs.push_back(static_cast<TestType>(smallest_log + 1e-4 * i));
  for (int i = 0; i < 120; ++i) logs.push_back(static_cast<TestType>(-i));

  Guarded<TestType> decays(logs);
  // Not the smallest normal number: a decayed query must have room for small entries.
  const double cut = static_cast<double>(Limits::min()) / static_cast<double>(Limits::epsilon());
  const auto n = static_cast<Index>(logs.size());
  team.exp_decay(n, decays.data(), decays.data());
  for (Index i = 0; i < n; ++i) {
    const TestType log_decay = logs[static_cast<std::size_t>(i)];
    const double exact = std::exp(static_cast<double>(log_decay));
    CAPTURE(log_decay);
    for (const TestType decay : {decays.data()[i], team.exp_decay(log_decay)}) {
      CHECK((decay == 0 || static_cast<double>(decay) >= 0.9 * cut));
      CHECK(std::abs(static_cast<double>(decay) - exact) <=
            4 * epsilon<TestType> * exact + 1.001 * cut);
      if (static_cast<double>(log_decay) > smallest_log + 1e-2) CHECK(decay > 0);
    }
  }
  CHECK(team.exp_decay(TestType(0)) == 1);
  CHECK(team.exp_decay(-Limits::infinity()) == 0);
  CHECK(HostTeam(0).exp_decay(-71.5F) == 0);
  CHECK(HostTeam(0).exp_decay(-672.4) == 0);
}
