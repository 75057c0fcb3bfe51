// The certificate bounds the true error, is what its recurrence says, and survives a rollback and a
// re-compression. The truth is the recurrence in a wider precision against the stored numbers.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/state_runner.hpp"
#include "support/watched_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

constexpr double epsilons[] = {1e-2, 3e-3, 0};

// Small, so that there can be many: every branch of a compaction is met at these sizes too.
StateConfig config_of(const Stream& stream, std::uint64_t run) {
  StateConfig config;
  config.d_k = stream.d_k;
  config.d_v = stream.d_v;
  config.buffer = 1 + static_cast<Index>(run % 8);
  config.epsilon = epsilons[run % 3];
  config.dense_fallback = run % 2 == 0;
  config.rank_cap = run % 5 == 0 ? 2 : 0;
  config.dense_retry = 2;
  config.active = 1 + static_cast<Index>(run % 3);
  config.recompress_growth = run % 4 == 0 ? 0 : 1.15;
  config.tail_share = run % 3 == 0 ? 1 : 0.3;
  config.tail_period = run % 4 == 0 ? 2 : 0;
  return config;
}

// Calls check(tag) for every policy of a rule, in both precisions.
template <class Rule, class Check>
void every_policy(const Check& check) {
  for_each_policy<Rule, Fp32>(check);
  for_each_policy<Rule, Fp64>(check);
}

// Keys of norm 10 under write strength 1 multiply an error by 99 at every token of a delta rule:
// few tokens, or it overflows.
Stream long_keys(RuleTraits rule, std::uint64_t seed) {
  Stream stream = realistic(rule, 9, 7, 10, seed);
  for (int t = 0; t < stream.tokens; ++t) {
    testing::detail::normalize(stream.key_at(t), stream.d_k);
    for (int i = 0; i < stream.d_k; ++i) stream.key_at(t)[i] *= 10;
  }
  set_write_strengths(stream, WriteStrengthPattern::one, seed);
  return stream;
}

// ---- The recurrence of the certificate, written once more --------------------------------------

// docs/numerics.md, (N1)-(N6) and (N9), in a wider precision and without the library's upward
// rounding.
template <class P>
class CertificateRecurrence {
 public:
  using T = typename P::Compute;
  using W = Wider<T>;

  W error = 0;
  W mass = 0;

  // The token that was buffered last.
  void advance(const SinkStateView<P>& view, const Token<T>& token) {
    const Index j = view.buffered() - 1;
    const Index d_k = view.config.d_k;
    const Index decays = P::Rule::log_decays(d_k);
    W log_decay = decays == 0 ? W(0) : -std::numeric_limits<W>::infinity();
    for (Index i = 0; i < decays; ++i) {
      log_decay = std::max(log_decay, static_cast<W>(token.log_decay[i]));
    }
    const W key = norm(token.key, d_k);
    const W written = key * norm(view.buffer.corrections.row(j), view.config.d_v);
    const W strength = std::abs(static_cast<W>(token.write_strength));
    mass *= std::exp(log_decay / 2);
    W growth = std::exp(log_decay);
    W rounding = 2 * unit * written;
    if (P::Rule::corrects) {
      const W reach = strength * key * key;
      const W reflection = std::abs(1 - static_cast<W>(token.write_strength) * key * key) +
                           (dot_roundings(d_k) + 6) * unit * reach;
      growth *= std::max(W(1), reflection);
      const Index terms = (view.dense() ? d_k : view.rank()) + j + 1;
      rounding +=
          reach * unit * mass *
          (dot_roundings(d_k) + W(0.74) * static_cast<W>(j + 1) + static_cast<W>(terms) + 8);
    }
    error = growth * error + rounding;
    mass += written;
  }

