// What the types and verbs promise beside the numbers: refusals, statuses, bytes, limits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/same_state.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

static_assert(std::is_trivially_copyable_v<MatrixView<float>>);
static_assert(std::is_trivially_copyable_v<LowRankFactorsView<float>>);
static_assert(std::is_trivially_copyable_v<UpdateBufferView<float>>);
static_assert(std::is_trivially_copyable_v<SinkStateView<Full32<GatedDelta>>>);
static_assert(std::is_trivially_copyable_v<Token<float>>);
static_assert(std::is_trivially_copyable_v<Tokens<float>>);

template <class Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Several tokens with queries, and room for their outputs.
template <class T>
struct Chunk {
  Rows<T> keys, values, log_decays, queries, outputs;
  std::vector<T> strengths;

  template <class Rule>
  Chunk(Rule, Random& random, Index count, Index d_k, Index d_v)
      : keys((random_rows(random, count, d_k) / 4).cast<T>()),
        values(random_rows(random, count, d_v).cast<T>()),
        log_decays(Rows<T>::Constant(count, Rule::log_decays(d_k), T(-0.25))),
        queries(random_rows(random, count, d_k).cast<T>()),
        outputs(Rows<T>::Constant(count, d_v, T(-99))),
        strengths(static_cast<std::size_t>(count), T(0.5)) {}

  Tokens<T> tokens() {
    return {view_of(keys), view_of(values), view_of(log_decays), strengths.data(), 1};
  }
  bool outputs_untouched() const { return (outputs.array() == T(-99)).all(); }
};

}  // namespace

// ---- Building --------------------------------------------------------------------------------

TEST_CASE("config: the first unusable field is named, with the wanted and the given value",
          "[config]") {
  struct Case {
    const char* field;
    const char* wanted;
    const char* given;
    void (*spoil)(StateConfig&);
  };
  const Case cases[] = {
      {"d_k", "[1, ", "0", [](StateConfig& c) { c.d_k = 0; }},
      {"d_k", "[1, ", "-3", [](StateConfig& c) { c.d_k = -3; }},
      {"d_v", "[1, ", "0", [](StateConfig& c) { c.d_v = 0; }},
      {"buffer", "[1, ", "0", [](StateConfig& c) { c.buffer = 0; }},
      {"draft", "[0, ", "-1", [](StateConfig& c) { c.draft = -1; }},
      {"rank_cap", "[0, ", "-2", [](StateConfig& c) { c.rank_cap = -2; }},
      {"dense_retry", "[1, ", "0", [](StateConfig& c) { c.dense_retry = 0; }},
      {"epsilon", "[0, 1)", "-0.5", [](StateConfig& c) { c.epsilon = -0.5; }},
      {"epsilon", "[0, 1)", "1.0", [](StateConfig& c) { c.epsilon = 1; }},
      {"epsilon", "[0, 1)", "nan", [](StateConfig& c) { c.epsilon = not_a_number; }},
      {"epsilon", "[0, 1)", "inf", [](StateConfig& c) { c.epsilon = infinity; }},
      {"active", "[0, ", "-1", [](StateConfig& c) { c.active = -1; }},
      {"recompress_slack", "[0, ", "-1", [](StateConfig& c) { c.recompress_slack = -1; }},
      {"tail_period", "[0, ", "-1", [](StateConfig& c) { c.tail_period = -1; }},
      {"tail_share", "[0, 1]", "1.5", [](StateConfig& c) { c.tail_share = 1.5; }},
      {"tail_share", "[0, 1]", "nan", [](StateConfig& c) { c.tail_share = not_a_number; }},
      {"recompress_growth", "0 or", "0.5", [](StateConfig& c) { c.recompress_growth = 0.5; }},
      {"recompress_growth", "0 or", "nan",
       [](StateConfig& c) { c.recompress_growth = not_a_number; }},
      {"recompress_growth", "0 or", "inf", [](StateConfig& c) { c.recompress_growth = infinity; }},
      {"d_k", "1048576]", "1048577", [](StateConfig& c) { c.d_k = (1 << 20) + 1; }},
      {"d_v", "1048576]", "1048577", [](StateConfig& c) { c.d_v = (1 << 20) + 1; }},
      {"buffer", "1048576]", "1048577", [](StateConfig& c) { c.buffer = (1 << 20) + 1; }},
      {"draft", "1048576]", "1048577", [](StateConfig& c) { c.draft = (1 << 20) + 1; }},
      {"dense_retry", "1048576]", "1048577", [](StateConfig& c) { c.dense_retry = (1 << 20) + 1; }},
  };
  for (const Case& c : cases) {
    StateConfig config = config_of(8, 6);
    c.spoil(config);
    const std::string messages[] = {
        refusal([&] { (void)config.checked(); }),
        refusal([&] { SinkState<Full32<Mamba2>> state(config); }),
        refusal([&] { (void)state_bytes<Full32<Mamba2>>(config); }),
        refusal([&] { (void)workspace_bytes<Full32<Mamba2>>(config); })};
    for (const std::string& message : messages) {
      CAPTURE(message, c.field, c.wanted, c.given);
      CHECK(contains(message, c.field));
      CHECK(contains(message, c.wanted));
      CHECK(contains(message, c.given));
    }
  }
}

