#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "oracles/norms.hpp"
#include "support/catch.hpp"
#include "support/streams.hpp"

using namespace sinkstate::testing;
using namespace sinkstate::oracle;

namespace {

bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
  return x.size() == y.size() &&
         (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}

bool same_bits(const Stream& x, const Stream& y) {
  return same_bits(x.key, y.key) && same_bits(x.value, y.value) && same_bits(x.query, y.query) &&
         same_bits(x.log_decay, y.log_decay) && same_bits(x.write_strength, y.write_strength) &&
         same_bits(x.sink, y.sink);
}

bool same_token(const Stream& stream, int s, int t) {
  return std::equal(stream.key_at(s), stream.key_at(s) + stream.d_k, stream.key_at(t)) &&
         std::equal(stream.value_at(s), stream.value_at(s) + stream.d_v, stream.value_at(t));
}

double key_norm(const Stream& stream, int token) {
  return frobenius_norm(stream.key_at(token), static_cast<std::size_t>(stream.d_k));
}

bool all_finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float element) { return std::isfinite(element); });
}

// The share of the squared norm that lies in the leading direction, by power iteration.
double leading_share(const std::vector<float>& rows, int width) {
  const auto n = static_cast<std::size_t>(width);
  std::vector<double> direction(n, 1.0), next(n);
  for (int iteration = 0; iteration < 50; ++iteration) {
    std::fill(next.begin(), next.end(), 0.0);
    for (std::size_t row = 0; row < rows.size(); row += n) {
      double projection = 0;
      for (std::size_t i = 0; i < n; ++i) projection += rows[row + i] * direction[i];
      for (std::size_t i = 0; i < n; ++i) next[i] += projection * rows[row + i];
    }
    const double norm = frobenius_norm(next);
    for (std::size_t i = 0; i < n; ++i) direction[i] = next[i] / norm;
  }
  const double total = frobenius_norm(rows);
  return frobenius_norm(next) / (total * total);
}

}  // namespace

TEST_CASE("streams: the same seed gives the same bits, another seed does not", "[streams]") {
  for (const RuleTraits rule : all_rules) {
    INFO(rule_name(rule));
    CHECK(same_bits(realistic(rule, 12, 5, 40, 7), realistic(rule, 12, 5, 40, 7)));
    CHECK_FALSE(same_bits(realistic(rule, 12, 5, 40, 7), realistic(rule, 12, 5, 40, 8)));
    CHECK(same_bits(random_full_rank(rule, 12, 5, 40, 7), random_full_rank(rule, 12, 5, 40, 7)));
  }
}

TEST_CASE("streams: random numbers are the published ones of mt19937_64", "[streams]") {
  Random random(5489);  // the engine's default seed; its first output is 14514284786278117030
  CHECK(random.uniform() == std::ldexp(static_cast<double>(14514284786278117030ULL >> 11), -53));

  double sum = 0, square = 0;
  const int count = 20000;
  for (int i = 0; i < count; ++i) {
    const double x = random.normal();
    sum += x;
    square += x * x;
  }
  CHECK(std::abs(sum / count) <= 0.03);
  CHECK(std::abs(square / count - 1) <= 0.05);
  CHECK(derived_seed(1, 0) != derived_seed(1, 1));
}

TEST_CASE("streams: sizes and ranges for every rule", "[streams]") {
  const int shapes[][2] = {{1, 1}, {1, 5}, {80, 128}, {24, 3}};
  for (const RuleTraits rule : all_rules) {
    for (const auto& shape : shapes) {
      for (const bool structured : {true, false}) {
        const Stream stream = structured ? realistic(rule, shape[0], shape[1], 50, 3)
                                         : random_full_rank(rule, shape[0], shape[1], 50, 3);
        INFO(describe(stream));
        REQUIRE(stream.key.size() == static_cast<std::size_t>(50 * shape[0]));
        REQUIRE(stream.query.size() == stream.key.size());
        REQUIRE(stream.value.size() == static_cast<std::size_t>(50 * shape[1]));
        REQUIRE(stream.log_decay.size() ==
                static_cast<std::size_t>(50 * rule.log_decay_count(shape[0])));
        REQUIRE(stream.write_strength.size() == 50);
        REQUIRE(stream.sink.size() == static_cast<std::size_t>(shape[1]));
        CHECK(all_finite(stream.key));
        CHECK(all_finite(stream.value));
        CHECK(all_finite(stream.query));
        for (const float b : stream.write_strength) REQUIRE((b > 0.0F && b < 1.0F));
        for (const float g : stream.log_decay) REQUIRE((g < 0.0F && g >= -0.2232F));
        if (rule.delta) {
          for (int t = 0; t < 50; ++t) REQUIRE(std::abs(key_norm(stream, t) - 1) <= 1e-6);
        }
        CHECK((stream.log_decay_at(0) == nullptr) == (rule.decay == RuleTraits::Decay::none));
        CHECK((frobenius_norm(stream.sink) > 0) == structured);
      }
    }
  }
}

