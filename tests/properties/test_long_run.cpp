// 100,000 tokens: rank, error and orthogonality stay what they were, and the certificate holds.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

constexpr int tokens = 100000;
constexpr int parts = 4;

struct Part {
  double rank = 0;
  double error = 0;  // root of the mean square, relative to the norm
  double worst_length = 0;
  double worst_angle = 0;  // |U^T U - I|
  int whole = 0;
  int looks = 0;
};

// Of terms that are frozen, no more is promised.
template <class T>
double length_error(const ListedRows<T>& rows) {
  double worst = 0;
  for (Index i = 0; i < rows.rows; ++i) {
    worst = std::max(worst, std::abs(wide(rows.middle_rows(i, 1)).norm() - 1));
  }
  return worst;
}

template <class P>
void check_long_run(const Stream& stream) {
  INFO(policy_name<P>() << "; " << describe(stream));
  StateConfig config;
  config.d_k = stream.d_k;
  config.d_v = stream.d_v;
  config.dense_fallback = false;
  if (!P::Compaction::adaptive) config.rank_cap = 12;
  StateRunner<P> runner(stream, config);
  oracle::DenseRecurrence<double> exact(stream.rule, stream.d_k, stream.d_v);
  std::vector<double> output(static_cast<std::size_t>(stream.d_v));
  Part run[parts];
  Margin certificate;
  for (int t = 0; t < tokens; ++t) {
    runner.step(t);
    step_read(exact, stream, t, output.data());
    if (!runner.view().due()) continue;
    const CompactionReport report = runner.compact();
    if (t % 160 != 159) continue;  // every 20th compaction
    Part& part = run[t / (tokens / parts)];
    const auto view = runner.view();
    const std::vector<double> stored = stored_state<P, double>(view);
    const double error = oracle::frobenius_distance(stored, exact.state());
    certificate.include(error, static_cast<double>(view.certificate()), t);
    part.rank += static_cast<double>(view.rank());
    part.error += std::pow(error / oracle::frobenius_norm(exact.state()), 2);
    part.worst_length = std::max({part.worst_length, length_error(view.factors.keys()),
                                  length_error(view.factors.values())});
    if (report.decomposed == report.rank_before) {  // and of those made together, this
      part.worst_angle = std::max({part.worst_angle, orthogonality_error(view.factors.keys()),
                                   orthogonality_error(view.factors.values())});
      ++part.whole;
    }
    ++part.looks;
  }
  CHECK(certificate.ratio() <= 1);
  for (Part& part : run) {
    REQUIRE(part.looks > 100);
    part.rank /= part.looks;
    part.error = std::sqrt(part.error / part.looks);
    CHECK(part.whole > 10);
    CHECK(part.worst_angle <= orthogonality_bound<typename P::Compute>);
    CHECK(part.worst_length <= orthogonality_bound<typename P::Compute>);
    INFO("rank " << part.rank << ", error " << part.error);
    // In the first quarter the state was still filling up. 1e-6 is rounding: DeltaNet forgets what
    // was dropped and then drops nothing.
    if (&part == run) continue;
    CHECK(part.rank <= 1.1 * run[1].rank + 1);
    CHECK(part.error <= 1.25 * run[1].error + 1e-6);
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("long run: 100,000 tokens leave rank and error where they were",
                        "[long_run]", AllRules) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const Stream stream = realistic(traits_of<TestType>, 32, 24, tokens, seed);
  check_long_run<Policy<TestType, Host, Fp32, LocalSvd, NoSink>>(stream);
  check_long_run<Policy<TestType, Host, Fp32, FullSvd, NoSink>>(stream);
  check_long_run<Policy<TestType, Host, Fp32, FixedRank, MeanValueSink>>(stream);
}
