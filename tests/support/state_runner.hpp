// Replays a stream through a state of any policy; what tests over all policies share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "oracles/dense_recurrence.hpp"
#include "sinkstate/sinkstate.hpp"
#include "support/streams.hpp"

namespace sinkstate::testing {

// ---- Policies --------------------------------------------------------------------------------

using AllRules =
    std::tuple<Mamba2, GatedDelta, KimiDelta, LinearAttention, GatedLinearAttention, DeltaNet>;

// The oracle's name for a rule of the library.
template <class Rule>
inline constexpr RuleTraits traits_of{
    Rule::corrects, Rule::decay == Decay::none     ? RuleTraits::Decay::none
                    : Rule::decay == Decay::scalar ? RuleTraits::Decay::scalar
                                                   : RuleTraits::Decay::per_channel};

template <class PolicyType>
struct PolicyTag {
  using type = PolicyType;
};

template <class Compaction>
inline constexpr const char* compaction_name = "";
template <>
inline constexpr const char* compaction_name<LocalSvd> = "LocalSvd";
template <>
inline constexpr const char* compaction_name<FullSvd> = "FullSvd";
template <>
inline constexpr const char* compaction_name<FixedRank> = "FixedRank";
template <>
inline constexpr const char* compaction_name<DenseBuffered> = "DenseBuffered";

// Calls body(PolicyTag<P>) for one rule with some compactions and every sink.
template <class Rule, class Precision, class... Compactions, class Body>
void for_each_sink(const Body& body) {
  (body(PolicyTag<Policy<Rule, Host, Precision, Compactions, NoSink>>{}), ...);
  (body(PolicyTag<Policy<Rule, Host, Precision, Compactions, MeanValueSink>>{}), ...);
}
template <class Rule, class Precision, class Body>
void for_each_policy(const Body& body) {
  for_each_sink<Rule, Precision, LocalSvd, FullSvd, FixedRank, DenseBuffered>(body);
}

template <class Number>
inline constexpr const char* number_name = "";
template <>
inline constexpr const char* number_name<float> = "fp32";
template <>
inline constexpr const char* number_name<double> = "fp64";
template <>
inline constexpr const char* number_name<Float16> = "fp16";
template <>
inline constexpr const char* number_name<BFloat16> = "bf16";
template <>
inline constexpr const char* number_name<Float8E4M3> = "fp8";

template <class P>
std::string policy_name() {
  return std::string(oracle::rule_name(traits_of<typename P::Rule>)) + ", " +
         number_name<typename P::Stored> + " behind " + number_name<typename P::Buffered> + ", " +
         compaction_name<typename P::Compaction> +
         (P::Sink::present ? ", MeanValueSink" : ", NoSink");
}

// A precision in which the rounding of a state's own precision can be seen.
template <class T>
using Wider = std::conditional_t<std::is_same_v<T, float>, double, long double>;

// ---- Scenarios: every pattern of streams.hpp, by number ----------------------------------------

inline constexpr int decay_scenarios = static_cast<int>(std::size(decay_patterns));
inline constexpr int strength_scenarios = static_cast<int>(std::size(write_strength_patterns));
inline constexpr int key_scenarios = static_cast<int>(std::size(key_patterns));
inline constexpr int scenarios = 2 + decay_scenarios + strength_scenarios + key_scenarios;

// Scenario 0 is realistic and 1 is random; the others apply one pattern to either of them.
inline Stream scenario_stream(int scenario, RuleTraits rule, int d_k, int d_v, int tokens,
                              std::uint64_t seed) {
  const bool from_realistic = scenario == 0 || (scenario > 1 && seed % 2 == 0);
  Stream stream = from_realistic ? realistic(rule, d_k, d_v, tokens, seed)
                                 : random_full_rank(rule, d_k, d_v, tokens, seed);
  // A random stream has no mean value: any direction is a valid sink.
  if (!from_realistic) std::copy_n(stream.value_at(0), d_v, stream.sink.begin());
  int pattern = scenario - 2;
  if (pattern < 0) return stream;
  if (pattern < decay_scenarios) {
    set_decays(stream, decay_patterns[pattern].pattern, seed);
    return stream;
  }
  pattern -= decay_scenarios;
  if (pattern < strength_scenarios) {
    set_write_strengths(stream, write_strength_patterns[pattern].pattern, seed);
    return stream;
  }
  pattern -= strength_scenarios;
  set_keys(stream, key_patterns[pattern].pattern, seed);
  return stream;
}

inline std::string scenario_name(int scenario) {
  if (scenario < 2) return scenario == 0 ? "realistic" : "random";
  int pattern = scenario - 2;
  if (pattern < decay_scenarios) return decay_patterns[pattern].name;
  pattern -= decay_scenarios;
  if (pattern < strength_scenarios) return write_strength_patterns[pattern].name;
  return key_patterns[pattern - strength_scenarios].name;
}

// ---- Replay ----------------------------------------------------------------------------------

// Helpers throw: a verb that refuses good input fails the test wherever it is called from.
inline void require_ok(Status status) {
  if (status != Status::ok) throw std::runtime_error(to_string(status));
}

// A stream's numbers in a state's precision; the conversion is exact.
template <class T>
class Inputs {
 public:
  explicit Inputs(const Stream& stream)
      : d_k_(stream.d_k),
        d_v_(stream.d_v),
        decays_(stream.rule.log_decay_count(stream.d_k)),
        keys_(stream.key.begin(), stream.key.end()),
        values_(stream.value.begin(), stream.value.end()),
        queries_(stream.query.begin(), stream.query.end()),
        log_decays_(stream.log_decay.begin(), stream.log_decay.end()),
        write_strengths_(stream.write_strength.begin(), stream.write_strength.end()),
        sink_(stream.sink.begin(), stream.sink.end()) {
    // Only its direction matters, and its size is bounded.
    T largest = T(0);
    for (const T x : sink_) largest = std::max(largest, std::abs(x));
    for (T& x : sink_) x = largest > T(0) ? x / largest : T(0);
  }

