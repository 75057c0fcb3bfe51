// The frozen terms of a state decomposed among themselves: what becomes of strengths, rows, certificate and masses.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/count_allocations.hpp"
#include "support/pool_requests.hpp"
#include "support/pool_rows.hpp"
#include "support/same_state.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class Sink>
using Under = Policy<Mamba2, Host, Fp64, LocalSvd, Sink>;

struct Term {
  double strength;
  std::vector<double> key, value;
};

// One state in a pool, given as terms.
template <class Sink = NoSink>
class Given {
  using P = Under<Sink>;

 public:
  Given(Index d, const std::vector<Term>& terms, double epsilon = 0.1)
      : runner_(config(d, epsilon)) {
    runner_.admit(0);
    const auto head = view().head(0, 0);
    sinkstate::detail::hold_rows(view(), head, static_cast<Index>(terms.size()));
    *head.rank = static_cast<std::int32_t>(terms.size());
    const auto state = this->state();
    for (std::size_t i = 0; i < terms.size(); ++i) {
      const auto row = static_cast<Index>(i);
      std::copy(terms[i].key.begin(), terms[i].key.end(), state.factors.keys().row(row));
      std::copy(terms[i].value.begin(), terms[i].value.end(), state.factors.values().row(row));
      state.factors.strength(row) = terms[i].strength;
      state.buffer.masses[0] += terms[i].strength;
    }
    state.record->settled_rank = state.rank();
  }
  StatePoolView<P> view() const { return runner_.view(); }
  SinkStateView<P> state() const { return view().state(0, 0); }
  Index consolidate() {
    Index removed = -1;
    PoolRunner<P>::require(sinkstate::consolidate(runner_.teams(), view(), 0, &removed));
    return removed;
  }
  PoolRunner<P>& runner() { return runner_; }
  std::vector<double> strengths() const {
    std::vector<double> all;
    for (Index i = 0; i < state().rank(); ++i) all.push_back(state().factors.strength(i));
    return all;
  }

 private:
  static PoolConfig config(Index d, double epsilon) {
    PoolConfig config = pool_of(d, d, 1);
    config.state.active = 1;
    config.state.epsilon = epsilon;
    config.state.recompress_growth = 0;
    config.state.tail_share = 1;
    config.state.dense_fallback = false;
    return config;
  }
  PoolRunner<P> runner_;
};

std::vector<double> axis(std::size_t d, std::size_t i) {
  std::vector<double> x(d);
  x[i] = 1;
  return x;
}
// cos along axis 0, the rest along axis i.
std::vector<double> between(std::size_t d, double cosine, std::size_t i) {
  std::vector<double> x(d);
  x[0] = cosine;
  x[i] = std::sqrt(1 - cosine * cosine);
  return x;
}

}  // namespace

TEST_CASE("consolidate: the frozen terms of the worked example become one", "[consolidate]") {
  // SinkState, figure 7(a): 2.08 and 1.41, with cosines .89 and .99, become 3.41 and .02, of which
  // epsilon .1 of 8.99 keeps the first. From the rounded cosines the two follow in closed form.
  const double a = 2.08, b = 1.41, cu = .89, cv = .99;
  const double squares = a * a + b * b + 2 * a * b * cu * cv;
  const double product = a * b * std::sqrt((1 - cu * cu) * (1 - cv * cv));
  const double first =
      std::sqrt((squares + std::sqrt(squares * squares - 4 * product * product)) / 2);
  const double second = product / first;
  REQUIRE(first == Catch::Approx(3.41).margin(0.03));

  Given<> given(4, {{8.99, axis(4, 3), axis(4, 3)},
                    {a, axis(4, 0), axis(4, 0)},
                    {b, between(4, cv, 1), between(4, cu, 1)}});
  const double strongest = given.state().factors.strength(0);
  CHECK(given.consolidate() == 1);
  REQUIRE(given.state().rank() == 2);
  CHECK(given.strengths()[0] == strongest);
  CHECK(given.state().factors.keys()(0, 3) == 1);
  CHECK(given.strengths()[1] == Catch::Approx(first).epsilon(1e-12));
  CHECK(given.state().certificate() == Catch::Approx(second).epsilon(1e-9));
  CHECK(given.state().certificate() >= second);
  CHECK(given.state().record->settled_rank == 2);
  CHECK(report(given.view()).rows == 2);
}