TEST_CASE("view: a sink direction is of a size that its coefficients can make up for", "[view]") {
  const StateConfig config = config_of(4, 3);
  for (const float size : {1e-7F, 1e7F, 1e-30F, 1e30F}) {
    const float direction[] = {0, size, -size / 2};
    const std::string message = refusal([&] {
      SinkState<Policy<Mamba2, Host, Fp32, FullSvd, MeanValueSink>> state(config, direction);
    });
    CAPTURE(message);
    CHECK(contains(message, "[1e-6, 1e6]"));
  }
  for (const float size : {0.0F, 1e-6F, 1e6F}) {
    const float direction[] = {0, size, -size / 2};
    CHECK_NOTHROW(SinkState<Policy<Mamba2, Host, Fp32, FullSvd, MeanValueSink>>(config, direction));
  }
}

TEST_CASE("shapes that disagree are refused, and nothing happens", "[shapes]") {
  using P = Full32<GatedDelta>;
  const StateConfig config = config_of(4, 3);
  SinkState<P> state(config);
  HostTeam team(workspace_bytes<P>(config));
  const std::vector<float> zeros(64, 0.0F);
  std::vector<float> written(64, 7.0F);
  const auto rows = [&](Index count, Index cols) {
    return MatrixView<const float>{zeros.data(), count, cols, cols};
  };
  const auto outputs = [&](Index count, Index cols) {
    return MatrixView<float>{written.data(), count, cols, cols};
  };
  const Tokens<float> good{rows(2, 4), rows(2, 3), rows(2, 1), zeros.data()};
  const Tokens<float> bad[] = {{rows(2, 3), rows(2, 3), rows(2, 1), zeros.data()},
                               {rows(2, 4), rows(2, 4), rows(2, 1), zeros.data()},
                               {rows(2, 4), rows(1, 3), rows(2, 1), zeros.data()},
                               {rows(2, 4), rows(2, 3), rows(2, 2), zeros.data()},
                               {rows(-3, 4), rows(-3, 3), rows(-3, 1), zeros.data()}};
  for (const Tokens<float>& tokens : bad) {
    CHECK(advance(team, state.view(), tokens) == Status::invalid_argument);
  }
  CHECK(step(team, state.view(), good, rows(1, 4), outputs(2, 3)) == Status::invalid_argument);
  CHECK(step(team, state.view(), good, rows(2, 4), outputs(2, 4)) == Status::invalid_argument);
  CHECK(materialize(team, state.view(), outputs(4, 4)) == Status::invalid_argument);
  const Token<float> token = good[0];
  CHECK(step(team, state.view(), token, nullptr, written.data()) == Status::invalid_argument);
  CHECK(step(team, state.view(), token, zeros.data(), nullptr) == Status::invalid_argument);
  CHECK(written == std::vector<float>(64, 7.0F));
  CHECK(state.view().buffered() == 0);
  CHECK(step(team, state.view(), good, rows(2, 4), outputs(2, 3)) == Status::ok);
}

TEST_CASE("dense fallback: a state of capacity one comes back", "[dense]") {
  using P = Full32<Mamba2>;
  StateConfig config = config_of(8, 8);
  config.rank_cap = 1;
  config.dense_retry = 2;
  SinkState<P> state(config);
  HostTeam team(workspace_bytes<P>(config));
  const auto run = [&](float log_decay, Index first, Index axes) {
    for (Index t = 0; t < config.buffer; ++t) {
      std::vector<float> key(8), value(8);
      key[static_cast<std::size_t>(first + t % axes)] = 1;
      value[static_cast<std::size_t>(first + t % axes)] = 1;
      REQUIRE(advance(team, state.view(), Token<float>{key.data(), value.data(), &log_decay, 1}) ==
              Status::ok);
    }
    REQUIRE(compact(team, state.view()) == Status::ok);
  };
  run(0, 0, 3);
  CHECK(state.view().dense());
  for (int period = 0; period < 3; ++period) run(-std::numeric_limits<float>::infinity(), 5, 1);
  CHECK(!state.view().dense());
  CHECK(state.view().rank() == 1);
}

