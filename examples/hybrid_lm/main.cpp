// A small hybrid language model that decodes on sinkstate: checked against golden data, compared with
// itself in dense form, writing text, and writing traces.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arguments.hpp"
#include "evaluate.hpp"
#include "golden.hpp"
#include "model.hpp"
#include "policies.hpp"
#include "replay/atomic_file.hpp"
#include "replay/report.hpp"
#include "replay/trace.hpp"
#include "report.hpp"
#include "sampling.hpp"
#include "sweep.hpp"

namespace {

using namespace sinkstate;
using namespace sinkstate::hybrid_lm;
using tools::ToolError;

struct SweepArguments {
  std::string text, svg, json;
  std::ptrdiff_t passages = 1, prefill = 1024, bytes = 2048;
  std::ptrdiff_t threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::string> settings;
};

struct GenerateArguments {
  std::vector<std::string> prompts;
  std::vector<std::ptrdiff_t> bytes{400};  // of all texts, or of each
  std::ptrdiff_t threads = std::max(1u, std::thread::hardware_concurrency());
  SamplingOptions sampling;
  bool dense = false;
  bool compare = false;
};

int compare_with_golden(const Model& model, const std::string& golden) {
  const GoldenCheck found = check_golden(model, golden);
  std::printf("%td bytes\n", found.bytes);
  bool good = true;
  const auto report = [&](const char* what, const Compared& part, double bar) {
    if (part.numbers == 0) {
      std::printf("%-18s none in this file\n", what);
      return;
    }
    std::printf("%-18s within %.1e (wanted %.0e), %td numbers\n", what, part.difference, bar,
                part.numbers);
    good = good && part.difference <= bar;
  };
  report("logits", found.logits, 1e-3);
  report("states", found.states, 1e-5);
  report("outputs of head 0", found.sequences, 1e-4);
  std::puts(good ? "the model computes what the reference did" : "DIFFERENT from the reference");
  return good ? 0 : 1;
}

/// Passages of a text, each from the middle of an equal part of it; one begins where the text does.
std::vector<std::string> passages_of(const std::string& path, std::ptrdiff_t count,
                                     std::ptrdiff_t prefill, std::ptrdiff_t& bytes) {
  const std::string text = read_text(path);
  const auto size = static_cast<std::ptrdiff_t>(text.size());
  const std::ptrdiff_t part = size / count;
  const std::ptrdiff_t skipped = count == 1 ? 0 : part / 2;
  const std::ptrdiff_t most = part - skipped - 2;  // one byte to score, and the one after it
  if (most < 0) {
    tools::refuse("text", std::string("at least ") + (count == 1 ? "2" : "3") + " bytes a passage",
                  std::to_string(size) + " for " + std::to_string(count));
  }
  if (prefill > most) {
    tools::refuse("--prefill", "at most " + std::to_string(most) + " of this text",
                  std::to_string(prefill));
  }
  const std::ptrdiff_t room = most + 1 - prefill;
  if (bytes == 0) bytes = room;
  if (bytes > room) {
    tools::refuse("--bytes",
                  "at most " + std::to_string(room) + " of this text behind a prefill of " +
                      std::to_string(prefill),
                  std::to_string(bytes));
  }
  std::vector<std::string> passages;
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    passages.push_back(text.substr(static_cast<std::size_t>(i * part + skipped),
                                   static_cast<std::size_t>(prefill + bytes + 1)));
  }
  return passages;
}

int evaluate_text(const Model& model, const std::string& folder, const std::string& path,
                  std::ptrdiff_t prefill, std::ptrdiff_t bytes, const Policies& policies,
                  const std::string& json_path) {
  require_different(folder, {{"--json", json_path}}, path);
  const std::vector<std::string> passage = passages_of(path, 1, prefill, bytes);
  const auto json_file = tools::open_output(json_path);
  Evaluation result;
  {
    tools::Progress bar(stderr, prefill + 2 * bytes);
    const Progress progress = [&](std::ptrdiff_t count) { bar.add(count); };
    const DenseReading reading = read_dense(model, passage.front(), prefill, bytes, progress);
    result = evaluate(model, reading, policies, progress);
  }
  if (json_file) json_file->write(json(result));
  tools::commit_all({json_file.get()});
  std::fputs(text(result).c_str(), stdout);
  return 0;
}

