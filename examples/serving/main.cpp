// Requests that arrive, are decoded together, and leave: hybrid_lm's model under continuous batching.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "arrivals.hpp"
#include "hybrid_lm/arguments.hpp"
#include "hybrid_lm/evaluate.hpp"
#include "hybrid_lm/policies.hpp"
#include "replay/atomic_file.hpp"
#include "replay/report.hpp"
#include "report.hpp"
#include "server.hpp"

namespace {

using namespace sinkstate;
using namespace sinkstate::serving;
using hybrid_lm::add_number;
using hybrid_lm::add_path;
using hybrid_lm::Policies;
using tools::refuse;

void in_range(const char* option, std::ptrdiff_t least, std::ptrdiff_t most, std::ptrdiff_t given) {
  tools::at_least(option, least, given);
  if (given > most) refuse(option, "at most " + std::to_string(most), std::to_string(given));
}
void in_range(const char* option, const char* wanted, bool good, double given) {
  if (!good) refuse(option, wanted, CLI::detail::to_string(given));
}

bool all_local_svd(const Policies& policies) {
  const auto freezes = [](const tools::ReplayOptions& options) {
    return options.compaction == tools::Compaction::local_svd;
  };
  return freezes(policies.gated_delta) && freezes(policies.kimi_delta) && freezes(policies.mamba2);
}

/// The settings that are served. Without consolidation where nothing is frozen.
std::vector<Setting> settings_of(const Policies& policies) {
  std::vector<Setting> settings{{"dense", {}, false, false},
                                {"factored", policies, false, false},
                                {"staggered", policies, true, false}};
  if (!all_local_svd(policies)) return settings;
  settings.push_back({"consolidated", policies, true, true});
  Policies untriggered = policies;
  bool triggered = false;
  for (tools::ReplayOptions* const options :
       {&untriggered.gated_delta, &untriggered.kimi_delta, &untriggered.mamba2}) {
    triggered = triggered || options->recompress_growth > 0;
    options->recompress_growth = 0;
  }
  if (triggered) settings.push_back({"consolidated, growth 0", untriggered, true, true});
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
  const auto number = [&app](const char* option, auto& value, const char* meaning) {
    add_number(&app, option, value, meaning)->capture_default_str();
  };
  add_path(&app, "--model", folder, "folder of config.json and model.safetensors")
      ->capture_default_str();
  add_path(&app, "--text", path, "prompts are cut out of it (default: the model's text.txt)");
  number("--requests", arrivals.requests, "that arrive");
  number("--arrival-rate", arrivals.rate, "of them in a step, in the mean");
  number("--prompt-bytes", arrivals.prompt_bytes, "of a prompt, at most; a quarter at least");
  number("--output-bytes", arrivals.output_bytes, "of an output, likewise");
  number("--fork-share", arrivals.fork_share, "of requests, that become two samples");
  app.add_option("--arrival-seed", arrivals.seed, "of arrivals, lengths, prompts and sampling")
      ->transform(tools::whole_number<std::uint64_t>())
      ->capture_default_str();
  number("--steps", steps, "to serve; 0: until all requests are finished");
  number("--slots", slots, "requests at once, at most");
  number("--threads", threads, "that decode");
  number("--budget", budget,
         "of recurrent states: bytes, or below 1000 a multiple of a dense request's");
  number("--draft", draft, "bytes that are proposed at once, at most; 0: none");
  number("--chunk", options.chunk, "bytes of a prompt in a step");
  app.add_option(
         "--recompressions", recompressions,
         "states decomposed whole for their rank in a step at most, where staggered; those that do "
         "not fit otherwise come on top (default: no cap)")
      ->transform(tools::whole_number<std::ptrdiff_t>());
  number("--consolidation-delay", delay,
         "steps until a result is swapped in, stale from the period on; 0: when it is ready, so "
         "that runs differ");
  number("--temperature", options.sampling.temperature, "0: always the likeliest byte");
  number("--compared", compared, "requests that the dense model reads too");
  add_path(&app, "--json", json_path, "write the figures here");
  add_path(&app, "--svg", svg_path, "draw bytes and ranks over the steps here");
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
  hybrid_lm::require_different(folder, {{"--json", json_path}, {"--svg", svg_path}}, path);
  options.slots = static_cast<int>(slots);
  options.threads = static_cast<int>(threads);
  options.steps = steps;
  options.draft = static_cast<int>(draft);
  options.consolidation_delay = delay;
  options.compared = static_cast<std::size_t>(compared);

  const Policies chosen = policies.resolve();
  const std::vector<Setting> settings = settings_of(chosen);
  if (settings.back().consolidated) {
    const Index period = period_of(chosen);
    if (delay >= period) {
      refuse("--consolidation-delay",
             "less than the " + std::to_string(period) + " tokens between two compactions",
             std::to_string(delay));
    }
  } else {
    for (const char* const option : {"--consolidation-delay", "--recompressions"}) {
      if (app.count(option) == 0) continue;
      refuse(option, "--policy local-svd in every layer, which alone has frozen terms", "another");
    }
    tools::say("serving", "consolidation is left out: only local-svd has frozen terms");
  }
  const hybrid_lm::Model model = hybrid_lm::load_model(folder);
  options.budget = budget < 1000 ? budget * hybrid_lm::dense_state_bytes(model) : budget;
  const auto coming = make_arrivals(hybrid_lm::read_text(path), arrivals);
  if (steps > 0 && steps <= coming.front().step) {
    refuse("--steps",
           "more than the " + std::to_string(coming.front().step) + " before anybody comes",
           std::to_string(steps));
  }
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
  if (json_file) json_file->write(json(results, arrivals, options));
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