TEST_CASE("config: what is usable passes", "[config]") {
  StateConfig config = config_of(1, 1);
  config.buffer = 1;
  config.epsilon = std::nextafter(1.0, 0.0);
  config.dense_retry = 1;
  CHECK(&config.checked() == &config);
  config.rank_cap = 1000;  // more than there is room for
  CHECK(config.checked().rank_capacity() == 0);
  config.dense_fallback = false;
  CHECK(config.rank_capacity() == 1);
}

TEST_CASE("config: the rank that pays is the last whose terms are smaller than the matrix",
          "[config]") {
  for (const auto& [d_k, d_v] : {std::pair<Index, Index>{128, 128}, {128, 80}, {7, 5}, {64, 1}}) {
    const StateConfig config = config_of(d_k, d_v);
    const Index rank = config.paying_rank();
    CHECK(rank * (d_k + d_v) < d_k * d_v);
    CHECK((rank + 1) * (d_k + d_v) >= d_k * d_v);
  }
}

TEST_CASE("parts: owners refuse impossible sizes", "[parts]") {
  CHECK(contains(refusal([] { LowRankFactors<float>(0, 4, 2); }), "d_k"));
  CHECK(contains(refusal([] { LowRankFactors<float>(4, 0, 2); }), "d_v"));
  CHECK(contains(refusal([] { LowRankFactors<float>(4, 4, -1); }), "capacity"));
  CHECK(contains(refusal([] { UpdateBuffer<float>(0, 4, 1, 8); }), "d_k"));
  CHECK(contains(refusal([] { UpdateBuffer<float>(4, 0, 1, 8); }), "d_v"));
  CHECK(contains(refusal([] { UpdateBuffer<float>(4, 4, -1, 8); }), "log decays"));
  CHECK(contains(refusal([] { UpdateBuffer<float>(4, 4, 1, 0); }), "capacity"));
}

TEST_CASE("parts: owners start empty and are copied by value", "[parts]") {
  LowRankFactors<float> factors(3, 2, 4);
  CHECK(factors.view().keys().rows == 0);
  *factors.view().rank = 1;
  factors.view().keys()(0, 2) = 5;
  LowRankFactors<float> copy = factors;
  factors.view().keys()(0, 2) = 6;
  CHECK(copy.view().keys()(0, 2) == 5);
  CHECK(copy.view().values().row(0) == copy.view().keys().row(0) + 3);

  UpdateBuffer<double> buffer(3, 2, 1, 4);
  CHECK(*buffer.view().count == 0);
  CHECK(buffer.view().capacity() == 4);
}

TEST_CASE("view: memory of the caller is checked", "[view]") {
  using P = Full32<GatedDelta>;
  const StateConfig config = config_of(8, 6);
  const std::size_t size = state_bytes<P>(config);
  AlignedBytes bytes(size + 64);
  void* const memory = bytes.workspace().take<char>(static_cast<Index>(size + 64));
  const std::string small = refusal([&] { make_view<P>(memory, size - 1, config); });
  CHECK(contains(small, std::to_string(size) + " bytes"));
  CHECK(contains(small, std::to_string(size - 1)));
  const std::string odd =
      refusal([&] { make_view<P>(static_cast<char*>(memory) + 4, size, config); });
  CHECK(contains(odd, "aligned to 64"));
  CHECK(contains(odd, "off by 4"));
  CHECK(contains(refusal([&] { make_view<P>(nullptr, size, config); }), "null"));
  StateConfig bad = config;
  bad.d_v = 0;
  CHECK(contains(refusal([&] { make_view<P>(memory, size, bad); }), "d_v"));
}

TEST_CASE("view: it does not read what the memory held before", "[view]") {
  using P = Full32<KimiDelta, MeanValueSink>;
  const StateConfig config = config_of(8, 6);
  const std::size_t size = state_bytes<P>(config);
  AlignedBytes bytes(size);
  void* const memory = bytes.workspace().take<char>(static_cast<Index>(size));
  std::memset(memory, 0xff, size);  // NaN everywhere
  const std::vector<float> direction(6, 1.0F);
  const auto view = make_view<P>(memory, size, config, direction.data());
  SinkState<P> fresh(config, direction.data());
  HostTeam team(workspace_bytes<P>(config));
  Random random(test_seed());
  Chunk<float> chunk(KimiDelta{}, random, 8, 8, 6), again = chunk;
  for (int round = 0; round < 2; ++round) {
    REQUIRE(step(team, view, chunk.tokens(), view_of(chunk.queries), view_of(chunk.outputs)) ==
            Status::ok);
    REQUIRE(step(team, fresh.view(), again.tokens(), view_of(again.queries),
                 view_of(again.outputs)) == Status::ok);
    CHECK(chunk.outputs == again.outputs);
    REQUIRE(compact(team, view) == Status::ok);
    REQUIRE(compact(team, fresh.view()) == Status::ok);
    CHECK(same_state(view, fresh.view()));
  }
}