int sweep_policies(const Model& model, const std::string& folder, SweepArguments arguments) {
  std::vector<Setting> settings;
  for (const std::string& flags : arguments.settings) settings.push_back({flags, flags});
  if (settings.empty()) settings = default_settings();
  require_different(folder, {{"--svg", arguments.svg}, {"--json", arguments.json}}, arguments.text);
  const std::vector<std::string> passages =
      passages_of(arguments.text, arguments.passages, arguments.prefill, arguments.bytes);
  const auto svg_file = tools::open_output(arguments.svg);
  const auto json_file = tools::open_output(arguments.json);
  std::vector<SweepRow> rows;
  {
    const auto count = static_cast<std::ptrdiff_t>(settings.size());
    const std::ptrdiff_t each = arguments.prefill + arguments.bytes * (1 + count);
    tools::Progress bar(stderr, arguments.passages * each);
    rows = sweep(model, passages, arguments.prefill, arguments.bytes, settings, arguments.threads,
                 [&](std::ptrdiff_t done) { bar.add(done); });
  }
  if (svg_file) svg_file->write(figure(rows));
  if (json_file) json_file->write(json(rows));
  tools::commit_all({svg_file.get(), json_file.get()});
  std::fputs(text(rows).c_str(), stdout);
  return 0;
}

/// A text that is being written.
struct Request {
  std::string text;
  std::ptrdiff_t left = 0;  // bytes to write
  Sampler sample;
  std::unique_ptr<Decoder> reader;  // dense
  std::unique_ptr<Decoder> writer;
  // Sums over the bytes of what factored states have changed, if the reader reads along.
  double bytes = 0, kl = 0, ratio = 0;

  bool ended() const { return left == 0; }
  void compare(const Model& model) {
    ++bytes;
    kl += kl_divergence(reader->logits(), writer->logits());
    ratio += state_bytes_in_use(model, *writer) / dense_state_bytes(model);
  }
  /// Frees its slots.
  void end() {
    reader.reset();
    writer.reset();
  }
};

/// Shows texts as far as they are written, one after the other.
class Output {
 public:
  /// @returns whether there is somebody who reads it
  bool show(const std::vector<Request>& requests) {
    for (; text_ < requests.size(); ++text_, shown_ = 0) {
      const Request& request = requests[text_];
      if (text_ > 0 && shown_ == 0) std::fputc('\n', stdout);
      std::fwrite(request.text.data() + shown_, 1, request.text.size() - shown_, stdout);
      shown_ = request.text.size();
      if (!request.ended()) break;
      std::fputc('\n', stdout);
      if (request.bytes == 0) continue;
      std::printf(
          "[%.2f of the dense states' bytes; KL %.1e nats a byte from the dense model on this "
          "text]\n",
          request.ratio / request.bytes, request.kl / request.bytes);
    }
    return std::fflush(stdout) == 0;
  }

 private:
  std::size_t text_ = 0;
  std::size_t shown_ = 0;
};

int generate(const Model& model, const GenerateArguments& arguments, const Policies& policies) {
  const std::size_t count = arguments.prompts.size();
  for (const std::string& prompt : arguments.prompts) {
    if (prompt.empty()) tools::refuse("--prompt", "a text", "an empty one");
  }
  if (arguments.bytes.size() != 1 && arguments.bytes.size() != count) {
    tools::refuse("--bytes", "one number, or one for each --prompt",
                  std::to_string(arguments.bytes.size()) + " for " + std::to_string(count));
  }
  const auto slots = static_cast<int>(count), threads = static_cast<int>(arguments.threads);
  const auto dense = make_states(model, slots, threads);
  const auto pools = arguments.dense ? dense : make_states(model, slots, threads, &policies);
  std::vector<Request> requests;
  for (std::size_t i = 0; i < count; ++i) {
    requests.push_back({arguments.prompts[i], arguments.bytes[arguments.bytes.size() == 1 ? 0 : i],
                        Sampler(arguments.sampling), std::make_unique<Decoder>(model, dense),
                        nullptr});
  }

  std::vector<Decoder*> readers, writers;
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i == 0 || !readers.empty(); ++i) {
    readers.clear();
    bytes.clear();
    for (const Request& request : requests) {
      if (i >= request.text.size()) continue;
      readers.push_back(request.reader.get());
      bytes.push_back(static_cast<std::uint8_t>(request.text[i]));
    }
    Decoder::read_together(readers, bytes);
  }
  for (Request& request : requests) {
    request.writer = arguments.dense ? std::move(request.reader)
                                     : std::make_unique<Decoder>(*request.reader, pools);
    if (!arguments.compare) request.reader.reset();
    if (request.ended()) request.end();
  }

  Output output;
  while (output.show(requests)) {
    readers.clear();
    writers.clear();
    bytes.clear();
    for (Request& request : requests) {
      if (request.ended()) continue;
      bytes.push_back(request.sample(request.writer->logits()));
      request.text += static_cast<char>(bytes.back());
      writers.push_back(request.writer.get());
      if (request.reader) readers.push_back(request.reader.get());
    }
    if (writers.empty()) break;
    Decoder::read_together(writers, bytes);
    Decoder::read_together(readers, bytes);
    for (Request& request : requests) {
      if (request.ended()) continue;
      if (request.reader) request.compare(model);
      if (--request.left == 0) request.end();
    }
  }
  return 0;
}

