// Results depend on the state and the arguments alone, to the bit.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "support/catch.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

constexpr int tokens = 60;

template <class P>
StateConfig config_of(const Stream& stream) {
  StateConfig config;
  config.d_k = stream.d_k;
  config.d_v = stream.d_v;
  config.buffer = 8;
  config.draft = 4;
  config.epsilon = 3e-3;
  config.dense_retry = 2;
  config.active = 4;
  config.tail_period = 2;
  if (!P::Compaction::adaptive) config.rank_cap = 8;  // a fixed rank is found by projection
  return config;
}

template <class T>
bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
}

// All that a state shows: its matrix, its certificate, its rank.
template <class P, class T = typename P::Compute>
std::vector<T> face(HostTeam& team, const SinkStateView<P>& view) {
  const Index d_k = view.config.d_k, d_v = view.config.d_v;
  std::vector<T> numbers(static_cast<std::size_t>(d_k * d_v));
  T certificate = 0;
  require_ok(materialize(team, view, MatrixView<T>{numbers.data(), d_k, d_v, d_v}, &certificate));
  numbers.push_back(certificate);
  numbers.push_back(view.certificate());
  numbers.push_back(static_cast<T>(view.rank()));
  return numbers;
}

// Outputs of tokens [first, last), one at a time, compacted when due; then what the state shows.
template <class P, class T = typename P::Compute>
std::vector<T> replay(HostTeam& team, const SinkStateView<P>& view, const Inputs<T>& inputs,
                      int first, int last) {
  std::vector<T> results;
  std::vector<T> output(static_cast<std::size_t>(view.config.d_v));
  for (int t = first; t < last; ++t) {
    require_ok(step(team, view, inputs.token(t), inputs.query(t), output.data()));
    results.insert(results.end(), output.begin(), output.end());
    if (view.due()) require_ok(compact(team, view));
  }
  const std::vector<T> shown = face(team, view);
  results.insert(results.end(), shown.begin(), shown.end());
  return results;
}

// One fresh state of a policy with its inputs.
template <class P>
struct Fresh {
  using T = typename P::Compute;

  explicit Fresh(const Stream& stream, std::size_t more_scratch = 0)
      : inputs(stream),
        config(config_of<P>(stream)),
        state(config, direction()),
        team(all_workspace_bytes<P>(config) + more_scratch) {}

  const T* direction() const { return P::Sink::present ? inputs.sink() : nullptr; }
  std::vector<T> replay_all() { return replay(team, state.view(), inputs, 0, tokens); }

  Inputs<T> inputs;
  StateConfig config;
  SinkState<P> state;
  HostTeam team;
};

// Bytes aligned to 64 that hold NaN, in any precision.
class PoisonedBytes {
 public:
  PoisonedBytes(std::size_t size, std::size_t offset) : bytes_(size + offset), offset_(offset) {
    std::memset(data(), 0xff, size);
  }
  void* data() { return static_cast<unsigned char*>(const_cast<void*>(bytes_.data())) + offset_; }

 private:
  AlignedBytes bytes_;
  std::size_t offset_;
};

// d_k and d_v are no multiples of the vector width; the first stream stays low-rank, the second
// goes dense.
template <class Rule, class Body>
void on_streams(const Body& body) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  for (const int scenario : {0, 1}) {
    const Stream stream = scenario_stream(scenario, traits_of<Rule>, 37, 22, tokens, seed);
    const auto for_policy = [&](auto tag) {
      using P = typename decltype(tag)::type;
      INFO(policy_name<P>() << "; " << scenario_name(scenario));
      body(tag, stream);
    };
    for_each_policy<Rule, Fp32>(for_policy);
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("determinism: a fixed rank is found by projection in these tests",
                        "[determinism]", AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    if (P::Compaction::adaptive || !P::Compaction::low_rank) return;
    Fresh<P> fresh(stream);
    Index projected = 0;
    for (int t = 0; t < tokens; ++t) {
      require_ok(advance(fresh.team, fresh.state.view(), fresh.inputs.token(t)));
      CompactionReport report;
      if (fresh.state.view().due()) require_ok(compact(fresh.team, fresh.state.view(), &report));
      projected += report.projected;
    }
    CHECK(projected > 0);
  });
}

