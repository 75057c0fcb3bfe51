// Random token streams for property tests: realistic ones, unstructured ones, and extremes.
//
// A stream is a function of its seed alone. The standard distributions differ between standard
// libraries, so the conversions from random bits are written out here. Tokens are stored as float:
// an fp32 state, an fp64 state and the oracle then see exactly the same numbers.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "oracles/dense_recurrence.hpp"

namespace sinkstate::testing {

using oracle::RuleTraits;

struct Stream {
  RuleTraits rule;
  int d_k;
  int d_v;
  int tokens;
  std::uint64_t seed;
  std::vector<float> key;             // [tokens][d_k]
  std::vector<float> value;           // [tokens][d_v]
  std::vector<float> query;           // [tokens][d_k]
  std::vector<float> log_decay;       // [tokens][rule.log_decay_count(d_k)]
  std::vector<float> write_strength;  // [tokens]
  std::vector<float> sink;            // [d_v], the mean value; zero where there is none

  const float* key_at(int token) const { return key.data() + offset(token, d_k); }
  const float* value_at(int token) const { return value.data() + offset(token, d_v); }
  const float* query_at(int token) const { return query.data() + offset(token, d_k); }
  // Null for a rule without decay.
  const float* log_decay_at(int token) const {
    const int count = rule.log_decay_count(d_k);
    return count == 0 ? nullptr : log_decay.data() + offset(token, count);
  }
  float write_strength_at(int token) const { return write_strength[offset(token, 1)]; }

  float* key_at(int token) { return key.data() + offset(token, d_k); }
  float* value_at(int token) { return value.data() + offset(token, d_v); }
  float* query_at(int token) { return query.data() + offset(token, d_k); }

