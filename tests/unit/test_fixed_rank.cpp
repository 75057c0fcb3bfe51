// FixedRank: how near the best approximation of its rank it comes, and what it promises besides.
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

#include "replay/trace.hpp"
#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/state_runner.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

StateConfig fixed_config(Index d_k, Index d_v, Index rank, Index buffer) {
  StateConfig config = config_of(d_k, d_v, 0, buffer);
  config.rank_cap = rank;
  return config;
}

template <class P>
Matrix stored_matrix(const SinkStateView<P>& view) {
  const std::vector<double> dense = stored_state<P, double>(view);
  return Eigen::Map<const Matrix>(dense.data(), view.config.d_k, view.config.d_v);
}

// What the best approximation of a rank leaves over, and the largest singular value.
struct Best {
  double error;
  double strongest;
};
Best best_of(const Matrix& matrix, Index rank) {
  const Eigen::MatrixXd square = matrix.transpose() * matrix;
  // Squares lose what is below 1e-8 of the strongest: far below what is compared.
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(square, Eigen::EigenvaluesOnly);
  const auto& squares = solver.eigenvalues();  // rising
  const Index weak = std::max<Index>(0, squares.size() - rank);
  return {std::sqrt(std::max(0.0, squares.head(weak).cwiseMax(0.0).sum())),
          std::sqrt(squares.tail(1)(0))};
}

struct Share {
  double sum = 0;
  double worst = 0;
  int count = 0;

  void include(double share) {
    sum += share;
    worst = std::max(worst, share);
    ++count;
  }
};

// Error over the least possible, after every compaction that had to drop something.
template <class Rule>
void replay_trace(const tools::Trace& trace, Index rank, Index buffer, Share& share) {
  using P = Fixed32<Rule>;
  for (std::ptrdiff_t h = 0; h < trace.value_heads; ++h) {
    const StateConfig config = fixed_config(trace.d_k, trace.d_v, rank, buffer);
    SinkState<P> state(config);
    HostTeam team(workspace_bytes<P>(config));
    const auto view = state.view();
    for (std::ptrdiff_t t = 0; t < trace.tokens; ++t) {
      const Token<float> token{trace.key(t, h), trace.value(t, h), trace.log_decays(t, h),
                               trace.write_strength(t, h)};
      REQUIRE(advance(team, view, token) == Status::ok);
      if (!view.due()) continue;
      const Matrix before = stored_matrix<P>(view);
      CompactionReport report;
      REQUIRE(compact(team, view, &report) == Status::ok);
      CHECK(view.rank() <= rank);
      if (report.projected == 0 || t % (8 * buffer) != buffer - 1) continue;
      const Best best = best_of(before, rank);
      if (best.error < 1e-5 * best.strongest) continue;  // rounding
      share.include((stored_matrix<P>(view) - before).norm() / best.error);
    }
  }
}

}  // namespace

TEST_CASE("fixed rank: within a few per cent of the best approximation on the shipped traces",
          "[fixed_rank]") {
  for (const auto& [rank, buffer] : {std::pair<Index, Index>{16, 8}, {16, 16}, {32, 32}}) {
    for (const char* name : {"mamba2", "gated_delta", "kimi_delta"}) {
      const tools::Trace trace =
          tools::load_trace(std::string(SINKSTATE_TEST_DATA "/") + name + ".safetensors");
      Share share;
      if (trace.rule == tools::Rule::mamba2) replay_trace<Mamba2>(trace, rank, buffer, share);
      if (trace.rule == tools::Rule::gated_delta) {
        replay_trace<GatedDelta>(trace, rank, buffer, share);
      }
      if (trace.rule == tools::Rule::kimi_delta) {
        replay_trace<KimiDelta>(trace, rank, buffer, share);
      }
      INFO(name << ", rank " << rank << ", buffer " << buffer << ": " << share.count
                << " compactions");
      REQUIRE(share.count >= 5);
      CHECK(share.sum / share.count <= 1.05);
      CHECK(share.worst <= 1.3);
    }
  }
}

