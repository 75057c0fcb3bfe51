// The profile of a trace: traces whose energies and spectra are known in closed form, and others
// against formulas of their own on Eigen's JacobiSVD.
#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "replay/error_ladder.hpp"
#include "replay/exact_svd.hpp"
#include "replay/profile.hpp"
#include "replay/profile_report.hpp"
#include "replay/replay.hpp"
#include "replay/report.hpp"
#include "replay/trace.hpp"
#include "support/catch.hpp"
#include "support/sanitized.hpp"
#include "support/streams.hpp"

using namespace sinkstate::tools;
using Catch::Approx;
using Eigen::MatrixXd;
using Eigen::VectorXd;
namespace oracle = sinkstate::oracle;
namespace testing = sinkstate::testing;
using Json = nlohmann::json;
using Index = std::ptrdiff_t;

namespace {

std::size_t at(Index index) { return static_cast<std::size_t>(index); }

// One head of linear attention (no decay, strength 1): S = sum of k v^T, so that what is written
// is what is there.
Trace plain_trace(Index tokens, Index d_k, Index d_v) {
  Trace trace;
  trace.rule = Rule::mamba2;
  trace.tokens = tokens;
  trace.key_heads = trace.value_heads = 1;
  trace.d_k = d_k;
  trace.d_v = d_v;
  trace.q.assign(at(tokens * d_k), 0.0f);
  trace.k = trace.q;
  trace.v.assign(at(tokens * d_v), 0.0f);
  trace.log_decay.assign(at(tokens), 0.0f);
  trace.beta.assign(at(tokens), 1.0f);
  return trace;
}

struct Result {
  TraceReport report;
  TraceProfile profile;
};

Result run(const Trace& trace, ReplayOptions options) {
  options.series = true;
  const auto progress = [](Index) {};
  Result result;
  result.report = replay("a trace", trace, options, nullptr, progress);
  result.profile = profile("a trace", trace, options, result.report, progress);
  return result;
}

Json json_of(const Result& result, const ReplayOptions& options) {
  return Json::parse(json({result.report}, options, {result.profile}))["traces"][0]["profile"];
}

}  // namespace

// --- in closed form ------------------------------------------------------------------------------

TEST_CASE("profile: planted energies of vectors, and a subspace that moves") {
  // Eight tokens: the early part are the first two, the late part the last two.
  Trace trace = plain_trace(8, 6, 5);
  const auto plant = [](std::vector<float>& rows, Index width, Index token, Index axis, float x) {
    rows[at(token * width + axis)] = x;
  };
  plant(trace.k, 6, 0, 0, 3);
  plant(trace.k, 6, 1, 1, 1);
  plant(trace.k, 6, 3, 2, -4);
  plant(trace.k, 6, 6, 1, 2);
  plant(trace.k, 6, 7, 3, 1);
  // One direction at all times, not along an axis.
  for (Index t = 0; t < 8; ++t) {
    plant(trace.v, 5, t, 0, 0.6f * static_cast<float>(t + 1));
    plant(trace.v, 5, t, 4, -0.8f * static_cast<float>(t + 1));
  }
  const TraceProfile profile = run(trace, {}).profile;
  CHECK(profile.part == 2);
  const HeadProfile& head = profile.heads.at(0);

  const auto same = [](const TopShares& given, const std::vector<double>& wanted) {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      INFO("top " << profiled_directions[i]);
      CHECK(given[i] == Approx(wanted[i]).margin(1e-12));
    }
  };
  // Energies 9, 5, 16 and 1; early 9 and 1; late 4 along the second of these and 1 along no other.
  same(head.k.top, {16 / 31.0, 25 / 31.0, 1, 1, 1});
  same(head.k.late_in_early, {0, 0.8, 0.8, 0.8, 0.8});
  same(head.k.late_in_late, {0.8, 1, 1, 1, 1});
  same(head.v.top, {1, 1, 1, 1, 1});
  same(head.v.late_in_early, {1, 1, 1, 1, 1});
  same(head.v.late_in_late, {1, 1, 1, 1, 1});
  for (const double share : head.q.top) CHECK(std::isnan(share));  // there are no queries
}

