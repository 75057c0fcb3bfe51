// Requests that arrive, are decoded together, and leave: hybrid_lm's model under continuous batching.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "arrivals.hpp"
#include "hybrid_lm/evaluate.hpp"
#include "hybrid_lm/policies.hpp"
#include "replay/atomic_file.hpp"
#include "replay/report.hpp"
#include "report.hpp"
#include "server.hpp"

namespace {

using namespace sinkstate;
using namespace sinkstate::serving;
using hybrid_lm::Policies;
using tools::refuse;

std::string read_text(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  if (text.empty()) throw tools::ToolError(path + ": cannot be read, or is empty");
  return text;
}

void add_number(CLI::App& app, const char* option, std::ptrdiff_t& value, const char* meaning) {
  app.add_option(option, value, meaning)
      ->transform(tools::whole_number<std::ptrdiff_t>())
      ->capture_default_str();
}
void add_number(CLI::App& app, const char* option, double& value, const char* meaning) {
  app.add_option(option, value, meaning)->check(tools::check_real_number)->capture_default_str();
}

void in_range(const char* option, std::ptrdiff_t least, std::ptrdiff_t most, std::ptrdiff_t given) {
  tools::at_least(option, least, given);
  if (given > most) refuse(option, "at most " + std::to_string(most), std::to_string(given));
}
void in_range(const char* option, const char* wanted, bool good, double given) {
  if (!good) refuse(option, wanted, CLI::detail::to_string(given));
}

std::vector<Setting> settings_of(const Policies& policies) {
  std::vector<Setting> settings{{"dense", {}, false, false},
                                {"factored", policies, false, false},
                                {"staggered", policies, true, false}};
  Policies untriggered = policies;
  bool freezes = true;
  for (tools::ReplayOptions* const options :
       {&untriggered.gated_delta, &untriggered.kimi_delta, &untriggered.mamba2}) {
    freezes = freezes && options->compaction == tools::Compaction::local_svd;
    options->recompress_growth = 0;
  }
  if (freezes) {
    settings.push_back({"consolidated", policies, true, true});
    settings.push_back({"consolidated, growth 0", untriggered, true, true});
  } else {
    tools::say("serving", "consolidation is left out: only local-svd has frozen terms");
  }
  return settings;
}

int run(int argc, char** argv) {
  CLI::App app{
      "Continuous batching on recurrent states: the same arrivals under several settings, within "
      "one budget of bytes."};
  std::string folder = SINKSTATE_HYBRID_LM_MODEL, path, json_path, svg_path;
  ArrivalOptions arrivals;
  ServingOptions options;
  std::ptrdiff_t slots = options.slots, threads = 1, steps = 0, draft = options.draft;
  std::ptrdiff_t compared = 2, recompressions = -1, delay = options.consolidation_delay;
  double budget = 3;
  app.add_option("--model", folder, "folder of config.json and model.safetensors");
  app.add_option("--text", path, "prompts are cut out of it (default: the model's text.txt)");
  add_number(app, "--requests", arrivals.requests, "that arrive");
  add_number(app, "--arrival-rate", arrivals.rate, "of them in a step, in the mean");
  add_number(app, "--prompt-bytes", arrivals.prompt_bytes,
             "of a prompt, at most; a quarter at least");
  add_number(app, "--output-bytes", arrivals.output_bytes, "of an output, likewise");
  add_number(app, "--fork-share", arrivals.fork_share, "of requests, that become two samples");
  app.add_option("--arrival-seed", arrivals.seed, "of arrivals, lengths, prompts and sampling")
      ->transform(tools::whole_number<std::uint64_t>())
      ->capture_default_str();
  add_number(app, "--steps", steps, "to serve; 0: until all requests are finished");
  add_number(app, "--slots", slots, "requests at once, at most");
  add_number(app, "--threads", threads, "that decode");
  add_number(app, "--budget", budget,
             "of recurrent states: bytes, or below 1000 a multiple of a dense request's");
  add_number(app, "--draft", draft, "bytes that are proposed at once, at most; 0: none");
  add_number(app, "--chunk", options.chunk, "bytes of a prompt in a step");
  app.add_option(
         "--recompressions", recompressions,
         "states decomposed whole for their rank in a step at most, where staggered; those that do "
         "not fit otherwise come on top (default: no cap)")
      ->transform(tools::whole_number<std::ptrdiff_t>());
  add_number(
      app, "--consolidation-delay", delay,
      "steps until a result is swapped in, stale from the period on; 0: when it is ready, so "
      "that runs differ");
  add_number(app, "--temperature", options.sampling.temperature, "0: always the likeliest byte");
  add_number(app, "--compared", compared, "requests that the dense model reads too");
  app.add_option("--json", json_path, "write the figures here");
  app.add_option("--svg", svg_path, "draw bytes and ranks over the steps here");
  hybrid_lm::PolicyArguments policies(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    tools::say("serving", std::string(error.what()) + " (see --help)");
    return 2;
  }
  constexpr std::ptrdiff_t many = 1000000;
  in_range("--requests", 1, many, arrivals.requests);
  in_range("--arrival-rate", "a number in (1e-6, 100]",
           arrivals.rate > 1e-6 && arrivals.rate <= 100, arrivals.rate);
  in_range("--prompt-bytes", 1, many, arrivals.prompt_bytes);
  in_range("--output-bytes", 1, many, arrivals.output_bytes);
  in_range("--fork-share", "a number in [0, 1]",
           arrivals.fork_share >= 0 && arrivals.fork_share <= 1, arrivals.fork_share);
  in_range("--steps", 0, many * many, steps);
  in_range("--slots", 1, 4096, slots);
  in_range("--threads", 1, 1024, threads);
  in_range("--draft", 0, 64, draft);
  in_range("--chunk", 1, many, options.chunk);
  in_range("--consolidation-delay", 0, many, delay);
  in_range("--compared", 0, many, compared);
  in_range("--budget", "a positive number below 1e18", budget > 0 && budget < 1e18, budget);
  in_range("--temperature", "a number in [0, 100]",
           options.sampling.temperature >= 0 && options.sampling.temperature <= 100,
           options.sampling.temperature);
  if (app.count("--recompressions") > 0) {
    in_range("--recompressions", 0, many, recompressions);
    options.recompressions = recompressions;
  }
  if (path.empty()) path = folder + "/text.txt";
  const std::string inputs[] = {path, folder + "/config.json", folder + "/model.safetensors"};
  for (const auto& [option, file] : {std::pair{"--json", json_path}, {"--svg", svg_path}}) {
    for (const std::string& input : inputs) {
      if (!file.empty() && tools::same_file(file, input)) {
        refuse(option, "a file of its own", "the input " + tools::quote(input));
      }
    }
  }
  if (!json_path.empty() && !svg_path.empty() && tools::same_file(json_path, svg_path)) {
    refuse("--svg", "a file of its own", "that of --json");
  }
  options.slots = static_cast<int>(slots);
  options.threads = static_cast<int>(threads);
  options.steps = steps;
  options.draft = static_cast<int>(draft);
  options.consolidation_delay = delay;
  options.compared = static_cast<std::size_t>(compared);

  const std::vector<Setting> settings = settings_of(policies.resolve());
  const hybrid_lm::Model model = hybrid_lm::load_model(folder);
  options.budget = budget < 1000 ? budget * hybrid_lm::dense_state_bytes(model) : budget;
  const auto coming = make_arrivals(read_text(path), arrivals);
  const auto json_file = tools::open_output(json_path);
  const auto svg_file = tools::open_output(svg_path);
  std::ptrdiff_t output = 0;
  for (const Arrival& arrival : coming) {
    output += arrival.samples * static_cast<std::ptrdiff_t>(arrival.output);
  }
  std::vector<ServingResult> results;
  {
    tools::Progress bar(stderr, output * static_cast<std::ptrdiff_t>(settings.size()));
    for (const Setting& setting : settings) {
      results.push_back(
          serve(model, coming, setting, options, [&](std::ptrdiff_t bytes) { bar.add(bytes); }));
    }
  }
  if (json_file) json_file->write(json(results, options));
  if (svg_file) svg_file->write(figure(results));
  tools::commit_all({json_file.get(), svg_file.get()});
  std::fputs(text(results).c_str(), stdout);
  if (std::fflush(stdout) == 0) return 0;
  tools::say("serving", "standard output: cannot be written");
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    tools::say("serving", error.what());
    return 2;
  }
}