 private:
  static std::size_t offset(int token, int width) {
    return static_cast<std::size_t>(token) * static_cast<std::size_t>(width);
  }
};

template <class T>
void step_read(oracle::DenseRecurrence<T>& recurrence, const Stream& stream, int token, T* output) {
  recurrence.step_read(stream.key_at(token), stream.value_at(token), stream.log_decay_at(token),
                       stream.write_strength_at(token), stream.query_at(token), output);
}

// ---- Seeds and scale -------------------------------------------------------------------------

namespace detail {

inline std::uint64_t number_from_environment(const char* name, std::uint64_t fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  errno = 0;
  const unsigned long long number = std::strtoull(text, &end, 0);
  // A seed that was silently misread would make a failure look gone.
  if (errno != 0 || *end != '\0' || *text == '-') {
    throw std::invalid_argument(std::string(name) + " is not a number: " + text);
  }
  return number;
}

}  // namespace detail

inline std::uint64_t test_seed() {
  return detail::number_from_environment("SINKSTATE_TEST_SEED", 20261130);
}

// Multiplies the length of property tests.
inline int test_scale() {
  const std::uint64_t scale = detail::number_from_environment("SINKSTATE_TEST_SCALE", 1);
  if (scale < 1 || scale > 1000000) {
    throw std::invalid_argument("SINKSTATE_TEST_SCALE is not in 1..1000000: " +
                                std::to_string(scale));
  }
  return static_cast<int>(scale);
}

// For INFO: how to see the same numbers again.
inline std::string seed_note(std::uint64_t seed) {
  return "repeat with SINKSTATE_TEST_SEED=" + std::to_string(seed);
}

// Independent seeds for the cases of one test (splitmix64).
inline std::uint64_t derived_seed(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// For INFO: the arguments that make this stream.
inline std::string describe(const Stream& stream) {
  return std::string(oracle::rule_name(stream.rule)) + ", d_k " + std::to_string(stream.d_k) +
         ", d_v " + std::to_string(stream.d_v) + ", tokens " + std::to_string(stream.tokens) +
         ", stream seed " + std::to_string(stream.seed);
}

// ---- Random numbers --------------------------------------------------------------------------

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  // In [0, 1), 53 bits.
  double uniform() { return std::ldexp(static_cast<double>(engine_() >> 11), -53); }

  bool chance(double probability) { return uniform() < probability; }

  int below(int count) { return static_cast<int>(uniform() * count); }

  // The sum of twelve 16-bit uniforms, centred and scaled: variance 1, and in integers, so that no
  // mathematics library has a say in it.
  double normal() {
    std::int64_t sum = 0;
    for (int draw = 0; draw < 3; ++draw) {
      const std::uint64_t bits = engine_();
      for (int part = 0; part < 64; part += 16) {
        sum += static_cast<std::int64_t>((bits >> part) & 0xffff);
      }
    }
    return static_cast<double>(sum - 6 * 65535) / 65536;
  }

  std::vector<double> normals(int count, double scale) {
    std::vector<double> x(static_cast<std::size_t>(count));
    for (double& element : x) element = scale * normal();
    return x;
  }

 private:
  std::mt19937_64 engine_;
};

// ---- Realistic and unstructured streams ------------------------------------------------------

namespace detail {

// A zero vector stays zero.
inline void normalize(std::vector<double>& x) {
  double square = 0;
  for (const double element : x) square += element * element;
  if (square == 0) return;
  for (double& element : x) element /= std::sqrt(square);
}

inline void store(const std::vector<double>& x, float* destination) {
  std::transform(x.begin(), x.end(), destination,
                 [](double element) { return static_cast<float>(element); });
}

inline void normalize(float* x, int count) {
  std::vector<double> wide(x, x + count);
  normalize(wide);
  store(wide, x);
}

inline double inverse_sqrt(int count) { return 1 / std::sqrt(static_cast<double>(count)); }

inline Stream empty_stream(RuleTraits rule, int d_k, int d_v, int tokens, std::uint64_t seed) {
  if (d_k < 1 || d_v < 1 || tokens < 0) throw std::invalid_argument("stream: impossible shape");
  const auto size = [&](int width) {
    return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(width);
  };
  Stream stream{};
  stream.rule = rule;
  stream.d_k = d_k;
  stream.d_v = d_v;
  stream.tokens = tokens;
  stream.seed = seed;
  stream.key.resize(size(d_k));
  stream.value.resize(size(d_v));
  stream.query.resize(size(d_k));
  stream.log_decay.resize(size(rule.log_decay_count(d_k)));
  stream.write_strength.resize(size(1));
  stream.sink.resize(static_cast<std::size_t>(d_v));
  return stream;
}

// Decays from lognormal time scales, median 20 tokens, each channel around its own, clipped to
// (.8, 1); write strengths in (0, 1).
inline void draw_gates(Stream& stream, Random& random) {
  const int channels = stream.rule.log_decay_count(stream.d_k);
  const double log_of_fastest = -0.22314355131420976;  // log .8
  const std::vector<double> channel_scale = random.normals(channels, 0.7);
  std::size_t at = 0;
  for (int token = 0; token < stream.tokens; ++token) {
    for (const double scale : channel_scale) {
      const double time_scale = 20 * std::exp(scale + 0.5 * random.normal());
      stream.log_decay[at++] = static_cast<float>(std::max(-1 / time_scale, log_of_fastest));
    }
  }
  for (float& b : stream.write_strength) b = static_cast<float>(0.02 + 0.96 * random.uniform());
}

// Vectors of one kind (keys and queries, or values): a fixed sink direction, a few topics whose
// strengths fall off, and a little noise in all directions. The shares are of the squared norm.
class Subspace {
 public:
  static constexpr int topics = 24;

  Subspace(Random& random, int width, double sink_share, double topic_share)
      : width_(width),
        sink_(random.normals(width, 1)),
        noise_(std::sqrt(1 - sink_share - topic_share) * inverse_sqrt(width)) {
    normalize(sink_);
    for (double& element : sink_) element *= std::sqrt(sink_share);
    const double ratio = 0.68;
    for (int topic = 0; topic < topics; ++topic) {
      const double share = topic_share * (1 - ratio) * std::pow(ratio, topic);
      directions_.push_back(random.normals(width, std::sqrt(share) * inverse_sqrt(width)));
    }
  }