TEST_CASE("consolidate, pitfall 8: a merged term may exceed an active one, and all are in order",
          "[consolidate]") {
  Given<> given(
      4,
      {{.6, axis(4, 1), axis(4, 2)}, {.5, axis(4, 0), axis(4, 0)}, {.5, axis(4, 0), axis(4, 0)}});
  CHECK(given.consolidate() == 1);
  REQUIRE(given.state().rank() == 2);
  CHECK(given.strengths()[0] == Catch::Approx(1).epsilon(1e-12));
  CHECK(given.strengths()[1] == .6);
  CHECK(given.state().factors.values()(1, 2) == 1);
  CHECK(std::abs(given.state().factors.keys()(0, 0)) == Catch::Approx(1).epsilon(1e-12));
}

TEST_CASE("consolidate: epsilon is relative to the strongest term of all", "[consolidate]") {
  // .2 and -.1 along one direction leave .1: dropped beside 1.5, kept beside .9.
  for (const double strongest : {1.5, .9}) {
    CAPTURE(strongest);
    std::vector<double> opposite = axis(4, 0);
    opposite[0] = -1;
    Given<> given(4, {{strongest, axis(4, 1), axis(4, 1)},
                      {.2, axis(4, 0), axis(4, 0)},
                      {.1, axis(4, 0), opposite}});
    const bool kept = .1 > .1 * strongest;
    CHECK(given.consolidate() == (kept ? 1 : 2));
    CHECK(given.state().rank() == (kept ? 2 : 1));
    CHECK(given.state().certificate() == Catch::Approx(kept ? 0 : .1).margin(1e-12));
  }
}

TEST_CASE("consolidate: epsilon is relative to the sink, if that is stronger", "[consolidate]") {
  for (const double sink : {0.0, 9.0, 11.0}) {
    CAPTURE(sink);
    Given<MeanValueSink> given(
        4,
        {{.9, axis(4, 1), axis(4, 1)}, {.5, axis(4, 0), axis(4, 0)}, {.5, axis(4, 0), axis(4, 0)}});
    const auto state = given.state();
    double square = 0;
    for (Index j = 0; j < 4; ++j) square += state.sink_direction[j] * state.sink_direction[j];
    state.sink(0, 2) = sink / std::sqrt(square);
    CHECK(given.consolidate() == (sink > 10 ? 2 : 1));
    CHECK(given.strengths().back() == .9);
  }
}

TEST_CASE("consolidate: a state whose rank would stay is left to the last bit", "[consolidate]") {
  Given<> given(4, {{1, axis(4, 1), axis(4, 1)},
                    {.5, axis(4, 0), axis(4, 0)},
                    {.4, between(4, .6, 2), between(4, .6, 3)}});
  const AlignedMemory before = snapshot_of(given.view(), 0);
  CHECK(given.consolidate() == 0);
  CHECK(snapshot_of(given.view(), 0) == before);
}

TEST_CASE("consolidate: it rounds with random words of its own", "[consolidate]") {
  // Not those of a compaction (from 1 on), of an initialisation (0) or of a sketch (-1), nor of
  // another consolidation between the same two compactions.
  std::vector<std::int64_t> events;
  for (const Index compactions : {0, 1, 7}) {
    for (const std::size_t rank : {2U, 3U}) {
      std::vector<Term> terms(rank, {1, axis(4, 1), axis(4, 1)});
      Given<> given(4, terms);
      given.state().record->compactions = compactions;
      AlignedBytes bytes(1 << 16);
      Workspace memory = bytes.workspace();
      const auto part =
          sinkstate::detail::FrozenPart<Under<NoSink>>::carve(memory, given.state().config);
      HostTeam team(64);
      sinkstate::detail::download(team, given.state(), part);
      CHECK(part.record->event < -1);
      events.push_back(part.record->event);
    }
  }
  std::sort(events.begin(), events.end());
  CHECK(std::adjacent_find(events.begin(), events.end()) == events.end());
}

