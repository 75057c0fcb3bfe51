#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "replay/trace.hpp"
#include "support/catch.hpp"
#include "support/temporary_directory.hpp"

using namespace sinkstate::tools;
using sinkstate::testing::TemporaryDirectory;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

std::vector<float> counted(std::ptrdiff_t count, float start) {
  std::vector<float> values;
  for (std::ptrdiff_t i = 0; i < count; ++i) values.push_back(start + static_cast<float>(i));
  return values;
}

// 2 key heads, 4 value heads, every number different within its tensor.
Trace small_trace(Rule rule) {
  Trace trace;
  trace.rule = rule;
  trace.source = "a test";
  trace.tokens = 3;
  trace.key_heads = 2;
  trace.value_heads = 4;
  trace.d_k = 5;
  trace.d_v = 2;
  trace.q = counted(3 * 2 * 5, 0);
  trace.k = counted(3 * 2 * 5, 100);
  trace.v = counted(3 * 4 * 2, 200);
  trace.log_decay = counted(3 * 4 * trace.decays_per_token(), -500);
  for (int i = 0; i < 3 * 4; ++i) trace.beta.push_back(static_cast<float>(i) / 8);
  trace.initial_state = counted(4 * 5 * 2, 300);
  trace.sink_direction = counted(4 * 2, 400);
  trace.state_end = counted(4 * 5 * 2, 500);
  return trace;
}

bool same(const Trace& a, const Trace& b) {
  return a.rule == b.rule && a.head_map == b.head_map && a.source == b.source &&
         a.tokens == b.tokens && a.key_heads == b.key_heads && a.value_heads == b.value_heads &&
         a.d_k == b.d_k && a.d_v == b.d_v && a.q == b.q && a.k == b.k && a.v == b.v &&
         a.log_decay == b.log_decay && a.beta == b.beta && a.initial_state == b.initial_state &&
         a.sink_direction == b.sink_direction && a.state_end == b.state_end;
}

// A trace file part by part, to be spoilt before it is written.
struct Parts {
  struct Part {
    std::vector<std::size_t> shape;
    std::vector<float> values;
  };
  std::map<std::string, std::string> metadata = {
      {"format", "sinkstate-trace-1"}, {"rule", "gated_delta"}, {"head_map", "interleaved"}};
  std::map<std::string, Part> tensors;

  void set(const std::string& name, const std::vector<std::size_t>& shape, float value) {
    std::size_t count = 1;
    for (const std::size_t extent : shape) count *= extent;
    tensors[name] = {shape, std::vector<float>(count, value)};
  }

  Parts() {
    set("q", {3, 2, 5}, 0.5f);
    set("k", {3, 2, 5}, 0.5f);
    set("v", {3, 4, 2}, 0.5f);
    set("log_decay", {3, 4}, -1);
    set("beta", {3, 4}, 1);
  }
};

// The message with which the spoilt trace is refused, empty when it is not.
std::string error_of(const std::function<void(Parts&)>& spoil) {
  TemporaryDirectory directory;
  const auto path = directory / "trace.safetensors";
  Parts parts;
  spoil(parts);
  std::vector<OutputTensor> tensors;
  for (const auto& [name, part] : parts.tensors) {
    tensors.push_back({name, FloatType::f32, part.shape, &part.values});
  }
  AtomicFile file(path);
  write_safetensors(file, parts.metadata, tensors);
  file.commit();
  try {
    load_trace(path);
  } catch (const ToolError& error) {
    const std::string message = error.what();
    CHECK(message.rfind(path.string() + ": ", 0) == 0);
    CHECK(message.find('\n') == std::string::npos);
    return message.substr(path.string().size() + 2);
  }
  return {};
}

