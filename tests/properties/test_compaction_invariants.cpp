// What holds after every compaction, over 10,000 of them: orthonormal factors, sorted strengths,
// and nothing dropped that epsilon keeps. Before and after are formed here in fp64 from stored
// numbers.
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

using Matrix = Eigen::MatrixXd;

template <class T>
constexpr double orthogonality_bar = std::is_same_v<T, float> ? 5e-6 : 1e-12;
// Of the strongest term: what rounding may change besides the truncation.
template <class T>
constexpr double rounding_bar = std::is_same_v<T, float> ? 5e-6 : 1e-12;

template <class T>
constexpr T unit_roundoff = std::numeric_limits<T>::epsilon() / 2;

template <class T>
Matrix to_matrix(const MatrixView<T>& rows) {
  Matrix matrix(rows.rows, rows.cols);
  for (Index i = 0; i < rows.rows; ++i) {
    for (Index j = 0; j < rows.cols; ++j) matrix(i, j) = static_cast<double>(rows(i, j));
  }
  return matrix;
}

template <class P>
Matrix stored_matrix(const SinkStateView<P>& view) {
  const std::vector<double> dense = stored_state<P, double>(view);
  using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const RowMajor>(dense.data(), view.config.d_k, view.config.d_v);
}

double spectral_norm(const Matrix& matrix) {
  return Eigen::JacobiSVD<Matrix>(matrix).singularValues()[0];
}

// Largest entry of |A A^T - I|.
double orthogonality(const Matrix& rows) {
  if (rows.rows() == 0) return 0;
  return (rows * rows.transpose() - Matrix::Identity(rows.rows(), rows.rows()))
      .cwiseAbs()
      .maxCoeff();
}

struct Worst {
  Margin keys, values, along_sink, residual, report;
};

template <class P>
double sink_strength_of(const SinkStateView<P>& view) {
  if (!P::Sink::present) return 0;
  return oracle::frobenius_norm(view.sink, static_cast<std::size_t>(view.config.d_k)) *
         oracle::frobenius_norm(view.sink_direction, static_cast<std::size_t>(view.config.d_v));
}

// The kept terms, after a compaction that left factors.
template <class P>
void check_factors(const SinkStateView<P>& view, double reference, int token, Worst& worst) {
  using T = typename P::Compute;
  REQUIRE(view.rank() <= view.config.rank_capacity());
  worst.keys.include(orthogonality(to_matrix(view.factors.keys())), orthogonality_bar<T>, token);
  worst.values.include(orthogonality(to_matrix(view.factors.values())), orthogonality_bar<T>,
                       token);

  const T* strengths = view.factors.strengths;
  for (Index i = 0; i < view.rank(); ++i) {
    REQUIRE(std::isfinite(strengths[i]));
    REQUIRE(strengths[i] > 0);
    REQUIRE((i == 0 || strengths[i] <= strengths[i - 1]));
    // The reference was rounded in T before epsilon was applied to it.
    const double least = view.config.epsilon * reference * (1 - rounding_bar<T>);
    REQUIRE(static_cast<double>(strengths[i]) >= least);
  }
  if (P::Sink::present && view.rank() > 0) {
    const Matrix direction =
        to_matrix(MatrixView<const T>{view.sink_direction, 1, view.config.d_v, view.config.d_v});
    // Each by its strength: the split leaves rounding of the whole content along the direction, and
    // a weak term, made of what the strong ones left over, has most of it.
    Matrix content = to_matrix(view.factors.values());
    for (Index i = 0; i < view.rank(); ++i) content.row(i) *= static_cast<double>(strengths[i]);
    const double length = direction.norm();
    if (length > 0) {
      const double along = (content * direction.transpose()).cwiseAbs().maxCoeff() / length;
      worst.along_sink.include(along, orthogonality_bar<T> * reference, token);
    }
  }
}