  const std::vector<double>& sink() const { return sink_; }

  std::vector<double> draw(Random& random, const std::vector<double>& topic_state) const {
    std::vector<double> x = random.normals(width_, noise_);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] += sink_[i];
      for (std::size_t topic = 0; topic < topics; ++topic) {
        x[i] += topic_state[topic] * directions_[topic][i];
      }
    }
    return x;
  }

 private:
  int width_;
  std::vector<double> sink_;
  double noise_;
  std::vector<std::vector<double>> directions_;
};

}  // namespace detail

// Roughly what the heads of trained models look like: slowly moving topics around a sink, 35 % of
// the tokens from a vocabulary of 48, 5 % exact repeats of the token before.
inline Stream realistic(RuleTraits rule, int d_k, int d_v, int tokens, std::uint64_t seed) {
  using detail::Subspace;
  struct Token {
    std::vector<double> key, value;
  };

  Stream stream = detail::empty_stream(rule, d_k, d_v, tokens, seed);
  Random random(seed);
  const Subspace key_space(random, d_k, 0.40, 0.57);
  const Subspace value_space(random, d_v, 0.58, 0.40);
  detail::store(value_space.sink(), stream.sink.data());

  const auto draw_token = [&](const std::vector<double>& topic_state) {
    Token token;
    token.key = key_space.draw(random, topic_state);
    token.value = value_space.draw(random, topic_state);
    if (rule.delta) detail::normalize(token.key);
    return token;
  };
  std::vector<Token> vocabulary;
  for (int word = 0; word < 48; ++word) {
    vocabulary.push_back(draw_token(random.normals(Subspace::topics, 1)));
  }

  const double memory = 0.9;
  std::vector<double> topic_state = random.normals(Subspace::topics, 1);
  Token token;
  for (int t = 0; t < tokens; ++t) {
    for (double& topic : topic_state) {
      topic = memory * topic + std::sqrt(1 - memory * memory) * random.normal();
    }
    const double kind = random.uniform();
    if (kind < 0.05 && t > 0) {
      // The token before once more.
    } else if (kind < 0.40) {
      token = vocabulary[static_cast<std::size_t>(random.below(48))];
    } else {
      token = draw_token(topic_state);
    }
    std::vector<double> query = key_space.draw(random, topic_state);
    if (rule.delta) detail::normalize(query);

    detail::store(token.key, stream.key_at(t));
    detail::store(token.value, stream.value_at(t));
    detail::store(query, stream.query_at(t));
  }
  detail::draw_gates(stream, random);
  return stream;
}

// Gaussian keys, values and queries of norm about 1: nothing to compress.
inline Stream random_full_rank(RuleTraits rule, int d_k, int d_v, int tokens, std::uint64_t seed) {
  Stream stream = detail::empty_stream(rule, d_k, d_v, tokens, seed);
  Random random(seed);
  for (int t = 0; t < tokens; ++t) {
    std::vector<double> key = random.normals(d_k, detail::inverse_sqrt(d_k));
    std::vector<double> query = random.normals(d_k, detail::inverse_sqrt(d_k));
    if (rule.delta) {
      detail::normalize(key);
      detail::normalize(query);
    }
    detail::store(key, stream.key_at(t));
    detail::store(query, stream.query_at(t));
    detail::store(random.normals(d_v, detail::inverse_sqrt(d_v)), stream.value_at(t));
  }
  detail::draw_gates(stream, random);
  return stream;
}

// ---- Extremes: modifiers of a stream ---------------------------------------------------------

template <class Pattern>
struct Named {
  Pattern pattern;
  const char* name;
};