TEST_CASE("profile: a planted spectrum") {
  // Token i writes 2^-i along axis i of keys and 11 - i of values.
  constexpr Index tokens = 12, d_k = 16, d_v = 12;
  Trace trace = plain_trace(tokens, d_k, d_v);
  for (Index i = 0; i < tokens; ++i) {
    trace.k[at(i * d_k + i)] = 1;
    trace.v[at(i * d_v + 11 - i)] = std::ldexp(1.0f, -static_cast<int>(i));
  }
  // The outputs of the three moments: term 0; terms 1 to 3 alike; terms 1 and 9, with little in 9.
  trace.q[at(3 * d_k)] = 1;
  for (Index i = 1; i < 4; ++i) {
    trace.q[at(7 * d_k + i)] = std::ldexp(1.0f, static_cast<int>(i));
  }
  trace.q[at(11 * d_k + 1)] = 2;
  trace.q[at(11 * d_k + 9)] = 0.12f * 512;
  ReplayOptions options;
  options.buffer = 4;
  options.epsilon = 0.01;
  options.dense_fallback = false;
  const Result result = run(trace, options);
  const HeadProfile& head = result.profile.heads.at(0);

  REQUIRE(head.singular_values.size() == 12);
  for (Index i = 0; i < 12; ++i) {
    CHECK(head.singular_values[at(i)] == Approx(std::ldexp(1.0, -static_cast<int>(i))));
  }
  REQUIRE(head.moments.size() == 3);
  // A sum of n terms 4^-i.
  const auto energy = [](int n) { return 4 / 3.0 * (1 - std::pow(0.25, n)); };
  const Index wanted_99[] = {4, 4, 4}, wanted_99_9[] = {4, 5, 5}, exact[] = {4, 7, 7};
  const Index output[] = {1, 4, 10};
  for (std::size_t m = 0; m < 3; ++m) {
    const StateMoment& moment = head.moments[m];
    const int terms = 4 * static_cast<int>(m + 1);
    CHECK(moment.tokens == terms);
    CHECK(moment.top_1 == Approx(energy(1) / energy(terms)));
    CHECK(moment.top_8 == Approx(energy(std::min(8, terms)) / energy(terms)));
    CHECK(moment.r99 == wanted_99[m]);
    CHECK(moment.r99_9 == wanted_99_9[m]);
    CHECK(moment.rank_exact == exact[m]);  // 2^-6 is the last above 0.01
    CHECK(moment.r99_output == output[m]);
    CHECK(std::isnan(moment.sink));
  }
  // Energies of all outputs together, by term: 1, 1 + 1, 1, 1, and 0.0144 of 5.0144 in term 9.
  CHECK(head.r99_output == 4);

  // 0 keeps all that is there: as many terms as tokens, stored and exact.
  options.epsilon = 0;
  const std::vector<StateMoment> all = run(trace, options).profile.heads.at(0).moments;
  for (std::size_t m = 0; m < 3; ++m) {
    CHECK(all[m].rank_exact == 4 * static_cast<Index>(m + 1));
    CHECK(all[m].rank_stored == 4.0 * static_cast<double>(m + 1));
  }
  // Seven terms stand above 0.01 at the end; of the policies, FullSvd stores just these.
  options.epsilon = 0.01;
  options.compaction = Compaction::full_svd;
  CHECK(run(trace, options).profile.heads.at(0).moments.back().rank_stored == 7);
}

