// How far a state with nothing truncated is from the oracle, against what is allowed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
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

// An error relative to the largest norm that the exact quantity had so far.
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

// Tokens [first, last) of a stream from a fresh state, or from `initial` by `method`; the oracle and
// the plain fp32 recurrence beside it. Compacts when due.
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
  std::vector<double> exact_output(static_cast<std::size_t>(stream.d_v));
  std::vector<float> plain_output(exact_output.size());
  for (int t = first; t < last; ++t) {
    step_read(exact, stream, t, exact_output.data());
    step_read(plain, stream, t, plain_output.data());
    const std::vector<T>& output = runner.step(t);
    of_state.see(oracle::frobenius_norm(exact.state()));
    of_output.see(oracle::frobenius_norm(exact_output));
    worst.output.include(of_output.of(output, exact_output),
                         for_output.after(of_output.of(plain_output, exact_output)), t);
    runner.compact_if_due();
    if ((t - first) % stride == 0 || t + 1 == last) compare_states(t);
  }
  return worst;
}

}  // namespace sinkstate::testing