enum class DecayPattern {
  zero,              // log decay 0: nothing is forgotten
  tiny,              // -1e-8: exp of it is 1 in fp32
  strong,            // -40
  severe,            // -150: exp of it is 0 in fp32
  forget,            // -inf
  mixed_by_token,    // mostly mild, one token in eight strong, severe or forgetting
  mixed_by_channel,  // each channel keeps one of the values; by token where there is one decay
};

inline constexpr Named<DecayPattern> decay_patterns[] = {
    {DecayPattern::zero, "log decay 0"},
    {DecayPattern::tiny, "log decay -1e-8"},
    {DecayPattern::strong, "log decay -40"},
    {DecayPattern::severe, "log decay -150"},
    {DecayPattern::forget, "log decay -inf"},
    {DecayPattern::mixed_by_token, "log decays mixed by token"},
    {DecayPattern::mixed_by_channel, "log decays mixed by channel"},
};

inline void set_decays(Stream& stream, DecayPattern pattern, std::uint64_t seed) {
  const float mild[] = {0.0F, -1e-8F, -0.05F};
  const float harsh[] = {-40.0F, -150.0F, -std::numeric_limits<float>::infinity()};
  const auto channels = static_cast<std::size_t>(stream.rule.log_decay_count(stream.d_k));
  const bool by_channel = pattern == DecayPattern::mixed_by_channel &&
                          stream.rule.decay == RuleTraits::Decay::per_channel;
  Random random(seed);
  const auto draw = [&](double harsh_share) {
    const bool is_harsh = random.chance(harsh_share);
    return (is_harsh ? harsh : mild)[random.below(3)];
  };
  std::vector<float> of_channel(channels);
  for (float& g : of_channel) g = draw(0.5);

  for (std::size_t t = 0; t < static_cast<std::size_t>(stream.tokens); ++t) {
    float of_token = 0.0F;
    switch (pattern) {
      case DecayPattern::zero:
        break;
      case DecayPattern::tiny:
        of_token = mild[1];
        break;
      case DecayPattern::strong:
        of_token = harsh[0];
        break;
      case DecayPattern::severe:
        of_token = harsh[1];
        break;
      case DecayPattern::forget:
        of_token = harsh[2];
        break;
      case DecayPattern::mixed_by_token:
      case DecayPattern::mixed_by_channel:
        of_token = draw(0.125);
        break;
    }
    for (std::size_t c = 0; c < channels; ++c) {
      stream.log_decay[t * channels + c] = by_channel ? of_channel[c] : of_token;
    }
  }
}

enum class WriteStrengthPattern { zero, one, two, random_up_to_two };

inline constexpr Named<WriteStrengthPattern> write_strength_patterns[] = {
    {WriteStrengthPattern::zero, "write strength 0"},
    {WriteStrengthPattern::one, "write strength 1"},
    {WriteStrengthPattern::two, "write strength 2"},
    {WriteStrengthPattern::random_up_to_two, "write strengths in [0, 2]"},
};

inline void set_write_strengths(Stream& stream, WriteStrengthPattern pattern, std::uint64_t seed) {
  Random random(seed);
  for (float& b : stream.write_strength) {
    switch (pattern) {
      case WriteStrengthPattern::zero:
        b = 0.0F;
        break;
      case WriteStrengthPattern::one:
        b = 1.0F;
        break;
      case WriteStrengthPattern::two:
        b = 2.0F;
        break;
      case WriteStrengthPattern::random_up_to_two:
        b = static_cast<float>(2 * random.uniform());
        break;
    }
  }
}

enum class KeyPattern {
  zero_keys,          // the first eight tokens, then every third
  equal_tokens,       // one key and value throughout
  near_duplicates_3,  // tokens within about 1e-3 of each other
  near_duplicates_5,  // tokens within about 1e-5 of each other
  same_key,           // different values: deficient on the key side only
  same_value,         // different keys: deficient on the value side only
  small_span,         // keys inside a space of three dimensions
  graded_weights,     // values times 1e4 .. 1e-4 within every eight tokens
};