TEST_CASE("view: the sink direction fits the policy", "[view]") {
  const StateConfig config = config_of(8, 3);
  const std::vector<float> direction(3, 1.0F);
  const std::string missing = refusal([&] { SinkState<Full32<Mamba2, MeanValueSink>> s(config); });
  CHECK(contains(missing, "sink direction"));
  CHECK(contains(missing, "null"));
  CHECK(contains(refusal([&] { SinkState<Full32<Mamba2>> s(config, direction.data()); }), "none"));
  for (const double bad : {not_a_number, infinity, -infinity}) {
    const std::vector<float> spoilt{1.0F, 1.0F, static_cast<float>(bad)};
    const std::string message =
        refusal([&] { SinkState<Full32<Mamba2, MeanValueSink>> s(config, spoilt.data()); });
    CHECK(contains(message, "finite"));
    CHECK(contains(message, "at 2"));
  }
}

// ---- Statuses --------------------------------------------------------------------------------

TEST_CASE("status: each has a line of its own", "[status]") {
  std::set<std::string> lines;
  for (int s = 0; s <= static_cast<int>(Status::workspace_too_small); ++s) {
    lines.insert(to_string(static_cast<Status>(s)));
  }
  CHECK(lines.size() == static_cast<std::size_t>(Status::workspace_too_small) + 1);
  CHECK(lines.count(to_string(static_cast<Status>(999))) == 0);
  CHECK(to_string(Status::ok) == std::string("ok"));
}

TEMPLATE_TEST_CASE("workspace: too little is said, and nothing is touched", "[status]",
                   (Full32<GatedDelta>), (Full32<KimiDelta, MeanValueSink>), (Dense32<Mamba2>)) {
  const StateConfig config = config_of(12, 10);
  const std::vector<float> direction(10, 0.5F);
  SinkState<TestType> state(config, TestType::Sink::present ? direction.data() : nullptr);
  const std::size_t full = workspace_bytes<TestType>(config);
  Random random(test_seed());
  Chunk<float> chunk(typename TestType::Rule{}, random, 3, 12, 10);
  {
    HostTeam team(full);
    REQUIRE(advance(team, state.view(), chunk.tokens()) == Status::ok);
    REQUIRE(compact(team, state.view()) == Status::ok);
    REQUIRE(advance(team, state.view(), chunk.tokens()) == Status::ok);
  }
  Rows<float> dense = Rows<float>::Constant(12, 10, -99.0F);
  using View = SinkStateView<TestType>;
  using Verb = Status (*)(HostTeam&, View, Chunk<float>&, Rows<float>&);
  const Verb verbs[] = {
      [](HostTeam& team, View view, Chunk<float>& c, Rows<float>&) {
        return advance(team, view, c.tokens()[0]);
      },
      [](HostTeam& team, View view, Chunk<float>& c, Rows<float>&) {
        return step(team, view, c.tokens()[0], c.queries.data(), c.outputs.data());
      },
      [](HostTeam& team, View view, Chunk<float>& c, Rows<float>&) {
        return advance(team, view, c.tokens());
      },
      [](HostTeam& team, View view, Chunk<float>& c, Rows<float>&) {
        return step(team, view, c.tokens(), view_of(c.queries), view_of(c.outputs));
      },
      [](HostTeam& team, View view, Chunk<float>& c, Rows<float>&) {
        return read_out(team, view, c.queries.data(), c.outputs.data());
      },
      [](HostTeam& team, View view, Chunk<float>&, Rows<float>& d) {
        return materialize(team, view, view_of(d));
      },
      [](HostTeam& team, View view, Chunk<float>&, Rows<float>&) { return compact(team, view); },
      [](HostTeam& team, View view, Chunk<float>&, Rows<float>& d) {
        return initialize(team, view, view_of(d));
      },
  };
  const auto before = bytes_of(config, state.view());
  for (std::size_t v = 0; v < std::size(verbs); ++v) {
    CAPTURE(v);
    int refused = 0;
    Status status = Status::workspace_too_small;
    for (std::size_t size = 0; size <= full && status != Status::ok; size += 64) {
      SinkState<TestType> attempt = state;
      HostTeam team(size);
      status = verbs[v](team, attempt.view(), chunk, dense);
      if (status == Status::ok) continue;
      REQUIRE(status == Status::workspace_too_small);
      CHECK(bytes_of(config, attempt.view()) == before);
      CHECK(chunk.outputs_untouched());
      CHECK((dense.array() == -99.0F).all());
      ++refused;
    }
    CHECK(status == Status::ok);
    CHECK(refused > 0);
    chunk.outputs.setConstant(-99.0F);
    dense.setConstant(-99.0F);
  }
}