  Token<T> token(int t) const {
    return {keys_.data() + t * d_k_, values_.data() + t * d_v_,
            decays_ == 0 ? nullptr : log_decays_.data() + t * decays_,
            write_strengths_[static_cast<std::size_t>(t)]};
  }
  Tokens<T> tokens(int first, int count) const {
    return {
        {keys_.data() + first * d_k_, count, d_k_, d_k_},
        {values_.data() + first * d_v_, count, d_v_, d_v_},
        {decays_ == 0 ? nullptr : log_decays_.data() + first * decays_, count, decays_, decays_},
        write_strengths_.data() + first};
  }
  const T* query(int t) const { return queries_.data() + t * d_k_; }
  MatrixView<const T> queries(int first, int count) const {
    return {query(first), count, d_k_, d_k_};
  }
  const T* sink() const { return sink_.data(); }

 private:
  std::ptrdiff_t d_k_, d_v_, decays_;
  std::vector<T> keys_, values_, queries_, log_decays_, write_strengths_, sink_;
};

// Scratch for every verb, whichever method initialises.
template <class P>
std::size_t all_workspace_bytes(const StateConfig& config) {
  return std::max(workspace_bytes<P>(config), workspace_bytes<P>(config, ExactSvd{}));
}

template <class PolicyType>
class StateRunner {
 public:
  using P = PolicyType;
  using T = typename P::Compute;

  StateRunner(const Stream& stream, const StateConfig& config)
      : inputs_(stream),
        state_(config, P::Sink::present ? inputs_.sink() : nullptr),
        team_(all_workspace_bytes<P>(config)),
        output_(static_cast<std::size_t>(stream.d_v)) {}
  StateRunner(const StateRunner&) = delete;  // the state looks at the sink of its own inputs
  StateRunner& operator=(const StateRunner&) = delete;

  SinkStateView<P> view() { return state_.view(); }
  SinkState<P>& state() { return state_; }
  HostTeam& team() { return team_; }
  const Inputs<T>& inputs() const { return inputs_; }
  T certificate() { return view().certificate(); }