TEST_CASE("profile: a planted sink") {
  // S = 4 e0 s^T + 2 e1 f^T + 0.08 e2 g^T + 0.02 e3 h^T; s, f, g, h orthonormal, s not an axis.
  constexpr Index d_k = 5, d_v = 6;
  Trace trace = plain_trace(8, d_k, d_v);
  const float strengths[] = {4, 2, 0.08f, 0.02f};
  for (Index i = 0; i < 4; ++i) {
    trace.k[at(i * d_k + i)] = strengths[i];
    if (i > 0) trace.v[at(i * d_v + i + 1)] = 1;
  }
  trace.v[0] = 0.6f;
  trace.v[1] = 0.8f;
  trace.sink_direction = {16 * 0.6f, 16 * 0.8f, 0, 0, 0, 0};
  ReplayOptions options;
  options.epsilon = 0.01;
  const double all = 16 + 4 + 0.08 * 0.08 + 0.02 * 0.02;
  {
    const Result result = run(trace, options);
    const StateMoment& end = result.profile.heads.at(0).moments.back();
    CHECK(result.profile.sink);
    CHECK(end.sink == Approx(16 / all));
    CHECK(end.sink_cosine == Approx(1));
    CHECK(end.r99 == 2);
    CHECK(end.content_r99 == 1);
    CHECK(end.rank_exact == 3);  // at least 0.04
    const std::vector<double>& content = result.profile.heads.at(0).content_singular_values;
    REQUIRE(content.size() == 3);
    CHECK(content[0] == Approx(2));
    CHECK(content[2] == Approx(0.02));
    const Json object = json_of(result, options)["per_head"][0];
    CHECK(object["moments"][0]["sink"].get<double>() == Approx(16 / all));
  }
  {
    // Kept apart, the sink is no term, but terms are still compared with it.
    options.sink = true;
    const StateMoment end = run(trace, options).profile.heads.at(0).moments.back();
    CHECK(end.rank_exact == 2);
    CHECK(end.rank_stored == 2);
    options.sink = false;
  }
  {
    // Halfway between sink and second term.
    trace.sink_direction = {0.6f, 0.8f, 1, 0, 0, 0};
    const StateMoment end = run(trace, options).profile.heads.at(0).moments.back();
    CHECK(end.sink == Approx((16 + 4) / 2.0 / all));
    CHECK(end.sink_cosine == Approx(std::sqrt(0.5)));
  }
  {
    // A state that is nothing but its sink has no content.
    Trace only = plain_trace(8, d_k, d_v);
    only.k[0] = only.k[1] = 1;
    for (Index j = 0; j < d_v; ++j) only.v[at(j)] = 0.1f * static_cast<float>(j + 1);
    only.sink_direction.assign(only.v.begin(), only.v.begin() + d_v);
    const HeadProfile head = run(only, options).profile.heads.at(0);
    CHECK(head.moments.back().sink == Approx(1));
    CHECK(head.moments.back().content_r99 == 0);
    CHECK(head.content_singular_values.empty());
  }
  {
    trace.sink_direction.assign(d_v, 0.0f);
    const Result result = run(trace, options);
    const StateMoment& end = result.profile.heads.at(0).moments.back();
    CHECK(std::isnan(end.sink));
    CHECK(std::isnan(end.sink_cosine));
    CHECK(end.content_r99 == end.r99);
    CHECK(json_of(result, options)["per_head"][0]["moments"][0]["sink"].is_null());
  }
  trace.sink_direction.clear();
  const Result result = run(trace, options);
  CHECK_FALSE(result.profile.sink);
  const Json object = json_of(result, options)["per_head"][0];
  CHECK(object["moments"][0].count("sink") == 0);
  CHECK(object.count("content_singular_values") == 0);
  CHECK(profile_table({result.report}, {result.profile}).find("no sink_direction") !=
        std::string::npos);
}

TEST_CASE("profile: planted shares of what comes next") {
  // After two tokens S = 2 e0 f0^T + e1 f1^T, after four also 0.5 e2 f2^T.
  constexpr Index d_k = 4, d_v = 3;
  Trace trace = plain_trace(6, d_k, d_v);
  const auto set = [](std::vector<float>& rows, Index width, Index token,
                      const std::vector<float>& entries) {
    std::copy(entries.begin(), entries.end(), rows.begin() + token * width);
  };
  set(trace.k, d_k, 0, {2, 0, 0, 0});
  set(trace.v, d_v, 0, {1, 0, 0});
  set(trace.k, d_k, 1, {0, 1, 0, 0});
  set(trace.v, d_v, 1, {0, 1, 0});
  // What meets the first state: none of a key's energy is in a third term, which is not there.
  set(trace.k, d_k, 2, {3, 0, 4, 0});
  set(trace.v, d_v, 2, {0, 0, 0});
  set(trace.k, d_k, 3, {0, 0, 0.5f, 0});
  set(trace.v, d_v, 3, {0, 0, 1});
  // And the second.
  set(trace.k, d_k, 4, {1, 1, 1, 1});
  set(trace.v, d_v, 4, {4, 0, 3});
  ReplayOptions options;
  options.buffer = 2;
  const HeadProfile head = run(trace, options).profile.heads.at(0);
  REQUIRE(head.moments.size() == 3);
  const double key[] = {(9 / 25.0 + 0.25) / 2, 0.25 / 2, 0.25 / 2};
  const double value[] = {16 / 25.0, 0, 9 / 25.0};  // the value that is zero has no shares
  REQUIRE(head.captured_k.size() == 3);
  REQUIRE(head.captured_v.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(head.captured_k[i] == Approx(key[i]).margin(1e-12));
    CHECK(head.captured_v[i] == Approx(value[i]).margin(1e-12));
  }
}

// --- against other formulas ----------------------------------------------------------------------