TEST_CASE("fixed rank: what has been kept is where the search starts", "[fixed_rank]") {
  // Sixteen terms in the body and sixteen weaker tokens: from the body the best answer is found at
  // once, from random rows one iteration is not enough.
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<Fixed32<Mamba2>> s(fixed_config(48, 40, 16, 16));
  const Matrix keys = orthonormal_rows(random, 32, 48);
  const Matrix values = orthonormal_rows(random, 32, 40);
  const auto row = [](const Matrix& rows, Index i) {
    return std::vector<double>(rows.row(i).data(), rows.row(i).data() + rows.cols());
  };
  for (Index i = 0; i < 16; ++i) s.step(row(keys, i), row(values, i));
  s.compact();
  REQUIRE(s.view.rank() == 16);
  for (Index i = 16; i < 32; ++i) s.step(row(keys, i), row(values, i), {}, 0.7);
  const Matrix before = stored_matrix<Fixed32<Mamba2>>(s.view);
  const CompactionReport report = s.compact();
  REQUIRE(report.projected == 20);
  const double error = (stored_matrix<Fixed32<Mamba2>>(s.view) - before).norm();
  CHECK(error <= 1.0001 * best_of(before, 16).error);
}

TEST_CASE("fixed rank: a start that decays have made dependent does not lose directions",
          "[fixed_rank]") {
  // The kept terms end on 4 of 40 channels and are dependent there; 16 new directions of the
  // buffer have to be found all the same.
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const StateConfig config = fixed_config(40, 36, 16, 24);
  TrackedState<Fixed32<KimiDelta>> s(config);
  for (int i = 0; i < 24; ++i) s.step(unit(random, 40), unit(random, 36));
  s.compact();
  REQUIRE(s.view.rank() == 16);
  std::vector<double> forget(40, -infinity);
  std::fill_n(forget.begin(), 4, -0.01);
  for (int i = 0; i < 24; ++i) {
    s.step(unit(random, 40), unit(random, 36), i == 0 ? forget : std::vector<double>{0},
           std::pow(0.7, i));
  }
  const Matrix before = stored_matrix<Fixed32<KimiDelta>>(s.view);
  const CompactionReport report = s.compact();
  CHECK(report.projected == 20);
  CHECK(s.view.rank() == 16);
  const Best best = best_of(before, 16);
  CHECK((stored_matrix<Fixed32<KimiDelta>>(s.view) - before).norm() <= 1.05 * best.error);
  s.check_factors();
  s.check_certificate();
}

TEMPLATE_TEST_CASE("fixed rank: the rank stays, the state is never dense, the loss is reported",
                   "[fixed_rank]", Fixed32<Mamba2>, Fixed32<GatedDelta>, Fixed32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const StateConfig config = fixed_config(48, 40, 10, 16);
  TrackedState<TestType> s(config);
  for (int i = 0; i < 160; ++i) {
    if (s.view.due()) {
      const Matrix before = stored_matrix<TestType>(s.view);
      const double certificate = static_cast<double>(s.view.certificate());
      const CompactionReport report = s.compact();
      CHECK(report.rank_after == 10);
      CHECK(report.capped);
      CHECK(report.projected > 0);
      CHECK_FALSE(s.view.dense());
      const double lost = (stored_matrix<TestType>(s.view) - before).norm();
      CHECK(report.dropped == Catch::Approx(lost).epsilon(1e-3));
      CHECK(static_cast<double>(s.view.certificate()) >= certificate + lost);
      s.check_factors();
    }
    s.step(unit(random, 48), unit(random, 40), {-0.02}, 0.5);
    s.check_certificate();
  }
  CHECK(state_bytes<TestType>(config) < 4 * (10 + 16) * (48 + 40 + 48 + 4) + 1024);
}