  const std::vector<T>& step(int token) {
    require_ok(
        sinkstate::step(team_, view(), inputs_.token(token), inputs_.query(token), output_.data()));
    return output_;
  }
  CompactionReport compact() {
    CompactionReport report;
    require_ok(sinkstate::compact(team_, view(), &report));
    return report;
  }
  void compact_if_due() {
    if (view().due()) compact();
  }
  template <class Method>
  void start_from(const std::vector<float>& dense, const Method& method, T certificate = 0) {
    const std::vector<T> content(dense.begin(), dense.end());
    start_from_own(content, method, certificate);
  }
  template <class Method>
  void start_from_own(const std::vector<T>& dense, const Method& method, T certificate = 0) {
    const StateConfig& config = view().config;
    require_ok(initialize(team_, view(),
                          MatrixView<const T>{dense.data(), config.d_k, config.d_v, config.d_v},
                          method, certificate));
  }
  std::vector<T> dense(T* certificate = nullptr) {
    const StateConfig& config = view().config;
    std::vector<T> matrix(static_cast<std::size_t>(config.d_k * config.d_v));
    require_ok(materialize(team_, view(),
                           MatrixView<T>{matrix.data(), config.d_k, config.d_v, config.d_v},
                           certificate));
    return matrix;
  }

 private:
  Inputs<T> inputs_;
  SinkState<P> state_;
  HostTeam team_;
  std::vector<T> output_;
};

// The matrix that the stored numbers stand for, in a wider precision and without the library:
// decays as suffix sums, the sink, the body, the buffer. Row-major [d_k][d_v].
template <class P, class W = Wider<typename P::Compute>>
std::vector<W> stored_state(const SinkStateView<P>& view) {
  const auto d_k = static_cast<std::size_t>(view.config.d_k);
  const auto d_v = static_cast<std::size_t>(view.config.d_v);
  std::vector<W> dense(d_k * d_v, W(0));
  std::vector<W> log_decay(d_k, W(0));  // applied since the column at hand
  const auto row = [](const auto& rows, Index i, std::size_t cols) {
    std::vector<W> numbers;
    for (std::size_t j = 0; j < cols; ++j) {
      numbers.push_back(static_cast<W>(rows(i, static_cast<Index>(j))));
    }
    return numbers;
  };
  const auto add = [&](const std::vector<W>& key, const std::vector<W>& value, W weight) {
    for (std::size_t i = 0; i < d_k; ++i) {
      const W left = weight * key[i] * std::exp(log_decay[i]);
      for (std::size_t j = 0; j < d_v; ++j) dense[i * d_v + j] += left * value[j];
    }
  };
  const Index channels = P::Rule::log_decays(view.config.d_k);
  for (Index t = view.buffered() - 1; t >= 0; --t) {
    add(row(view.buffer.keys, t, d_k), row(view.buffer.corrections, t, d_v), W(1));
    for (std::size_t i = 0; channels > 0 && i < d_k; ++i) {
      log_decay[i] +=
          static_cast<W>(view.buffer.log_decays(t, channels == 1 ? 0 : static_cast<Index>(i)));
    }
  }
  for (Index r = 0; r < view.rank(); ++r) {
    add(row(view.factors.keys(), r, d_k), row(view.factors.values(), r, d_v),
        static_cast<W>(view.factors.strength(r)));
  }
  if (P::Sink::present) {
    add(row(view.sink, 0, d_k), {view.sink_direction, view.sink_direction + d_v}, W(1));
  }
  for (std::size_t i = 0; view.dense() && i < d_k; ++i) {
    const std::vector<W> numbers = row(view.matrix, static_cast<Index>(i), d_v);
    for (std::size_t j = 0; j < d_v; ++j) {
      dense[i * d_v + j] += std::exp(log_decay[i]) * numbers[j];
    }
  }
  return dense;
}

// ---- Margins ---------------------------------------------------------------------------------

// The worst error / allowed of a run and where it was; a NaN is the worst of all.
class Margin {
 public:
  void include(double error, double allowed, int token) {
    const double ratio = error == 0 ? 0 : error / allowed;
    if (ratio <= ratio_ || std::isnan(ratio_)) return;
    ratio_ = ratio;
    error_ = error;
    token_ = token;
  }
  void include(const Margin& other) {
    if (!(other.ratio_ <= ratio_) && !std::isnan(ratio_)) *this = other;
  }
  double ratio() const { return ratio_; }
  std::string where() const {
    return "worst error " + std::to_string(error_ * 1e9) + "e-9, token " + std::to_string(token_);
  }

 private:
  double ratio_ = 0;
  double error_ = 0;
  int token_ = 0;
};

}  // namespace sinkstate::testing