namespace {

// What a trace means to one head, written down once more in Eigen.
struct Head {
  MatrixXd q, k, v;              // a token a row
  std::vector<MatrixXd> states;  // after 0, 1, ... tokens
};

Head exact_head(const Trace& trace, Index h) {
  const Index key_head = trace.head_map == HeadMap::tiled ? h % trace.key_heads
                                                          : h * trace.key_heads / trace.value_heads;
  const auto rows = [&](const std::vector<float>& numbers, Index heads, Index head, Index width) {
    MatrixXd matrix(trace.tokens, width);
    for (Index t = 0; t < trace.tokens; ++t) {
      for (Index i = 0; i < width; ++i) {
        matrix(t, i) = double{numbers[at((t * heads + head) * width + i)]};
      }
    }
    return matrix;
  };
  Head head{rows(trace.q, trace.key_heads, key_head, trace.d_k),
            rows(trace.k, trace.key_heads, key_head, trace.d_k),
            rows(trace.v, trace.value_heads, h, trace.d_v),
            {}};
  MatrixXd state = MatrixXd::Zero(trace.d_k, trace.d_v);
  if (!trace.initial_state.empty()) {
    for (Index i = 0; i < trace.d_k; ++i) {
      for (Index j = 0; j < trace.d_v; ++j) {
        state(i, j) = double{trace.initial_state[at((h * trace.d_k + i) * trace.d_v + j)]};
      }
    }
  }
  head.states.push_back(state);
  const Index decays = trace.rule == Rule::kimi_delta ? trace.d_k : 1;
  for (Index t = 0; t < trace.tokens; ++t) {
    const Index row = t * trace.value_heads + h;
    for (Index i = 0; i < trace.d_k; ++i) {
      state.row(i) *= std::exp(double{trace.log_decay[at(row * decays + i % decays)]});
    }
    const VectorXd key = head.k.row(t), value = head.v.row(t);
    const VectorXd seen = trace.rule == Rule::mamba2 ? VectorXd(VectorXd::Zero(trace.d_v))
                                                     : VectorXd(state.transpose() * key);
    state += double{trace.beta[at(row)]} * key * (value - seen).transpose();
    head.states.push_back(state);
  }
  return head;
}

using Svd = Eigen::JacobiSVD<MatrixXd>;
Svd svd_of(const MatrixXd& matrix) {
  return Svd(matrix, Eigen::ComputeThinU | Eigen::ComputeThinV);
}

// The best approximation with so many terms.
MatrixXd truncated(const Svd& svd, Index terms) {
  return svd.matrixU().leftCols(terms) * svd.singularValues().head(terms).asDiagonal() *
         svd.matrixV().leftCols(terms).transpose();
}

// The least number of terms for which what `part_of` makes of them has so much of the whole.
template <class PartOf>
Index least_terms(Index full, double share, const PartOf& energy_of) {
  for (Index terms = 0; terms < full; ++terms) {
    if (energy_of(terms) >= share * energy_of(full)) return terms;
  }
  return full;
}

Index r99_of(const MatrixXd& matrix, double share) {
  const Svd svd = svd_of(matrix);
  return least_terms(svd.singularValues().size(), share,
                     [&](Index terms) { return truncated(svd, terms).squaredNorm(); });
}

void check_vectors(const VectorProfile& given, const MatrixXd& rows, Index part) {
  const auto share = [](const MatrixXd& of, const MatrixXd& basis_of, Index count) {
    const Svd svd = svd_of(basis_of);
    const MatrixXd basis = svd.matrixV().leftCols(std::min(count, svd.matrixV().cols()));
    return (of * basis * basis.transpose()).squaredNorm() / of.squaredNorm();
  };
  const MatrixXd early = rows.topRows(part), late = rows.bottomRows(part);
  for (std::size_t i = 0; i < profiled_directions.size(); ++i) {
    const Index count = profiled_directions[i];
    INFO("top " << count);
    CHECK(given.top[i] == Approx(share(rows, rows, count)).margin(1e-9));
    CHECK(given.late_in_early[i] == Approx(share(late, early, count)).margin(1e-9));
    CHECK(given.late_in_late[i] == Approx(share(late, late, count)).margin(1e-9));
  }
}

// Every head different, and one key head for two value heads.
Trace random_trace(Rule rule, HeadMap map, Index d_k, Index d_v, Index tokens) {
  Trace trace;
  trace.rule = rule;
  trace.head_map = map;
  trace.tokens = tokens;
  trace.key_heads = 2;
  trace.value_heads = 4;
  trace.d_k = d_k;
  trace.d_v = d_v;
  const oracle::RuleTraits traits = rule == Rule::mamba2        ? oracle::mamba2
                                    : rule == Rule::gated_delta ? oracle::gated_delta
                                                                : oracle::kimi_delta;
  std::vector<testing::Stream> heads;
  for (std::uint64_t h = 0; h < 4; ++h) {
    heads.push_back(testing::realistic(traits, static_cast<int>(d_k), static_cast<int>(d_v),
                                       static_cast<int>(tokens), testing::derived_seed(3, h)));
    const testing::Stream& head = heads.back();
    trace.sink_direction.insert(trace.sink_direction.end(), head.sink.begin(), head.sink.end());
    trace.initial_state.resize(trace.initial_state.size() + at(d_k * d_v),
                               0.01f * static_cast<float>(h));
  }
  const auto append = [](std::vector<float>& to, const float* from, Index count) {
    to.insert(to.end(), from, from + count);
  };
  for (int t = 0; t < tokens; ++t) {
    for (std::size_t h = 0; h < 2; ++h) {
      append(trace.q, heads[h].query_at(t), d_k);
      append(trace.k, heads[h].key_at(t), d_k);
    }
    for (const testing::Stream& head : heads) {
      append(trace.v, head.value_at(t), d_v);
      append(trace.log_decay, head.log_decay_at(t), trace.decays_per_token());
      trace.beta.push_back(head.write_strength_at(t));
    }
  }
  return trace;
}

}  // namespace