TEMPLATE_LIST_TEST_CASE("determinism: repetition, other and larger scratch", "[determinism]",
                        AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    const auto expected = Fresh<P>(stream).replay_all();
    CHECK(same_bits(Fresh<P>(stream).replay_all(), expected));
    // Scratch at other addresses, larger, and full of another state's numbers.
    Fresh<P> larger(stream, 12345);
    Fresh<P> other(stream);
    replay(larger.team, other.state.view(), other.inputs, 10, 40);
    CHECK(same_bits(larger.replay_all(), expected));
  });
}

TEMPLATE_LIST_TEST_CASE("determinism: inputs and outputs anywhere", "[determinism]", AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    using T = typename P::Compute;
    const auto d_k = static_cast<std::size_t>(stream.d_k);
    const auto d_v = static_cast<std::size_t>(stream.d_v);
    const auto decays = static_cast<std::size_t>(P::Rule::log_decays(stream.d_k));
    const auto expected = Fresh<P>(stream).replay_all();
    for (const std::size_t shift : {1U, 3U, 7U, 13U}) {
      Fresh<P> fresh(stream);
      std::vector<T> key(d_k + 16), value(d_v + 16), query(std::max(d_k, d_v) + 16);
      std::vector<T> log_decay(decays + 16);
      std::vector<T> results;
      for (int t = 0; t < tokens; ++t) {
        const Token<T> token = fresh.inputs.token(t);
        std::copy_n(token.key, d_k, key.data() + shift);
        std::copy_n(token.value, d_v, value.data() + shift + 1);
        std::copy_n(fresh.inputs.query(t), d_k, query.data() + shift + 2);
        std::copy_n(token.log_decay, decays, log_decay.data() + shift);
        // The output may lie where the query was.
        T* const output = query.data() + shift + 2;
        require_ok(step(fresh.team, fresh.state.view(),
                        Token<T>{key.data() + shift, value.data() + shift + 1,
                                 log_decay.data() + shift, token.write_strength},
                        output, output));
        results.insert(results.end(), output, output + d_v);
        if (fresh.state.view().due()) require_ok(compact(fresh.team, fresh.state.view()));
      }
      const auto shown = face(fresh.team, fresh.state.view());
      results.insert(results.end(), shown.begin(), shown.end());
      CHECK(same_bits(results, expected));
    }
  });
}

TEMPLATE_LIST_TEST_CASE("determinism: several tokens at once", "[determinism]", AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    using T = typename P::Compute;
    const auto expected = Fresh<P>(stream).replay_all();
    const std::ptrdiff_t stride = stream.d_v + 3;
    for (const int at_once : {1, 3, 8}) {
      Fresh<P> fresh(stream);
      std::vector<T> rows(static_cast<std::size_t>(8 * stride));
      std::vector<T> results;
      for (int t = 0; t < tokens;) {
        const auto view = fresh.state.view();
        const int until_due = static_cast<int>(view.config.buffer - view.buffered());
        const int count = std::min({at_once, until_due, tokens - t});
        require_ok(step(fresh.team, view, fresh.inputs.tokens(t, count),
                        fresh.inputs.queries(t, count),
                        MatrixView<T>{rows.data(), count, stream.d_v, stride}));
        for (int row = 0; row < count; ++row) {
          results.insert(results.end(), rows.data() + row * stride,
                         rows.data() + row * stride + stream.d_v);
        }
        if (view.due()) require_ok(compact(fresh.team, view));
        t += count;
      }
      const auto shown = face(fresh.team, fresh.state.view());
      results.insert(results.end(), shown.begin(), shown.end());
      CHECK(same_bits(results, expected));
    }
  });
}