  // @param was_dense, buffered  of the state before this compaction
  // @returns the most that the rotations of the decomposition may have added: how large they were
  // is not recorded, only how many sweeps there were
  W compact(const SinkStateView<P>& view, const CompactionReport& report, bool was_dense,
            Index buffered) {
    const StateConfig& config = view.config;
    const auto c = static_cast<W>(report.rank_before);
    const auto recompress = [&](Index terms) {
      return 8 * static_cast<W>(terms) +
             2 * (dot_roundings(config.d_k) + dot_roundings(config.d_v)) + 20;
    };
    W roundings = W(1.74) * static_cast<W>(buffered + 1) + 13;
    W rotations = 0;
    if (!was_dense && !view.dense()) {
      roundings += recompress(report.decomposed);
      if (report.tail > 0) roundings += recompress(report.tail);
      rotations = unit * 12 * c * static_cast<W>(report.sweeps) * mass;
      if (report.projected > 0) {
        const auto p = static_cast<W>(report.projected);
        roundings += std::sqrt(p) * (c + std::sqrt(c)) + 4 * p + 2 * dot_roundings(config.d_k) + c;
      }
    } else {
      roundings += c;
      if (!view.dense()) roundings += 2 * static_cast<W>(report.rank_after + 1);
    }
    error += static_cast<W>(report.dropped) + unit * roundings * mass;
    mass = body_norm(view);
    if (P::Sink::present) {
      mass += norm(view.sink.data, config.d_k) * norm(view.sink_direction, config.d_v);
    }
    return rotations;
  }

 private:
  static constexpr W unit = std::numeric_limits<T>::epsilon() / 2;

  static W norm(const T* x, Index count) {
    W sum = 0;
    for (Index i = 0; i < count; ++i) sum += static_cast<W>(x[i]) * static_cast<W>(x[i]);
    return std::sqrt(sum);
  }
  static W dot_roundings(Index n) { return static_cast<W>((n + 15) / 16 + 4); }
  // Strengths add up; a dense body counts by its Frobenius norm.
  static W body_norm(const SinkStateView<P>& view) {
    W sum = 0;
    for (Index r = 0; r < view.rank(); ++r) sum += static_cast<W>(view.factors.strengths[r]);
    for (Index i = 0; view.dense() && i < view.config.d_k; ++i) {
      sum = std::hypot(sum, norm(view.matrix.row(i), view.config.d_v));
    }
    return sum;
  }
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("certificate: never below the true error", "[certificate]", AllRules) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const auto runs = static_cast<std::uint64_t>(2 * scenarios * test_scale());
  for (std::uint64_t run = 0; run < runs; ++run) {
    const int scenario = static_cast<int>(run % scenarios);
    const Stream stream =
        scenario_stream(scenario, traits_of<TestType>, 9 + static_cast<int>(run % 4),
                        7 + static_cast<int>(run % 3), 96, derived_seed(seed, run));
    INFO(scenario_name(scenario) << "; " << describe(stream));
    every_policy<TestType>([&](auto tag) {
      using P = typename decltype(tag)::type;
      INFO(policy_name<P>() << ", epsilon " << config_of(stream, run).epsilon);
      Watched<P> watched(stream, config_of(stream, run));
      Margin margin;
      watched.replay(0, stream.tokens, margin);
      check_bound(margin);
    });
  }
}

TEMPLATE_LIST_TEST_CASE("certificate: keys of norm 10", "[certificate]", AllRules) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (std::uint64_t run = 0; run < 24; ++run) {
    const Stream stream = long_keys(traits_of<TestType>, derived_seed(seed, run));
    every_policy<TestType>([&](auto tag) {
      using P = typename decltype(tag)::type;
      INFO(policy_name<P>() << "; " << describe(stream));
      Watched<P> watched(stream, config_of(stream, run));
      Margin margin;
      watched.replay(0, stream.tokens, margin);
      check_bound(margin);
      CHECK(std::isfinite(watched.runner().certificate()));
    });
  }
}