TEST_CASE("streams: realistic streams have their sink, repeats and time scales", "[streams]") {
  const int tokens = 2000;
  const Stream stream = realistic(kimi_delta, 64, 80, tokens, 11);

  int repeats = 0, seen_before = 0;
  for (int t = 1; t < tokens; ++t) {
    if (same_token(stream, t, t - 1)) ++repeats;
    for (int s = 0; s < t; ++s) {
      if (same_token(stream, t, s)) {
        ++seen_before;
        break;
      }
    }
  }
  CHECK(std::abs(repeats / double(tokens) - 0.057) <= 0.02);      // .05 + .35 / 48
  CHECK(std::abs(seen_before / double(tokens) - 0.376) <= 0.04);  // .40 less 48 first occurrences

  const double key_share = leading_share(stream.key, stream.d_k);
  const double value_share = leading_share(stream.value, stream.d_v);
  CHECK((key_share >= 0.3 && key_share <= 0.5));
  CHECK((value_share >= 0.45 && value_share <= 0.7));

  std::vector<float> decays = stream.log_decay;
  std::nth_element(decays.begin(), decays.begin() + static_cast<std::ptrdiff_t>(decays.size() / 2),
                   decays.end());
  const double median_time_scale = -1 / static_cast<double>(decays[decays.size() / 2]);
  CHECK((median_time_scale >= 14 && median_time_scale <= 28));
}

TEST_CASE("streams: decay patterns", "[streams]") {
  const float forget = -std::numeric_limits<float>::infinity();
  Stream stream = realistic(kimi_delta, 40, 3, 100, 1);
  const auto all_are = [&](float wanted) {
    return std::all_of(stream.log_decay.begin(), stream.log_decay.end(),
                       [&](float g) { return g == wanted; });
  };
  set_decays(stream, DecayPattern::zero, 2);
  CHECK(all_are(0.0F));
  set_decays(stream, DecayPattern::tiny, 2);
  CHECK(all_are(-1e-8F));
  set_decays(stream, DecayPattern::strong, 2);
  CHECK(all_are(-40.0F));
  set_decays(stream, DecayPattern::severe, 2);
  CHECK(all_are(-150.0F));
  set_decays(stream, DecayPattern::forget, 2);
  CHECK(all_are(forget));

  const auto contains_every_value = [](const std::vector<float>& decays) {
    for (const float g :
         {0.0F, -1e-8F, -0.05F, -40.0F, -150.0F, -std::numeric_limits<float>::infinity()}) {
      if (std::find(decays.begin(), decays.end(), g) == decays.end()) return false;
    }
    return true;
  };
  set_decays(stream, DecayPattern::mixed_by_channel, 2);
  CHECK(contains_every_value(stream.log_decay));
  for (std::size_t i = 40; i < stream.log_decay.size(); ++i) {
    REQUIRE(stream.log_decay[i] == stream.log_decay[i - 40]);
  }
  set_decays(stream, DecayPattern::mixed_by_token, 2);
  for (std::size_t i = 0; i < stream.log_decay.size(); ++i) {
    REQUIRE(stream.log_decay[i] == stream.log_decay[i - i % 40]);
  }

  for (const DecayPattern pattern :
       {DecayPattern::mixed_by_token, DecayPattern::mixed_by_channel}) {
    Stream scalar = realistic(mamba2, 4, 3, 400, 1);
    set_decays(scalar, pattern, 2);
    CHECK(contains_every_value(scalar.log_decay));
    Stream none = realistic(delta_net, 4, 3, 40, 1);
    set_decays(none, pattern, 2);
    CHECK(none.log_decay.empty());
  }
}

TEST_CASE("streams: write strength patterns", "[streams]") {
  Stream stream = realistic(gated_delta, 4, 3, 200, 1);
  const auto range = [&](WriteStrengthPattern pattern) {
    set_write_strengths(stream, pattern, 2);
    const auto ends =
        std::minmax_element(stream.write_strength.begin(), stream.write_strength.end());
    return std::vector<float>{*ends.first, *ends.second};
  };
  CHECK(range(WriteStrengthPattern::zero) == std::vector<float>{0, 0});
  CHECK(range(WriteStrengthPattern::one) == std::vector<float>{1, 1});
  CHECK(range(WriteStrengthPattern::two) == std::vector<float>{2, 2});
  const std::vector<float> mixed = range(WriteStrengthPattern::random_up_to_two);
  CHECK((mixed[0] >= 0.0F && mixed[0] < 0.1F && mixed[1] > 1.9F && mixed[1] <= 2.0F));
}

