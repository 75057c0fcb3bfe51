// A small hybrid language model that decodes on sinkstate: checked against golden data, compared with
// itself in dense form, writing text, and writing traces.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "model.hpp"
#include "replay/atomic_file.hpp"
#include "replay/policy_flags.hpp"
#include "replay/report.hpp"
#include "replay/trace.hpp"
#include "sampling.hpp"

namespace {

using namespace sinkstate;
using namespace sinkstate::hybrid_lm;
using tools::ToolError;
using Json = nlohmann::ordered_json;

/// Policies of the command line: the flags of replay, and the same in quotes for one kind of layer.
class PolicyArguments {
 public:
  explicit PolicyArguments(CLI::App& command) : flags_(command, common_) {
    for (Kind& kind : kinds_) {
      command.add_option(
          kind.option, kind.flags,
          "for these layers instead, in quotes: \"--policy full-svd --epsilon 0.1\"");
    }
  }
  Policies resolve() {
    flags_.resolve();
    Policies policies{common_, common_, common_};
    tools::ReplayOptions* const targets[] = {&policies.gated_delta, &policies.kimi_delta,
                                             &policies.mamba2};
    for (std::size_t i = 0; i < std::size(kinds_); ++i) {
      if (kinds_[i].flags.empty()) continue;
      CLI::App app;
      tools::ReplayOptions own;
      tools::PolicyFlags flags(app, own);
      try {
        app.parse(kinds_[i].flags, false);
        flags.resolve();
      } catch (const std::exception& error) {
        throw ToolError(std::string(kinds_[i].option) + ": " + error.what());
      }
      *targets[i] = own;
    }
    return policies;
  }

