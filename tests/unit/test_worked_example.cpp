// The worked example of "SinkState", section 4.2: a 4 x 4 state and two tokens of Mamba-2, epsilon
// 0.1, two decimals. The paper writes H = S^T: its U is our value side, its V our key side.
//
// Published in full: u_0, v_0, the strengths, both tokens, the decays. Of the other terms of H_0
// only first components are, and of H_0 itself only the first row.
#include <cmath>
#include <cstddef>
#include <vector>

#include "sinkstate/sinkstate.hpp"
#include "support/catch.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using sinkstate::testing::all_workspace_bytes;
using sinkstate::testing::require_ok;

namespace {

using Vector = std::vector<double>;
using Full = Policy<Mamba2, Host, Fp64, FullSvd, NoSink>;
using Local = Policy<Mamba2, Host, Fp64, LocalSvd, NoSink>;

// Half a unit of the last published digit, and as much for inputs that were rounded too.
constexpr double two_decimals = 0.01;

const Vector u0 = {.2, .4, .4, .8};
const Vector v0 = {.4, .2, .8, .4};

struct PaperToken {
  Vector k, v, q;
  double decay;
  Vector y;
};
const PaperToken the = {
    {.74, .52, 1.48, 1.04}, {.52, 1.04, .74, 1.48}, {1, 0, 0, 1}, .9, {2.73, 4.37, 4.38, 6.59}};
const PaperToken biggest = {
    {1.68, .64, -.64, -.72}, {.48, -.04, .76, -.48}, {1, 1, 0, 0}, .8, {3.08, 2.11, 5.24, 2.39}};

double dot(const Vector& x, const Vector& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

Vector padded(const Vector& x, std::size_t size) {
  Vector y = x;
  y.resize(size, 0.0);
  return y;
}

MatrixView<double> rows_of(Vector& numbers, Index cols) {
  return {numbers.data(), static_cast<Index>(numbers.size()) / cols, cols, cols};
}

StateConfig config_of(Index d) {
  StateConfig config;
  config.d_k = config.d_v = d;
  config.buffer = 2;
  config.epsilon = 0.1;
  config.dense_fallback = false;
  // The paper's update: one active term, the others frozen and cut at epsilon.
  config.active = 1;
  config.recompress_growth = 0;
  config.tail_share = 1;
  return config;
}

// A state that starts from S = sum_i strength_i key_i value_i^T and takes the two tokens.
template <class P>
class Example {
 public:
  explicit Example(Index d)
      : d_(d), state_(config_of(d)), team_(all_workspace_bytes<P>(config_of(d))) {}

  void add_term(double strength, const Vector& key, const Vector& value) {
    initial_.resize(static_cast<std::size_t>(d_ * d_), 0.0);
    auto dense = rows_of(initial_, d_);
    for (Index i = 0; i < d_; ++i) {
      for (Index j = 0; j < d_; ++j) {
        dense(i, j) +=
            strength * key[static_cast<std::size_t>(i)] * value[static_cast<std::size_t>(j)];
      }
    }
  }
  void start() { require_ok(initialize(team_, view(), rows_of(initial_, d_), ExactSvd{})); }
  Vector step(const PaperToken& token) {
    const auto size = static_cast<std::size_t>(d_);
    const Vector key = padded(token.k, size), value = padded(token.v, size);
    const Vector query = padded(token.q, size);
    const double log_decay = std::log(token.decay);
    Vector output(size);
    require_ok(sinkstate::step(team_, view(),
                               Token<double>{key.data(), value.data(), &log_decay, 1.0},
                               query.data(), output.data()));
    return output;
  }
  void compact() { require_ok(sinkstate::compact(team_, view())); }
  SinkStateView<P> view() { return state_.view(); }

 private:
  Index d_;
  SinkState<P> state_;
  HostTeam team_;
  Vector initial_;
};

}  // namespace

TEST_CASE("worked example: the core, by orthogonalising both sides", "[worked_example]") {
  HostTeam team(1 << 12);
  Vector left = u0, right = v0;
  for (const PaperToken* token : {&the, &biggest}) {
    left.insert(left.end(), token->v.begin(), token->v.end());
    right.insert(right.end(), token->k.begin(), token->k.end());
  }
  Vector left_coords(9), right_coords(9), scratch(3);
  const auto r_left = rows_of(left_coords, 3), r_right = rows_of(right_coords, 3);
  REQUIRE(detail::orthogonalize(team, rows_of(left, 4), 0, r_left, scratch.data()) == 3);
  REQUIRE(detail::orthogonalize(team, rows_of(right, 4), 0, r_right, scratch.data()) == 3);

  // Row j of r holds the coordinates of vector j: C = R_L^T diag(weights) R_R, the paper's R_L
  // transposed.
  const double weights[] = {5.76, .8, 1};
  double first_row[3] = {0, 0, 0};
  for (Index column = 0; column < 3; ++column) {
    for (Index j = 0; j < 3; ++j)
      first_row[column] += weights[j] * r_left(j, 0) * r_right(j, column);
  }
  CHECK(first_row[0] == Catch::Approx(8.96).margin(two_decimals));
  CHECK(first_row[1] == Catch::Approx(.48).margin(two_decimals));
  CHECK(first_row[2] == Catch::Approx(0).margin(two_decimals));
}

TEST_CASE("worked example: singular values and first rows", "[worked_example]") {
  HostTeam team(1 << 16);
  Workspace memory = team.workspace();
  auto list = detail::TermList<double>::carve(memory, 3, 4, 4);
  REQUIRE_FALSE(memory.exhausted());
  const Vector* keys[] = {&v0, &the.k, &biggest.k};
  const Vector* values[] = {&u0, &the.v, &biggest.v};
  const double weights[] = {5.76, .8, 1};
  list.count = 3;
  for (Index i = 0; i < 3; ++i) {
    team.copy(4, keys[i]->data(), list.keys.row(i));
    team.copy(4, values[i]->data(), list.values.row(i));
    list.weights[i] = weights[i];
  }

  const auto terms = detail::decompose(team, list);
  REQUIRE(terms.count == 3);
  CHECK(terms.strength(0) == Catch::Approx(8.99).margin(two_decimals));
  CHECK(terms.strength(1) == Catch::Approx(2.08).margin(two_decimals));
  CHECK(terms.strength(2) == Catch::Approx(.04).margin(two_decimals));

  Vector key(4), value(4);
  const double u_active[] = {.22, .47, .31};
  for (Index i = 0; i < 3; ++i) {
    terms.form(team, i, key.data(), value.data());
    CHECK(std::abs(value[0]) == Catch::Approx(u_active[i]).margin(two_decimals));
  }
  terms.form(team, 0, key.data(), value.data());
  const double sign = key[0] < 0 ? -1 : 1;
  const double v_active[] = {.39, .22, .78, .44};
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(sign * key[i] == Catch::Approx(v_active[i]).margin(two_decimals));
  }
}