std::string cut_error(std::ptrdiff_t tokens, const std::vector<std::ptrdiff_t>& heads) {
  try {
    cut(small_trace(Rule::mamba2), tokens, heads);
  } catch (const ToolError& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("a trace comes back as it was saved") {
  TemporaryDirectory directory;
  const auto path = directory / "trace.safetensors";
  for (const Rule rule : {Rule::mamba2, Rule::gated_delta, Rule::kimi_delta}) {
    for (const FloatType type : {FloatType::f32, FloatType::f16}) {
      Trace trace = small_trace(rule);
      trace.head_map = type == FloatType::f16 ? HeadMap::tiled : HeadMap::interleaved;
      trace.stored.q = trace.stored.v = type;
      trace.log_decay[4] = -infinity;
      save_trace(path, trace);
      const Trace loaded = load_trace(path);
      CHECK(same(loaded, trace));
      CHECK(loaded.stored.v == type);
      CHECK(loaded.stored.k == FloatType::f32);

      trace.initial_state.clear();
      trace.sink_direction.clear();
      trace.state_end.clear();
      save_trace(path, trace);
      CHECK(same(load_trace(path), trace));
    }
  }
}

TEST_CASE("value heads read the key heads of their map") {
  Trace trace = small_trace(Rule::kimi_delta);
  const std::ptrdiff_t interleaved[] = {0, 0, 1, 1};
  const std::ptrdiff_t tiled[] = {0, 1, 0, 1};
  for (std::ptrdiff_t h = 0; h < 4; ++h) {
    trace.head_map = HeadMap::interleaved;
    CHECK(trace.key_head(h) == interleaved[h]);
    CHECK(*trace.key(2, h) == 100.0f + static_cast<float>(5 * (2 * 2 + interleaved[h])));
    trace.head_map = HeadMap::tiled;
    CHECK(trace.key_head(h) == tiled[h]);
    CHECK(*trace.query(1, h) == static_cast<float>(5 * (2 * 1 + tiled[h])));
    CHECK(*trace.value(2, h) == 200.0f + static_cast<float>(2 * (4 * 2 + h)));
    CHECK(*trace.log_decays(1, h) == -500.0f + static_cast<float>(5 * (4 + h)));
    CHECK(trace.write_strength(1, h) == static_cast<float>(4 + h) / 8);
  }
}

TEST_CASE("a trace that is not one is refused with what is wrong") {
  CHECK(error_of([](Parts&) {}).empty());

  SECTION("metadata") {
    CHECK(error_of([](Parts& p) { p.metadata.erase("format"); }) ==
          "metadata format: wanted sinkstate-trace-1, given none");
    CHECK(error_of([](Parts& p) { p.metadata["format"] = "sinkstate-trace-2"; }) ==
          "metadata format: wanted sinkstate-trace-1, given \"sinkstate-trace-2\"");
    CHECK(error_of([](Parts& p) { p.metadata["rule"] = "mamba3"; }) ==
          "metadata rule: wanted mamba2 or gated_delta or kimi_delta, given \"mamba3\"");
    CHECK(error_of([](Parts& p) { p.metadata.erase("head_map"); }) ==
          "metadata head_map: wanted interleaved or tiled, given none");
  }
  SECTION("tensors") {
    for (const std::string name : {"q", "k", "v", "log_decay", "beta"}) {
      CHECK(error_of([&](Parts& p) { p.tensors.erase(name); }) ==
            "tensor \"" + name + "\" is missing");
    }
    // Ignored, but by name: it may be a misspelt optional tensor.
    CHECK(error_of([](Parts& p) { p.set("inital_state", {4, 5, 2}, 0); }).empty());
  }
  SECTION("shapes") {
    CHECK(error_of([](Parts& p) {
            p.set("q", {3, 10}, 0);
          }) ==
          "tensor \"q\": wanted shape [tokens, key heads, d_k], each at least 1, given [3, 10]");
    CHECK(error_of([](Parts& p) {
            p.set("q", {0, 2, 5}, 0);
          }) ==
          "tensor \"q\": wanted shape [tokens, key heads, d_k], each at least 1, given [0, 2, 5]");
    CHECK(error_of([](Parts& p) {
            p.set("v", {3, 4, 0}, 0);
          }) ==
          "tensor \"v\": wanted shape [tokens, value heads, d_v], each at least 1, "
          "given [3, 4, 0]");
    CHECK(error_of([](Parts& p) {
            p.set("v", {3, 5, 2}, 0);
          }) == "heads: wanted value heads that are a multiple of the key heads, given 5 and 2");
    CHECK(error_of([](Parts& p) {
            p.set("v", {3, 1, 2}, 0);
          }) == "heads: wanted value heads that are a multiple of the key heads, given 1 and 2");
    CHECK(error_of([](Parts& p) {
            p.set("v", {4, 4, 2}, 0);
          }) == "tensor \"v\": wanted shape [3, 4, 2], given [4, 4, 2]");
    CHECK(error_of([](Parts& p) {
            p.set("k", {3, 2, 6}, 0);
          }) == "tensor \"k\": wanted shape [3, 2, 5], given [3, 2, 6]");
    CHECK(error_of([](Parts& p) { p.set("beta", {12}, 0); }) ==
          "tensor \"beta\": wanted shape [3, 4], given [12]");
    CHECK(error_of([](Parts& p) {
            p.set("state_end", {4, 2, 5}, 0);
          }) == "tensor \"state_end\": wanted shape [4, 5, 2], given [4, 2, 5]");
    CHECK(error_of([](Parts& p) {
            p.set("log_decay", {3, 4, 5}, -1);
          }) ==
          "tensor \"log_decay\": wanted shape [3, 4], given [3, 4, 5] "
          "(gated_delta has one log decay per token and head)");
    CHECK(error_of([](Parts& p) { p.metadata["rule"] = "kimi_delta"; }) ==
          "tensor \"log_decay\": wanted shape [3, 4, 5], given [3, 4] "
          "(kimi_delta has one log decay per token, head and key channel)");
  }
  SECTION("values") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const std::string name : {"q", "k", "v", "beta"}) {
      for (const float bad : {nan, infinity, -infinity}) {
        const std::string message = error_of([&](Parts& p) { p.tensors[name].values[7] = bad; });
        CHECK(message.find(": wanted a finite number, given ") != std::string::npos);
      }
    }
    CHECK(error_of([&](Parts& p) { p.tensors["v"].values[13] = nan; }) ==
          "v[1, 2, 1]: wanted a finite number, given NaN");
    CHECK(error_of([&](Parts& p) {
            p.set("sink_direction", {4, 2}, 1);
            p.tensors["sink_direction"].values[7] = nan;
          }) == "sink_direction[3, 1]: wanted a finite number, given NaN");
    CHECK(error_of([](Parts& p) { p.tensors["log_decay"].values[6] = -infinity; }).empty());
    CHECK(error_of([](Parts& p) { p.tensors["log_decay"].values[6] = 0; }).empty());
    CHECK(error_of([](Parts& p) { p.tensors["log_decay"].values[6] = 0.97f; }) ==
          "log_decay[1, 2]: wanted at most 0 (the logarithm of the decay, not the decay), "
          "given 0.97");
    CHECK(error_of([&](Parts& p) { p.tensors["log_decay"].values[6] = nan; }) ==
          "log_decay[1, 2]: wanted at most 0 (the logarithm of the decay, not the decay), "
          "given NaN");
    CHECK(error_of([](Parts& p) { p.tensors["beta"].values[0] = 2.5f; }).empty());
  }
}