inline constexpr Named<KeyPattern> key_patterns[] = {
    {KeyPattern::zero_keys, "zero keys"},
    {KeyPattern::equal_tokens, "all tokens equal"},
    {KeyPattern::near_duplicates_3, "near-parallel keys and values, 1e-3"},
    {KeyPattern::near_duplicates_5, "near-parallel keys and values, 1e-5"},
    {KeyPattern::same_key, "same key, different values"},
    {KeyPattern::same_value, "same value, different keys"},
    {KeyPattern::small_span, "keys inside a small span"},
    {KeyPattern::graded_weights, "weights 1e4 to 1e-4 in one buffer"},
};

// Keys of delta rules stay unit vectors, zero keys aside.
inline void set_keys(Stream& stream, KeyPattern pattern, std::uint64_t seed) {
  Random random(seed);
  const Stream original = stream;
  const int d_k = stream.d_k, d_v = stream.d_v;
  if (stream.tokens == 0) return;

  const auto same_key = [&](int t) { std::copy_n(original.key_at(0), d_k, stream.key_at(t)); };
  const auto same_value = [&](int t) {
    std::copy_n(original.value_at(0), d_v, stream.value_at(t));
  };
  // Moves x by distance times its length, in a random direction.
  const auto perturb = [&](float* x, int count, double distance) {
    double square = 0;
    for (int i = 0; i < count; ++i) square += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    const double scale = distance * std::sqrt(square) * detail::inverse_sqrt(count);
    for (int i = 0; i < count; ++i) {
      x[i] = static_cast<float>(static_cast<double>(x[i]) + scale * random.normal());
    }
  };
  const auto keep_unit = [&](int t) {
    if (stream.rule.delta) detail::normalize(stream.key_at(t), d_k);
  };
  const auto near_duplicate = [&](int t, double distance) {
    same_key(t);
    same_value(t);
    perturb(stream.key_at(t), d_k, distance);
    perturb(stream.value_at(t), d_v, distance);
    keep_unit(t);
  };

  std::vector<std::vector<double>> span;
  for (int direction = 0; direction < 3; ++direction) {
    span.push_back(random.normals(d_k, detail::inverse_sqrt(d_k)));
  }
  const float weights[] = {1e4F, 1e3F, 1e2F, 1e1F, 1e-1F, 1e-2F, 1e-3F, 1e-4F};

  for (int t = 0; t < stream.tokens; ++t) {
    switch (pattern) {
      case KeyPattern::zero_keys:
        // Eight, so that the first buffer may be folded into an empty state.
        if (t < 8 || t % 3 == 0) std::fill_n(stream.key_at(t), d_k, 0.0F);
        break;
      case KeyPattern::equal_tokens:
        same_key(t);
        same_value(t);
        break;
      case KeyPattern::near_duplicates_3:
        near_duplicate(t, 1e-3);
        break;
      case KeyPattern::near_duplicates_5:
        near_duplicate(t, 1e-5);
        break;
      case KeyPattern::same_key:
        same_key(t);
        break;
      case KeyPattern::same_value:
        same_value(t);
        break;
      case KeyPattern::small_span: {
        const std::vector<double> weight = random.normals(3, 1 / std::sqrt(3.0));
        for (int i = 0; i < d_k; ++i) {
          const auto row = static_cast<std::size_t>(i);
          stream.key_at(t)[i] = static_cast<float>(
              weight[0] * span[0][row] + weight[1] * span[1][row] + weight[2] * span[2][row]);
        }
        keep_unit(t);
        break;
      }
      case KeyPattern::graded_weights:
        for (int j = 0; j < d_v; ++j) stream.value_at(t)[j] *= weights[t % 8];
        break;
    }
  }
}

// 1e-25 and 1e+25: squares of such values leave the range of fp32.
inline void scale_values(Stream& stream, float scale) {
  for (float& element : stream.value) element *= scale;
  for (float& element : stream.sink) element *= scale;
}

}  // namespace sinkstate::testing