TEMPLATE_TEST_CASE("fixed rank: nothing is lost while the rank suffices", "[fixed_rank]",
                   Fixed32<Mamba2>, Fixed32<GatedDelta>, Fixed32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  SECTION("B80: one token, and none") {
    TrackedState<TestType> s(fixed_config(32, 24, 16, 4));
    for (int i = 0; i < 4; ++i) s.step(unit(random, 32), std::vector<double>(24, 0.0), {-0.1});
    CHECK(s.compact().rank_after == 0);
    s.step(unit(random, 32), unit(random, 24), {-0.1});
    CHECK(s.compact().rank_after == 1);
    s.check_factors();
    s.check_exact();
  }
  SECTION("tokens of a subspace, B75: fewer directions than the block is wide") {
    TrackedState<TestType> s(fixed_config(64, 48, 8, 32));
    std::vector<std::vector<double>> keys;
    for (int i = 0; i < 5; ++i) keys.push_back(unit(random, 64));
    for (std::size_t i = 0; i < 128; ++i) {
      s.step(keys[i % 5], unit(random, 48), {-0.1}, 0.5);
    }
    const CompactionReport report = s.compact();
    CHECK(report.rank_after <= 8);
    CHECK_FALSE(report.capped);  // what is left over is rounding
    s.check_factors();
    s.check_exact();
  }
  SECTION("all directions") {
    TrackedState<TestType> s(fixed_config(12, 16, 12, 8));
    for (int i = 0; i < 64; ++i) s.step(unit(random, 12), unit(random, 16), {-0.1}, 0.5);
    const CompactionReport report = s.compact();
    CHECK(report.projected == 0);
    CHECK(report.rank_after == 12);
    s.check_factors();
    s.check_exact();
  }
}

TEST_CASE("fixed rank: the seed decides the random columns, to the bit", "[fixed_rank]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const auto run = [&](std::uint64_t columns) {
    Random random(seed);
    StateConfig config = fixed_config(40, 36, 8, 16);
    config.seed = columns;
    TrackedState<Fixed32<GatedDelta>> s(config);
    for (int i = 0; i < 64; ++i) s.step(unit(random, 40), unit(random, 36), {-0.02}, 0.5);
    s.compact();
    const Rows<float> dense = s.stored_own();
    return std::vector<float>(dense.data(), dense.data() + dense.size());
  };
  CHECK(run(1) == run(1));
  CHECK(run(1) != run(2));
}

TEST_CASE("fixed rank: every compaction draws its own columns", "[fixed_rank]") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  const auto run = [&](std::int64_t compactions) {
    Random random(seed);
    TrackedState<Fixed32<GatedDelta>> s(fixed_config(40, 36, 8, 16));
    for (int i = 0; i < 16; ++i) s.step(unit(random, 40), unit(random, 36), {-0.02}, 0.5);
    s.view.record->compactions = compactions;
    s.compact();
    const Rows<float> dense = s.stored_own();
    return std::vector<float>(dense.data(), dense.data() + dense.size());
  };
  CHECK(run(0) == run(0));
  CHECK(run(0) != run(1));
}

TEST_CASE("fixed rank: the terms kept last are the start", "[fixed_rank]") {
  // All values nearly equal: one iteration from random columns cannot tell them apart, the exact
  // leading space as a start can.
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  constexpr Index d_k = 40, terms = 30, rank = 8;
  const Matrix right = orthonormal_rows(random, terms, d_k);
  const Matrix left = orthonormal_rows(random, terms, terms);
  Eigen::VectorXd strengths(terms);
  for (Index i = 0; i < terms; ++i) strengths[i] = i < rank ? 1.0 : 0.9;
  Rows<float> keys = (left.transpose() * strengths.asDiagonal() * right).cast<float>();
  Rows<float> values = Matrix::Identity(terms, terms).cast<float>();
  Rows<float> start = right.topRows(rank).cast<float>();
  HostTeam team(1 << 20);
  Workspace memory = team.workspace();
  StateConfig config = config_of(d_k, terms);
  const auto scratch =
      sinkstate::detail::SubspaceScratch<float>::carve(memory, config, rank, terms);
  std::vector<float> z(static_cast<std::size_t>(terms));
  REQUIRE_FALSE(memory.exhausted());
  sinkstate::detail::MixedTerms<float> mixed{view_of(keys), view_of(values), 0};
  sinkstate::detail::reduce_to_subspace(team, mixed, view_of(start), Philox{seed}, 0, scratch,
                                        z.data());
  // How much of each leading direction the projected rows contain.
  const Matrix projected = wide(mixed.keys);
  const Matrix inside = projected * right.topRows(rank).transpose();
  CHECK(inside.norm() == Catch::Approx(std::sqrt(double{rank})).epsilon(1e-5));
}