TEST_CASE("a cut keeps what each value head reads") {
  for (const HeadMap map : {HeadMap::interleaved, HeadMap::tiled}) {
    for (const std::vector<std::ptrdiff_t>& heads : std::vector<std::vector<std::ptrdiff_t>>{
             {0, 1, 2, 3}, {3}, {1, 2}, {0, 2}, {0, 1}, {2, 1, 0}, {3, 2, 1, 0}}) {
      Trace trace = small_trace(Rule::kimi_delta);
      trace.head_map = map;
      const Trace part = cut(trace, 2, heads);
      CHECK(part.tokens == 2);
      CHECK(part.state_end.empty());
      CHECK(part.value_heads % part.key_heads == 0);
      for (std::size_t i = 0; i < heads.size(); ++i) {
        const auto h = static_cast<std::ptrdiff_t>(i);
        for (std::ptrdiff_t t = 0; t < 2; ++t) {
          CHECK(*part.query(t, h) == *trace.query(t, heads[i]));
          CHECK(*part.key(t, h) == *trace.key(t, heads[i]));
          CHECK(*part.value(t, h) == *trace.value(t, heads[i]));
          CHECK(*part.log_decays(t, h) == *trace.log_decays(t, heads[i]));
          CHECK(part.write_strength(t, h) == trace.write_strength(t, heads[i]));
        }
        CHECK(part.initial_state[10 * i] == 300.0f + 10 * static_cast<float>(heads[i]));
        CHECK(part.sink_direction[2 * i] == 400.0f + 2 * static_cast<float>(heads[i]));
      }
    }
  }
  // Key heads are shared where the map allows it.
  CHECK(cut(small_trace(Rule::mamba2), 1, {0, 1}).key_heads == 1);
  CHECK(cut(small_trace(Rule::mamba2), 1, {0, 1, 2}).key_heads == 3);

  CHECK(cut_error(0, {0}) == "tokens: wanted 1 to 3, given 0");
  CHECK(cut_error(4, {0}) == "tokens: wanted 1 to 3, given 4");
  CHECK(cut_error(1, {4}) == "heads: wanted 0 to 3, given 4");
  CHECK(cut_error(1, {-1}) == "heads: wanted 0 to 3, given -1");
  CHECK(cut_error(1, {}) == "heads: wanted at least one, given none");
}