TEMPLATE_TEST_CASE("buffer: full is said, drafts have room beyond the period", "[status]",
                   (Full32<GatedDelta>), (Dense32<KimiDelta>)) {
  StateConfig config = config_of(8, 6, 0, 4);
  config.draft = 2;
  TrackedState<TestType> s(config);
  Random random(test_seed());
  for (int i = 0; i < 6; ++i) {
    CHECK(s.view.due() == (i >= 4));
    REQUIRE(s.try_advance(unit(random, 8), unit(random, 6), {-0.1}) == Status::ok);
  }
  const auto before = bytes_of(config, s.view);
  CHECK(s.try_advance(unit(random, 8), unit(random, 6), {-0.1}) == Status::buffer_full);
  CHECK(bytes_of(config, s.view) == before);

  REQUIRE(roll_back(s.view, 2) == Status::ok);
  Chunk<float> chunk(typename TestType::Rule{}, random, 3, 8, 6);
  const auto rolled = bytes_of(config, s.view);
  CHECK(step(s.team, s.view, chunk.tokens(), view_of(chunk.queries), view_of(chunk.outputs)) ==
        Status::buffer_full);
  CHECK(chunk.outputs_untouched());
  CHECK(bytes_of(config, s.view) == rolled);
}

TEMPLATE_TEST_CASE("rollback: from 0 to what is buffered", "[status]", (Full32<GatedDelta>),
                   (Full32<KimiDelta>), (Dense32<Mamba2>)) {
  TrackedState<TestType> s(config_of(8, 6));
  Random random(test_seed());
  feed(s, random, 11);  // one compaction
  REQUIRE(s.view.buffered() == 3);
  SinkState<TestType> before = s.state;
  feed(s, random, 4);
  CHECK(roll_back(s.view, -1) == Status::nothing_to_roll_back);
  CHECK(roll_back(s.view, 8) == Status::nothing_to_roll_back);
  CHECK(s.view.buffered() == 7);
  CHECK(roll_back(s.view, 0) == Status::ok);
  CHECK(s.view.buffered() == 7);
  CHECK(roll_back(s.view, 4) == Status::ok);
  CHECK(same_state(s.view, before.view()));
  CHECK(roll_back(s.view, 3) == Status::ok);
  CHECK(s.view.buffered() == 0);
  CHECK(roll_back(s.view, 1) == Status::nothing_to_roll_back);
  CHECK(s.view.record->tokens == 8);
}

TEMPLATE_TEST_CASE("tokens at once: a bad one in the middle, and none is applied", "[status]",
                   (Full32<GatedDelta>), (Full32<KimiDelta>), (Dense32<Mamba2>)) {
  TrackedState<TestType> s(config_of(8, 6));
  Random random(test_seed());
  feed(s, random, 3);
  const auto before = bytes_of(s.config, s.view);
  Chunk<float> chunk(typename TestType::Rule{}, random, 4, 8, 6);
  Status expected = Status::non_finite_input;
  bool of_query = false;
  SECTION("a key") { chunk.keys(2, 7) = static_cast<float>(not_a_number); }
  SECTION("a value") { chunk.values(2, 5) = static_cast<float>(infinity); }
  SECTION("a write strength") { chunk.strengths[2] = static_cast<float>(not_a_number); }
  SECTION("a log decay") {
    chunk.log_decays(2, 0) = 0.5F;
    expected = Status::positive_log_decay;
  }
  SECTION("a query") {
    chunk.queries(3, 0) = static_cast<float>(not_a_number);
    of_query = true;
  }
  CHECK(step(s.team, s.view, chunk.tokens(), view_of(chunk.queries), view_of(chunk.outputs)) ==
        expected);
  CHECK(chunk.outputs_untouched());
  CHECK(bytes_of(s.config, s.view) == before);
  if (of_query) return;
  CHECK(advance(s.team, s.view, chunk.tokens()) == expected);
  CHECK(bytes_of(s.config, s.view) == before);
}