/// The tokens of one layer's recurrence, as the dense model has them. Its keys and queries are those
/// that the recurrence sees: after normalisation, and of delta rules with the query's d_k^(-1/2).
int write_trace(const Model& model, const std::string& folder, const std::string& path,
                std::ptrdiff_t bytes, std::size_t layer, const std::string& output) {
  require_different(folder, {{"--output", output}}, path);
  const std::string text = read_text(path);
  if (bytes == 0) bytes = static_cast<std::ptrdiff_t>(text.size());
  if (bytes < 1 || bytes > static_cast<std::ptrdiff_t>(text.size())) {
    tools::refuse("--bytes", "at most the " + std::to_string(text.size()) + " of this text",
                  std::to_string(bytes));
  }
  if (layer >= model.layers.size() || model.layers[layer].mixer == Mixer::attention) {
    tools::refuse("--layer", "a recurrent layer", std::to_string(layer));
  }
  tools::AtomicFile file(output);
  const Mixer mixer = model.layers[layer].mixer;
  const HeadShape& shape = model.config.heads(mixer);
  tools::Trace trace;
  trace.rule = mixer == Mixer::gated_delta  ? tools::Rule::gated_delta
               : mixer == Mixer::kimi_delta ? tools::Rule::kimi_delta
                                            : tools::Rule::mamba2;
  trace.source = "hybrid-lm, layer " + std::to_string(layer) +
                 (mixer == Mixer::mamba2 ? "" : ", q times d_k^-1/2") + ", state_end in fp32";
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
    for (int h = 0; h < shape.heads; ++h) {
      const HeadToken token = decoder.token(layer, h);
      if (h % group == 0) {
        trace.q.insert(trace.q.end(), token.query, token.query + shape.d_k);
        trace.k.insert(trace.k.end(), token.key, token.key + shape.d_k);
      }
      trace.v.insert(trace.v.end(), token.value, token.value + shape.d_v);
      trace.log_decay.insert(trace.log_decay.end(), token.log_decay,
                             token.log_decay + trace.decays_per_token());
      trace.beta.push_back(token.write_strength);
    }
  }
  trace.state_end = decoder.dense_states(layer);
  tools::save_trace(file, trace);
  file.commit();
  std::printf("%s: %td tokens of layer %zu, %d heads\n", output.c_str(), bytes, layer, shape.heads);
  return 0;
}

// The command line: each subcommand with its options, and what it runs.

struct Command {
  CLI::App* app;
  std::function<int(const Model&, const std::string& folder)> run;
};

Command add_check(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("check", "compare with the reference's numbers");
  const auto golden = std::make_shared<std::string>();
  add_path(command, "golden", *golden, "golden file, or a part of one");
  return {command, [=](const Model& model, const std::string& folder) {
            return compare_with_golden(model,
                                       golden->empty() ? folder + "/golden.safetensors" : *golden);
          }};
}

Command add_eval(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("eval", "factored beside dense over the same text");
  struct Arguments {
    std::string text, json;
    std::ptrdiff_t bytes = 0, prefill = 0;
    PolicyArguments policies;
    explicit Arguments(CLI::App& app) : policies(app) {}
  };
  const auto a = std::make_shared<Arguments>(*command);
  add_path(command, "text", a->text, "a text file")->required();
  add_number(command, "--bytes", a->bytes, "steps to score; 0, the default: to the end");
  add_number(command, "--prefill", a->prefill, "bytes that run dense and are then compressed");
  add_path(command, "--json", a->json, "write the report here");
  return {command, [=](const Model& model, const std::string& folder) {
            tools::at_least("--prefill", 0, a->prefill);
            tools::at_least("--bytes", 0, a->bytes);
            return evaluate_text(model, folder, a->text, a->prefill, a->bytes,
                                 a->policies.resolve(), a->json);
          }};
}

Command add_sweep(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("sweep", "drift against memory over many policies, as a table");
  const auto a = std::make_shared<SweepArguments>();
  add_path(command, "text", a->text, "a text file")->required();
  add_number(command, "--passages", a->passages,
             "that many, from the middles of as many equal parts of the text")
      ->capture_default_str();
  add_number(command, "--prefill", a->prefill, "bytes that run dense and are then compressed")
      ->capture_default_str();
  add_number(command, "--bytes", a->bytes, "steps to score in each passage")->capture_default_str();
  command
      ->add_option("--setting", a->settings,
                   "policy flags in quotes, as of eval; can be repeated (default: 55 of all "
                   "policies)")
      ->allow_extra_args(false);
  add_number(command, "--threads", a->threads, "passages and settings at a time")
      ->capture_default_str();
  add_path(command, "--svg", a->svg, "draw a figure here");
  add_path(command, "--json", a->json, "write the figures here");
  return {command, [=](const Model& model, const std::string& folder) {
            tools::at_least("--passages", 1, a->passages);
            tools::at_least("--prefill", 0, a->prefill);
            tools::at_least("--bytes", 1, a->bytes);
            tools::at_least("--threads", 1, a->threads);
            return sweep_policies(model, folder, *a);
          }};
}