TEST_CASE("profile: every number against a direct computation") {
  struct Case {
    Rule rule;
    HeadMap map;
    Index d_k, d_v;
    bool sink;
  };
  for (const Case& one : {Case{Rule::mamba2, HeadMap::interleaved, 20, 13, false},
                          Case{Rule::gated_delta, HeadMap::tiled, 17, 17, true},
                          Case{Rule::kimi_delta, HeadMap::interleaved, 12, 21, false}}) {
    const Trace trace = random_trace(one.rule, one.map, one.d_k, one.d_v, 83);
    ReplayOptions options;
    options.prefill = 5;
    options.epsilon = 0.03;
    options.sink = one.sink;
    const Result result = run(trace, options);
    const TraceProfile& profile = result.profile;
    CHECK(profile.epsilon == 0.03);
    CHECK(profile.part == 21);
    REQUIRE(profile.heads.size() == 4);
    const Index full = std::min(one.d_k, one.d_v);
    for (Index h = 0; h < 4; ++h) {
      INFO(to_string(one.rule) << ", head " << h);
      const Head exact = exact_head(trace, h);
      const HeadProfile& given = profile.heads[at(h)];
      check_vectors(given.q, exact.q, 21);
      check_vectors(given.k, exact.k, 21);
      check_vectors(given.v, exact.v, 21);

      const VectorXd direction =
          Eigen::Map<const Eigen::VectorXf>(trace.sink_direction.data() + h * one.d_v, one.d_v)
              .cast<double>();
      const bool sink = direction.norm() > 0;
      VectorXd captured_k = VectorXd::Zero(full), captured_v = captured_k;
      VectorXd truncated_output = VectorXd::Zero(full + 1);
      REQUIRE(given.moments.size() == 10);  // 78 tokens, nine buffers, and the end
      for (std::size_t m = 0; m < 10; ++m) {
        const StateMoment& moment = given.moments[m];
        REQUIRE(moment.tokens == (m < 9 ? 5 + 8 * (static_cast<Index>(m) + 1) : 83));
        INFO("after " << moment.tokens);
        const MatrixXd& state = exact.states[at(moment.tokens)];
        const Svd svd = svd_of(state);
        CHECK(moment.top_1 == Approx(truncated(svd, 1).squaredNorm() / state.squaredNorm()));
        CHECK(moment.top_8 == Approx(truncated(svd, 8).squaredNorm() / state.squaredNorm()));
        CHECK(moment.r99 == r99_of(state, 0.99));
        CHECK(moment.r99_9 == r99_of(state, 0.999));

        const VectorXd query = exact.q.row(moment.tokens - 1);
        const auto output = [&](Index terms) {
          return (truncated(svd, terms).transpose() * query).squaredNorm();
        };
        CHECK(moment.r99_output == least_terms(full, 0.99, output));
        for (Index terms = 0; terms <= full; ++terms) truncated_output(terms) += output(terms);

        const VectorXd unit = sink ? VectorXd(direction.normalized()) : direction;
        const MatrixXd along = state * unit * unit.transpose();
        if (sink) {
          CHECK(moment.sink == Approx(along.squaredNorm() / state.squaredNorm()));
          CHECK(moment.sink_cosine == Approx(std::abs(svd.matrixV().col(0).dot(unit))));
        }
        CHECK(moment.content_r99 == r99_of(state - along, 0.99));

        const VectorXd terms =
            one.sink ? svd_of(state - along).singularValues() : VectorXd(svd.singularValues());
        const double strongest = one.sink ? std::max(terms(0), along.norm()) : terms(0);
        CHECK(moment.rank_exact == (terms.array() >= 0.03 * strongest).count());

        const TraceReport& report = result.report;
        CHECK(moment.rank_stored == (m < 9 ? report.series[at(h)].rank[at(moment.tokens - 5)]
                                           : report.per_head[at(h)].rank_final));
        if (m == 9) {
          REQUIRE(given.singular_values.size() == at(full));
          for (Index i = 0; i < full; ++i) {
            CHECK(given.singular_values[at(i)] ==
                  Approx(svd.singularValues()(i)).margin(1e-12 * svd.singularValues()(0)));
          }
          break;
        }
        const VectorXd key = exact.k.row(moment.tokens), value = exact.v.row(moment.tokens);
        // The first states have fewer terms than there is room for.
        const VectorXd there =
            (svd.singularValues().array() > 1e-13 * svd.singularValues()(0)).cast<double>();
        captured_k += (svd.matrixU().transpose() * key).cwiseAbs2().cwiseProduct(there) /
                      key.squaredNorm() / 9;
        captured_v += (svd.matrixV().transpose() * value).cwiseAbs2().cwiseProduct(there) /
                      value.squaredNorm() / 9;
      }
      CHECK(given.r99_output ==
            least_terms(full, 0.99, [&](Index terms) { return truncated_output(terms); }));
      for (Index i = 0; i < full; ++i) {
        CHECK(given.captured_k[at(i)] == Approx(captured_k(i)).margin(1e-7));
        CHECK(given.captured_v[at(i)] == Approx(captured_v(i)).margin(1e-7));
      }
    }
  }
}