TEMPLATE_TEST_CASE("worked example: the survivors, frozen terms merged", "[worked_example]", Full,
                   Local) {
  // The frozen vectors are not published. Two further channels stand for them: apart from the
  // active terms, they keep their strengths, 1.41 and .79, as in the paper.
  Example<TestType> example(6);
  example.add_term(8.0, padded(v0, 6), padded(u0, 6));
  example.add_term(1.95, {0, 0, 0, 0, 1, 0}, {0, 0, 0, 0, 1, 0});
  example.add_term(1.10, {0, 0, 0, 0, 0, 1}, {0, 0, 0, 0, 0, 1});
  example.start();
  REQUIRE(example.view().rank() == 3);
  example.step(the);
  example.step(biggest);
  REQUIRE(example.view().due());
  example.compact();

  const auto factors = example.view().factors;
  REQUIRE(example.view().rank() == 3);
  CHECK(factors.strengths[0] == Catch::Approx(8.99).margin(two_decimals));
  CHECK(factors.strengths[1] == Catch::Approx(2.08).margin(two_decimals));
  CHECK(factors.strengths[2] == Catch::Approx(1.41).margin(two_decimals));
  CHECK(std::abs(factors.values()(0, 0)) == Catch::Approx(.22).margin(two_decimals));
  CHECK(std::abs(factors.values()(1, 0)) == Catch::Approx(.47).margin(two_decimals));
  CHECK(std::abs(factors.values()(2, 4)) == Catch::Approx(1).margin(1e-12));
}

TEST_CASE("worked example: outputs along u_0", "[worked_example]") {
  // The other terms of H_0 are orthogonal to u_0: along it the published outputs are those of a
  // state that starts from the first term alone.
  Example<Full> example(4);
  example.add_term(8.0, v0, u0);
  example.start();
  for (const PaperToken* token : {&the, &biggest}) {
    CHECK(dot(u0, example.step(*token)) == Catch::Approx(dot(u0, token->y)).margin(two_decimals));
  }
}

TEST_CASE("worked example: first components of the outputs", "[worked_example]") {
  // They depend on the first row of H_0 alone, which is published before the term of strength .06
  // was cut off; the outputs are those after.
  Example<Full> example(4);
  example.add_term(1, {1.18, .84, .81, .78}, {1, 0, 0, 0});
  example.start();
  for (const PaperToken* token : {&the, &biggest}) {
    const double cut = .06 * std::sqrt(dot(token->q, token->q));
    CHECK(example.step(*token)[0] == Catch::Approx(token->y[0]).margin(cut + two_decimals));
  }
}