Command add_generate(CLI::App& app) {
  CLI::App* const command =
      app.add_subcommand("generate", "write on from a prompt, or from several at once");
  struct Arguments : GenerateArguments {
    PolicyArguments policies;
    explicit Arguments(CLI::App& app) : policies(app) {}
  };
  const auto a = std::make_shared<Arguments>(*command);
  command
      ->add_option(
          "--prompt", a->prompts,
          "what the text begins with; can be repeated: the texts are decoded together, and "
          "are what each would be alone")
      ->required()
      ->allow_extra_args(false);
  command
      ->add_option("--bytes", a->bytes, "bytes to write; repeated: of each prompt (default: 400)")
      ->transform(tools::whole_number<std::ptrdiff_t>())
      ->allow_extra_args(false);
  add_number(command, "--threads", a->threads, "that decode")->capture_default_str();
  add_number(command, "--temperature", a->sampling.temperature, "0: always the likeliest byte")
      ->capture_default_str();
  add_number(command, "--top-p", a->sampling.top_p, "share of probability that is sampled from")
      ->capture_default_str();
  command->add_option("--sampling-seed", a->sampling.seed, "of the sampling")
      ->transform(tools::whole_number<std::uint64_t>())
      ->capture_default_str();
  command->add_flag("--dense", a->dense, "keep the states dense");
  command->add_flag("--compare", a->compare,
                    "let the dense model read along, and say what differs");
  return {command, [=](const Model& model, const std::string&) {
            for (const std::ptrdiff_t bytes : a->bytes) tools::at_least("--bytes", 0, bytes);
            tools::at_least("--threads", 1, a->threads);
            if (a->threads > 1024) {
              tools::refuse("--threads", "at most 1024", std::to_string(a->threads));
            }
            const SamplingOptions& sampling = a->sampling;
            if (!(sampling.temperature >= 0 && sampling.temperature <= 100)) {
              tools::refuse("--temperature", "a number in [0, 100]",
                            CLI::detail::to_string(sampling.temperature));
            }
            if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
              tools::refuse("--top-p", "a number in (0, 1]",
                            CLI::detail::to_string(sampling.top_p));
            }
            if (a->dense && (a->compare || a->policies.given())) {
              throw ToolError("--dense: takes no policy, and has nothing to compare");
            }
            return generate(model, *a, a->policies.resolve());
          }};
}

Command add_trace(CLI::App& app) {
  CLI::App* const command = app.add_subcommand("trace", "write a trace that replay reads");
  struct Arguments {
    std::string text, output;
    std::ptrdiff_t bytes = 0;
    std::size_t layer = 0;
  };
  const auto a = std::make_shared<Arguments>();
  add_path(command, "text", a->text, "a text file")->required();
  add_number(command, "--bytes", a->bytes, "bytes to read; 0, the default: all");
  command->add_option("--layer", a->layer, "which")
      ->transform(tools::whole_number<std::size_t>())
      ->required();
  add_path(command, "--output", a->output,
           "the trace: keys and queries as the recurrence sees them, state_end in fp32")
      ->required();
  return {command, [=](const Model& model, const std::string& folder) {
            tools::at_least("--bytes", 0, a->bytes);
            return write_trace(model, folder, a->text, a->bytes, a->layer, a->output);
          }};
}

void say(std::string line) { tools::say("hybrid_lm", std::move(line)); }

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "A small byte-level hybrid language model (Gated DeltaNet, Kimi Delta Attention, Mamba-2, "
      "attention) whose recurrent states are kept by sinkstate."};
  app.require_subcommand(1);
  app.fallthrough();  // --model may come last
  std::string folder = SINKSTATE_HYBRID_LM_MODEL;
  add_path(&app, "--model", folder, "folder of config.json and model.safetensors")
      ->capture_default_str();
  const Command commands[] = {add_check(app), add_eval(app), add_sweep(app), add_generate(app),
                              add_trace(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    say(std::string(error.what()) + " (see --help)");
    return 2;
  }
  try {
    const Model model = load_model(folder);
    for (const Command& command : commands) {
      if (!command.app->parsed()) continue;
      const int code = command.run(model, folder);
      if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
      say("standard output: cannot be written");
      return 1;
    }
  } catch (const std::exception& error) {
    say(error.what());
  }
  return 2;
}
