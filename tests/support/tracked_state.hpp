// A state beside the recurrence that it should follow, fed by hand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/state_runner.hpp"

namespace sinkstate::testing {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

template <class Rule, class Sink = NoSink>
using Full32 = Policy<Rule, Host, Fp32, FullSvd, Sink>;
template <class Rule, class Sink = NoSink>
using Full64 = Policy<Rule, Host, Fp64, FullSvd, Sink>;
template <class Rule, class Sink = NoSink>
using Local32 = Policy<Rule, Host, Fp32, LocalSvd, Sink>;
template <class Rule, class Sink = NoSink>
using Local64 = Policy<Rule, Host, Fp64, LocalSvd, Sink>;
template <class Rule, class Sink = NoSink>
using Fixed32 = Policy<Rule, Host, Fp32, FixedRank, Sink>;
template <class Rule, class Sink = NoSink>
using Dense32 = Policy<Rule, Host, Fp32, DenseBuffered, Sink>;

inline StateConfig config_of(Index d_k, Index d_v, double epsilon = 0, Index buffer = 8) {
  StateConfig config;
  config.d_k = d_k;
  config.d_v = d_v;
  config.epsilon = epsilon;
  config.buffer = buffer;
  return config;
}

template <class T>
std::vector<T> narrow(const std::vector<double>& x) {
  std::vector<T> y;
  for (const double element : x) y.push_back(static_cast<T>(element));
  return y;
}

// Unit vector `axis` of `size`, times `scale`.
inline std::vector<double> axis(Index size, Index axis, double scale = 1) {
  std::vector<double> x(static_cast<std::size_t>(size), 0.0);
  x[static_cast<std::size_t>(axis)] = scale;
  return x;
}

inline std::vector<double> unit(Random& random, Index size) {
  std::vector<double> x = random.normals(static_cast<int>(size), 1);
  detail::normalize(x);
  return x;
}

// Everything that a state holds in its own memory.
template <class P>
std::vector<unsigned char> bytes_of(const StateConfig& config, const SinkStateView<P>& view) {
  std::vector<unsigned char> bytes(state_bytes<P>(config));
  std::memcpy(bytes.data(), view.factors.components,
              bytes.size());  // the first piece of the memory
  return bytes;
}

template <class P>
class TrackedState {
 public:
  using T = typename P::Compute;
  using Oracle = oracle::DenseRecurrence<double>;

  // No direction: no sink.
  explicit TrackedState(const StateConfig& sizes, const std::vector<double>& direction = {})
      : config(sizes),
        direction_(narrow<T>(direction)),
        state(sizes, direction.empty() ? nullptr : direction_.data()),
        view(state.view()),
        team(workspace_bytes<P>(sizes)),
        exact(traits_of<typename P::Rule>, static_cast<int>(sizes.d_k),
              static_cast<int>(sizes.d_v)) {}
  TrackedState(const TrackedState&) = delete;

  // The state alone.
  Status try_advance(const std::vector<double>& key, const std::vector<double>& value,
                     const std::vector<double>& log_decay = {}, double write_strength = 1) {
    const auto k = narrow<T>(key), v = narrow<T>(value), g = decays(log_decay);
    return advance(team, view,
                   Token<T>{k.data(), v.data(), g.data(), static_cast<T>(write_strength)});
  }

  // Both, in the precision of the state. Compacts first when the buffer is full.
  void step(const std::vector<double>& key, const std::vector<double>& value,
            const std::vector<double>& log_decay = {}, double write_strength = 1) {
    if (view.due()) compact();
    REQUIRE(try_advance(key, value, log_decay, write_strength) == Status::ok);
    const auto k = narrow<T>(key), v = narrow<T>(value), g = decays(log_decay);
    exact.step(k.data(), v.data(), g.data(), static_cast<T>(write_strength));
    largest = std::max(largest, oracle::frobenius_norm(exact.state()));
  }

  CompactionReport compact() {
    CompactionReport report;
    REQUIRE(sinkstate::compact(team, view, &report) == Status::ok);
    some_frozen_ = report.decomposed < report.rank_before;
    return report;
  }

  // S^T query
  std::vector<double> read(const std::vector<double>& query) {
    const auto q = narrow<T>(query);
    std::vector<T> output(static_cast<std::size_t>(config.d_v));
    REQUIRE(read_out(team, view, q.data(), output.data()) == Status::ok);
    return {output.begin(), output.end()};
  }

  Rows<T> stored_own() {
    Rows<T> dense(config.d_k, config.d_v);
    REQUIRE(materialize(team, view, view_of(dense), &certificate_) == Status::ok);
    return dense;
  }
  Matrix stored() { return stored_own().template cast<double>(); }
  Matrix wanted() const {
    return Eigen::Map<const Matrix>(exact.state().data(), config.d_k, config.d_v);
  }

  double error() { return (stored() - wanted()).norm(); }

  // Nothing was truncated: the error is rounding, relative to the largest norm so far.
  void check_exact(double roundoffs = 40) {
    CHECK(error() <= roundoffs * std::numeric_limits<T>::epsilon() * largest);
    check_certificate();
  }

  void check_certificate() {
    const double deviation = error();  // and the certificate of the same matrix
    CHECK(deviation <= static_cast<double>(certificate_));
    CHECK(std::isfinite(certificate_));
  }

  // Behind a compaction. Frozen terms are orthogonal to nothing.
  void check_factors() {
    if (!some_frozen_) {
      CHECK(orthogonality_error(view.factors.keys()) <= orthogonality_bound<T>);
      CHECK(orthogonality_error(view.factors.values()) <= orthogonality_bound<T>);
    }
    for (Index i = 0; i < view.rank(); ++i) {
      CHECK(view.factors.strengths[i] > 0);
      if (i > 0) CHECK(view.factors.strengths[i] <= view.factors.strengths[i - 1]);
    }
  }

  double strength(Index i) const { return static_cast<double>(view.factors.strengths[i]); }

  const StateConfig config;

 private:
  std::vector<T> direction_;
  T certificate_ = 0;
  bool some_frozen_ = false;

 public:
  SinkState<P> state;
  SinkStateView<P> view;
  HostTeam team;
  Oracle exact;
  double largest = 0;

 private:
  // One number for all channels, unless each has its own; 0 when not given.
  std::vector<T> decays(const std::vector<double>& log_decay) const {
    const Index wanted = P::Rule::log_decays(config.d_k);
    if (log_decay.size() == static_cast<std::size_t>(wanted)) return narrow<T>(log_decay);
    const double all = log_decay.empty() ? 0.0 : log_decay[0];
    return std::vector<T>(static_cast<std::size_t>(wanted), static_cast<T>(all));
  }
};

// Random tokens.
template <class P>
void feed(TrackedState<P>& s, Random& random, int tokens) {
  for (int i = 0; i < tokens; ++i) {
    s.step(unit(random, s.config.d_k), unit(random, s.config.d_v), {-0.1}, 0.5);
  }
}

}  // namespace sinkstate::testing
