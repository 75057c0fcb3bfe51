// Replays traces of recurrent layers through a policy, beside the exact recurrence, and says what
// it costs.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "replay.hpp"
#include "report.hpp"
#include "trace.hpp"

namespace {

using namespace sinkstate::tools;

struct Arguments {
  std::vector<std::string> traces;
  ReplayOptions replay;
  std::string outputs;
  std::string json;
};

/// Options of policies and features that later versions bring: known by name, so that nobody
/// believes that they had an effect.
struct Foreign {
  const char* name;
  const char* reason;
};
constexpr Foreign foreign[] = {
    {"--rounding", "belongs to 16- and 8-bit storage; this version stores fp32"},
    {"--svg", "this version draws no figures"},
};

struct PolicyName {
  const char* name;
  Compaction compaction;
};
constexpr PolicyName policies[] = {{"local-svd", Compaction::local_svd},
                                   {"full-svd", Compaction::full_svd},
                                   {"fixed-rank", Compaction::fixed_rank},
                                   {"dense-buffered", Compaction::dense_buffered}};

/// Options that mean something to some policies only.
struct Restricted {
  const char* name;
  std::vector<Compaction> policies;
};
const Restricted restricted[] = {
    {"--epsilon", {Compaction::local_svd, Compaction::full_svd}},
    {"--rank-cap", {Compaction::local_svd, Compaction::full_svd}},
    {"--no-dense-fallback", {Compaction::local_svd, Compaction::full_svd}},
    {"--active", {Compaction::local_svd}},
    {"--recompress-growth", {Compaction::local_svd}},
    {"--recompress-slack", {Compaction::local_svd}},
    {"--tail-share", {Compaction::local_svd}},
    {"--tail-period", {Compaction::local_svd}},
    {"--rank", {Compaction::fixed_rank}},
    {"--seed", {Compaction::local_svd, Compaction::full_svd, Compaction::fixed_rank}},
};

/// One line on stderr, whatever bytes a file name has.
void say(std::string line) {
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') c = '?';
  }
  std::fprintf(stderr, "replay: %s\n", line.c_str());
}

void refuse_foreign(const CLI::App& app) {
  for (const Foreign& option : foreign) {
    if (app.count(option.name) > 0)
      throw ToolError(std::string(option.name) + ": " + option.reason);
  }
}

/// Text to whole numbers, strictly: CLI11 alone takes "" for 0, "010" for 8 and what is too large
/// for the largest.
template <class Number>
CLI::Validator whole_number() {
  return {[](std::string& text) -> std::string {
            Number value{};
            const char* const end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            if (error == std::errc::result_out_of_range) {
              using Limits = std::numeric_limits<Number>;
              return "wanted a number from " + std::to_string(Limits::min()) + " to " +
                     std::to_string(Limits::max()) + ", given " + quote(text);
            }
            if (error != std::errc() || stop != end) {
              return std::string("wanted a whole number") +
                     (std::is_signed_v<Number> ? "" : " from 0") + ", given " + quote(text);
            }
            text = std::to_string(value);
            return {};
          },
          ""};
}

/// For CLI11, an empty text is 0.
std::string check_real_number(const std::string& text) {
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' ? std::string() : "wanted a number, given " + quote(text);
}

[[noreturn]] void refuse(const std::string& option, const std::string& wanted,
                         const std::string& given) {
  throw ToolError(option + ": wanted " + wanted + ", given " + given);
}

bool same_file(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code error;  // what cannot be looked at is refused when it is opened
  const fs::path known_a = fs::weakly_canonical(fs::absolute(a), error);
  const fs::path known_b = fs::weakly_canonical(fs::absolute(b), error);
  return !known_a.empty() && known_a == known_b;
}