TEMPLATE_TEST_CASE("tokens at once: an overflow in the middle, and none is applied", "[status]",
                   (Full32<GatedDelta>), (Full32<KimiDelta>), (Dense32<DeltaNet>)) {
  TrackedState<TestType> s(config_of(8, 6));
  Random random(test_seed());
  feed(s, random, 3);
  SinkState<TestType> before = s.state;
  Chunk<float> chunk(typename TestType::Rule{}, random, 4, 8, 6);
  // The third token reads what the second wrote, times 1e30.
  chunk.keys.row(1).setConstant(1e15F);
  chunk.keys.row(2).setConstant(1e20F);
  CHECK(advance(s.team, s.view, chunk.tokens()) == Status::overflow);
  CHECK(same_state(s.view, before.view()));
  CHECK(step(s.team, s.view, chunk.tokens(), view_of(chunk.queries), view_of(chunk.outputs)) ==
        Status::overflow);
  CHECK(same_state(s.view, before.view()));
  CHECK((chunk.outputs.bottomRows(2).array() == -99.0F).all());
}

TEMPLATE_TEST_CASE("overflow: one step leaves every byte as it was", "[status]", (Full32<Mamba2>),
                   (Full32<GatedDelta>), (Dense32<KimiDelta>)) {
  TrackedState<TestType> s(config_of(8, 6));
  Random random(test_seed());
  feed(s, random, 11);
  const auto before = bytes_of(s.config, s.view);
  const std::vector<float> key(8, 1.0F), value(6, 1e30F), log_decay(8, -0.1F);
  std::vector<float> query(8, 1e30F), output(6, -99.0F);
  CHECK(s.try_advance(std::vector<double>(8, 1), std::vector<double>(6, 1e30), {-0.1}, 1e30) ==
        Status::overflow);
  CHECK(bytes_of(s.config, s.view) == before);
  const Token<float> token{key.data(), value.data(), log_decay.data(), 1.0F};
  CHECK(step(s.team, s.view, token, query.data(), output.data()) == Status::overflow);
  CHECK(bytes_of(s.config, s.view) == before);
  CHECK(output == std::vector<float>(6, -99.0F));
  REQUIRE(advance(s.team, s.view, token) == Status::ok);
  CHECK(read_out(s.team, s.view, query.data(), output.data()) == Status::overflow);
  CHECK(output == std::vector<float>(6, -99.0F));
}

TEMPLATE_TEST_CASE("read_out: a bad query is said", "[status]", (Full32<GatedDelta>),
                   (Dense32<Mamba2>)) {
  TrackedState<TestType> s(config_of(8, 6));
  std::vector<float> query(8, 1.0F), output(6, -99.0F);
  query[7] = static_cast<float>(infinity);
  CHECK(read_out(s.team, s.view, query.data(), output.data()) == Status::non_finite_input);
  CHECK(output == std::vector<float>(6, -99.0F));
}

TEMPLATE_TEST_CASE("step: the output may be any of the inputs", "[alias]", (Full32<KimiDelta>),
                   (Full32<GatedLinearAttention>), (Dense32<KimiDelta>)) {
  Random random(test_seed());
  TrackedState<TestType> plain(config_of(20, 20));
  feed(plain, random, 11);
  const SinkState<TestType> start = plain.state;
  std::vector<float> inputs[4];  // key, value, log decay, query
  for (auto& x : inputs) x = narrow<float>(unit(random, 20));
  for (float& g : inputs[2]) g = -std::abs(g);
  std::vector<float> expected(20);
  const Token<float> token{inputs[0].data(), inputs[1].data(), inputs[2].data(), 0.75F};
  REQUIRE(step(plain.team, plain.view, token, inputs[3].data(), expected.data()) == Status::ok);

  for (std::size_t target = 0; target < 4; ++target) {
    CAPTURE(target);
    SinkState<TestType> state = start;
    std::vector<float> x[4] = {inputs[0], inputs[1], inputs[2], inputs[3]};
    const Token<float> aliased{x[0].data(), x[1].data(), x[2].data(), 0.75F};
    REQUIRE(step(plain.team, state.view(), aliased, x[3].data(), x[target].data()) == Status::ok);
    CHECK(x[target] == expected);
    CHECK(same_state(state.view(), plain.view));
  }
  std::vector<float> query = inputs[3], read(20);
  REQUIRE(read_out(plain.team, plain.view, query.data(), read.data()) == Status::ok);
  REQUIRE(read_out(plain.team, plain.view, query.data(), query.data()) == Status::ok);
  CHECK(query == read);
}

// ---- Initialisation --------------------------------------------------------------------------