TEST_CASE("profile: the states that the shipped traces carry") {
  if (testing::sanitized) return;  // figures, and slow ones
  for (const std::string name : {"mamba2", "gated_delta", "kimi_delta"}) {
    const Trace whole = load_trace(SINKSTATE_TEST_DATA "/" + name + ".safetensors");
    REQUIRE(!whole.state_end.empty());
    ReplayOptions options;
    options.buffer = whole.tokens / 2;  // few moments
    options.compaction = Compaction::dense_buffered;
    const TraceProfile profile = run(whole, options).profile;
    const MatrixXd end =
        Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(
            whole.state_end.data(), whole.d_k, whole.d_v)
            .cast<double>();
    const VectorXd values = Svd(end).singularValues();
    const StateMoment& moment = profile.heads.at(0).moments.back();
    INFO(name);
    CHECK(moment.top_1 ==
          Approx(values.head(1).squaredNorm() / values.squaredNorm()).epsilon(1e-3));
    CHECK(moment.top_8 ==
          Approx(values.head(8).squaredNorm() / values.squaredNorm()).epsilon(1e-3));
    CHECK(moment.r99 == least_terms(values.size(), 0.99,
                                    [&](Index terms) { return values.head(terms).squaredNorm(); }));
  }
}

// --- moments, extremes, threads ------------------------------------------------------------------

TEST_CASE("profile: moments lie after compactions, and the last at the end") {
  ReplayOptions options;
  const auto moments = [&](Index tokens, Index prefill, Index buffer) {
    options.prefill = prefill;
    options.buffer = buffer;
    return profile_moments(tokens, options);
  };
  CHECK(moments(1, 0, 8) == std::vector<Index>{1});
  CHECK(moments(5, 4, 8) == std::vector<Index>{5});
  CHECK(moments(16, 0, 8) == std::vector<Index>{8, 16});
  CHECK(moments(19, 2, 8) == std::vector<Index>{10, 18, 19});
  const auto many = moments(4099, 1, 8);
  REQUIRE(many.size() == 65);
  CHECK(many[0] == 65);  // of 512 compactions every eighth
  CHECK(many[1] == 129);
  CHECK(many[63] == 4097);
  CHECK(many[64] == 4099);
  for (const Index tokens : {100, 1000, 1003}) {
    const auto some = moments(tokens, 3, 4);
    CHECK(some.size() <= 65);
    CHECK(some.back() == tokens);
    CHECK(std::is_sorted(some.begin(), some.end()));
    CHECK(std::set<Index>(some.begin(), some.end()).size() == some.size());
    for (std::size_t i = 0; i + 1 < some.size(); ++i) CHECK((some[i] - 3) % 4 == 0);
  }
}