TEST_CASE("consolidate: refusals", "[consolidate]") {
  Given<> given(
      4, {{1, axis(4, 1), axis(4, 1)}, {.5, axis(4, 0), axis(4, 0)}, {.5, axis(4, 0), axis(4, 0)}});
  const AlignedMemory before = snapshot_of(given.view(), 0);
  CHECK(consolidate(given.runner().teams(), given.view(), 1) == Status::invalid_slot);
  CHECK(consolidate(given.runner().teams(), given.view(), -1) == Status::invalid_slot);
  HostTeams starved(1, 64);
  CHECK(consolidate(starved, given.view(), 0) == Status::workspace_too_small);
  CHECK(snapshot_of(given.view(), 0) == before);
  given.view().slot(0).blocked = Status::overflow;
  CHECK(consolidate(given.runner().teams(), given.view(), 0) == Status::overflow);
}

TEST_CASE("consolidate, pitfall 10: with tokens buffered it is what it would have been before them",
          "[consolidate]") {
  // The body decays as a whole: its terms are merged as of the last compaction.
  using P = Policy<KimiDelta, Host, Fp16, LocalSvd>;
  PoolConfig config = pool_of(24, 24, 2, 1, 2, 8);
  config.state.active = 2;
  config.state.epsilon = 0.02;
  config.state.recompress_growth = 0;
  config.state.dense_fallback = false;
  PoolRunner<P> runner(config);
  for (Index s = 0; s < 2; ++s) runner.admit(s);
  for (Index t = 0; t < 40; ++t) {
    runner.run(0, 5, t, 1);
    runner.run(1, 5, t, 1);
  }
  const auto pool = runner.view();
  REQUIRE(pool.state(0, 0).buffered() == 0);
  Index removed = 0;
  PoolRunner<P>::require(consolidate(runner.teams(), pool, 0, &removed));
  CHECK(removed > 0);
  runner.run(0, 5, 40, 3);
  runner.run(1, 5, 40, 3);
  PoolRunner<P>::require(consolidate(runner.teams(), pool, 1));
  for (Index h = 0; h < 2; ++h) {
    const auto a = pool.state(0, h), b = pool.state(1, h);
    REQUIRE(a.rank() == b.rank());
    CHECK(same_rows(a.factors.keys(), b.factors.keys(), a.rank()));
    CHECK(same_rows(a.factors.values(), b.factors.values(), a.rank()));
    CHECK(same_strengths(a.factors, b.factors, a.rank()));
  }
}

namespace {

using Consolidated = std::tuple<
    Policy<Mamba2, Host, Fp32, LocalSvd>, Policy<GatedDelta, Host, Fp32, LocalSvd>,
    Policy<KimiDelta, Host, Fp32, LocalSvd, MeanValueSink>, Policy<DeltaNet, Host, Fp64, LocalSvd>,
    Policy<GatedDelta, Host, Fp16, LocalSvd, MeanValueSink>, Policy<Mamba2, Host, Fp8, LocalSvd>,
    Policy<KimiDelta, Host, Precision<float, BFloat16, BFloat16>, LocalSvd>>;

}  // namespace