// Compacts and holds the state after against the state before.
template <class P>
void check_compaction(StateRunner<P>& runner, int token, Worst& worst) {
  using T = typename P::Compute;
  const Matrix before = stored_matrix(runner.view());
  const double certificate_before = static_cast<double>(runner.certificate());
  const CompactionReport report = runner.compact();
  const SinkStateView<P> view = runner.view();
  const Matrix after = stored_matrix(view);
  const Matrix lost = before - after;

  REQUIRE(view.buffered() == 0);
  REQUIRE(report.rank_after == view.rank());
  REQUIRE(report.dense == view.dense());
  // The certificate covers all that changed, rounding included.
  REQUIRE(static_cast<double>(view.certificate()) >= certificate_before + lost.norm());

  const double sink = sink_strength_of(view);
  const double strongest =
      view.rank() > 0 ? static_cast<double>(view.factors.strengths[0]) : spectral_norm(before);
  const double reference = std::max(sink, strongest);
  if (!view.dense()) check_factors(view, reference, token, worst);

  const double rounding = rounding_bar<T> * reference;
  // The norm of a tail is reported with its own rounding on top: docs/numerics.md, (N6), here with
  // the D of at most 24 channels.
  const auto c = static_cast<double>(report.rank_before);
  const double tail_roundings = c * (24 + 4 * std::sqrt(c) + 8 + 6 * report.sweeps);
  const double reported =
      rounding + report.dropped * tail_roundings * static_cast<double>(unit_roundoff<T>);
  worst.report.include(std::max(0.0, lost.norm() - report.dropped), rounding, token);
  worst.report.include(std::max(0.0, report.dropped - lost.norm()), reported, token);
  if (!report.capped) {
    const double truncated = view.dense() ? 0 : view.config.epsilon * reference * (1 + 1e-5);
    worst.residual.include(spectral_norm(lost), truncated + rounding, token);
  }
}

template <class P>
int check_run(int run, int compactions) {
  const int sizes[] = {8, 16, 24};
  const double epsilons[] = {1e-2, 3e-3, 0};
  const std::uint64_t seed = derived_seed(test_seed(), static_cast<std::uint64_t>(run));
  StateConfig config;
  config.d_k = sizes[run % 3];
  config.d_v = sizes[(run / 3) % 3];
  config.buffer = 3 + run % 6;
  config.epsilon = epsilons[run % 3];
  config.dense_fallback = run % 2 == 0;
  config.rank_cap = run % 7 == 0 ? 4 : 0;
  config.dense_retry = 4;
  const int tokens = compactions * static_cast<int>(config.buffer);
  const Stream stream =
      scenario_stream(run % scenarios, traits_of<typename P::Rule>, static_cast<int>(config.d_k),
                      static_cast<int>(config.d_v), tokens, seed);
  INFO(policy_name<P>() << "; " << scenario_name(run % scenarios) << "; " << describe(stream)
                        << "; epsilon " << config.epsilon << ", buffer " << config.buffer);

  StateRunner<P> runner(stream, config);
  Worst worst;
  int done = 0;
  for (int t = 0; t < tokens; ++t) {
    runner.step(t);
    if (!runner.view().due()) continue;
    check_compaction(runner, t, worst);
    ++done;
  }
  const auto check = [](const char* what, const Margin& margin) {
    INFO(what << ": " << margin.where());
    CHECK(margin.ratio() <= 1);
  };
  check("|U^T U - I|", worst.keys);
  check("|V^T V - I|", worst.values);
  check("content along the sink", worst.along_sink);
  check("update residual", worst.residual);
  check("reported loss", worst.report);
  return done;
}

}  // namespace

TEST_CASE("compaction: the invariants hold over 10,000 compactions", "[compaction]") {
  INFO(seed_note(test_seed()));
  // 6 rules x 2 sinks x 2 precisions x 42 runs (twice every scenario) x 10.
  const int runs = 2 * scenarios * test_scale();
  const int compactions = 10;
  int done = 0;
  const auto run_policy = [&](auto tag) {
    using P = typename decltype(tag)::type;
    for (int run = 0; run < runs; ++run) done += check_run<P>(run, compactions);
  };
  const auto run_rule = [&](auto rule) {
    using Rule = decltype(rule);
    run_policy(PolicyTag<Policy<Rule, Host, Fp32, FullSvd, NoSink>>{});
    run_policy(PolicyTag<Policy<Rule, Host, Fp32, FullSvd, MeanValueSink>>{});
    run_policy(PolicyTag<Policy<Rule, Host, Fp64, FullSvd, NoSink>>{});
    run_policy(PolicyTag<Policy<Rule, Host, Fp64, FullSvd, MeanValueSink>>{});
  };
  std::apply([&](auto... rules) { (run_rule(rules), ...); }, AllRules{});
  CHECK(done >= 10000);
}