TEST_CASE("streams: key patterns", "[streams]") {
  const Stream original = realistic(gated_delta, 16, 12, 64, 5);
  const auto with = [&](KeyPattern pattern) {
    Stream stream = original;
    set_keys(stream, pattern, 6);
    return stream;
  };
  const auto key_distance = [](const Stream& stream, int s, int t) {
    return frobenius_distance(stream.key_at(s), stream.key_at(t),
                              static_cast<std::size_t>(stream.d_k));
  };

  for (const auto& entry : key_patterns) {
    INFO(entry.name);
    const Stream stream = with(entry.pattern);
    CHECK(same_bits(stream, with(entry.pattern)));
    for (int t = 0; t < stream.tokens; ++t) {
      const bool zero = entry.pattern == KeyPattern::zero_keys && (t < 8 || t % 3 == 0);
      REQUIRE(std::abs(key_norm(stream, t) - (zero ? 0 : 1)) <= 1e-6);
    }
  }

  const Stream equal = with(KeyPattern::equal_tokens);
  const Stream near_3 = with(KeyPattern::near_duplicates_3);
  const Stream near_5 = with(KeyPattern::near_duplicates_5);
  for (int t = 1; t < 64; ++t) {
    REQUIRE(same_token(equal, 0, t));
    REQUIRE(key_distance(near_3, t - 1, t) > 1e-4);
    REQUIRE(key_distance(near_3, t - 1, t) < 4e-3);
    REQUIRE(key_distance(near_5, t - 1, t) > 1e-6);
    REQUIRE(key_distance(near_5, t - 1, t) < 4e-5);
  }

  const Stream same_key = with(KeyPattern::same_key);
  CHECK(key_distance(same_key, 0, 63) == 0);
  CHECK(same_bits(same_key.value, original.value));
  const Stream same_value = with(KeyPattern::same_value);
  CHECK(std::equal(same_value.value_at(0), same_value.value_at(1), same_value.value_at(63)));
  CHECK(same_bits(same_value.key, original.key));

  // Against the orthogonalised first three keys nothing is left of any other.
  const Stream small_span = with(KeyPattern::small_span);
  std::vector<std::vector<double>> basis;
  for (int t = 0; t < 64; ++t) {
    std::vector<double> rest(small_span.key_at(t), small_span.key_at(t) + 16);
    for (int pass = 0; pass < 2; ++pass) {
      for (const auto& direction : basis) {
        double projection = 0;
        for (std::size_t i = 0; i < 16; ++i) projection += direction[i] * rest[i];
        for (std::size_t i = 0; i < 16; ++i) rest[i] -= projection * direction[i];
      }
    }
    const double norm = frobenius_norm(rest);
    if (t < 3) {
      REQUIRE(norm > 1e-3);
      for (double& element : rest) element /= norm;
      basis.push_back(rest);
    } else {
      REQUIRE(norm <= 1e-4);
    }
  }

  const Stream graded = with(KeyPattern::graded_weights);
  CHECK(graded.value[0] == original.value[0] * 1e4F);
  CHECK(graded.value_at(15)[0] == original.value_at(15)[0] * 1e-4F);
}

TEST_CASE("streams: scaled values stay finite and not zero in float", "[streams]") {
  for (const float scale : {1e-25F, 1e+25F}) {
    Stream stream = realistic(gated_delta, 8, 6, 32, 9);
    const double norm = frobenius_norm(stream.value);
    scale_values(stream, scale);
    CHECK(all_finite(stream.value));
    CHECK(std::abs(frobenius_norm(stream.value) / (norm * static_cast<double>(scale)) - 1) <= 1e-6);
    DenseRecurrence<float> recurrence(gated_delta, 8, 6);
    std::vector<float> output(6);
    for (int t = 0; t < stream.tokens; ++t) step_read(recurrence, stream, t, output.data());
    CHECK(all_finite(output));
    CHECK(frobenius_norm(output) > 0);
  }
}

TEST_CASE("streams: seed and scale", "[streams]") {
  CHECK(test_scale() >= 1);
  CHECK(seed_note(42) == "repeat with SINKSTATE_TEST_SEED=42");
  CHECK(seed_note(test_seed()) == seed_note(test_seed()));
}