TEST_CASE("fixed rank: the certificate counts the rounding of the projection", "[fixed_rank]") {
  // Rank 5 in a block of 12: nothing is truncated, and the certificate grows by what is counted.
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  TrackedState<Fixed32<Mamba2>> s(fixed_config(64, 48, 8, 32));
  std::vector<std::vector<double>> keys;
  for (int i = 0; i < 5; ++i) keys.push_back(unit(random, 64));
  for (std::size_t i = 0; i < 32; ++i) s.step(keys[i % 5], unit(random, 48), {0}, 0.5);
  const double before = static_cast<double>(s.view.certificate());
  const double mass = static_cast<double>(s.view.buffer.masses[32]);
  const CompactionReport report = s.compact();
  REQUIRE(report.projected > 0);
  const double c = 32;
  const auto p = static_cast<double>(report.projected);
  const double fold = 1.74 * 33 + 13;                                             // (N5)
  const double recompress = 8 * c + 2 * (8 + 7) + 20;                             // (N6)
  const double subspace = std::sqrt(p) * (c + std::sqrt(c)) + 4 * p + 2 * 8 + c;  // (N13)
  const double unit_roundoff = std::numeric_limits<float>::epsilon() / 2;
  CHECK(static_cast<double>(s.view.certificate()) - before >=
        0.999 * unit_roundoff * mass * (fold + recompress + subspace));
}

TEST_CASE("fixed rank: defaults", "[fixed_rank]") {
  StateConfig config = config_of(128, 96);
  CHECK(SinkStateView<Fixed32<Mamba2>>::rank_capacity(config) == 16);
  CHECK(SinkStateView<Fixed32<GatedDelta>>::rank_capacity(config) == 16);
  CHECK(SinkStateView<Fixed32<KimiDelta>>::rank_capacity(config) == 32);
  config.rank_cap = 20;
  CHECK(SinkStateView<Fixed32<KimiDelta>>::rank_capacity(config) == 20);
  config.d_v = 11;
  CHECK(SinkStateView<Fixed32<KimiDelta>>::rank_capacity(config) == 11);
}

TEMPLATE_TEST_CASE("fixed rank: a dense matrix is taken in at the same rank", "[fixed_rank]",
                   Fixed32<Mamba2>, Fixed32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const Matrix wide_dense = with_singular_values(random, 48, 40, geometric(40, 1e-2));
  Rows<float> dense = wide_dense.cast<float>();
  TrackedState<TestType> s(fixed_config(48, 40, 12, 8));
  CompactionReport report;
  SECTION("randomized") {
    REQUIRE(initialize(s.team, s.view, MatrixView<const float>(view_of(dense)), RandomizedSvd{}, 0,
                       &report) == Status::ok);
  }
  SECTION("exact") {
    s.team = HostTeam(all_workspace_bytes<TestType>(s.config));
    REQUIRE(initialize(s.team, s.view, MatrixView<const float>(view_of(dense)), ExactSvd{}, 0,
                       &report) == Status::ok);
  }
  CHECK(report.rank_after == 12);
  CHECK(report.capped);
  s.check_factors();
  const double error = (s.stored() - wide_dense).norm();
  CHECK(error <= 1.01 * best_of(wide_dense, 12).error);
  CHECK(report.dropped == Catch::Approx(error).epsilon(1e-4));
}