TEMPLATE_TEST_CASE("initialize: arguments are checked, and nothing is touched", "[initialize]",
                   (Full32<GatedDelta>), (Dense32<Mamba2>)) {
  TrackedState<TestType> s(config_of(8, 6));
  Random random(test_seed());
  feed(s, random, 11);
  const auto before = bytes_of(s.config, s.view);
  Rows<float> dense = Rows<float>::Ones(8, 6);
  const auto status = [&](const MatrixView<const float>& matrix, const RandomizedSvd& method = {},
                          double certificate = 0) {
    const Status result =
        initialize(s.team, s.view, matrix, method, static_cast<float>(certificate));
    CHECK(bytes_of(s.config, s.view) == before);
    return result;
  };
  const MatrixView<const float> good = view_of(dense);
  CHECK(status({good.data, 7, 6, 6}) == Status::invalid_argument);
  CHECK(status({good.data, 8, 5, 6}) == Status::invalid_argument);
  CHECK(status({good.data, 6, 8, 8}) == Status::invalid_argument);  // transposed
  CHECK(status(good, {}, -1e-30) == Status::invalid_argument);
  CHECK(status(good, {}, not_a_number) == Status::invalid_argument);
  for (const RandomizedSvd& bad :
       {RandomizedSvd{0, 2, 0}, RandomizedSvd{-1, 2, 0}, RandomizedSvd{4097, 2, 0},
        RandomizedSvd{16, -1, 0}, RandomizedSvd{16, 65, 0}}) {
    CHECK(status(good, bad) == Status::invalid_argument);
    CHECK(contains(refusal([&] { (void)workspace_bytes<TestType>(s.config, bad); }), "block"));
  }
  dense(7, 5) = static_cast<float>(not_a_number);
  CHECK(status(view_of(dense)) == Status::non_finite_input);
}

TEMPLATE_TEST_CASE("initialize: a body that goes dense is the input, however far apart its entries",
                   "[initialize]", Local32<Mamba2>, Full32<GatedDelta>, Dense32<Mamba2>) {
  TrackedState<TestType> s(config_of(2, 2));
  const float entries[] = {1e30f, 0, 0, 1e-15f};
  REQUIRE(initialize(s.team, s.view, MatrixView<const float>{entries, 2, 2, 2}) == Status::ok);
  REQUIRE(s.view.dense());
  CHECK(std::equal(entries, entries + 4, s.view.matrix.data));
  CHECK(s.view.certificate() == 0);
}

TEST_CASE("initialize: a dense body beside a sink keeps small entries too", "[initialize]") {
  TrackedState<Local32<Mamba2, MeanValueSink>> s(config_of(2, 2), axis(2, 1));
  const float entries[] = {1e30f, 2, 1e-15f, 3};
  REQUIRE(initialize(s.team, s.view, MatrixView<const float>{entries, 2, 2, 2}) == Status::ok);
  REQUIRE(s.view.dense());
  CHECK(s.view.matrix(1, 0) == 1e-15f);
  CHECK(s.view.sink(0, 0) == 2);
  CHECK(s.view.sink(0, 1) == 3);
}

TEMPLATE_TEST_CASE("initialize: it starts anew and carries the certificate", "[initialize]",
                   (Full32<GatedDelta>), (Dense32<Mamba2>)) {
  TrackedState<TestType> s(config_of(24, 20));
  Random random(test_seed());
  feed(s, random, 11);
  Rows<float> dense = with_singular_values(random, 24, 20, {2, 1}).cast<float>();
  REQUIRE(initialize(s.team, s.view, view_of(dense), RandomizedSvd{}, 0.25F) == Status::ok);
  CHECK(s.view.buffered() == 0);
  CHECK(s.view.record->tokens == 0);
  CHECK(s.view.record->compactions == 0);
  CHECK(s.view.certificate() >= 0.25F);
  CHECK(s.view.certificate() <= 0.2501F);
  CHECK((s.stored() - dense.cast<double>()).norm() <= 1e-5);
}

TEMPLATE_TEST_CASE("initialize: a norm beyond the type's range is said, not stored", "[initialize]",
                   (Full32<Mamba2>), (Dense32<Mamba2>)) {
  TrackedState<TestType> s(config_of(8, 8));
  s.step(axis(8, 0), axis(8, 0));
  const auto before = bytes_of(s.config, s.view);
  const float largest = std::numeric_limits<float>::max();
  Rows<float> dense = Rows<float>::Constant(8, 8, largest);  // one singular value, 8 times as large
  const Status status = initialize(s.team, s.view, view_of(dense));
  if (status == Status::ok) {
    // In dense form each entry does fit.
    CHECK(s.view.dense());
    CHECK(s.stored() == dense.cast<double>());
  } else {
    CHECK(status == Status::overflow);
    CHECK(bytes_of(s.config, s.view) == before);
  }
}

// ---- Compaction ------------------------------------------------------------------------------