 private:
  struct Kind {
    const char* option;
    std::string flags;
  };
  Kind kinds_[3] = {{"--gdn", {}}, {"--kda", {}}, {"--mamba2", {}}};
  tools::ReplayOptions common_;
  tools::PolicyFlags flags_;
};

std::string read_text(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw ToolError(path + ": cannot be read");
  std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  if (stream.bad() || text.empty()) throw ToolError(path + ": wanted a text, given an empty file");
  return text;
}

int check(const Model& model, const std::string& golden) {
  const GoldenCheck found = check_golden(model, golden);
  constexpr double logit_bar = 1e-3, state_bar = 1e-5, sequence_bar = 1e-4;
  std::printf(
      "%td bytes: logits within %.1e (wanted %.0e), states within %.1e (wanted %.0e), "
      "outputs of head 0 within %.1e (wanted %.0e)\n",
      found.bytes, found.logits, logit_bar, found.states, state_bar, found.sequences, sequence_bar);
  const bool good =
      found.logits <= logit_bar && found.states <= state_bar && found.sequences <= sequence_bar;
  std::puts(good ? "the model computes what the reference did" : "DIFFERENT from the reference");
  return good ? 0 : 1;
}

Json to_json(const StateCosts& costs) {
  return Json{{"bytes_mean", costs.bytes_mean},
              {"step_seconds", costs.step_seconds},
              {"compaction_seconds", costs.compaction_seconds}};
}

Json to_json(const Evaluation& e) {
  Json ranks = Json::array(), fallback = Json::array(), dense = Json::array(),
       factored = Json::array();
  for (const LayerFigures& layer : e.layers) {
    ranks.push_back(
        {{"layer", layer.layer}, {"mixer", layer.mixer}, {"heads", layer.factored.rank_mean}});
    fallback.push_back({{"layer", layer.layer}, {"heads", layer.factored.dense_fallback}});
    dense.push_back(to_json(layer.dense));
    factored.push_back(to_json(layer.factored));
  }
  return Json{{"bytes", e.bytes},
              {"prefill", e.prefill},
              {"bits_per_byte_dense", e.bits_per_byte_dense},
              {"bits_per_byte", e.bits_per_byte},
              {"kl_mean", e.kl_mean},
              {"kl_worst", e.kl_worst},
              {"kl_per_1024", e.kl_per_1024},
              {"top1_agreement", e.top1_agreement},
              {"logit_error", e.logit_error},
              {"state_ratio_mean", e.state_ratio_mean},
              {"state_ratio_peak", e.state_ratio_peak},
              {"rank_mean", ranks},
              {"dense_fallback", fallback},
              {"bytes_per_second_dense", e.bytes_per_second_dense},
              {"bytes_per_second", e.bytes_per_second},
              {"states_dense", dense},
              {"states", factored}};
}

void print(const Evaluation& e) {
  std::printf("%td bytes behind a prefill of %td\n\n", e.bytes, e.prefill);
  std::printf("  bits per byte      %.5f dense, %.5f factored\n", e.bits_per_byte_dense,
              e.bits_per_byte);
  std::printf("  KL(dense||factored) %.2e nats a byte, worst %.2e; by 1024 bytes:", e.kl_mean,
              e.kl_worst);
  for (const double kl : e.kl_per_1024) std::printf(" %.1e", kl);
  std::printf("\n  same likeliest byte %.2f %%\n", 100 * e.top1_agreement);
  std::printf("  state bytes        %.3f of dense (peak %.3f), everything counted\n",
              e.state_ratio_mean, e.state_ratio_peak);
  std::printf("  bytes per second   %.0f dense, %.0f factored\n\n", e.bytes_per_second_dense,
              e.bytes_per_second);
  std::puts(
      "  layer   mean rank of each head (share of bytes in dense form)   us a byte: dense, "
      "step + compaction");
  for (const LayerFigures& layer : e.layers) {
    std::string ranks;
    for (std::size_t h = 0; h < layer.factored.rank_mean.size(); ++h) {
      char text[64];
      std::snprintf(text, sizeof text, " %.1f (%.0f%%)", layer.factored.rank_mean[h],
                    100 * layer.factored.dense_fallback[h]);
      ranks += text;
    }
    const double scale = 1e6 / static_cast<double>(e.bytes);
    std::printf("  %zu %-7s%s   %.0f, %.0f + %.0f\n", layer.layer, layer.mixer.c_str(),
                ranks.c_str(), scale * layer.dense.step_seconds,
                scale * layer.factored.step_seconds, scale * layer.factored.compaction_seconds);
  }
}

int evaluate_text(const Model& model, const std::string& path, std::ptrdiff_t prefill,
                  std::ptrdiff_t bytes, const Policies& policies, const std::string& json) {
  const std::string text = read_text(path);
  const auto size = static_cast<std::ptrdiff_t>(text.size());
  if (bytes == 0) bytes = size - prefill - 1;
  if (bytes < 1 || prefill + bytes + 1 > size) {
    tools::refuse("--bytes",
                  "with a prefill of " + std::to_string(prefill) +
                      " and the byte after it, at most " + std::to_string(size - prefill - 1) +
                      " of this text",
                  std::to_string(bytes));
  }
  std::unique_ptr<tools::AtomicFile> file;
  if (!json.empty()) file = std::make_unique<tools::AtomicFile>(json);
  Evaluation result;
  {
    tools::Progress progress(stderr, prefill + bytes);
    result = evaluate(model, text, prefill, bytes, policies,
                      [&](std::ptrdiff_t count) { progress.add(count); });
  }
  if (file) {
    file->write(to_json(result).dump(2) + "\n");
    file->flush();
    file->commit();
  }
  print(result);
  return 0;
}

int generate(const Model& model, const std::string& prompt, std::ptrdiff_t bytes,
             const SamplingOptions& sampling, bool dense, const Policies& policies) {
  if (prompt.empty()) tools::refuse("--prompt", "a text", "an empty one");
  Decoder reader(model);
  const Vector* logits = nullptr;
  for (const char c : prompt) logits = &reader.read(static_cast<std::uint8_t>(c));
  Vector next = *logits;
  std::unique_ptr<Decoder> writer =
      dense ? std::make_unique<Decoder>(reader) : std::make_unique<Decoder>(reader, policies);
  Sampler sample(sampling);
  std::fputs(prompt.c_str(), stdout);
  for (std::ptrdiff_t i = 0; i < bytes; ++i) {
    const std::uint8_t byte = sample(next);
    std::fputc(byte, stdout);
    std::fflush(stdout);
    next = writer->read(byte);
  }
  std::fputc('\n', stdout);
  return std::ferror(stdout) != 0 ? 1 : 0;
}

/// The tokens of one layer's recurrence, as the dense model has them.
int write_trace(const Model& model, const std::string& path, std::ptrdiff_t bytes,
                std::size_t layer, const std::string& output) {
  const std::string text = read_text(path);
  if (bytes == 0) bytes = static_cast<std::ptrdiff_t>(text.size());
  if (bytes < 1 || bytes > static_cast<std::ptrdiff_t>(text.size())) {
    tools::refuse("--bytes", "at most the " + std::to_string(text.size()) + " of this text",
                  std::to_string(bytes));
  }
  if (layer >= model.layers.size() || model.layers[layer].mixer == Mixer::attention) {
    tools::refuse("--layer", "a recurrent layer", std::to_string(layer));
  }
  const Mixer mixer = model.layers[layer].mixer;
  const HeadShape& shape = model.config.heads(mixer);
  tools::Trace trace;
  trace.rule = mixer == Mixer::gated_delta  ? tools::Rule::gated_delta
               : mixer == Mixer::kimi_delta ? tools::Rule::kimi_delta
                                            : tools::Rule::mamba2;
  trace.source = "hybrid-lm, layer " + std::to_string(layer);
  trace.tokens = bytes;
  trace.key_heads = shape.key_heads;
  trace.value_heads = shape.heads;
  trace.d_k = shape.d_k;
  trace.d_v = shape.d_v;
  const Matrix& mean = model.layers[layer].value_mean;
  trace.sink_direction.assign(mean.data(), mean.data() + mean.size());
  Decoder decoder(model);
  const int group = shape.heads / shape.key_heads;
  for (std::ptrdiff_t t = 0; t < bytes; ++t) {
    decoder.read(static_cast<std::uint8_t>(text[static_cast<std::size_t>(t)]));
    const auto& heads = decoder.tokens(layer);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const HeadToken& token = heads[h];
      if (static_cast<int>(h) % group == 0) {
        trace.q.insert(trace.q.end(), token.query, token.query + shape.d_k);
        trace.k.insert(trace.k.end(), token.key, token.key + shape.d_k);
      }
      trace.v.insert(trace.v.end(), token.value, token.value + shape.d_v);
      trace.log_decay.insert(trace.log_decay.end(), token.log_decay,
                             token.log_decay + trace.decays_per_token());
      trace.beta.push_back(token.write_strength);
    }
  }
  for (int h = 0; h < shape.heads; ++h) {
    const std::vector<float> state = decoder.states(layer).dense(h);
    trace.state_end.insert(trace.state_end.end(), state.begin(), state.end());
  }
  tools::save_trace(output, trace);
  std::printf("%s: %td tokens of layer %zu, %d heads\n", output.c_str(), bytes, layer, shape.heads);
  return 0;
}

