// What holds after every compaction, over 10,000 of each policy: orthonormal new factors, frozen ones
// untouched, sorted strengths, and nothing dropped that the policy keeps. Before and after are formed
// here in fp64 from stored numbers.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <type_traits>
#include <vector>

#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class T>
constexpr double orthogonality_bar = std::is_same_v<T, float> ? 5e-6 : 1e-12;
// Of the strongest term: what rounding may change besides the truncation.
template <class T>
constexpr double rounding_bar = std::is_same_v<T, float> ? 5e-6 : 1e-12;

template <class T>
constexpr T unit_roundoff = std::numeric_limits<T>::epsilon() / 2;

template <class P>
Matrix stored_matrix(const SinkStateView<P>& view) {
  const std::vector<double> dense = stored_state<P, double>(view);
  return Eigen::Map<const Matrix>(dense.data(), view.config.d_k, view.config.d_v);
}

template <class T>
Matrix some_rows(const ListedRows<T>& rows, const std::vector<Index>& chosen) {
  Matrix matrix(static_cast<Index>(chosen.size()), rows.cols);
  for (Index i = 0; i < matrix.rows(); ++i) {
    matrix.row(i) = wide(rows.middle_rows(chosen[static_cast<std::size_t>(i)], 1));
  }
  return matrix;
}

struct Worst {
  Margin keys, values, along_sink, residual, report;
};

template <class P>
double sink_strength_of(const SinkStateView<P>& view) {
  if (!P::Sink::present) return 0;
  return oracle::frobenius_norm(view.sink.data, static_cast<std::size_t>(view.config.d_k)) *
         oracle::frobenius_norm(view.sink_direction, static_cast<std::size_t>(view.config.d_v));
}

// The values of the body before a compaction: no compaction writes to those of a frozen term.
template <class P>
class ValuesBefore {
 public:
  using T = typename P::Compute;
  explicit ValuesBefore(const SinkStateView<P>& view) {
    for (Index i = 0; i < view.rank(); ++i) {
      const T* const row = view.factors.values().row(i);
      values_.insert(std::vector<T>(row, row + view.config.d_v));
    }
  }
  bool contain(const T* row, Index size) const {
    return values_.count(std::vector<T>(row, row + size)) > 0;
  }

 private:
  std::set<std::vector<T>> values_;
};

// The kept terms, after a compaction that left factors.
template <class P>
void check_factors(const SinkStateView<P>& view, const CompactionReport& report,
                   const ValuesBefore<P>& before, double reference, int token, Worst& worst) {
  using T = typename P::Compute;
  const StateConfig& config = view.config;
  REQUIRE(view.rank() <= SinkStateView<P>::rank_capacity(config));
  const bool all = report.decomposed == report.rank_before;
  std::vector<Index> fresh;
  for (Index i = 0; i < view.rank(); ++i) {
    const bool frozen = before.contain(view.factors.values().row(i), config.d_v);
    if (all || !frozen) fresh.push_back(i);
    // A frozen key is a unit vector too, whatever the decays of its channels.
    const double length = wide(view.factors.keys().middle_rows(i, 1)).norm();
    worst.keys.include(std::abs(length - 1), orthogonality_bar<T>, token);
  }
  // Two decompositions in one compaction: orthogonal within each.
  if (report.tail == 0) {
    worst.keys.include(orthogonality_error(some_rows(view.factors.keys(), fresh)),
                       orthogonality_bar<T>, token);
    worst.values.include(orthogonality_error(some_rows(view.factors.values(), fresh)),
                         orthogonality_bar<T>, token);
  }

  const T* strengths = view.factors.strengths;
  double epsilon = P::Compaction::adaptive ? config.epsilon : 0;
  if (!all) epsilon *= config.tail_share;
  for (Index i = 0; i < view.rank(); ++i) {
    REQUIRE(std::isfinite(strengths[i]));
    REQUIRE(strengths[i] > 0);
    REQUIRE((i == 0 || strengths[i] <= strengths[i - 1]));
    // The reference was rounded in T before epsilon was applied to it.
    const double least = epsilon * reference * (1 - rounding_bar<T>);
    REQUIRE(static_cast<double>(strengths[i]) >= least);
  }
  if (P::Sink::present && view.rank() > 0) {
    const Matrix direction =
        wide(MatrixView<const T>{view.sink_direction, 1, config.d_v, config.d_v});
    // Each by its strength: the split leaves rounding of the whole content along the direction, and
    // a weak term, made of what the strong ones left over, has most of it.
    Matrix content = wide(view.factors.values());
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
  const ValuesBefore<P> values_before(runner.view());
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
  if (!view.dense()) check_factors(view, report, values_before, reference, token, worst);

  const double rounding = rounding_bar<T> * reference;
  // The norm of a tail is reported with its own rounding on top: docs/numerics.md, (N6), here with
  // the D of at most 24 channels.
  const auto c = static_cast<double>(report.rank_before);
  const double tail_roundings = c * (24 + 4 * std::sqrt(c) + 8 + 6 * report.sweeps);
  const double reported =
      rounding + report.dropped * tail_roundings * static_cast<double>(unit_roundoff<T>);
  worst.report.include(std::max(0.0, lost.norm() - report.dropped), rounding, token);
  // With all terms decomposed the bound is the norm itself.
  const bool all = report.decomposed == report.rank_before && report.tail == 0;
  if (all || view.dense()) {
    worst.report.include(std::max(0.0, report.dropped - lost.norm()), reported, token);
  }
  if (P::Compaction::adaptive && !report.capped && !view.dense()) {
    // Each term that went is below epsilon.
    const auto gone = static_cast<double>(report.rank_before - report.rank_after);
    worst.report.include(report.dropped,
                         gone * view.config.epsilon * reference * (1 + 1e-5) + reported, token);
  }
  if (!report.capped && all) {
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
  if (!P::Compaction::adaptive) config.rank_cap = 3 + run % 6;
  config.active = run % 4 == 0 ? 0 : 1 + run % 3;
  config.recompress_growth = run % 5 == 0 ? 0 : 1.15;
  config.tail_share = run % 3 == 0 ? 1 : 0.3;
  config.tail_period = run % 4 == 1 ? 2 : 0;
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

TEMPLATE_TEST_CASE("compaction: the invariants hold over 10,000 compactions", "[compaction]",
                   LocalSvd, FullSvd, FixedRank) {
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
    for_each_sink<decltype(rule), Fp32, TestType>(run_policy);
    for_each_sink<decltype(rule), Fp64, TestType>(run_policy);
  };
  std::apply([&](auto... rules) { (run_rule(rules), ...); }, AllRules{});
  CHECK(done >= 10000);
}