TEST_CASE("consolidate: merged terms are orthonormal on both sides, and the product is the same",
          "[consolidate]") {
  using P = Policy<GatedDelta>;
  PoolConfig config = pool_of(64, 48, 1);
  config.state.active = 4;
  config.state.epsilon = 0.03;
  config.state.recompress_growth = 0;
  config.state.dense_fallback = false;
  PoolRunner<P> runner(config);
  runner.admit(0);
  AlignedBytes bytes(1 << 20);
  int checked = 0;
  HostTeam team(workspace_bytes<P>(config.state));
  for (Index t = 0; t < 240; t += 4) {
    runner.run(0, 9, t, 4);
    const auto state = runner.view().state(0, 0);
    if (state.rank() < 12) continue;
    Workspace memory = bytes.workspace();
    const auto part = sinkstate::detail::FrozenPart<P>::carve(memory, state.config);
    REQUIRE_FALSE(memory.exhausted());
    sinkstate::detail::download(team, state, part);
    const Index before = part.record->before;
    CHECK(before == state.rank() - 4);
    std::vector<double> product(64 * 48);
    const auto add = [&](double sign) {
      for (Index n = 0; n < part.record->count; ++n) {
        for (Index i = 0; i < 64; ++i) {
          for (Index j = 0; j < 48; ++j) {
            product[static_cast<std::size_t>(48 * i + j)] += sign * double(part.strengths[n]) *
                                                             double(part.keys(n, i)) *
                                                             double(part.values(n, j));
          }
        }
      }
    };
    add(1);
    const double norm = oracle::frobenius_norm(product);
    PoolRunner<P>::require(sinkstate::detail::decompose_part(team, state.config, part));
    if (!part.record->changes()) continue;
    add(-1);
    CHECK(oracle::frobenius_norm(product) <= part.record->dropped + 1e-5 * norm);
    const auto orthonormal = [&](const MatrixView<float>& rows) {
      double worst = 0;
      for (Index a = 0; a < part.record->count; ++a) {
        for (Index b = 0; b <= a; ++b) {
          double dot = a == b ? -1 : 0;
          for (Index i = 0; i < rows.cols; ++i) dot += double(rows(a, i)) * double(rows(b, i));
          worst = std::max(worst, std::abs(dot));
        }
      }
      return worst;
    };
    CHECK(orthonormal(part.keys) <= 5e-6);
    CHECK(orthonormal(part.values) <= 5e-6);
    ++checked;
  }
  CHECK(checked > 10);
}

TEMPLATE_TEST_CASE("consolidate: what storing rounds is certified, and the mass bounds the terms",
                   "[consolidate]", Fp16, Bf16, Fp8) {
  using P = Policy<Mamba2, Host, TestType, LocalSvd>;
  Random random(test_seed());
  INFO(seed_note(test_seed()));
  double closest = 0;
  for (int run = 0; run < 200; ++run) {
    PoolConfig config = pool_of(8, 8, 1);
    config.state.active = 1;
    config.state.epsilon = 1e-4;
    config.state.dense_fallback = false;
    PoolRunner<P> runner(config);
    runner.admit(0);
    const auto head = runner.view().head(0, 0);
    sinkstate::detail::hold_rows(runner.view(), head, 7);
    *head.rank = 7;
    const auto state = runner.view().state(0, 0);
    // An active term, and three in pairs: what is formed of a pair is of length one, which what is
    // stored is not.
    HostTeam team(4096);
    for (Index i = 0; i < 7; ++i) {
      std::vector<float> x(8);
      const auto fill = [&](double place) {
        Random same(static_cast<std::uint64_t>(1000 * run) + static_cast<std::uint64_t>(place));
        double square = 0;
        for (float& number : x) {
          number = static_cast<float>(same.normal());
          square += double(number) * double(number);
        }
        for (float& number : x) number /= static_cast<float>(std::sqrt(square));
      };
      fill(static_cast<double>((i + 1) / 2));
      sinkstate::detail::write_row(team, state.factors.keys(), i, x.data(), {});
      fill(static_cast<double>((i + 1) / 2) + 500);
      sinkstate::detail::write_row(team, state.factors.values(), i, x.data(), {});
      state.factors.strength(i) = i == 0 ? 1e-3f : static_cast<float>(1 - random.uniform() * 0.1);
    }
    state.buffer.masses[0] = sinkstate::detail::strengths_sum(state);
    const auto before = runner.dense(0);
    const auto vectors_of = [&](Index term) {
      std::vector<float> x(16);
      (void)sinkstate::detail::read_row(team, state.factors.keys(), term, x.data());
      (void)sinkstate::detail::read_row(team, state.factors.values(), term, x.data() + 8);
      return x;
    };
    const std::vector<float> active = vectors_of(0);
    PoolRunner<P>::require(consolidate(runner.teams(), runner.view(), 0));
    REQUIRE(state.rank() == 4);
    // The active term is the weakest now, and as it was.
    REQUIRE(vectors_of(3) == active);
    REQUIRE(state.factors.strength(3) == 1e-3f);
    const double change = oracle::frobenius_distance(runner.dense(0), before);
    CAPTURE(run, change);
    REQUIRE(change <= static_cast<double>(state.certificate()));
    closest = std::max(closest, change / static_cast<double>(state.certificate()));
    REQUIRE(state.buffer.masses[0] >= sinkstate::detail::strengths_sum(state));
  }
  CHECK(closest > 0.3);
}