TEMPLATE_TEST_CASE("compact: an empty buffer changes nothing", "[compact]", (Full32<GatedDelta>),
                   (Dense32<Mamba2>)) {
  TrackedState<TestType> s(config_of(12, 10));
  Random random(test_seed());
  feed(s, random, 3);
  s.compact();
  const auto before = bytes_of(s.config, s.view);
  const CompactionReport report = s.compact();
  CHECK(bytes_of(s.config, s.view) == before);
  CHECK(report.rank_before == s.view.rank());
  CHECK(report.rank_after == s.view.rank());
  CHECK(report.dense == s.view.dense());
  CHECK(report.dropped == 0);
  CHECK(report.sweeps == 0);
}

TEST_CASE("compact: the report", "[compact]") {
  TrackedState<Full32<Mamba2>> s(config_of(12, 10, 0.1));
  s.step(axis(12, 0), axis(10, 0));
  s.compact();
  s.step(axis(12, 1), axis(10, 1), {0}, 0.5);
  s.step(axis(12, 2), axis(10, 2), {0}, 0.05);  // below epsilon
  const CompactionReport report = s.compact();
  CHECK(report.rank_before == 3);
  CHECK(report.rank_after == 2);
  CHECK(report.dropped >= static_cast<double>(0.05F));
  CHECK(report.dropped == Catch::Approx(0.05).epsilon(1e-4));
  CHECK(report.sweeps >= 1);
  CHECK_FALSE(report.capped);
  CHECK_FALSE(report.dense);
}

TEST_CASE("compact: epsilon is relative to the sink when that is stronger", "[compact]") {
  // Content of .05 beside a sink of 10: below 1 % of it. Beside one of 1 it stays.
  const auto rank_beside = [](double sink) {
    TrackedState<Full32<Mamba2, MeanValueSink>> s(config_of(12, 10, 1e-2), axis(10, 0, 0.5));
    s.step(axis(12, 0), axis(10, 0, sink));
    s.step(axis(12, 1), axis(10, 1, 0.05));
    const CompactionReport report = s.compact();
    CHECK(report.dropped == Catch::Approx(report.rank_after == 0 ? 0.05 : 0.0).epsilon(1e-4));
    s.check_certificate();
    return report.rank_after;
  };
  CHECK(rank_beside(10) == 0);
  CHECK(rank_beside(1) == 1);
}

TEMPLATE_TEST_CASE("sink: a zero direction is no sink, to the bit", "[compact]", Mamba2, GatedDelta,
                   KimiDelta) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  const StateConfig config = config_of(12, 10, 1e-2);
  TrackedState<Full32<TestType>> without(config);
  TrackedState<Full32<TestType, MeanValueSink>> with(config, std::vector<double>(10, 0.0));
  for (int i = 0; i < 40; ++i) {
    const auto key = unit(random, 12), value = unit(random, 10), query = unit(random, 12);
    without.step(key, value, {-0.1}, 0.5);
    with.step(key, value, {-0.1}, 0.5);
    CHECK(with.read(query) == without.read(query));
  }
  CHECK(with.view.record->compactions > 3);
  CHECK(with.stored() == without.stored());
}

TEMPLATE_TEST_CASE("dense fallback: there, and back when the state is small again", "[compact]",
                   (Full32<Mamba2>), (Full32<GatedDelta>), (Full32<KimiDelta, MeanValueSink>)) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = config_of(16, 16);
  config.dense_retry = 3;
  REQUIRE(config.rank_capacity() == 7);
  TrackedState<TestType> s(config, TestType::Sink::present ? axis(16, 0) : std::vector<double>{});
  const auto round = [&](int tokens) {
    feed(s, random, tokens);
    s.check_exact(100);
    const CompactionReport report = s.compact();
    CHECK(report.dense == s.view.dense());
    CHECK(report.dropped <= 1e-5 * s.largest);
    s.check_exact(100);
  };
  round(4);
  CHECK_FALSE(s.view.dense());
  round(8);
  REQUIRE(s.view.dense());
  CHECK(s.view.rank() == 0);
  for (int i = 0; i < 4; ++i) {  // a trial among them, which full rank fails
    round(8);
    CHECK(s.view.dense());
  }
  // Everything forgotten, three tokens since: low-rank again at the next trial.
  s.step(axis(16, 0), axis(16, 1), {-infinity});
  int compactions = 0;
  for (; s.view.dense() && compactions < 10; ++compactions) {
    s.step(axis(16, compactions % 3), unit(random, 16), {-0.1});
    s.compact();
    s.check_exact(100);
  }
  CHECK(compactions <= config.dense_retry);
  REQUIRE_FALSE(s.view.dense());
  CHECK(s.view.rank() >= 1);
  CHECK(s.view.rank() <= 4);
  s.check_factors();
  round(2);
  CHECK_FALSE(s.view.dense());
}
