// The language model of the example: against the reference's numbers, dense against factored, pools
// against plain states, texts together against each alone, and what it refuses.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hybrid_lm/evaluate.hpp"
#include "hybrid_lm/golden.hpp"
#include "hybrid_lm/model.hpp"
#include "hybrid_lm/report.hpp"
#include "hybrid_lm/sampling.hpp"
#include "hybrid_lm/sweep.hpp"
#include "replay/any_state.hpp"
#include "support/catch.hpp"
#include "support/temporary_directory.hpp"

using namespace sinkstate;
using namespace sinkstate::hybrid_lm;
using sinkstate::testing::TemporaryDirectory;
using tools::Compaction;

namespace fs = std::filesystem;

namespace {

const fs::path folder = SINKSTATE_HYBRID_LM_MODEL;

const Model& model() {
  static const Model loaded = load_model(folder);
  return loaded;
}

std::string contents(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}
void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

Policies all(const tools::ReplayOptions& options) { return {options, options, options}; }

Evaluation evaluate_text(std::ptrdiff_t prefill, std::ptrdiff_t bytes, const Policies& policies) {
  static const std::string text = contents(folder / "text.txt");
  REQUIRE(text.size() >= 8192);
  const auto progress = [](std::ptrdiff_t) {};
  return evaluate(model(), read_dense(model(), text, prefill, bytes, progress), policies, progress);
}

template <class Action>
std::string refusal(const Action& action) {
  try {
    action();
  } catch (const tools::ToolError& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// A part of the model's own text, some of which runs dense.
struct Part {
  std::size_t offset, prompt, bytes;

  std::uint8_t byte(std::size_t i) const {
    static const std::string text = contents(folder / "text.txt");
    return static_cast<std::uint8_t>(text.at(offset + i));
  }
  std::uint8_t behind_prompt(std::size_t i) const { return byte(prompt + i); }
  std::unique_ptr<Decoder> read_prompt() const {
    auto reader = std::make_unique<Decoder>(model());
    for (std::size_t i = 0; i < prompt; ++i) reader->read(byte(i));
    return reader;
  }
};

/// What pools are held against: the states of one text, each on its own and stepped by hand.
class PlainLayer : public LayerStates {
 public:
  PlainLayer(const LayerWeights& layer, const tools::ReplayOptions& options)
      : LayerStates(layer.mixer, model().config.heads(layer.mixer), 1), seed_(options.seed) {
    const tools::Rule rule = layer.mixer == Mixer::gated_delta  ? tools::Rule::gated_delta
                             : layer.mixer == Mixer::kimi_delta ? tools::Rule::kimi_delta
                                                                : tools::Rule::mamba2;
    for (int h = 0; h < shape().heads; ++h) {
      heads_.push_back(tools::make_state(rule, options, shape().d_k, shape().d_v,
                                         layer.value_mean.row(h).data()));
    }
    team_ = std::make_unique<HostTeam>(heads_.front()->workspace_bytes());
  }

  void admit(int) override {}
  void fork(int, int) override { FAIL("not here"); }
  void initialize(HostTeams&, int, const std::vector<float>& dense, std::int64_t) override {
    RandomizedSvd method;
    method.seed = seed_;
    const float* next = dense.data();
    for (auto& head : heads_) {
      REQUIRE(head->initialize(*team_, {next, shape().d_k, shape().d_v, shape().d_v}, method, 0) ==
              Status::ok);
      next += shape().d_k * shape().d_v;
    }
  }
  std::vector<float> dense(HostTeams&, int) override {
    std::vector<float> numbers(heads_.size() * static_cast<std::size_t>(shape().d_k * shape().d_v));
    float* next = numbers.data();
    for (auto& head : heads_) {
      REQUIRE(head->materialize(*team_, {next, shape().d_k, shape().d_v, shape().d_v}, nullptr) ==
              Status::ok);
      next += shape().d_k * shape().d_v;
    }
    return numbers;
  }
  void step(HostTeams&, const std::vector<std::int32_t>&) override {
    costs_of(0).begin_token();
    for (int h = 0; h < shape().heads; ++h) {
      tools::AnyState& head = *heads_[static_cast<std::size_t>(h)];
      const HeadToken now = token(0, h);
      REQUIRE(head.step(*team_, {now.key, now.value, now.log_decay, now.write_strength}, now.query,
                        now.output) == Status::ok);
      costs_of(0).add_head(h, static_cast<double>(head.bytes().total()),
                           static_cast<double>(head.rank()), head.dense());
      if (head.due()) REQUIRE(head.compact(*team_, nullptr) == Status::ok);
    }
  }

 private:
  std::uint64_t seed_;
  std::vector<std::unique_ptr<tools::AnyState>> heads_;
  std::unique_ptr<HostTeam> team_;
};

std::shared_ptr<ModelStates> plain_states(const Policies& policies) {
  std::vector<std::unique_ptr<LayerStates>> layers;
  for (const LayerWeights& layer : model().layers) {
    layers.push_back(layer.mixer == Mixer::attention
                         ? nullptr
                         : std::make_unique<PlainLayer>(layer, policies.of(layer.mixer)));
  }
  return std::make_shared<ModelStates>(std::move(layers), 1, 1);
}

}  // namespace

TEST_CASE("hybrid_lm: what the reference computed") {
  const GoldenCheck check = check_golden(model(), folder / "golden.safetensors");
  CHECK(check.bytes == 768);
  CHECK(check.logits.numbers == 768 * 256);
  CHECK(check.logits.difference <= 1e-3);
  CHECK(check.states.numbers == 2 * (2 * 4 * 128 * 128 + 8 * 128 * 80));
  CHECK(check.states.difference <= 1e-5);
  CHECK(check.sequences.numbers == 160 * (2 * 128 + 80));
  CHECK(check.sequences.difference <= 1e-4);
}

TEST_CASE("hybrid_lm: a golden file may be a part of one, or wrong") {
  const TemporaryDirectory directory;
  const fs::path path = directory / "golden.safetensors";
  const std::string text = "ab";
  struct Tensor {
    std::string name;
    std::vector<std::size_t> shape;
    std::vector<float> values;
  };
  const auto save = [&](const std::vector<Tensor>& tensors) {
    nlohmann::json header;
    std::string data = text;
    header["input_bytes"] = {
        {"dtype", "U8"}, {"shape", {text.size()}}, {"data_offsets", {0, text.size()}}};
    for (const Tensor& tensor : tensors) {
      const std::size_t begin = data.size();
      data.append(reinterpret_cast<const char*>(tensor.values.data()), 4 * tensor.values.size());
      header[tensor.name] = {
          {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
    }
    const std::string json = header.dump();
    std::string length(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(json.size() >> (8 * i));
    write(path, length + json + data);
  };
  const auto refused = [&](const std::vector<Tensor>& tensors) {
    save(tensors);
    return refusal([&] { check_golden(model(), path); });
  };

  Decoder decoder(model());
  std::vector<float> logits, output;
  for (const char c : text) {
    const Vector& row = decoder.read(static_cast<std::uint8_t>(c));
    logits.insert(logits.end(), row.data(), row.data() + row.size());
    const float* const o = decoder.token(0, 0).output;
    if (output.empty()) output.assign(o, o + 128);
  }
  SECTION("one part alone, and which") {
    save({{"logits", {2, 256}, logits}});
    GoldenCheck check = check_golden(model(), path);
    CHECK(check.logits.numbers == 512);
    CHECK(check.logits.difference == 0);
    CHECK(check.states.numbers + check.sequences.numbers == 0);
    save({{"layers.0.head0.o", {1, 128}, output}});
    check = check_golden(model(), path);
    CHECK(check.sequences.numbers == 128);
    CHECK(check.sequences.difference == 0);
  }
  SECTION("a difference is seen, and so is NaN, whatever comes behind it") {
    logits[300] += 0.5f;
    save({{"logits", {2, 256}, logits}});
    CHECK(check_golden(model(), path).logits.difference == Catch::Approx(0.5).epsilon(1e-5));
    logits[17] = std::numeric_limits<float>::quiet_NaN();
    save({{"logits", {2, 256}, logits}});
    CHECK(std::isnan(check_golden(model(), path).logits.difference));
    output[0] = std::numeric_limits<float>::quiet_NaN();
    save({{"layers.0.head0.o", {1, 128}, output}});
    CHECK(std::isnan(check_golden(model(), path).sequences.difference));
    std::vector<float> states(4 * 128 * 128, 1.0f);
    states[5] = std::numeric_limits<float>::infinity();
    save({{"layers.4.state_2", {4, 128, 128}, states}});
    CHECK(std::isnan(check_golden(model(), path).states.difference));
  }
  SECTION("what cannot be compared is refused") {
    CHECK(contains(refused({}), "wanted logits, states or outputs of head 0, given none"));
    CHECK(contains(refused({{"logits", {1, 256}, std::vector<float>(256)}}),
                   "logits: wanted shape [2, 256], given [1, 256]"));
    CHECK(contains(refused({{"layers.0.head0.o", {3, 128}, std::vector<float>(384)}}),
                   "layers.0.head0.o: wanted shape [2, 128], given [3, 128]"));
    CHECK(contains(refused({{"layers.0.state_2", {4, 128, 1}, std::vector<float>(512)}}),
                   "layers.0.state_2: wanted shape [4, 128, 128], given [4, 128, 1]"));
    for (const char* const name : {"layers.3.state_2", "layers.0.state_3", "layers.9.state_1"}) {
      CHECK(contains(refused({{name, {1}, {0.0f}}}), "wanted states of recurrent layers"));
    }
  }
}

TEST_CASE("hybrid_lm: softplus neither overflows nor goes below zero") {
  CHECK(softplus(0.0f) == Catch::Approx(std::log(2.0)));
  CHECK(softplus(90.0f) == 90.0f);
  CHECK(softplus(1e4f) == 1e4f);
  CHECK(softplus(-1e4f) == 0.0f);
  CHECK(softplus(-20.0f) == Catch::Approx(std::exp(-20.0)));
  CHECK(softplus(std::nextafter(20.0f, 30.0f)) >= softplus(20.0f));
}

TEST_CASE("hybrid_lm: logits that are not finite are an error, not a text") {
  Model broken = model();
  broken.final_norm *= 1e38f;
  Decoder decoder(broken);
  CHECK(contains(refusal([&] { decoder.read('a'); }), "logits behind byte 1 are not finite"));
}

TEST_CASE("hybrid_lm: with nothing truncated, factored logits are the dense ones") {
  for (const Compaction compaction : tools::all_compactions) {
    for (const bool sink : {false, true}) {
      tools::ReplayOptions options;
      options.compaction = compaction;
      options.epsilon = 0;
      options.sink = sink;
      options.rank_cap = compaction == Compaction::fixed_rank ? 128 : 0;
      const bool slow = compaction == Compaction::fixed_rank;
      INFO(tools::to_string(compaction) << (sink ? ", sink" : ""));
      const Evaluation result = evaluate_text(40, slow ? 40 : 256, all(options));
      CHECK(result.logit_error <= 1e-3);
      CHECK(result.kl_worst <= 1e-6);
      CHECK(result.top1_agreement == 1);
    }
  }
}

TEST_CASE("hybrid_lm: three policies, truncated") {
  const std::ptrdiff_t bytes = 400;
  tools::ReplayOptions local, fixed;
  local.epsilon = 3e-2;
  fixed.compaction = Compaction::fixed_rank;
  Policies mixed = all(local);
  mixed.kimi_delta = fixed;
  for (const Policies& policies : {all(local), all(fixed), mixed}) {
    const Evaluation result = evaluate_text(100, bytes, policies);
    CHECK(result.bytes == bytes);
    CHECK(result.kl_mean > 0);
    CHECK(result.kl_mean < 0.05);
    CHECK(result.kl_worst >= result.kl_mean);
    CHECK(result.kl_per_1024.size() == 1);
    CHECK(result.kl_per_1024[0] == Catch::Approx(result.kl_mean).epsilon(1e-9));
    CHECK(std::abs(result.bits_per_byte - result.bits_per_byte_dense) < 0.05);
    CHECK(result.bits_per_byte_dense < 1.5);  // the model knows its own writing
    CHECK(result.top1_agreement > 0.8);
    CHECK(result.state_ratio_mean < 0.9);
    CHECK(result.state_ratio_peak >= result.state_ratio_mean);
    REQUIRE(result.layers.size() == 6);
    for (const LayerFigures& layer : result.layers) {
      for (const double rank : layer.dense.rank_mean) CHECK(rank >= 80);
      for (const double rank : layer.factored.rank_mean) CHECK(rank > 0);
    }
  }
}

TEST_CASE("hybrid_lm: a sweep is the mean of evaluations, for any number of threads") {
  const std::string text = contents(folder / "text.txt");
  const std::vector<std::string> passages{text.substr(0, 97), text.substr(1000, 97)};
  const std::vector<Setting> settings{{"a", "--epsilon 0.1"},
                                      {"b", "--policy fixed-rank --rank 6 --sink"}};
  const auto progress = [](std::ptrdiff_t) {};
  const auto rows = [&](std::ptrdiff_t threads) {
    return sweep(model(), passages, 32, 64, settings, threads, progress);
  };
  const std::vector<SweepRow> alone = rows(1);
  REQUIRE(alone.size() == 2);
  CHECK(json(alone) == json(rows(3)));
  for (const SweepRow& row : alone) {
    const Policies policies = parse_policies("", row.setting.flags);
    double kl = 0, worst = 0, ratio = 0, lost = 0;
    for (const std::string& passage : passages) {
      const Evaluation e =
          evaluate(model(), read_dense(model(), passage, 32, 64, progress), policies, progress);
      kl += e.kl_mean / 2;
      worst = std::max(worst, e.kl_worst);
      ratio += e.state_ratio_mean / 2;
      lost += (e.bits_per_byte - e.bits_per_byte_dense) / 2;
    }
    CHECK(row.kl_mean == Catch::Approx(kl).epsilon(1e-12));
    CHECK(row.kl_worst == worst);
    CHECK(row.state_ratio_mean == Catch::Approx(ratio).epsilon(1e-12));
    CHECK(row.bits_lost == Catch::Approx(lost).epsilon(1e-9));
    CHECK(row.rank_mean > 0);
    CHECK(row.kl_per_1024.size() == 1);
  }
  CHECK(contains(sinkstate::hybrid_lm::text(alone), "| `--policy fixed-rank --rank 6 --sink` |"));
  CHECK(contains(refusal([&] {
                   sweep(model(), passages, 32, 64, {{"a", "--rank 3"}}, 1, progress);
                 }),
                 "--setting: --rank: local-svd has no use for it"));
}

TEST_CASE("hybrid_lm: the settings of the sweep are all understood, and cover all policies") {
  std::set<Compaction> compactions;
  bool sink = false;
  for (const Setting& setting : default_settings()) {
    INFO(setting.flags);
    const Policies policies = parse_policies("", setting.flags);
    compactions.insert(policies.kimi_delta.compaction);
    sink = sink || policies.gated_delta.sink;
  }
  CHECK(compactions.size() == std::size(tools::all_compactions));
  CHECK(sink);
  CHECK(default_settings().size() >= 24);
}

TEST_CASE("hybrid_lm: from the first byte on, without a prefill") {
  const Evaluation result = evaluate_text(0, 24, all({}));
  CHECK(result.kl_worst < 0.05);
  CHECK(result.state_ratio_mean < 1);
}

TEST_CASE("hybrid_lm: a decoder is a function of the text, to the bit") {
  Decoder one(model()), other(model());
  for (const char c : std::string("The same words")) {
    const Vector logits = one.read(static_cast<std::uint8_t>(c));
    CHECK(logits == other.read(static_cast<std::uint8_t>(c)));
  }
  Decoder copy(one);
  CHECK(copy.read('.') == one.read('.'));
}

TEST_CASE("hybrid_lm: pools give what plain states give, to the bit") {
  for (const char* const flags :
       {"--epsilon 0.05", "--policy fixed-rank --rank 6 --sink",
        "--policy full-svd --epsilon 0.1 --buffer 5 --storage fp8 --rounding stochastic",
        "--policy dense-buffered",
        "--sink --storage fp16 --no-dense-fallback --kda \"--policy fixed-rank --buffer 3\""}) {
    INFO(flags);
    const Policies policies = parse_policies("", flags);
    for (const Part& part : {Part{500, 60, 50}, Part{2000, 0, 30}}) {
      const auto prompt = part.read_prompt();
      Decoder pooled(*prompt, policies), plain(*prompt, plain_states(policies));
      bool same = true;
      for (std::size_t i = 0; i < part.bytes; ++i) {
        const Vector logits = pooled.read(part.behind_prompt(i));
        same = same && logits == plain.read(part.behind_prompt(i));
      }
      CHECK(same);
      for (std::size_t n = 0; n < model().layers.size(); ++n) {
        if (model().layers[n].mixer == Mixer::attention) continue;
        CHECK(pooled.dense_states(n) == plain.dense_states(n));
        CHECK(pooled.state_bytes(n) == plain.state_bytes(n));
        const StateCosts costs = pooled.costs(n), wanted = plain.costs(n);
        CHECK(costs.bytes_mean == wanted.bytes_mean);
        CHECK(costs.rank_mean == wanted.rank_mean);
        CHECK(costs.dense_fallback == wanted.dense_fallback);
      }
    }
  }
}

TEST_CASE("hybrid_lm: texts that are read together are what each is alone, to the bit") {
  // The third begins when the first ends, in its slots.
  const std::vector<Part> parts{{0, 40, 30}, {1000, 7, 55}, {3000, 90, 25}};
  const Policies factored = parse_policies(
      "",
      "--epsilon 0.1 --gdn \"--policy fixed-rank --rank 9 --storage fp8 --rounding stochastic\"");
  for (const Policies* const policies : {&factored, static_cast<const Policies*>(nullptr)}) {
    INFO((policies == nullptr ? "dense" : "factored"));
    std::vector<std::vector<Vector>> alone(parts.size());
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const auto prompt = parts[p].read_prompt();
      Decoder decoder(*prompt, make_states(model(), 1, 1, policies));
      for (std::size_t i = 0; i < parts[p].bytes; ++i) {
        alone[p].push_back(decoder.read(parts[p].behind_prompt(i)));
      }
    }
    for (const int threads : {1, 3}) {
      INFO(threads << " threads");
      const auto states = make_states(model(), 2, threads, policies);
      std::vector<std::unique_ptr<Decoder>> decoders(parts.size());
      std::vector<std::size_t> read(parts.size());
      const auto begin = [&](std::size_t p) {
        decoders[p] = std::make_unique<Decoder>(*parts[p].read_prompt(), states);
      };
      begin(0);
      begin(1);
      bool same = true;
      for (;;) {
        std::vector<std::size_t> running;
        std::vector<Decoder*> group;
        std::vector<std::uint8_t> bytes;
        for (std::size_t p = 0; p < parts.size(); ++p) {
          if (!decoders[p]) continue;
          running.push_back(p);
          group.push_back(decoders[p].get());
          bytes.push_back(parts[p].behind_prompt(read[p]));
        }
        if (group.empty()) break;
        Decoder::read_together(group, bytes);
        for (const std::size_t p : running) {
          same = same && decoders[p]->logits() == alone[p][read[p]];
          if (++read[p] < parts[p].bytes) continue;
          decoders[p].reset();
          if (p == 0) begin(2);
        }
      }
      CHECK(same);
      for (std::size_t p = 0; p < parts.size(); ++p) CHECK(read[p] == parts[p].bytes);
    }
  }
}

TEST_CASE(
    "hybrid_lm: a copy among the same states is an equal one, and there are as many as slots") {
  const Part part{700, 30, 40};
  const Policies policies = parse_policies("", "--epsilon 0.1");
  const auto prompt = part.read_prompt();
  for (const auto& states :
       {make_states(model(), 2, 1, &policies), make_states(model(), 2, 1, nullptr)}) {
    Decoder one(*prompt, states);
    for (std::size_t i = 0; i < 13; ++i) one.read(part.behind_prompt(i));  // some are buffered
    Decoder copy(one, states);
    CHECK(copy.logits() == one.logits());
    CHECK(contains(refusal([&] { Decoder third(one, states); }), "at most 2 texts at once"));
    bool same = true;
    for (std::size_t i = 13; i < part.bytes; ++i) {
      Decoder::read_together({&one, &copy}, {part.behind_prompt(i), part.behind_prompt(i)});
      same = same && one.logits() == copy.logits();
    }
    CHECK(same);
    CHECK(one.read('a') != copy.read('b'));
    Decoder other(model());
    CHECK(contains(refusal([&] {
                     Decoder::read_together({&one, &other}, {'a', 'a'});
                   }),
                   "share their states"));
  }
}

TEST_CASE("hybrid_lm: sampling") {
  Vector logits = Vector::Constant(256, -20);
  logits['a'] = 1;
  logits['b'] = 0.9f;
  logits['c'] = 0;
  SamplingOptions options;
  SECTION("temperature 0 takes the likeliest") {
    options.temperature = 0;
    Sampler sample(options);
    for (int i = 0; i < 20; ++i) CHECK(sample(logits) == 'a');
  }
  SECTION("a small top-p too") {
    options.top_p = 0.1;
    Sampler sample(options);
    for (int i = 0; i < 20; ++i) CHECK(sample(logits) == 'a');
  }
  SECTION("otherwise by probability, the same for a seed") {
    options.temperature = 1;
    options.top_p = 1;
    Sampler sample(options), again(options);
    std::map<char, int> counts;
    for (int i = 0; i < 20000; ++i) {
      const std::uint8_t byte = sample(logits);
      CHECK(byte == again(logits));
      ++counts[static_cast<char>(byte)];
    }
    const double all_three = std::exp(1.0) + std::exp(0.9) + 1;
    CHECK(counts['a'] / 20000.0 == Catch::Approx(std::exp(1.0) / all_three).margin(0.02));
    CHECK(counts['c'] / 20000.0 == Catch::Approx(1 / all_three).margin(0.02));
    options.seed = 2;
    Sampler third(options);
    std::string first_bytes, third_bytes;
    Sampler fresh({1, 1, 1});
    for (int i = 0; i < 50; ++i) {
      first_bytes += static_cast<char>(fresh(logits));
      third_bytes += static_cast<char>(third(logits));
    }
    CHECK(first_bytes != third_bytes);
  }
  SECTION("top-p leaves the tail out") {
    options.temperature = 1;
    options.top_p = 0.7;
    Sampler sample(options);
    std::set<int> seen;
    for (int i = 0; i < 500; ++i) seen.insert(sample(logits));
    CHECK(seen == std::set<int>{'a', 'b'});
  }
}

TEST_CASE("hybrid_lm: files that are not the model's are refused") {
  const TemporaryDirectory directory;
  const fs::path config = directory / "config.json", weights = directory / "model.safetensors";
  const std::string good = contents(folder / "config.json");
  const auto load = [&] { return refusal([&] { (void)load_model(directory / "."); }); };
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t place = text.find(from);
    REQUIRE(place != std::string::npos);
    write(config, text.replace(place, from.size(), to));
    return load();
  };
  CHECK(contains(load(), "config.json: cannot be read"));
  write(config, "");
  CHECK(contains(load(), "config.json: wanted a JSON object"));
  write(config, "{}");
  CHECK(contains(load(), "/mlp/kind: wanted, not there"));
  CHECK(contains(with("\"swiglu\"", "\"relu\""), "/mlp/kind: wanted \"swiglu\", given "));
  CHECK(contains(with("\"gdn\", \"kda\"", "\"gdn\", \"rwkv\""), "layer_kinds: wanted gdn, kda"));
  CHECK(contains(with("\"d_model\": 256", "\"d_model\": 0"), "/d_model: wanted a number in"));
  CHECK(contains(with("\"k_heads\": 2", "\"k_heads\": 3"),
                 "/gdn/k_heads: wanted a divisor of 4, given 3"));
  CHECK(contains(with("\"n_layers\": 8", "\"n_layers\": 9"), "/n_layers: wanted 8, given "));
  CHECK(contains(with("\"order\": \"decay, then", "\"order\": \"delta, then"),
                 "/gdn/order: wanted "));
  CHECK(contains(with("\"h // 2\"", "\"h % 2\""), "/gdn/value_head_to_key_head: wanted "));
  CHECK(contains(with("\"q_scale\": 0.088", "\"q_scale\": 0.089"), "/gdn/q_scale: wanted 0.088"));
  CHECK(contains(with("\"scale\": 0.125", "\"scale\": 1"), "/attn/scale: wanted 0.125"));
  CHECK(contains(with("\"head_dim\": 64", "\"head_dim\": 65"), "/attn/head_dim: wanted an even"));
  CHECK(contains(with("\"d_inner\": 640", "\"d_inner\": 64"), "/mamba2/d_inner: wanted 640"));
  CHECK(contains(with("\"norm_groups\": 2", "\"norm_groups\": 3"),
                 "/mamba2/norm_groups: wanted a divisor of 640, given 3"));
  CHECK(contains(with("\"v_heads\": 4", "\"v_heads\": 65536"), "/gdn/value_head_to_key_head"));
  CHECK(contains(with("\"kda\": {\"heads\": 4", "\"kda\": {\"heads\": 65536"),
                 "wanted layers of at most 1048576 channels, given 65536 heads of 128 x 128"));
  write(config, good);
  CHECK(contains(load(), "model.safetensors: "));
  write(weights, contents(folder / "model.safetensors").substr(0, 100000));
  CHECK(contains(load(), "model.safetensors: "));
  fs::remove(weights);
  fs::create_symlink(fs::absolute(folder / "model.safetensors"), weights);
  CHECK(load().empty());
  CHECK(contains(with("\"hidden\": 704", "\"hidden\": 700"),
                 "wanted shape [700, 256], given [704, 256]"));
  CHECK(contains(with("\"g_rank\": 128", "\"g_rank\": 64"),
                 "wanted shape [64, 256], given [128, 256]"));
  std::string shorter = good;
  shorter.replace(shorter.find(", \"attn\"]"), 8, "");
  shorter.replace(shorter.find("\"n_layers\": 8"), 13, "\"n_layers\": 7");
  write(config, shorter);
  CHECK(contains(load(), "\"layers.7.mixer.k_proj.weight\": the configuration has no use for it"));

  CHECK(contains(refusal([&] { check_golden(model(), directory / "none"); }), "none: "));
  CHECK(contains(refusal([&] { check_golden(model(), folder / "model.safetensors"); }),
                 "input_bytes"));
}

TEST_CASE("hybrid_lm: the command line") {
  const TemporaryDirectory directory;
  const auto run = [&](const std::string& arguments) {
    const std::string command = "'" SINKSTATE_TEST_HYBRID_LM "' " + arguments + " >'" +
                                (directory / "out").string() + "' 2>'" +
                                (directory / "err").string() + "'";
    const int status = std::system(command.c_str());
    return status == -1 ? -1 : status / 256;
  };
  const auto refused = [&](const std::string& arguments, const std::string& why) {
    INFO(arguments);
    CHECK(run(arguments) == 2);
    const std::string error = contents(directory / "err");
    INFO(error);
    CHECK(contains(error, why));
    CHECK(error.find('\n') == error.size() - 1);
    CHECK(contents(directory / "out").empty());
  };
  const std::string text = "'" + (folder / "text.txt").string() + "'";
  refused("", "subcommand");
  refused("eval none.txt", "none.txt: cannot be read");
  refused("eval /dev/null", "wanted a text");
  refused("eval /", "/: cannot be read");
  refused("eval '" SINKSTATE_TEST_HYBRID_LM "'", "wanted a text, given byte ");
  write(directory / "zero.txt", std::string("A text\n\twith a zero\0 in it", 27));
  refused("sweep '" + (directory / "zero.txt").string() + "'", "given byte 0 at offset 19");
  refused("eval /dev/zero", "given byte 0 at offset 0");
  refused("eval " + text + " --bytes 100000", "--bytes: wanted at most 93");
  refused("eval " + text + " --prefill 100000", "--prefill: wanted at most 93");
  refused("eval " + text + " --json ''", "--json: wanted a path");
  refused("eval " + text + " --json " + text,
          "--json: wanted a file of its own, given that of text");
  refused("sweep " + text + " --bytes 8 --svg x --json ./x", "--json: wanted a file of its own");
  refused("trace " + text + " --layer 0 --output " + text, "--output: wanted a file of its own");
  refused("trace " + text + " --layer 0 --output /none/x", "/none/x: cannot be written");
  refused("eval " + text + " --kda ''", "--kda: wanted policy flags, given none");
  refused("eval " + text + " --kda '--help'", "--kda: ");
  refused("eval " + text + " --kda ' '", "--kda: wanted policy flags, given none");
  refused("eval " + text + " --json '" + (folder / "config.json").string() + "'",
          "--json: wanted a file of its own, given that of --model");
  refused("trace " + text + " --layer 0 --output '" + (folder / "model.safetensors").string() + "'",
          "--output: wanted a file of its own, given that of --model");
  refused("eval \"$(printf 'a\\nb')\"", "a?b: cannot be read");
  refused("check ''", "golden: wanted a path");
  refused("--model '' check", "--model: wanted a path");
  refused("generate --prompt x --dense --epsilon 0.1", "--dense: takes no policy");
  refused("eval " + text + " --prefill -1", "--prefill: wanted at least 0");
  refused("eval " + text + " --policy foo", "--policy: wanted local-svd");
  refused("eval " + text + " --policy full-svd --active 3", "--active: full-svd has no use for it");
  refused("eval " + text + " --gdn '--policy foo'", "--gdn: --policy: wanted local-svd");
  refused("eval " + text + " --kda '--nonsense'", "--kda: ");
  refused("generate --prompt ''", "--prompt: wanted a text");
  refused("generate --prompt x --temperature -1", "--temperature: wanted a number in [0, 100]");
  refused("generate --prompt x --top-p 0", "--top-p: wanted a number in (0, 1]");
  refused("trace " + text + " --layer 3 --output x", "--layer: wanted a recurrent layer");
  refused("--model '" + (directory / ".").string() + "' check", "config.json: cannot be read");
  CHECK(run("check --model '" + folder.string() + "'") == 0);
  CHECK(contains(contents(directory / "out"), "the model computes what the reference did"));
  if (fs::exists("/dev/full")) {
    const int status =
        std::system(("'" SINKSTATE_TEST_HYBRID_LM "' generate --prompt x >/dev/full 2>'" +
                     (directory / "err").string() + "'")
                        .c_str());
    CHECK(status / 256 == 1);
    CHECK(contents(directory / "err") == "hybrid_lm: standard output: cannot be written\n");
  }
  const std::string generate =
      "generate --prompt 'It was a fine morning' --bytes 60 --sampling-seed 3 --epsilon 0.05";
  CHECK(run(generate) == 0);
  const std::string written = contents(directory / "out");
  CHECK(written.rfind("It was a fine morning", 0) == 0);
  CHECK(written.size() == 21 + 60 + 1);
  CHECK(run(generate) == 0);
  CHECK(contents(directory / "out") == written);

  CHECK(run("generate --prompt 'A letter' --bytes 40 --compare") == 0);
  const std::string letter = contents(directory / "out");
  CHECK(contains(letter, " of the dense states' bytes; KL "));
  // Several texts are what each is alone, one below the other.
  CHECK(run("generate --prompt 'The end' --bytes 25 --compare") == 0);
  const std::string end = contents(directory / "out");
  for (const char* const threads : {"1", "3"}) {
    CHECK(
        run(std::string("generate --prompt 'A letter' --prompt 'The end' --bytes 40 --bytes 25 ") +
            "--compare --threads " + threads) == 0);
    CHECK(contents(directory / "out") == letter + "\n" + end);
  }
  CHECK(run("generate --prompt 'A' --prompt 'An end' --bytes 0 --dense") == 0);
  CHECK(contents(directory / "out") == "A\n\nAn end\n");
  refused("generate --prompt x --prompt ''", "--prompt: wanted a text");
  refused("generate --prompt x --prompt y --prompt z --bytes 1 --bytes 2",
          "--bytes: wanted one number, or one for each --prompt, given 2 for 3");
  refused("generate --prompt x --bytes -1", "--bytes: wanted at least 0");
  refused("generate --prompt x --threads 0", "--threads: wanted at least 1");
  refused("generate --prompt x --threads 5000", "--threads: wanted at most 1024");
  refused("generate --prompt x --dense --compare", "--dense: takes no policy");

  const std::string svg = (directory / "sweep.svg").string();
  CHECK(run("sweep " + text + " --passages 2 --prefill 32 --bytes 16 --setting '--epsilon 0.1' " +
            "--setting '--policy fixed-rank --rank 4' --svg '" + svg + "'") == 0);
  CHECK(contains(contents(directory / "out"), "| `--policy fixed-rank --rank 4` |"));
  CHECK(contains(contents(svg), "<title>--epsilon 0.1</title>"));
  CHECK(run("sweep --passages 1 --prefill 8 --bytes 4 --setting '--epsilon 0.1' " + text) == 0);
  refused("sweep " + text + " --passages 0", "--passages: wanted at least 1");
  refused("sweep " + text + " --passages 9 --prefill 0 --bytes 5000", "--bytes: wanted");
  refused("sweep " + text + " --bytes 8 --setting '--policy foo'", "--setting: --policy: wanted");
  refused("sweep " + text + " --bytes 8 --svg /none/x.svg", "/none/x.svg: cannot be written");

  const std::string report = (directory / "report.json").string();
  CHECK(run("eval " + text +
            " --bytes 64 --prefill 64 --kda '--policy fixed-rank --rank 8' --json '" + report +
            "'") == 0);
  for (const char* key :
       {"bytes", "bits_per_byte_dense", "bits_per_byte", "kl_mean", "kl_worst", "kl_per_1024",
        "top1_agreement", "state_ratio_mean", "state_ratio_peak", "rank_mean", "dense_fallback",
        "bytes_per_second_dense", "bytes_per_second"}) {
    CHECK(contains(contents(report), std::string("\"") + key + "\": "));
  }
  const std::string trace = (directory / "trace.safetensors").string();
  for (const char* layer : {"0", "1", "2"}) {
    CHECK(run("trace " + text + " --bytes 40 --layer " + layer + " --output '" + trace + "'") == 0);
    // replay holds the state at the end against its own recurrence.
    CHECK(std::system(("'" SINKSTATE_TEST_REPLAY "' '" + trace + "' --sink >/dev/null").c_str()) ==
          0);
  }
}