TEMPLATE_LIST_TEST_CASE(
    "consolidate: the certificate is never below the true error, whenever it is done",
    "[consolidate]", Consolidated) {
  using P = TestType;
  using T = typename P::Compute;
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed) << ", " << policy_name<P>());
  Index removed_in_all = 0;
  for (std::uint64_t run = 0; run < 12 * static_cast<std::uint64_t>(test_scale()); ++run) {
    CAPTURE(run);
    const int d_k = 16 + static_cast<int>(run % 3) * 8, d_v = 24;
    const Stream stream =
        realistic(traits_of<typename P::Rule>, d_k, d_v, 160, derived_seed(seed, run));
    PoolConfig config = pool_of(d_k, d_v, 1, 1, 1, 1 + static_cast<Index>(run % 8));
    config.state.active = 1 + static_cast<Index>(run % 3);
    config.state.epsilon = run % 4 == 0 ? 1e-3 : 3e-2;
    config.state.recompress_growth = run % 2 == 0 ? 0 : 1.15;
    config.state.dense_fallback = run % 3 == 0;
    config.state.rounding = run % 5 < 2 ? Rounding::stochastic : Rounding::nearest;
    // Rows of the quota alone, or others behind them, which never run short.
    config.quota = run % 2 == 0 ? 0 : 3;
    config.reserve = run % 2 == 0 ? 0 : 24;
    std::vector<T> direction(stream.sink.begin(), stream.sink.end());
    const Index sinks = P::Sink::present ? 1 : 0;
    StatePool<P> memory(config, {sinks ? direction.data() : nullptr, sinks, d_v, d_v});
    const auto pool = memory.view();
    HostTeams teams(1, workspace_bytes<P>(config.state));
    PoolRunner<P>::require(admit(pool, 0));
    oracle::DenseRecurrence<double> exact(traits_of<typename P::Rule>, d_k, d_v);
    std::vector<std::vector<double>> past;  // of each buffered token
    Random random(derived_seed(seed, 1000 + run));
    std::vector<T> numbers(static_cast<std::size_t>(d_k * d_v));
    const std::int32_t slot = 0;

    for (int t = 0; t < stream.tokens; ++t) {
      past.push_back(exact.state());
      exact.step(stream.key_at(t), stream.value_at(t), stream.log_decay_at(t),
                 stream.write_strength_at(t));
      const auto widened = [](const float* x, int n) {
        return x == nullptr ? std::vector<T>{} : std::vector<T>(x, x + n);
      };
      const auto key = widened(stream.key_at(t), d_k), value = widened(stream.value_at(t), d_v);
      const auto decay = widened(stream.log_decay_at(t), stream.rule.log_decay_count(d_k));
      const T strength = static_cast<T>(stream.write_strength_at(t));
      TokenBatch<T> batch;
      batch.entries = 1;
      batch.slots = &slot;
      batch.keys.data = key.data();
      batch.values.data = value.data();
      batch.log_decays.data = decay.data();
      batch.write_strengths.data = &strength;
      PoolRunner<P>::require(step(teams, pool, batch));
      if (random.uniform() < 0.3) {
        const std::uint64_t of_bodies = pool.slot(0).bodies.now();
        const Index before = pool.state(0, 0).rank();
        Index removed = 0;
        PoolRunner<P>::require(consolidate(teams, pool, 0, &removed));
        const auto state = pool.state(0, 0);
        CHECK(state.rank() == before - removed);
        CHECK(pool.slot(0).bodies.now() > of_bodies);
        CHECK(check_rows(pool) == "");
        CHECK(report(pool).rows == (state.dense() ? pool.dense_rows(config.state) : state.rank()));
        removed_in_all += removed;
        double mass = 0;
        for (Index i = 0; i < state.rank(); ++i) {
          mass += static_cast<double>(state.factors.strength(i));
          if (i > 0) CHECK(state.factors.strength(i) <= state.factors.strength(i - 1));
        }
        CHECK(static_cast<double>(state.buffer.masses[0]) >= mass);
      }
      if (random.uniform() < 0.1) {
        PoolRunner<P>::require(roll_back(pool, 0, 1));
        exact.state() = past.back();
        past.pop_back();
      }
      if (pool.due(0)) {
        const Status done = compact(teams, pool, &slot, 1);
        if (done != Status::truncated) PoolRunner<P>::require(done);
        past.clear();
      }
      T allowed = T(0);
      PoolRunner<P>::require(materialize(
          teams, pool, 0, DenseStates<T>::keys_by_values(numbers.data(), d_k, d_v), &allowed));
      const double error = oracle::frobenius_distance(numbers, exact.state());
      CAPTURE(t, error, allowed);
      REQUIRE(error <= static_cast<double>(allowed));
    }
  }
  CHECK(removed_in_all > 20);
}