void say(const std::string& line) { std::fprintf(stderr, "hybrid_lm: %s\n", line.c_str()); }

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "A small byte-level hybrid language model (Gated DeltaNet, Kimi Delta Attention, Mamba-2, "
      "attention) whose recurrent states are kept by sinkstate."};
  app.require_subcommand(1);
  std::string folder = SINKSTATE_HYBRID_LM_MODEL;
  app.add_option("--model", folder, "folder of config.json and model.safetensors")
      ->capture_default_str();

  std::string golden;
  CLI::App* const checking = app.add_subcommand("check", "compare with the reference's numbers");
  checking->add_option("golden", golden, "golden file, or a part of one");

  std::string text, json;
  std::ptrdiff_t bytes = 0, prefill = 0;
  CLI::App* const evaluating =
      app.add_subcommand("eval", "factored beside dense over the same text");
  evaluating->add_option("text", text, "a text file")->required();
  evaluating->add_option("--bytes", bytes, "steps to score (default: to the end)")
      ->transform(tools::whole_number<std::ptrdiff_t>());
  evaluating->add_option("--prefill", prefill, "bytes that run dense and are then compressed")
      ->transform(tools::whole_number<std::ptrdiff_t>());
  evaluating->add_option("--json", json, "write the report here");
  PolicyArguments evaluating_policies(*evaluating);

  std::string prompt;
  std::ptrdiff_t length = 400;
  SamplingOptions sampling;
  bool dense = false;
  CLI::App* const generating = app.add_subcommand("generate", "write on from a prompt");
  generating->add_option("--prompt", prompt, "what the text begins with")->required();
  generating->add_option("--bytes", length, "bytes to write")
      ->transform(tools::whole_number<std::ptrdiff_t>())
      ->capture_default_str();
  generating->add_option("--temperature", sampling.temperature, "0: always the likeliest byte")
      ->check(tools::check_real_number)
      ->capture_default_str();
  generating->add_option("--top-p", sampling.top_p, "share of probability that is sampled from")
      ->check(tools::check_real_number)
      ->capture_default_str();
  generating->add_option("--sampling-seed", sampling.seed, "of the sampling")
      ->transform(tools::whole_number<std::uint64_t>())
      ->capture_default_str();
  generating->add_flag("--dense", dense, "keep the states dense");
  PolicyArguments generating_policies(*generating);

  std::string output;
  std::size_t layer = 0;
  CLI::App* const tracing = app.add_subcommand("trace", "write a trace that replay reads");
  tracing->add_option("text", text, "a text file")->required();
  tracing->add_option("--bytes", bytes, "bytes to read (default: all)")
      ->transform(tools::whole_number<std::ptrdiff_t>());
  tracing->add_option("--layer", layer, "which")
      ->transform(tools::whole_number<std::size_t>())
      ->required();
  tracing->add_option("--output", output, "the trace")->required();

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    say(std::string(error.what()) + " (see --help)");
    return 2;
  }
  try {
    const auto not_below = [](const char* option, std::ptrdiff_t least, std::ptrdiff_t given) {
      if (given < least) {
        tools::refuse(option, "at least " + std::to_string(least), std::to_string(given));
      }
    };
    not_below("--prefill", 0, prefill);
    not_below("--bytes", 0, bytes);
    not_below("--bytes", 0, length);
    if (!(sampling.temperature >= 0 && sampling.temperature <= 100)) {
      tools::refuse("--temperature", "a number in [0, 100]", std::to_string(sampling.temperature));
    }
    if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
      tools::refuse("--top-p", "a number in (0, 1]", std::to_string(sampling.top_p));
    }
    const Policies policies = evaluating->parsed()   ? evaluating_policies.resolve()
                              : generating->parsed() ? generating_policies.resolve()
                                                     : Policies{};
    const Model model = load_model(folder);
    if (checking->parsed()) {
      return check(model, golden.empty() ? folder + "/golden.safetensors" : golden);
    }
    if (evaluating->parsed()) {
      return evaluate_text(model, text, prefill, bytes, policies, json);
    }
    if (generating->parsed()) return generate(model, prompt, length, sampling, dense, policies);
    return write_trace(model, text, bytes, layer, output);
  } catch (const std::exception& error) {
    say(error.what());
    return 2;
  }
}
