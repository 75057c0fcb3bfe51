// How far a state with nothing truncated is from the oracle, against what is allowed; the checks
// are the same in both precisions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/state_runner.hpp"
#include "support/streams.hpp"

namespace sinkstate::testing {

struct Deviation {
  Margin state;
  Margin output;

  void include(const Deviation& other) {
    state.include(other.state);
    output.include(other.output);
  }
};

// An error relative to the largest norm seen so far.
class RelativeError {
 public:
  void see(double norm) { largest_ = std::max(largest_, norm); }
  template <class X, class Y>
  double of(const std::vector<X>& x, const std::vector<Y>& exact) const {
    return oracle::relative_error(x, exact, largest_);
  }

 private:
  double largest_ = 0;
};

// fp64: 1e-12. fp32: a multiple of the largest error so far of the plain fp32 recurrence, + 1e-6.
template <class T>
class Allowance {
 public:
  explicit Allowance(double multiple) : multiple_(multiple) {}
  double after(double plain_error) {
    plain_ = std::max(plain_, plain_error);
    return std::is_same_v<T, float> ? multiple_ * plain_ + 1e-6 : 1e-12;
  }

 private:
  double multiple_;
  double plain_ = 0;
};

// Tokens [first, last) of a stream from a fresh state, or from `initial` by `method`; the oracle
// and the plain fp32 recurrence beside it. Compacts when due.
template <class P, class Method = ExactSvd>
Deviation deviation(const Stream& stream, const StateConfig& config, double multiple, int first,
                    int last, const std::vector<float>& initial = {}, const Method& method = {}) {
  using T = typename P::Compute;
  StateRunner<P> runner(stream, config);
  oracle::DenseRecurrence<double> exact(stream.rule, stream.d_k, stream.d_v);
  oracle::DenseRecurrence<float> plain(stream.rule, stream.d_k, stream.d_v);
  Deviation worst;
  RelativeError of_state, of_output;
  Allowance<T> for_state(multiple), for_output(multiple);

  const auto compare_states = [&](int token) {
    const double allowed = for_state.after(of_state.of(plain.state(), exact.state()));
    worst.state.include(of_state.of(runner.dense(), exact.state()), allowed, token);
  };
  if (!initial.empty()) {
    exact.state().assign(initial.begin(), initial.end());
    plain.state() = initial;
    runner.start_from(initial, method);
    of_state.see(oracle::frobenius_norm(exact.state()));
    compare_states(-1);
  }
  // The stride for large states is prime to the buffer, so that every fill of it is met.
  const int stride = stream.d_k * stream.d_v <= 2000 ? 1 : 7;
  const auto d_k = static_cast<std::size_t>(stream.d_k);
  std::vector<double> exact_output(static_cast<std::size_t>(stream.d_v));
  std::vector<float> plain_output(exact_output.size());
  for (int t = first; t < last; ++t) {
    step_read(exact, stream, t, exact_output.data());
    step_read(plain, stream, t, plain_output.data());
    const std::vector<T>& output = runner.step(t);
    of_state.see(oracle::frobenius_norm(exact.state()));
    // |S| |q|, which bounds |S^T q|: a query that the state hardly answers cancels in any
    // arithmetic.
    const double query = oracle::frobenius_norm(stream.query_at(t), d_k);
    of_output.see(oracle::frobenius_norm(exact.state()) * query);
    worst.output.include(of_output.of(output, exact_output),
                         for_output.after(of_output.of(plain_output, exact_output)), t);
    runner.compact_if_due();
    if ((t - first) % stride == 0 || t + 1 == last) compare_states(t);
  }
  return worst;
}

// ---- Checks ----------------------------------------------------------------------------------

inline constexpr int exactness_tokens = 512;
inline constexpr double without_compaction = 3;
inline constexpr double with_compaction = 6;

struct Shape {
  int d_k;
  int d_v;
};

// Nothing truncated; the cap is the rank that a state can have, or what pays before it goes dense.
// Few active terms, so that small shapes have frozen ones.
inline StateConfig untruncated(Shape shape, int buffer, bool dense_fallback) {
  StateConfig config;
  config.d_k = shape.d_k;
  config.d_v = shape.d_v;
  config.buffer = buffer;
  config.epsilon = 0;
  config.rank_cap = config.full_rank();
  config.active = 4;
  config.dense_fallback = dense_fallback;
  return config;
}

template <class P>
void check_deviation(const Stream& stream, const Deviation& worst, const std::string& how) {
  INFO(policy_name<P>() << ", " << how << "; " << describe(stream));
  {
    INFO("state: " << worst.state.where());
    CHECK(worst.state.ratio() <= 1);
  }
  {
    INFO("output: " << worst.output.where());
    CHECK(worst.output.ratio() <= 1);
  }
}

// Windows of 64 tokens, each from a fresh state and never compacted.
template <class P>
void check_uncompacted(const Stream& stream, bool dense_fallback) {
  constexpr int window = 64;
  // One slot more than tokens: the buffer is never due.
  const StateConfig config = untruncated({stream.d_k, stream.d_v}, window + 1, dense_fallback);
  Deviation worst;
  for (int first = 0; first < stream.tokens; first += window) {
    worst.include(deviation<P>(stream, config, without_compaction, first,
                               std::min(first + window, stream.tokens)));
  }
  check_deviation<P>(stream, worst, "without compaction");
}

template <class P>
void check_compacted(const Stream& stream, bool dense_fallback) {
  const StateConfig config = untruncated({stream.d_k, stream.d_v}, 8, dense_fallback);
  check_deviation<P>(stream, deviation<P>(stream, config, with_compaction, 0, stream.tokens),
                     dense_fallback ? "compacted, dense fallback" : "compacted");
}

// Only an adaptive rank can go dense or not.
template <class P, class Check>
void with_and_without_fallback(const Check& check) {
  if (P::Compaction::adaptive) check(false);
  check(true);
}

// Every scenario meets every rule, compaction and sink; shapes rotate.
template <class Rule, class Precision>
void check_every_scenario(std::uint64_t rule_number) {
  const Shape shapes[] = {{1, 5}, {5, 1}, {5, 80}, {96, 5}, {24, 16}, {128, 5}, {5, 256}, {80, 1}};
  const std::uint64_t runs =
      static_cast<std::uint64_t>(scenarios) * static_cast<std::uint64_t>(test_scale());
  for (std::uint64_t run = 0; run < runs; ++run) {
    const Shape shape = shapes[(3 * run + rule_number) % std::size(shapes)];
    const int scenario = static_cast<int>(run % scenarios);
    const Stream stream = scenario_stream(scenario, traits_of<Rule>, shape.d_k, shape.d_v,
                                          exactness_tokens, derived_seed(test_seed(), run));
    INFO(scenario_name(scenario));
    for_each_policy<Rule, Precision>([&](auto tag) {
      using P = typename decltype(tag)::type;
      check_uncompacted<P>(stream, true);
      with_and_without_fallback<P>([&](bool fallback) { check_compacted<P>(stream, fallback); });
    });
  }
}

// Shapes of real heads; one run of each policy, the shape, scenario and fallback rotate.
template <class Rule, class Precision>
void check_large_shapes(std::uint64_t rule_number) {
  const Shape shapes[] = {{96, 80}, {80, 128}, {128, 96}, {256, 80}};
  std::uint64_t run = rule_number;
  for_each_policy<Rule, Precision>([&](auto tag) {
    using P = typename decltype(tag)::type;
    const Shape shape = shapes[run % std::size(shapes)];
    const int scenario = static_cast<int>(5 * run % scenarios);
    const Stream stream = scenario_stream(scenario, traits_of<Rule>, shape.d_k, shape.d_v,
                                          exactness_tokens, derived_seed(test_seed(), 100 + run));
    INFO(scenario_name(scenario));
    check_uncompacted<P>(stream, true);
    check_compacted<P>(stream, run % 3 == 0);
    ++run;
  });
}

// Keys from three directions make a state of rank three; a fixed rank of four then drops nothing,
// though the buffer's values are independent and the rank is found by projection. Where channels
// decay on their own the directions are channels, which keep theirs.
template <class Rule, class Precision>
void check_projected(std::uint64_t seed) {
  Stream stream = random_full_rank(traits_of<Rule>, 40, 24, exactness_tokens, seed);
  Random random(seed);
  std::vector<double> directions[3];
  for (int i = 0; i < 3; ++i) {
    directions[i] = random.normals(stream.d_k, 1);
    if (Rule::decay == Decay::per_channel) {
      std::fill(directions[i].begin(), directions[i].end(), 0.0);
      directions[i][static_cast<std::size_t>(i)] = 1;
    }
    testing::detail::normalize(directions[i]);
  }
  for (int t = 0; t < stream.tokens; ++t) {
    // One of them: a sum of several would be rounded out of their span.
    const double sign = t % 2 == 0 ? 1 : -1;
    const std::vector<double>& direction = directions[t % 7 % 3];
    for (std::size_t c = 0; c < direction.size(); ++c) {
      stream.key_at(t)[c] = static_cast<float>(sign * direction[c]);
    }
  }
  for_each_sink<Rule, Precision, FixedRank>([&](auto tag) {
    using P = typename decltype(tag)::type;
    StateConfig config = untruncated({stream.d_k, stream.d_v}, 8, true);
    config.rank_cap = 4;
    check_deviation<P>(stream, deviation<P>(stream, config, with_compaction, 0, stream.tokens),
                       "projected");
    StateRunner<P> runner(stream, config);
    Index projected = 0, compactions = 0;
    for (int t = 0; t < stream.tokens; ++t) {
      runner.step(t);
      if (!runner.view().due()) continue;
      projected += runner.compact().projected > 0 ? 1 : 0;
      ++compactions;
    }
    CHECK(projected >= compactions - 1);
  });
}

// A dense state of the given rank with entries near 1.
inline std::vector<float> initial_state(Shape shape, int rank, std::uint64_t seed) {
  Random random(seed);
  const auto d_k = static_cast<std::size_t>(shape.d_k), d_v = static_cast<std::size_t>(shape.d_v);
  std::vector<double> dense(d_k * d_v, 0.0);
  for (int r = 0; r < rank; ++r) {
    const std::vector<double> key = random.normals(shape.d_k, 1);
    const std::vector<double> value = random.normals(shape.d_v, std::pow(0.8, r));
    for (std::size_t i = 0; i < d_k; ++i) {
      for (std::size_t j = 0; j < d_v; ++j) dense[i * d_v + j] += key[i] * value[j];
    }
  }
  return {dense.begin(), dense.end()};
}

template <class Rule, class Precision>
void check_given_initial_state(std::uint64_t rule_number) {
  const Shape shapes[] = {{5, 80}, {24, 16}, {80, 96}};
  std::uint64_t run = 200 + rule_number;
  for (const Shape shape : shapes) {
    const int full = std::min(shape.d_k, shape.d_v);
    for (const int rank : {0, 3, full}) {
      const std::uint64_t seed = derived_seed(test_seed(), run++);
      const int tokens = full > 64 && rank != 3 ? 64 : exactness_tokens;
      const Stream stream = realistic(traits_of<Rule>, shape.d_k, shape.d_v, tokens, seed);
      const std::vector<float> initial = initial_state(shape, rank, seed);
      INFO("initial state of rank " << rank);
      for_each_policy<Rule, Precision>([&](auto tag) {
        using P = typename decltype(tag)::type;
        with_and_without_fallback<P>([&](bool fallback) {
          const StateConfig config = untruncated(shape, 8, fallback);
          check_deviation<P>(
              stream, deviation<P>(stream, config, with_compaction, 0, tokens, initial, ExactSvd{}),
              "from ExactSvd");
          RandomizedSvd randomized;
          randomized.seed = seed;
          check_deviation<P>(
              stream, deviation<P>(stream, config, with_compaction, 0, tokens, initial, randomized),
              "from RandomizedSvd");
        });
      });
    }
  }
}

}  // namespace sinkstate::testing