/// What was left after parsing by type: values and combinations without a meaning.
void check(const CLI::App& app, const Arguments& arguments, const std::string& storage,
           const std::string& backend) {
  if (storage != "fp32") refuse("--storage", "fp32 (all that this version has)", storage);
  if (backend != "host") refuse("--backend", "host (all that this version has)", backend);
  const ReplayOptions& replay = arguments.replay;
  for (const Restricted& option : restricted) {
    const auto& users = option.policies;
    const bool used = std::find(users.begin(), users.end(), replay.compaction) != users.end();
    if (used || app.count(option.name) == 0) continue;
    std::string names;
    for (const Compaction user : users) {
      names += (names.empty() ? "" : ", ") + std::string(to_string(user));
    }
    throw ToolError(std::string(option.name) + ": " + to_string(replay.compaction) +
                    " has no use for it, it belongs to " + names);
  }
  const auto number = [](double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", value);
    return std::string(text);
  };
  if (!(replay.epsilon >= 0 && replay.epsilon < 1)) {
    refuse("--epsilon", "a number in [0, 1)", number(replay.epsilon));
  }
  if (replay.recompress_growth != 0 &&
      !(replay.recompress_growth >= 1 && replay.recompress_growth <= 1e6)) {
    refuse("--recompress-growth", "0 or a number in [1, 1e6]", number(replay.recompress_growth));
  }
  const auto at_least = [](const char* option, std::ptrdiff_t least, std::ptrdiff_t given) {
    if (given < least) refuse(option, "at least " + std::to_string(least), std::to_string(given));
  };
  at_least("--buffer", 1, replay.buffer);
  if (replay.buffer > 65536) refuse("--buffer", "at most 65536", std::to_string(replay.buffer));
  if (!(replay.tail_share >= 0 && replay.tail_share <= 1)) {
    refuse("--tail-share", "a number in [0, 1]", number(replay.tail_share));
  }
  constexpr std::ptrdiff_t most = std::ptrdiff_t{1} << 20;  // of a StateConfig
  const auto in_range = [&](const char* option, std::ptrdiff_t least, std::ptrdiff_t given) {
    if (app.count(option) == 0) return;
    at_least(option, least, given);
    if (given > most) refuse(option, "at most " + std::to_string(most), std::to_string(given));
  };
  if (app.count("--rank-cap") > 0) at_least("--rank-cap", 1, replay.rank_cap);
  if (app.count("--rank") > 0) at_least("--rank", 1, replay.rank_cap);
  in_range("--active", 1, replay.active);
  in_range("--recompress-slack", 0, replay.recompress_slack);
  in_range("--tail-period", 0, replay.tail_period);
  at_least("--prefill", 0, replay.prefill);
  at_least("--threads", 1, replay.threads);
  if (!arguments.outputs.empty() && arguments.traces.size() != 1) {
    refuse("--outputs", "one trace", std::to_string(arguments.traces.size()));
  }
  std::vector<std::string> files = arguments.traces;
  for (const auto& [option, path] :
       {std::pair("--outputs", arguments.outputs), std::pair("--json", arguments.json)}) {
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
    work += traces.back().tokens * traces.back().value_heads;
  }
  std::unique_ptr<AtomicFile> outputs_file;
  std::unique_ptr<AtomicFile> json_file;
  if (!arguments.outputs.empty()) outputs_file = std::make_unique<AtomicFile>(arguments.outputs);
  if (!arguments.json.empty()) json_file = std::make_unique<AtomicFile>(arguments.json);

  std::vector<TraceReport> reports;
  ReplayOutputs outputs;
  {
    Progress progress(stderr, work);
    for (std::size_t i = 0; i < traces.size(); ++i) {
      reports.push_back(replay(arguments.traces[i], traces[i], arguments.replay,
                               outputs_file ? &outputs : nullptr,
                               [&](std::ptrdiff_t tokens) { progress.add(tokens); }));
    }
  }
  if (outputs_file) write_outputs(*outputs_file, traces.front(), outputs);
  if (json_file) json_file->write(json(reports, arguments.replay));
  if (outputs_file) outputs_file->flush();
  if (json_file) json_file->flush();
  if (outputs_file) outputs_file->commit();
  if (json_file) json_file->commit();
  std::fputs(table(reports, arguments.replay).c_str(), stdout);
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
  std::string policy = "local-svd";
  std::string storage = "fp32";
  std::string backend = "host";
  ReplayOptions& replay = arguments.replay;
  replay.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  bool no_dense_fallback = false;
  std::string unused;

  CLI::App app{
      "Replays traces of linear-attention layers through a sinkstate policy, beside the exact fp64 "
      "recurrence. docs/traces.md describes the files."};
  app.add_option("trace", arguments.traces, "trace files (safetensors, format sinkstate-trace-1)")
      ->required();
  app.option_defaults()->always_capture_default();
  app.add_option("--policy", policy, "local-svd, full-svd, fixed-rank or dense-buffered");
  app.add_option("--epsilon", replay.epsilon,
                 "terms below this share of the strongest are dropped (local-svd, full-svd)")
      ->check(check_real_number);
  app.add_option("--buffer", replay.buffer, "tokens between two compactions")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--active", replay.active,
                 "strongest terms, decomposed with the buffer (local-svd; default: 8, Kimi Delta "
                 "Attention 16)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--recompress-growth", replay.recompress_growth,
                 "all terms are decomposed once they are this many times what the last time left, "
                 "plus the slack; 0: only when they no longer fit (local-svd)")
      ->check(check_real_number);
  app.add_option("--recompress-slack", replay.recompress_slack, "that slack (local-svd)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--tail-share", replay.tail_share,
                 "until then, the share of epsilon below which terms are dropped (local-svd)")
      ->check(check_real_number);
  app.add_option("--tail-period", replay.tail_period,
                 "compactions after which the other terms are decomposed among themselves; 0: "
                 "never (local-svd)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--rank", replay.rank_cap,
                 "the rank (fixed-rank; default: 16, Kimi Delta Attention 32)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option(
         "--rank-cap", replay.rank_cap,
         "most terms; beyond them a state goes dense (local-svd, full-svd; default: as many "
         "as pay)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_flag("--no-dense-fallback", no_dense_fallback,
               "never go dense: keep up to min(d_k, d_v) terms (local-svd, full-svd)");
  app.add_flag("--sink", replay.sink, "keep the part along the trace's sink_direction apart");
  app.add_option("--prefill", replay.prefill, "tokens that run dense and are then compressed")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--seed", replay.seed, "of random sketches (all but dense-buffered)")
      ->transform(whole_number<std::uint64_t>());
  app.add_option("--threads", replay.threads, "heads replayed at a time")
      ->transform(whole_number<int>());
  app.add_option("--outputs", arguments.outputs,
                 "write outputs and final states here (safetensors; one trace)");
  app.add_option("--json", arguments.json, "write the report here");
  app.add_option("--storage", storage, "of the factors: fp32");
  app.add_option("--backend", backend, "host");
  for (const Foreign& option : foreign) {
    app.add_option(option.name, unused)
        ->group("")
        ->expected(0, 1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    try {
      refuse_foreign(app);
      say(std::string(error.what()) + " (see --help)");
    } catch (const ToolError& known) {
      say(known.what());
    }
    return 2;
  }
  try {
    refuse_foreign(app);
    const auto named = std::find_if(std::begin(policies), std::end(policies),
                                    [&](const PolicyName& known) { return policy == known.name; });
    if (named == std::end(policies)) {
      refuse("--policy", "local-svd, full-svd, fixed-rank or dense-buffered", policy);
    }
    replay.compaction = named->compaction;
    check(app, arguments, storage, backend);
    replay.dense_fallback = !no_dense_fallback;
    return run(arguments);
  } catch (const std::exception& error) {
    say(error.what());
    return 2;
  }
}