TEST_CASE("profile: the smallest traces, zeros and extremes") {
  for (const Rule rule : {Rule::mamba2, Rule::gated_delta, Rule::kimi_delta}) {
    for (const float number : {0.0f, 1.0f, 1e-38f, 1e-45f}) {
      for (const auto& [d_k, d_v] : {std::pair<Index, Index>{1, 1}, {1, 40}, {40, 1}, {3, 2}}) {
        INFO(to_string(rule) << " " << number << " " << d_k << " x " << d_v);
        Trace trace = plain_trace(1, d_k, d_v);
        trace.rule = rule;
        trace.log_decay.resize(at(trace.decays_per_token()), 0.0f);
        trace.sink_direction.assign(at(d_v), number);
        for (auto* numbers : {&trace.q, &trace.k, &trace.v}) {
          std::fill(numbers->begin(), numbers->end(), number);
        }
        Result result = run(trace, {});
        result.profile.error = climb("a trace", trace, {}, 0.01, [](Index) {});
        const HeadProfile& head = result.profile.heads.at(0);
        REQUIRE(head.moments.size() == 1);
        const Index rank = number == 0 ? 0 : 1;
        CHECK(head.moments[0].r99 == rank);
        CHECK(head.moments[0].rank_exact == rank);
        CHECK(head.singular_values.size() == at(rank));
        CHECK(std::isnan(head.captured_k.at(0)));  // nothing comes after the end
        if (rank > 0) CHECK(head.moments[0].sink == Approx(1));
        if (rank > 0) CHECK(head.k.late_in_early[0] == Approx(1));
        // Only JSON can be parsed, and NaN is none; tables and figures say "-" or nothing.
        CHECK_NOTHROW(json_of(result, {}));
        for (const std::string& text : {profile_table({result.report}, {result.profile}),
                                        figure({result.report}, {}, {result.profile})}) {
          CHECK(text.find("nan") == std::string::npos);
          CHECK(text.find("inf") == std::string::npos);
        }
      }
    }
  }
  // Keys that reach beyond the range of floats in their squares.
  Trace trace = plain_trace(16, 3, 2);
  std::fill(trace.k.begin(), trace.k.end(), 1e30f);
  std::fill(trace.v.begin(), trace.v.end(), 1e-30f);
  CHECK(run(trace, {}).profile.heads.at(0).k.top[0] == Approx(1));

  trace = plain_trace(1, 1025, 1);
  CHECK_THROWS_WITH(check_profile("wide", trace),
                    "wide: --profile: wanted d_k and d_v of at most 1024, given 1025 and 1");
  CHECK_NOTHROW(check_profile("wide", plain_trace(1, 1024, 1024)));
}

TEST_CASE("profile: the same for any number of threads, with all tokens reported") {
  const Trace trace = random_trace(Rule::gated_delta, HeadMap::tiled, 9, 8, 50);
  ReplayOptions options;
  const Json one = json_of(run(trace, options), options);
  options.threads = 3;
  CHECK(json_of(run(trace, options), options) == one);

  options.threads = 1;
  options.series = true;
  const TraceReport report = replay("a trace", trace, options, nullptr, [](Index) {});
  Index done = 0;
  const auto count = [&](Index tokens) { done += tokens; };
  profile("a trace", trace, options, report, count);
  CHECK(done == 4 * 50);
  done = 0;
  climb("a trace", trace, options, 0.5, count);
  CHECK(done == 4 * 50 * most_rungs(trace));
}

TEST_CASE("profile: singular values down to rounding") {
  CHECK(exact_svd(MatrixXd::Zero(3, 40)).values.size() == 0);
  for (const auto& [rows, columns] : {std::pair<Index, Index>{50, 30}, {30, 50}, {1, 7}, {7, 1}}) {
    const Index rank = std::min<Index>(5, std::min(rows, columns));
    const MatrixXd matrix = MatrixXd::Random(rows, rank) * MatrixXd::Random(rank, columns);
    const ExactSvd svd = exact_svd(matrix);
    REQUIRE(svd.values.size() == rank);
    CHECK((svd.left * svd.values.asDiagonal() * svd.right.transpose() - matrix).norm() <
          1e-13 * matrix.norm());
    CHECK((svd.right.transpose() * svd.right - MatrixXd::Identity(rank, rank)).norm() < 1e-13);
    CHECK((singular_values(matrix, 0) - svd.values).norm() < 1e-13 * svd.values(0));
    CHECK(singular_values(matrix, 1e20 * svd.values(0)).size() == 0);
  }
}

// --- which setting meets an error ----------------------------------------------------------------

