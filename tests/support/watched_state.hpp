// A state that replays a stream beside the exact recurrence, with its certificate held against the true error.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "support/catch.hpp"
#include "support/state_runner.hpp"

namespace sinkstate::testing {

template <class W>
double distance(const std::vector<W>& x, const std::vector<W>& y) {
  W sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return static_cast<double>(std::sqrt(sum));
}

// A state beside the exact recurrence.
template <class P>
class Watched {
 public:
  using T = typename P::Compute;

  Watched(const Stream& stream, const StateConfig& config)
      : stream_(stream),
        runner_(stream, config),
        exact_(stream.rule, stream.d_k, stream.d_v),
        output_(static_cast<std::size_t>(stream.d_v)) {}

  StateRunner<P>& runner() { return runner_; }
  oracle::DenseRecurrence<Wider<T>>& exact() { return exact_; }

  void step(int token) {
    runner_.step(token);
    step_read(exact_, stream_, token, output_.data());
  }
  // True error over certificate; below 1 or the certificate lies.
  void compare(int token, Margin& margin) {
    margin.include(distance(stored_state(runner_.view()), exact_.state()),
                   static_cast<double>(runner_.certificate()), token);
  }
  void replay(int first, int last, Margin& margin) {
    for (int t = first; t < last; ++t) {
      step(t);
      compare(t, margin);
      runner_.compact_if_due();
      compare(t, margin);
    }
  }

 private:
  const Stream& stream_;
  StateRunner<P> runner_;
  oracle::DenseRecurrence<Wider<T>> exact_;
  std::vector<Wider<T>> output_;
};

inline void check_bound(const Margin& margin) {
  INFO(margin.where());
  CHECK(margin.ratio() <= 1);
}

}  // namespace sinkstate::testing