TEMPLATE_LIST_TEST_CASE("determinism: a rolled back draft leaves nothing", "[determinism]",
                        AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    using T = typename P::Compute;
    const auto expected = Fresh<P>(stream).replay_all();
    Fresh<P> fresh(stream);
    const auto view = fresh.state.view();
    std::vector<T> results;
    std::vector<T> output(static_cast<std::size_t>(stream.d_v));
    for (int t = 0; t < tokens; ++t) {
      // Other tokens first, as many as a draft may have, and away with them.
      const int draft = t % 5;
      for (int ahead = 0; ahead < draft; ++ahead) {
        require_ok(advance(fresh.team, view, fresh.inputs.token((t * 7 + ahead) % tokens)));
      }
      require_ok(roll_back(view, draft));
      require_ok(
          step(fresh.team, view, fresh.inputs.token(t), fresh.inputs.query(t), output.data()));
      results.insert(results.end(), output.begin(), output.end());
      if (view.due()) require_ok(compact(fresh.team, view));
    }
    const auto shown = face(fresh.team, view);
    results.insert(results.end(), shown.begin(), shown.end());
    CHECK(same_bits(results, expected));
    CHECK(view.record->tokens == tokens);
  });
}

TEMPLATE_LIST_TEST_CASE("determinism: advance and read apart, step together", "[determinism]",
                        AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    // The state does not depend on whether it was read.
    Fresh<P> stepped(stream), advanced(stream);
    stepped.replay_all();
    for (int t = 0; t < tokens; ++t) {
      require_ok(advance(advanced.team, advanced.state.view(), advanced.inputs.token(t)));
      if (advanced.state.view().due()) require_ok(compact(advanced.team, advanced.state.view()));
    }
    CHECK(same_bits(face(advanced.team, advanced.state.view()),
                    face(stepped.team, stepped.state.view())));
  });
}

TEMPLATE_LIST_TEST_CASE("determinism: a copy goes on alike", "[determinism]", AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    Fresh<P> fresh(stream);
    replay(fresh.team, fresh.state.view(), fresh.inputs, 0, 29);
    SinkState<P> snapshot = fresh.state;
    const auto original = replay(fresh.team, fresh.state.view(), fresh.inputs, 29, tokens);
    CHECK(same_bits(replay(fresh.team, snapshot.view(), fresh.inputs, 29, tokens), original));
  });
}

TEMPLATE_LIST_TEST_CASE("determinism: reset, and memory that held NaN", "[determinism]", AllRules) {
  on_streams<TestType>([](auto tag, const Stream& stream) {
    using P = typename decltype(tag)::type;
    const auto expected = Fresh<P>(stream).replay_all();

    Fresh<P> used(stream);
    used.replay_all();
    reset(used.state.view());
    CHECK(same_bits(used.replay_all(), expected));

    Fresh<P> fresh(stream);
    const std::size_t size = state_bytes<P>(fresh.config);
    for (const std::size_t offset : {0U, 64U, 192U}) {
      PoisonedBytes memory(size, offset);
      const auto view = make_view<P>(memory.data(), size, fresh.config, fresh.direction());
      CHECK(same_bits(replay(fresh.team, view, fresh.inputs, 0, tokens), expected));
      std::memset(memory.data(), 0xff, size);
      reset(view);
      CHECK(same_bits(replay(fresh.team, view, fresh.inputs, 0, tokens), expected));
    }
    // Nor does scratch that holds NaN.
    const Workspace scratch = fresh.team.workspace();
    Workspace poison = scratch;
    const auto bytes = static_cast<Index>(all_workspace_bytes<P>(fresh.config));
    std::memset(poison.take<unsigned char>(bytes), 0xff, static_cast<std::size_t>(bytes));
    CHECK(same_bits(fresh.replay_all(), expected));
  });
}