TEST_CASE("profile: the setting that meets an error is the first that does") {
  const Trace trace = random_trace(Rule::gated_delta, HeadMap::interleaved, 16, 16, 60);
  for (const Compaction compaction : all_compactions) {
    ReplayOptions options;
    options.compaction = compaction;
    options.buffer = 4;
    if (compaction == Compaction::fixed_rank) options.rank_cap = 2;
    const Compaction adaptive =
        compaction == Compaction::full_svd ? Compaction::full_svd : Compaction::local_svd;
    const auto error_at = [&](Compaction policy, double setting, std::ptrdiff_t head) {
      ReplayOptions trial;
      trial.compaction = policy;
      trial.buffer = 4;
      if (policy == Compaction::fixed_rank) {
        trial.rank_cap = static_cast<Index>(setting);
      } else {
        trial.epsilon = setting;
      }
      const TraceReport report = replay("a trace", trace, trial, nullptr, [](Index) {});
      return head < 0 ? report.total.output_error_rms : report.per_head[at(head)].output_error_rms;
    };
    const ErrorLadders error = climb("a trace", trace, options, 0.1, [](Index) {});
    CHECK(error.wanted == 0.1);
    CHECK(error.adaptive == adaptive);
    for (std::ptrdiff_t head = -1; head < 4; ++head) {
      const auto met = [&](const Ladder& ladder) {
        return head < 0 ? ladder.meets(0.1) : ladder.meets(0.1, at(head));
      };
      INFO(to_string(compaction) << ", head " << head);
      const double epsilons[] = {0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4, 1e-4};
      const double ranks[] = {1, 2, 3, 4, 6, 8, 12, 16};
      const auto first = [&](const auto& ladder, Compaction policy) {
        return std::find_if(std::begin(ladder), std::end(ladder),
                            [&](double setting) { return error_at(policy, setting, head) <= 0.1; });
      };
      REQUIRE(met(error.epsilons) != nullptr);
      CHECK(met(error.epsilons)->setting == *first(epsilons, adaptive));
      REQUIRE(met(error.ranks) != nullptr);
      CHECK(met(error.ranks)->setting == *first(ranks, Compaction::fixed_rank));
    }
  }
  // No rung of a ladder is exact to twelve digits; then all were tried, and the report says none.
  ReplayOptions options;
  options.dense_fallback = false;
  Result result = run(trace, options);
  result.profile.error = climb("a trace", trace, options, 1e-12, [](Index) {});
  CHECK(result.profile.error->epsilons.meets(1e-12) == nullptr);
  CHECK(result.profile.error->ranks.meets(1e-12, 3) == nullptr);
  const Json object = json_of(result, options)["error"];
  CHECK(object["epsilon"]["total"].is_null());
  CHECK(object["epsilon"]["tried"].size() == 8);
  CHECK(object["rank"]["per_head"].size() == 4);
  CHECK(object["rank"]["per_head"][0].is_null());
  CHECK(object["rank"]["tried"].back()["rank"] == 16);
  CHECK(profile_table({result.report}, {result.profile}).find("  none  ") != std::string::npos);
}

// --- the figure ----------------------------------------------------------------------------------

TEST_CASE("profile: the figure shows the spectra, and stored beside exact ranks") {
  TraceProfile profile;
  profile.heads.resize(2);
  profile.heads[0].singular_values = {8, 2, 1e-7};
  for (const Index tokens : {8, 16}) {
    StateMoment moment;
    moment.tokens = tokens;
    moment.rank_exact = tokens / 4;
    moment.rank_stored = static_cast<double>(tokens) / 2;
    profile.heads[0].moments.push_back(moment);
  }
  const std::vector<LineChart> charts = charts_of(profile, "a trace", "a policy");
  REQUIRE(charts.size() == 2);
  CHECK(charts[0].title == "a trace: singular values at the end");
  CHECK(charts[1].title == "a trace, a policy: stored rank (solid), exact rank (dashed)");
  REQUIRE(charts[0].series.size() == 2);
  const ChartSeries& values = charts[0].series[0];
  REQUIRE(values.points.size() == 2);  // not the one below 1e-6
  CHECK(values.points[0].y == 1);
  CHECK(values.points[1].x == 1);
  CHECK(values.points[1].y == 0.25);
  CHECK(charts[0].series[1].points.empty());
  REQUIRE(charts[1].series.size() == 4);
  const ChartSeries& stored = charts[1].series[0];
  const ChartSeries& exact = charts[1].series[1];
  CHECK_FALSE(stored.dashed);
  CHECK(exact.dashed);
  CHECK(stored.colour == exact.colour);
  CHECK(stored.points.at(1).x == 16);
  CHECK(stored.points.at(1).y == 8);
  CHECK(exact.points.at(1).y == 4);

  TraceReport report;
  report.trace = "one.safetensors";
  const std::string svg = figure({report, report}, {}, {profile, profile});
  std::size_t count = 0;
  for (std::size_t i = svg.find("<g "); i != std::string::npos; i = svg.find("<g ", i + 1)) ++count;
  CHECK(count == 8);
}