namespace {

// Layers of one pool, and a consolidator that works at once.
template <class P>
std::unique_ptr<Consolidator> consolidator_of(StatePoolView<P> pool,
                                              std::vector<SwapRecord>* log = nullptr) {
  ConsolidatorOptions options;
  options.executor = [](const std::function<void()>& task) { task(); };
  options.log = log;
  std::vector<std::unique_ptr<ConsolidatedLayer>> layers;
  layers.push_back(consolidated(pool));
  return std::make_unique<Consolidator>(std::move(layers), options);
}

PoolConfig merging(Padding padding = Padding::negative) {
  PoolConfig config = pool_of(24, 24, 3, 1, 2);
  config.padding = padding;
  config.state.active = 2;
  config.state.epsilon = 0.05;
  config.state.recompress_growth = 0;
  config.state.dense_fallback = false;
  return config;
}

}  // namespace

TEST_CASE("consolidator: asked for slots that hold no request, it touches nobody's rows",
          "[consolidate]") {
  using P = Policy<GatedDelta>;
  for (const Padding padding : {Padding::negative, Padding::slot_zero}) {
    // Memory that holds anything.
    PoolConfig config = merging(padding);
    config.quota = 1;
    config.reserve = 3 * 2 * 24;
    AlignedMemory memory(pool_bytes<P>(config).total, 0x11);
    const auto pool = make_pool<P>(memory.data(), memory.size(), config);
    HostTeams teams(1, workspace_bytes<P>(config.state));
    const auto consolidator = consolidator_of(pool);
    const std::int32_t all[] = {-1, 0, 1, 2, 3};
    consolidator->request(0, all, 5);  // none was ever admitted
    CHECK(consolidator->swap() == 0);

    const auto run = [&](std::int32_t slot) {
      for (Index t = 0; t < 40; ++t) {
        BatchTensors<P> tensors(config, 1);
        tensors.set(0, 5, t);
        const std::vector<std::int32_t> slots{slot};
        PoolRunner<P>::require(step(teams, pool, tensors.batch(slots)));
        PoolRunner<P>::require(compact_due(teams, pool, &slot, 1));
      }
    };
    PoolRunner<P>::require(admit(pool, 1));
    run(1);
    REQUIRE(pool.state(1, 0).rank() > 6);
    const auto held = static_cast<std::size_t>(*pool.head(1, 0).held);
    PoolRunner<P>::require(release(pool, 1));
    PoolRunner<P>::require(admit(pool, 2));
    run(2);
    // It has taken rows that the other gave back, and that are still in the list of that one.
    std::size_t taken = 0;
    for (Index h = 0; h < 2; ++h) {
      const auto head = pool.head(2, h);
      for (std::size_t i = 2; i < held; ++i) {
        taken += static_cast<std::size_t>(
            std::count(head.list, head.list + *head.held, pool.head(1, 0).list[i]));
      }
    }
    CHECK(taken > held / 2);
    const std::uint64_t before = image_of(pool);
    const std::int32_t gone[] = {0, 1};
    consolidator->request(0, gone, 2);
    consolidator->drain();
    CHECK(image_of(pool) == before);
    CHECK(*pool.head(1, 0).held == 0);
    CHECK(check_rows(pool).empty());
    CHECK(consolidator->statistics().rank_removed == 0);
    const std::int32_t here = 2;
    consolidator->request(0, &here, 1);
    consolidator->drain();
    CHECK(consolidator->statistics().rank_removed > 0);
  }
}

