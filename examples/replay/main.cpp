// Replays traces of recurrent layers through a policy, beside the exact recurrence, and says what
// it costs.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_state.hpp"
#include "error_ladder.hpp"
#include "policy_flags.hpp"
#include "profile.hpp"
#include "profile_report.hpp"
#include "replay.hpp"
#include "report.hpp"
#include "text_table.hpp"
#include "trace.hpp"

namespace {

using namespace sinkstate::tools;

struct Arguments {
  std::vector<std::string> traces;
  ReplayOptions replay;
  std::string outputs;
  std::string json;
  std::string svg;
  bool profile = false;
  std::optional<double> profile_error;
};

void say(std::string line) { sinkstate::tools::say("replay", std::move(line)); }

Backend backend_named(const std::string& given) {
  for (const Backend backend : all_backends) {
    if (given == to_string(backend)) return backend;
  }
  refuse("--backend", "host or cuda", given);
}

/// What was left after parsing by type: values and combinations without a meaning.
void check(const CLI::App& app, const Arguments& arguments) {
  const ReplayOptions& replay = arguments.replay;
  check_backend(replay);
  at_least("--prefill", 0, replay.prefill);
  at_least("--threads", 1, replay.threads);
  if (!arguments.outputs.empty() && arguments.traces.size() != 1) {
    refuse("--outputs", "one trace", std::to_string(arguments.traces.size()));
  }
  if (arguments.profile_error) {
    if (!arguments.profile)
      throw ToolError("--profile-error: belongs to --profile, which is not given");
    const double error = *arguments.profile_error;
    if (!(error > 0 && error < 1)) {
      refuse("--profile-error", "a number in (0, 1)", format("%g", error));
    }
  }
  std::vector<std::string> files = arguments.traces;
  for (const auto& [option, path] :
       {std::pair("--outputs", arguments.outputs), std::pair("--json", arguments.json),
        std::pair("--svg", arguments.svg)}) {
    if (app.count(option) == 0) continue;
    if (path.empty()) refuse(option, "a path", "an empty one");
    for (const std::string& other : files) {
      if (same_file(path, other))
        refuse(option, "a file of its own", "one that is named twice: " + path);
    }
    files.push_back(path);
  }
}

void write_outputs(AtomicFile& file, const Trace& trace, const ReplayOutputs& outputs) {
  const auto shape = [](std::ptrdiff_t a, std::ptrdiff_t b, std::ptrdiff_t c) {
    return std::vector<std::size_t>{static_cast<std::size_t>(a), static_cast<std::size_t>(b),
                                    static_cast<std::size_t>(c)};
  };
  write_safetensors(
      file, {{"format", "sinkstate-outputs-1"}},
      {{"output", FloatType::f32, shape(trace.tokens, trace.value_heads, trace.d_v),
        &outputs.output},
       {"state", FloatType::f32, shape(trace.value_heads, trace.d_k, trace.d_v), &outputs.state}});
}

int run(const Arguments& arguments) {
  // What can be refused without replaying is refused first, and files appear only when all is done.
  std::vector<Trace> traces;
  std::ptrdiff_t work = 0;
  for (const std::string& path : arguments.traces) {
    traces.push_back(load_trace(path));
    check_options(path, traces.back(), arguments.replay);
    std::ptrdiff_t passes = 1;
    if (arguments.profile) {
      check_profile(path, traces.back());
      passes += 1 + (arguments.profile_error ? most_rungs(traces.back()) : 0);
    }
    work += passes * traces.back().tokens * traces.back().value_heads;
  }
  const auto outputs_file = open_output(arguments.outputs);
  const auto json_file = open_output(arguments.json);
  const auto svg_file = open_output(arguments.svg);

  std::vector<TraceReport> reports;
  std::vector<TraceProfile> profiles;
  ReplayOutputs outputs;
  {
    Progress progress(stderr, work);
    const auto add = [&](std::ptrdiff_t tokens) { progress.add(tokens); };
    for (std::size_t i = 0; i < traces.size(); ++i) {
      const std::string& name = arguments.traces[i];
      reports.push_back(
          replay(name, traces[i], arguments.replay, outputs_file ? &outputs : nullptr, add));
      if (!arguments.profile) continue;
      profiles.push_back(profile(name, traces[i], arguments.replay, reports.back(), add));
      if (arguments.profile_error) {
        profiles.back().error =
            climb(name, traces[i], arguments.replay, *arguments.profile_error, add);
      }
    }
  }
  if (outputs_file) write_outputs(*outputs_file, traces.front(), outputs);
  if (json_file) json_file->write(json(reports, arguments.replay, profiles));
  if (svg_file) svg_file->write(figure(reports, arguments.replay, profiles));
  commit_all({outputs_file.get(), json_file.get(), svg_file.get()});
  std::fputs(table(reports, arguments.replay).c_str(), stdout);
  if (arguments.profile) std::fputs(profile_table(reports, profiles).c_str(), stdout);
  if (std::fflush(stdout) != 0) {
    say("standard output: the table cannot be written");
    return 1;
  }

  for (std::size_t i = 0; i < traces.size(); ++i) {
    for (const std::string& name : traces[i].ignored) {
      say("note: " + arguments.traces[i] + ": tensor " + quote(name) +
          " is not part of a trace, ignored");
    }
  }
  for (const TraceReport& report : reports) {
    if (!report.total.certificate_holds) {
      say(report.trace + ": an error certificate was below the true error: please report this");
      return 1;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  std::string backend = "host";
  ReplayOptions& replay = arguments.replay;
  replay.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));

  CLI::App app{
      "Replays traces of linear-attention layers through a sinkstate policy, beside the exact fp64 "
      "recurrence. docs/traces.md describes the files."};
  app.add_option("trace", arguments.traces, "trace files (safetensors, format sinkstate-trace-1)")
      ->required();
  app.option_defaults()->always_capture_default();
  PolicyFlags policy(app, replay);
  app.add_option("--prefill", replay.prefill, "tokens that run dense and are then compressed")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--threads", replay.threads, "heads replayed at a time")
      ->transform(whole_number<int>());
  app.add_option("--outputs", arguments.outputs,
                 "write outputs and final states here (safetensors; one trace)");
  app.add_option("--json", arguments.json, "write the report here");
  app.add_option("--svg", arguments.svg, "draw rank and output error over the tokens here");
  app.add_flag(
      "--profile", arguments.profile,
      "say how few directions hold vectors, exact states and outputs; a figure has the spectra");
  app.add_option("--profile-error", arguments.profile_error,
                 "and which epsilon and which fixed rank keep the output error at this or below")
      ->check(check_real_number);
  app.add_option("--backend", backend, "where states live: host or cuda (a device; fp32 storage)");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    say(std::string(error.what()) + " (see --help)");
    return 2;
  }
  try {
    policy.resolve();
    replay.backend = backend_named(backend);
    check(app, arguments);
    replay.series = !arguments.svg.empty() || arguments.profile;
    return run(arguments);
  } catch (const std::exception& error) {
    say(error.what());
    return 2;
  }
}