TEMPLATE_LIST_TEST_CASE("certificate: is what its recurrence says", "[certificate]", AllRules) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (std::uint64_t run = 0; run < 2 * scenarios; ++run) {
    const int scenario = static_cast<int>(run % scenarios);
    const Stream stream =
        scenario_stream(scenario, traits_of<TestType>, 20, 7, 64, derived_seed(seed, run));
    every_policy<TestType>([&](auto tag) {
      using P = typename decltype(tag)::type;
      using T = typename P::Compute;
      INFO(policy_name<P>() << "; " << scenario_name(scenario) << "; " << describe(stream));
      StateRunner<P> runner(stream, config_of(stream, run));
      CertificateRecurrence<P> expected;
      Margin above, below;
      // Each update is rounded upwards by 32 u a few times; so are the masses that went into it.
      const double round_up = 100.0 * static_cast<double>(std::numeric_limits<T>::epsilon());
      const auto compare = [&](int t, double slack) {
        const auto actual = static_cast<double>(runner.certificate());
        const auto exact = static_cast<double>(expected.error);
        below.include(exact, actual, t);
        above.include(actual, exact + slack + (t + 2) * round_up * exact, t);
      };
      for (int t = 0; t < stream.tokens; ++t) {
        runner.step(t);
        expected.advance(runner.view(), runner.inputs().token(t));
        compare(t, 0);
        if (!runner.view().due()) continue;
        const bool was_dense = runner.view().dense();
        const Index buffered = runner.view().buffered();
        const CompactionReport report = runner.compact();
        const auto rotations = expected.compact(runner.view(), report, was_dense, buffered);
        compare(t, static_cast<double>(rotations));
        expected.error = static_cast<Wider<T>>(runner.certificate());
      }
      check_bound(below);
      check_bound(above);
      if (scenario == 0) CHECK(runner.certificate() > 0);
    });
  }
}

TEMPLATE_LIST_TEST_CASE("certificate: restored by a rollback", "[certificate]", AllRules) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const Stream stream = realistic(traits_of<TestType>, 9, 7, 24, seed);
  every_policy<TestType>([&](auto tag) {
    using P = typename decltype(tag)::type;
    using T = typename P::Compute;
    INFO(policy_name<P>());
    StateConfig config = config_of(stream, 0);
    config.buffer = 16;
    StateRunner<P> runner(stream, config);
    for (int t = 0; t < 8; ++t) runner.step(t);
    runner.compact();
    std::vector<T> certificates{runner.certificate()};
    for (int t = 8; t < 24; ++t) {
      runner.step(t);
      certificates.push_back(runner.certificate());
    }
    for (int kept : {13, 12, 7, 1, 0}) {
      require_ok(roll_back(runner.view(), runner.view().buffered() - kept));
      const T now = runner.certificate();
      CHECK(std::memcmp(&now, &certificates[static_cast<std::size_t>(kept)], sizeof(T)) == 0);
    }
    CHECK(certificates.back() != certificates.front());
  });
}

TEMPLATE_LIST_TEST_CASE("certificate: carried through re-compression", "[certificate]", AllRules) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (std::uint64_t run = 0; run < 24; ++run) {
    const Stream stream = realistic(traits_of<TestType>, 12, 10, 60, derived_seed(seed, run));
    every_policy<TestType>([&](auto tag) {
      using P = typename decltype(tag)::type;
      using T = typename P::Compute;
      INFO(policy_name<P>() << "; " << describe(stream));
      Watched<P> watched(stream, config_of(stream, run));
      Margin margin;
      watched.replay(0, 21, margin);  // with tokens in the buffer, mostly

      T carried = 0;
      const std::vector<T> dense = watched.runner().dense(&carried);
      const std::vector<Wider<T>> wide(dense.begin(), dense.end());
      margin.include(distance(wide, watched.exact().state()), static_cast<double>(carried), 21);
      CHECK(carried >= watched.runner().certificate());

      RandomizedSvd randomized{4, 1, run};
      if (run % 2 == 0) {
        watched.runner().start_from_own(dense, ExactSvd{}, carried);
      } else {
        watched.runner().start_from_own(dense, randomized, carried);
      }
      CHECK(watched.runner().certificate() >= carried);
      watched.compare(21, margin);
      watched.replay(21, 60, margin);
      check_bound(margin);
    });
  }
}