TEST_CASE("consolidator: a slot whose heads are out of step is left alone, as `consolidate` does",
          "[consolidate]") {
  using P = Policy<GatedDelta>;
  PoolRunner<P> runner(merging());
  runner.admit(0);
  runner.run(0, 5, 0, 40);
  runner.view().slot(0).blocked = Status::overflow;
  std::vector<SwapRecord> log;
  const auto consolidator = consolidator_of(runner.view(), &log);
  const std::int32_t slot = 0;
  consolidator->request(0, &slot, 1);
  consolidator->drain();
  CHECK(log.empty());
  CHECK(consolidator->statistics().done == 0);
}

TEST_CASE("consolidator: neither request nor swap allocates", "[consolidator]") {
  using P = Policy<GatedDelta>;
  PoolConfig config = pool_of(24, 24, 4, 1, 2);
  config.state.active = 2;
  config.state.epsilon = 0.05;
  config.state.recompress_growth = 0;
  PoolRunner<P> runner(config);
  // Tasks fit the function objects that hold them.
  std::array<std::function<void()>, 64> tasks;
  std::size_t first = 0;
  std::size_t last = 0;
  ConsolidatorOptions options;
  options.executor = [&](std::function<void()> task) {
    tasks[last++ % tasks.size()] = std::move(task);
  };
  std::vector<std::unique_ptr<ConsolidatedLayer>> layers;
  layers.push_back(consolidated(runner.view()));
  Consolidator consolidator(std::move(layers), options);
  for (Index s = 0; s < 4; ++s) runner.admit(s);
  long allocated = 0;
  Index swapped = 0;
  for (Index t = 0; t < 64; ++t) {
    for (Index s = 0; s < 4; ++s) runner.step(s, static_cast<std::uint64_t>(s), t);
    const long before = allocations;
    swapped += consolidator.swap();
    allocated += allocations - before;
    for (Index s = 0; s < 4; ++s) {
      runner.compact_due(s);
      const auto slot = static_cast<std::int32_t>(s);
      const long now = allocations;
      if (runner.view().state(s, 0).buffered() == 0) consolidator.request(0, &slot, 1);
      allocated += allocations - now;
    }
    while (first < last) tasks[first++ % tasks.size()]();
  }
  CHECK(swapped > 20);
  CHECK(consolidator.statistics().rank_removed > 0);
  CHECK(allocated == 0);
}
