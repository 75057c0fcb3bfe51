// The executable `replay`: what it refuses and how, and what a good run leaves behind.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "replay/safetensors.hpp"
#include "replay/trace.hpp"
#include "support/catch.hpp"
#include "support/temporary_directory.hpp"

using namespace sinkstate::tools;
using sinkstate::testing::read_file;
using sinkstate::testing::TemporaryDirectory;
using sinkstate::testing::write_file;
namespace fs = std::filesystem;
using Json = nlohmann::json;

namespace {

std::string shell_quote(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

struct Run {
  int code = -1;
  std::string out;
  std::string err;
};

// Runs a shell command in `folder`; what it prints is kept elsewhere.
Run shell(const fs::path& folder, const std::string& command) {
  const TemporaryDirectory printed;
  const std::string line = "cd " + shell_quote(folder.string()) + " && { " + command + "\n} >" +
                           shell_quote((printed / "out").string()) + " 2>" +
                           shell_quote((printed / "err").string()) + " </dev/null";
  const int status = std::system(line.c_str());
  Run run;
  run.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  run.out = read_file(printed / "out");
  run.err = read_file(printed / "err");
  return run;
}

std::string command_line(const std::vector<std::string>& arguments) {
  std::string line = shell_quote(SINKSTATE_TEST_REPLAY);
  for (const std::string& argument : arguments) line += " " + shell_quote(argument);
  return line;
}

// Every file below a folder with what it holds.
std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().lexically_relative(folder).string();
    files[name] = entry.is_regular_file() ? read_file(entry.path()) : "not a file";
  }
  return files;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

constexpr std::ptrdiff_t tokens = 5;
constexpr std::ptrdiff_t key_heads = 2;
constexpr std::ptrdiff_t value_heads = 4;
constexpr std::ptrdiff_t d_k = 3;
constexpr std::ptrdiff_t d_v = 2;

Trace small_trace() {
  Trace trace;
  trace.rule = Rule::gated_delta;
  trace.tokens = tokens;
  trace.key_heads = key_heads;
  trace.value_heads = value_heads;
  trace.d_k = d_k;
  trace.d_v = d_v;
  const auto some = [](std::ptrdiff_t count, float first, float step) {
    std::vector<float> values;
    for (std::ptrdiff_t i = 0; i < count; ++i) {
      values.push_back(first + step * static_cast<float>(i * 7 % 11));
    }
    return values;
  };
  trace.q = some(tokens * key_heads * d_k, -0.5f, 0.1f);
  trace.k = some(tokens * key_heads * d_k, -0.4f, 0.09f);
  trace.v = some(tokens * value_heads * d_v, -1.0f, 0.3f);
  trace.log_decay = some(tokens * value_heads, -1.5f, 0.1f);
  trace.beta = some(tokens * value_heads, 0.1f, 0.05f);
  return trace;
}

// A folder with one good trace, in which `replay` runs.
struct Workshop {
  TemporaryDirectory directory;
  fs::path folder = directory / "";

  Workshop() { save_trace(directory / "good.safetensors", small_trace()); }

  Run replay(const std::vector<std::string>& arguments) const {
    return shell(folder, command_line(arguments));
  }

  // The one line that says why; everything else that a refusal promises is checked here.
  std::string refusal(const std::vector<std::string>& arguments) const {
    return refusal_of(command_line(arguments));
  }

  std::string refusal_of(const std::string& command) const {
    INFO(command);
    const auto before = contents(folder);
    const Run run = shell(folder, command);
    CHECK(run.code == 2);
    CHECK(run.out.empty());
    CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
    CHECK(run.err.rfind("replay: ", 0) == 0);
    CHECK(run.err.size() > std::string("replay: \n").size());
    CHECK(run.err.back() == '\n');
    CHECK(run.err.size() < 500);
    CHECK(!contains(run.err, "Usage"));
    CHECK((contents(folder) == before));
    return run.err;
  }

  // A trace refused, and an option refused beside the good trace. All outputs are asked for, so
  // that any may be left.
  std::string bad_trace(const std::string& path) const {
    const std::string error = refusal(
        {path, "--json", "report.json", "--outputs", "outputs.safetensors", "--svg", "figure.svg"});
    CHECK(error.rfind("replay: " + path + ": ", 0) == 0);
    return error;
  }
  std::string bad_option(std::vector<std::string> arguments) const {
    for (const char* argument : {"good.safetensors", "--json", "report.json", "--outputs",
                                 "outputs.safetensors", "--svg", "figure.svg"}) {
      arguments.push_back(argument);
    }
    return refusal(arguments);
  }

  // The good trace with other bytes: header and data as `spoil` leaves them.
  std::string spoilt(const std::function<void(Json& header, std::string& data)>& spoil) const {
    const std::string good = read_file(directory / "good.safetensors");
    std::uint64_t length = 0;
    for (int i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(good[at(i)]);
    Json header = Json::parse(good.substr(8, length));
    std::string data = good.substr(8 + length);
    spoil(header, data);
    const std::string text = header.dump();
    std::string bytes;
    for (std::uint64_t rest = text.size(), i = 0; i < 8; ++i, rest >>= 8) {
      bytes += static_cast<char>(rest & 0xFF);
    }
    write_file(directory / "bad.safetensors", bytes + text + data);
    return bad_trace("bad.safetensors");
  }
  // The good trace with other numbers.
  std::string spoilt_trace(const std::function<void(Trace&)>& spoil) const {
    Trace trace = small_trace();
    spoil(trace);
    save_trace(directory / "bad.safetensors", trace);
    return bad_trace("bad.safetensors");
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
};

}  // namespace

TEST_CASE("files that are not safetensors are refused") {
  const Workshop shop;
  const std::string good = read_file(shop.directory / "good.safetensors");
  const auto bytes = [&](const std::string& content) {
    write_file(shop.directory / "bad.safetensors", content);
    return shop.bad_trace("bad.safetensors");
  };
  CHECK(contains(shop.bad_trace("missing.safetensors"), "cannot be read: No such file"));
  CHECK(contains(shop.bad_trace("missing/missing.safetensors"), "cannot be read: No such file"));
  CHECK(contains(shop.bad_trace("good.safetensors/x"), "cannot be read: "));
  CHECK(contains(shop.bad_trace("."), "cannot be read: not a regular file"));
  CHECK(contains(shop.bad_trace("/dev/zero"), "cannot be read: not a regular file"));
  CHECK(contains(bytes(""), "wanted at least 8 bytes, given 0"));
  CHECK(contains(bytes("1234567"), "wanted at least 8 bytes, given 7"));
  CHECK(contains(bytes(std::string(8, '\xff')), "header length: wanted at most 0, given 1844674"));
  CHECK(contains(bytes(std::string(7, '\0') + "\x7f" + good.substr(8)), "header length: "));
  CHECK(contains(bytes(std::string(8, '\0')), "header: wanted a JSON object"));
  CHECK(contains(bytes("this is a text and no safetensors file"), "header length: "));
  for (const std::size_t kept :
       {std::size_t{8}, std::size_t{100}, good.size() / 2, good.size() - 1}) {
    INFO("kept " << kept);
    bytes(good.substr(0, kept));
  }
  CHECK(contains(bytes(good + "x"), "1 unused bytes after the last tensor"));
  CHECK(contains(bytes(good.substr(0, 8) + "[" + good.substr(9)), "header: "));
}

TEST_CASE("files whose offsets or shapes do not fit are refused") {
  const Workshop shop;
  const auto offsets = [&](const char* tensor, Json begin, Json end) {
    return shop.spoilt([&](Json& header, std::string&) {
      header[tensor]["data_offsets"] = Json::array({std::move(begin), std::move(end)});
    });
  };
  const std::size_t q_bytes = tokens * key_heads * d_k * 4;
  CHECK(contains(offsets("k", 0, q_bytes), "overlap"));
  CHECK(contains(offsets("k", q_bytes, 10 * q_bytes), "data_offsets: "));
  CHECK(contains(offsets("q", q_bytes, 0), "data_offsets: wanted begin <= end"));
  CHECK(contains(offsets("q", 0, 1), "data_offsets: wanted 120 bytes"));
  CHECK(contains(offsets("q", -1, q_bytes), "data_offsets: "));
  CHECK(contains(offsets("q", 0.5, q_bytes), "data_offsets: "));
  CHECK(contains(offsets("q", "0", q_bytes), "data_offsets: "));
  CHECK(contains(offsets("q", 18446744073709551615u, q_bytes), "data_offsets: "));
  CHECK(contains(offsets("q", 18446744073709551500u, 18446744073709551615u), "data_offsets: "));

  const auto shape = [&](const char* tensor, const std::vector<std::size_t>& extents) {
    return shop.spoilt([&](Json& header, std::string&) { header[tensor]["shape"] = extents; });
  };
  const std::size_t huge = std::size_t{1} << 62;
  CHECK(contains(shape("q", {huge, huge, huge}), "shape [4611686018427387904, "));
  CHECK(contains(shape("q", {huge, 4, 1}), "too large"));
  CHECK(contains(shape("q", {tokens, key_heads, d_k + 1}), "data_offsets: wanted "));
  CHECK(contains(shape("q", {tokens, key_heads * d_k}), "tensor \"q\": wanted shape [tokens, "));
  CHECK(contains(shape("k", {tokens, d_k, key_heads}),
                 "tensor \"k\": wanted shape [5, 2, 3], given [5, 3, 2]"));
  CHECK(contains(shape("beta", {value_heads, tokens}),
                 "tensor \"beta\": wanted shape [5, 4], given [4, 5]"));
  CHECK(contains(shop.spoilt([](Json& header, std::string&) { header["q"]["dtype"] = "I32"; }),
                 "dtype: wanted F32, F16 or BF16, given I32"));
  CHECK(contains(shop.spoilt([](Json& header, std::string&) { header["q"]["dtype"] = "F99"; }),
                 "dtype: unknown type"));
}

TEST_CASE("traces that mean nothing are refused") {
  const Workshop shop;
  const auto without = [&](const char* name) {
    return shop.spoilt([&](Json& header, std::string& data) {
      const auto begin = header[name]["data_offsets"][0].get<std::size_t>();
      const std::size_t bytes = header[name]["data_offsets"][1].get<std::size_t>() - begin;
      header.erase(name);
      data.erase(begin, bytes);
      for (auto& [key, entry] : header.items()) {
        if (key == "__metadata__" || entry["data_offsets"][0].get<std::size_t>() < begin) continue;
        for (Json& offset : entry["data_offsets"]) offset = offset.get<std::size_t>() - bytes;
      }
    });
  };
  for (const char* name : {"q", "k", "v", "log_decay", "beta"}) {
    CHECK(contains(without(name), std::string("tensor \"") + name + "\" is missing"));
  }
  const auto metadata = [&](const char* key, const char* value) {
    return shop.spoilt([&](Json& header, std::string&) { header["__metadata__"][key] = value; });
  };
  CHECK(contains(metadata("format", "sinkstate-trace-2"),
                 "metadata format: wanted sinkstate-trace-1"));
  CHECK(contains(metadata("rule", "mamba3"), "metadata rule: wanted mamba2 or "));
  CHECK(contains(metadata("rule", "line\nbreak\x1b[31m"), "metadata rule: wanted mamba2 or "));
  CHECK(contains(metadata("rule", "kimi_delta"), "one log decay per token, head and key channel"));
  CHECK(contains(metadata("head_map", ""), "metadata head_map: wanted interleaved or tiled"));

  CHECK(contains(shop.spoilt_trace([](Trace& trace) {
    trace.tokens = 0;
    for (auto* values : {&trace.q, &trace.k, &trace.v, &trace.log_decay, &trace.beta})
      values->clear();
  }),
                 "each at least 1, given [0, 2, 3]"));
  CHECK(contains(shop.spoilt_trace([](Trace& trace) {
    trace.value_heads = 3;
    trace.v.resize(tokens * 3 * d_v);
    trace.log_decay.resize(tokens * 3);
    trace.beta.resize(tokens * 3);
  }),
                 "heads: wanted value heads that are a multiple of the key heads, given 3 and 2"));

  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.q[0] = nan; }),
                 "q[0, 0, 0]: wanted a finite number, given NaN"));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.k.back() = nan; }), "k[4, 1, 2]: "));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.v.back() = infinity; }),
                 "v[4, 3, 1]: wanted a finite number, given inf"));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.beta[1] = -infinity; }), "beta[0, 1]: "));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.log_decay[1] = nan; }), "log_decay[0, 1]: "));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.log_decay[1] = 0.9f; }),
                 "log_decay[0, 1]: wanted at most 0"));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.initial_state.assign(24, nan); }),
                 "initial_state[0, 0, 0]: "));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.sink_direction.assign(8, nan); }),
                 "sink_direction[0, 0]: "));

  // Found while the work is done, and as clean.
  CHECK(contains(shop.spoilt_trace([&](Trace& t) { t.state_end.assign(24, 1.0f); }),
                 "state_end of head "));
  CHECK(contains(shop.spoilt_trace([&](Trace& t) {
    t.v[6] = 3e38f;
    t.beta[3] = 100;
  }),
                 "head 3, token 0: the result does not fit"));

  // A note about a tensor of no use is not a second line.
  CHECK(contains(shop.spoilt([](Json& header, std::string& data) {
    const std::size_t end = data.size();
    data += "1234";
    header["inital_state"] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {end, end + 4}}};
    header["__metadata__"]["rule"] = "none";
  }),
                 "metadata rule: "));
}

TEST_CASE("numbers out of their range, and what is no number, are refused by option") {
  const Workshop shop;
  const auto refused = [&](const std::string& option, const std::string& value,
                           const std::string& why) {
    const std::string error = shop.bad_option({option, value});
    INFO(option << " " << value << " -> " << error);
    CHECK(contains(error, option + ": "));
    CHECK(contains(error, why));
    // The same with "=".
    CHECK(contains(shop.bad_option({option + "=" + value}), option));
  };
  for (const char* value : {"-1", "-1e-300", "nan", "-nan", "inf", "-inf", "1", "1.0000001", "1e30",
                            "1e400", "0x1p3"}) {
    refused("--epsilon", value, "wanted a number in [0, 1), given ");
  }
  refused("--epsilon", "-1e-300", "given -1e-300");
  for (const char* value : {"abc", "0.1x", "0,1", "1e", "--", "0.1 0.2"}) {
    refused("--epsilon", value, "");
  }
  for (const char* option : {"--buffer", "--prefill", "--rank-cap", "--active", "--rank",
                             "--recompress-slack", "--tail-period", "--threads", "--seed"}) {
    for (const char* value : {"x", "8x", "8.5", "1e3", "1e30", "0x10", "+8", " 8", "8 ", "nan",
                              "9999999999999999999999"}) {
      refused(option, value, "wanted a ");
    }
    CHECK(contains(shop.bad_option({option, ""}), std::string(option) + ": "));
  }
  CHECK(contains(shop.bad_option({"--epsilon", ""}), "--epsilon: wanted a number, given \"\""));
  for (const char* option : {"--recompress-growth", "--tail-share"}) {
    for (const char* value : {"-1", "nan", "inf", "1e7"}) refused(option, value, "wanted ");
    for (const char* value : {"abc", "0,5", ""}) {
      CHECK(contains(shop.bad_option({option, value}), std::string(option) + ": wanted a number"));
    }
  }
  refused("--recompress-growth", "0.5", "wanted 0 or a number in [1, 1e6], given 0.5");
  refused("--tail-share", "1.5", "wanted a number in [0, 1], given 1.5");
  for (const char* option : {"--buffer", "--prefill", "--rank-cap"}) {
    refused(option, "9223372036854775808", "wanted a number from ");  // 2^63
    refused(option, "-9223372036854775809", "wanted a number from ");
  }
  refused("--threads", "2147483648", "wanted a number from ");
  refused("--seed", "18446744073709551616", "wanted a number from 0 to 18446744073709551615");
  refused("--seed", "-1", "wanted a whole number from 0, given \"-1\"");
  refused("--buffer", "0", "wanted at least 1, given 0");
  refused("--buffer", "-8", "wanted at least 1, given -8");
  refused("--buffer", "65537", "wanted at most 65536, given 65537");
  refused("--buffer", "9223372036854775807", "wanted at most 65536");
  refused("--rank-cap", "0", "wanted at least 1, given 0");
  refused("--rank-cap", "-1", "wanted at least 1, given -1");
  refused("--active", "0", "wanted at least 1, given 0");
  for (const char* option : {"--active", "--recompress-slack", "--tail-period"}) {
    refused(option, "-1", "wanted at least ");
    refused(option, "1048577", "wanted at most 1048576, given 1048577");
  }
  CHECK(contains(shop.bad_option({"--policy", "fixed-rank", "--rank", "0"}),
                 "--rank: wanted at least 1, given 0"));
  refused("--threads", "0", "wanted at least 1, given 0");
  refused("--threads", "-2", "wanted at least 1, given -2");
  refused("--prefill", "-1", "wanted at least 0, given -1");
  for (const char* value : {"5", "6", "9223372036854775807"}) {
    refused("--prefill", value,
            std::string("wanted fewer than the 5 tokens of the trace, given ") + value);
  }
}

TEST_CASE("policies, backends and options that do not exist are refused by name") {
  const Workshop shop;
  CHECK(contains(shop.bad_option({"--policy", "foo"}),
                 "--policy: wanted local-svd, full-svd, fixed-rank or dense-buffered, given foo"));
  CHECK(contains(shop.bad_option({"--policy", ""}), "--policy"));
  CHECK(contains(shop.bad_option({"--policy", "FULL-SVD"}), "given FULL-SVD"));
  CHECK(contains(shop.bad_option({"--storage", "fp12"}),
                 "--storage: wanted fp32, fp16, bf16 or fp8, given fp12"));
  CHECK(contains(shop.bad_option({"--storage", ""}), "--storage"));
  CHECK(contains(shop.bad_option({"--storage", "fp16", "--rounding", "up"}),
                 "--rounding: wanted nearest or stochastic, given up"));
  CHECK(contains(shop.bad_option({"--rounding", "nearest"}), "--rounding: fp32 storage"));
  CHECK(contains(shop.bad_option({"--storage", "fp32", "--rounding", "stochastic"}),
                 "--rounding: fp32 storage"));
  CHECK(
      contains(shop.bad_option({"--policy", "dense-buffered", "--storage", "bf16", "--seed", "1"}),
               "--seed: "));
  CHECK(
      contains(shop.bad_option({"--backend", "gpu"}), "--backend: wanted host or cuda, given gpu"));
  CHECK(contains(shop.bad_option({"--backend", ""}), "--backend"));
  CHECK(contains(shop.bad_option({"--backend", "cuda", "--storage", "fp16"}),
                 "--backend: cuda replays fp32 storage in this tool, given fp16"));
#ifndef SINKSTATE_REPLAY_CUDA
  CHECK(contains(shop.bad_option({"--backend", "cuda"}),
                 "--backend: this replay was built without CUDA: configure with "
                 "-DSINKSTATE_ENABLE_CUDA=ON"));
#endif
  CHECK(contains(shop.bad_option({"--nonsense"}), "--nonsense"));
  CHECK(contains(shop.bad_option({"--nonsense", "3"}), "--nonsense"));
  CHECK(contains(shop.bad_option({"-x"}), "-x"));
  CHECK(contains(shop.bad_option({"--eps", "0.1"}), "--eps"));
  CHECK(contains(shop.bad_option({"--sink=maybe"}), "--sink"));
  CHECK(contains(shop.bad_option({"--buffer", "8", "--buffer", "9"}), "--buffer"));
  CHECK(contains(shop.refusal({"two\nlines"}), "two?lines"));
  CHECK(contains(shop.bad_option({"--two\nlines"}), "--two?lines"));
  CHECK(contains(shop.refusal({}), "trace"));
  CHECK(contains(shop.refusal({"--sink"}), "trace"));
  CHECK(contains(shop.refusal({"good.safetensors", "--buffer"}), "--buffer"));
  CHECK(contains(shop.refusal({"good.safetensors", "--json"}), "--json"));
  CHECK(contains(shop.refusal({"good.safetensors", "--svg"}), "--svg"));

  // Options that the policy does not use would be a promise.
  struct Use {
    std::vector<std::string> option;
    std::vector<std::string> policies;
  };
  const Use uses[] = {{{"--epsilon", "0.1"}, {"local-svd", "full-svd"}},
                      {{"--rank-cap", "3"}, {"local-svd", "full-svd"}},
                      {{"--no-dense-fallback"}, {"local-svd", "full-svd"}},
                      {{"--active", "4"}, {"local-svd"}},
                      {{"--recompress-growth", "1.5"}, {"local-svd"}},
                      {{"--recompress-slack", "3"}, {"local-svd"}},
                      {{"--tail-share", "0.5"}, {"local-svd"}},
                      {{"--tail-period", "4"}, {"local-svd"}},
                      {{"--rank", "4"}, {"fixed-rank"}},
                      {{"--seed", "1"}, {"local-svd", "full-svd", "fixed-rank"}}};
  for (const Use& use : uses) {
    for (const std::string policy : {"local-svd", "full-svd", "fixed-rank", "dense-buffered"}) {
      std::vector<std::string> arguments = {"--policy", policy};
      arguments.insert(arguments.end(), use.option.begin(), use.option.end());
      INFO(policy << " " << use.option.front());
      if (std::find(use.policies.begin(), use.policies.end(), policy) == use.policies.end()) {
        CHECK(contains(shop.bad_option(arguments),
                       use.option.front() + ": " + policy + " has no use for it"));
      } else {
        arguments.push_back("good.safetensors");
        CHECK(shop.replay(arguments).code == 0);
      }
    }
  }
  CHECK(contains(shop.bad_option({"--sink"}), "--sink: wanted a tensor sink_direction"));
}

TEST_CASE("outputs that cannot be written are refused before the work") {
  const Workshop shop;
  fs::create_directory(shop.directory / "folder");
  write_file(shop.directory / "file", "a file");
  write_file(shop.directory / "kept.json", "kept");
  write_file(shop.directory / "kept.safetensors", "kept");
  const std::string long_name(300, 'x');
  for (const char* option : {"--json", "--outputs", "--svg"}) {
    const std::string other = option == std::string("--json") ? "--outputs" : "--json";
    for (const std::string& path :
         {std::string("missing/file"), std::string("folder"), std::string("folder/"),
          std::string("file/x"), std::string("/dev/null"), std::string("."), long_name}) {
      const std::string error =
          shop.refusal({"good.safetensors", option, path, other, "kept.json"});
      INFO(error);
      CHECK(contains(error, path + ": cannot be written: "));
    }
    CHECK(contains(shop.refusal({"good.safetensors", option, ""}),
                   std::string(option) + ": wanted a path"));
    CHECK(contains(shop.refusal({"good.safetensors", option, "kept.json", option, "x.json"}),
                   option));
    // Its own input.
    for (const char* path :
         {"good.safetensors", "./good.safetensors", "folder/../good.safetensors"}) {
      CHECK(contains(shop.refusal({"good.safetensors", option, path}),
                     std::string(option) + ": wanted a file of its own"));
    }
  }
  fs::create_symlink("good.safetensors", shop.directory / "link");
  CHECK(contains(shop.refusal({"good.safetensors", "--json", "link"}),
                 "--json: wanted a file of its own"));
  for (const char* path : {"new", "./new", "folder/../new"}) {
    for (const char* option : {"--json", "--outputs"}) {
      CHECK(contains(shop.refusal({"good.safetensors", option, "new", "--svg", path}),
                     "--svg: wanted a file of its own"));
    }
    CHECK(contains(shop.refusal({"good.safetensors", "--json", "new", "--outputs", path}),
                   "--json: wanted a file of its own"));
  }
  CHECK(contains(shop.refusal({"good.safetensors", "good.safetensors", "--outputs", "new"}),
                 "--outputs: wanted one trace, given 2"));

  // A disk that fills up, here a limit of the size of files.
  save_trace(shop.directory / "long.safetensors", [] {
    Trace trace = small_trace();
    for (auto* values : {&trace.q, &trace.k, &trace.v, &trace.log_decay, &trace.beta}) {
      const std::vector<float> once = *values;
      for (int i = 1; i < 400; ++i) values->insert(values->end(), once.begin(), once.end());
    }
    trace.tokens *= 400;
    return trace;
  }());
  const std::string error = shop.refusal_of(
      "trap '' XFSZ; ulimit -f 16; " +
      command_line({"long.safetensors", "--outputs", "kept.safetensors", "--json", "kept.json"}));
  CHECK(contains(error, "kept.safetensors: cannot be written: "));
}

TEST_CASE("several traces are one job") {
  const Workshop shop;
  write_file(shop.directory / "bad.safetensors", "not a trace");
  write_file(shop.directory / "kept.json", "kept");
  CHECK(contains(shop.refusal({"good.safetensors", "bad.safetensors", "--json", "report.json"}),
                 "bad.safetensors: "));
  CHECK(contains(shop.refusal({"good.safetensors", "bad.safetensors", "--json", "kept.json"}),
                 "bad.safetensors: "));

  Trace trace = small_trace();
  trace.state_end.assign(24, 1.0f);  // only the replay itself finds out
  save_trace(shop.directory / "wrong.safetensors", trace);
  CHECK(contains(shop.refusal({"good.safetensors", "wrong.safetensors", "--json", "kept.json"}),
                 "wrong.safetensors: state_end"));

  const Run run = shop.replay({"good.safetensors", "good.safetensors", "--json", "kept.json"});
  CHECK(run.code == 0);
  const Json report = Json::parse(read_file(shop.directory / "kept.json"));
  REQUIRE(report["traces"].size() == 2);
  CHECK(report["traces"][0]["total"]["rank_histogram"] ==
        report["traces"][1]["total"]["rank_histogram"]);
}

TEST_CASE("a good run prints a table, and writes what was asked for and nothing else") {
  const Workshop shop;
  const auto before = contents(shop.folder);
  Run run = shop.replay({"good.safetensors"});
  CHECK(run.code == 0);
  CHECK(run.err.empty());  // no bar either: this is no terminal
  CHECK(run.out.rfind("policy local-svd, epsilon 0.01, buffer 8\n", 0) == 0);
  CHECK(contains(run.out, "\ngood "));
  CHECK(contains(run.out, " all "));
  CHECK(run.out.find_first_of("\r\033") == std::string::npos);
  CHECK((contents(shop.folder) == before));

  write_file(shop.directory / "report.json", "what was there is replaced");
  run = shop.replay({"good.safetensors",
                     "--outputs",
                     "outputs.safetensors",
                     "--json",
                     "report.json",
                     "--buffer",
                     "2",
                     "--prefill",
                     "1",
                     "--seed",
                     "18446744073709551615",
                     "--rank-cap",
                     "9223372036854775807",
                     "--epsilon",
                     "1e-3",
                     "--threads",
                     "2147483647",
                     "--storage",
                     "fp32",
                     "--backend",
                     "host"});
  CHECK(run.code == 0);
  CHECK(run.err.empty());
  CHECK(contents(shop.folder).size() == before.size() + 2);

  const Json report = Json::parse(read_file(shop.directory / "report.json"));
  const Json& entry = report["traces"][0];
  CHECK(entry["trace"] == "good.safetensors");
  CHECK(entry["rule"] == "gated_delta");
  CHECK(entry["tokens"] == tokens);
  CHECK(entry["heads"] == value_heads);
  CHECK(entry["d_k"] == d_k);
  CHECK(entry["d_v"] == d_v);
  CHECK(entry["policy"]["seed"] == 18446744073709551615u);
  CHECK(entry["policy"]["prefill"] == 1);
  CHECK(entry["policy"]["epsilon"] == 1e-3);
  CHECK(entry["total"]["compactions"] == 2 * value_heads);
  CHECK(entry["per_head"].size() == static_cast<std::size_t>(value_heads));

  SafetensorsFile outputs(shop.directory / "outputs.safetensors");
  CHECK(outputs.metadata() ==
        std::map<std::string, std::string>{{"format", "sinkstate-outputs-1"}});
  CHECK(outputs.tensors().size() == 2);
  CHECK(outputs.info("output").shape == std::vector<std::size_t>{tokens, value_heads, d_v});
  CHECK(outputs.info("state").shape == std::vector<std::size_t>{value_heads, d_k, d_v});
  CHECK(outputs.float_type("output") == FloatType::f32);
  CHECK(outputs.float_type("state") == FloatType::f32);
  CHECK(outputs.to_float("output").size() == static_cast<std::size_t>(tokens * value_heads * d_v));

  // Again, over its own outputs: the same bytes but for the times.
  const std::string first = read_file(shop.directory / "outputs.safetensors");
  run = shop.replay({"good.safetensors", "--outputs", "outputs.safetensors", "--buffer", "2",
                     "--prefill", "1", "--epsilon", "1e-3", "--threads", "1", "--seed",
                     "18446744073709551615"});
  CHECK(run.code == 0);
  CHECK((read_file(shop.directory / "outputs.safetensors") == first));
}

TEST_CASE("storage, rounding and seed are what the report says, and narrower is less") {
  const Workshop shop;
  double wide = std::numeric_limits<double>::infinity();
  for (const std::string storage : {"fp32", "bf16", "fp8"}) {
    std::vector<std::string> arguments{"good.safetensors", "--policy", "dense-buffered",
                                       "--storage",        storage,    "--json",
                                       "report.json"};
    if (storage != "fp32") {
      arguments.insert(arguments.end(), {"--rounding", "stochastic", "--seed", "5"});
    }
    const Run run = shop.replay(arguments);
    CHECK(run.code == 0);
    CHECK(contains(run.out, "fp32 storage") == false);
    const Json report = Json::parse(read_file(shop.directory / "report.json"));
    const Json& policy = report["traces"][0]["policy"];
    CHECK(policy["storage"] == storage);
    CHECK(policy["rounding"] == (storage == "fp32" ? "nearest" : "stochastic"));
    if (storage != "fp32") {
      CHECK(policy["seed"] == 5);
      CHECK(contains(run.out, storage + " storage rounded stochastically"));
    }
    const double bytes = report["traces"][0]["total"]["bytes_mean"];
    CHECK(bytes < wide);
    if (storage == "fp32") wide = bytes;
  }
}

TEST_CASE("a figure of two traces, beside an unchanged report") {
  const Workshop shop;
  const std::vector<std::string> traces = {"good.safetensors", "good.safetensors"};
  const auto with = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), traces.begin(), traces.end());
    const Run run = shop.replay(arguments);
    CHECK(run.code == 0);
    CHECK(run.err.empty());
    return run;
  };
  with({"--json", "without.json"});
  with({"--json", "with.json", "--svg", "figure.svg"});
  const auto rank = [&](const char* file) {
    return Json::parse(read_file(shop.directory / file))["traces"][1]["total"]["rank_histogram"];
  };
  CHECK(rank("with.json") == rank("without.json"));
  const std::string svg = read_file(shop.directory / "figure.svg");
  CHECK(svg.rfind("<svg ", 0) == 0);
  CHECK(svg.rfind("</svg>\n") == svg.size() - 7);
  const std::string polyline = "<polyline ";
  std::ptrdiff_t lines = 0;
  for (std::size_t i = svg.find(polyline); i != std::string::npos; i = svg.find(polyline, i + 1)) {
    ++lines;
  }
  CHECK(lines == 2 * 2 * 2 * value_heads);  // traces, charts, and each line again in the legend
  CHECK(contains(svg, ">&quot;good&quot;, local-svd, epsilon 0.01, buffer 8: stored rank<"));

  // The same bytes again, alone and for any number of threads.
  with({"--svg", "again.svg", "--threads", "1"});
  CHECK((read_file(shop.directory / "again.svg") == svg));
}

TEST_CASE("a profile is added, and changes nothing else") {
  const Workshop shop;
  const std::vector<std::string> common = {"good.safetensors", "--buffer", "2", "--json"};
  const auto report = [&](std::vector<std::string> more) {
    more.insert(more.begin(), common.begin(), common.end());
    const Run run = shop.replay(more);
    CHECK(run.code == 0);
    CHECK(run.err.empty());
    Json entry = Json::parse(read_file(shop.directory / "report.json"))["traces"][0];
    for (Json* figures : {&entry["total"], &entry["per_head"][0], &entry["per_head"][1],
                          &entry["per_head"][2], &entry["per_head"][3]}) {
      for (const char* time :
           {"ns_per_token_dense", "ns_per_token_step", "ns_per_token_compaction"}) {
        CHECK(figures->erase(time) == 1);
      }
    }
    return std::pair(entry, run.out);
  };
  const auto [plain, plain_table] = report({"report.json"});
  CHECK(plain.count("profile") == 0);
  CHECK(!contains(plain_table, "profile: "));

  auto [entry, table] =
      report({"report.json", "--profile", "--profile-error", "0.01", "--svg", "figure.svg"});
  const Json profile = entry["profile"];
  CHECK(entry.erase("profile") == 1);
  CHECK(entry == plain);
  REQUIRE(profile["per_head"].size() == static_cast<std::size_t>(value_heads));
  CHECK(profile["per_head"][0]["moments"].size() == 3);  // after 2, 4 and 5 tokens
  CHECK(profile["error"]["wanted"] == 0.01);
  for (const char* words :
       {"profile: energy of the vectors", "profile: the exact states", "no sink_direction",
        "profile: what the states capture", "profile: what keeps the output error at 0.01"}) {
    CHECK(contains(table, words));
  }
  CHECK(contains(read_file(shop.directory / "figure.svg"), "singular values at the end"));

  const auto without_error = report({"report.json", "--profile", "--threads", "1"});
  CHECK(without_error.first["profile"]["per_head"] == profile["per_head"]);
  CHECK(without_error.first["profile"].count("error") == 0);

  CHECK(contains(shop.bad_option({"--profile-error", "0.01"}),
                 "--profile-error: belongs to --profile, which is not given"));
  for (const char* value : {"0", "1", "-0.1", "nan", "inf", "1e-400"}) {
    CHECK(contains(shop.bad_option({"--profile", "--profile-error", value}),
                   "--profile-error: wanted a number in (0, 1), given "));
  }
  for (const char* value : {"", "x", "1%", "0,1"}) {
    CHECK(contains(shop.bad_option({"--profile", "--profile-error", value}),
                   "--profile-error: wanted a number, given "));
  }

  Trace wide = small_trace();
  wide.tokens = wide.key_heads = wide.value_heads = 1;
  wide.d_k = 1025;
  wide.q.assign(1025, 1.0f);
  wide.k = wide.q;
  wide.v.resize(d_v);
  wide.log_decay.resize(1);
  wide.beta.resize(1);
  save_trace(shop.directory / "wide.safetensors", wide);
  CHECK(contains(shop.refusal({"good.safetensors", "wide.safetensors", "--profile"}),
                 "wide.safetensors: --profile: wanted d_k and d_v of at most 1024, given 1025 and "
                 "2"));
}

TEST_CASE("numbers are read as people write them") {
  const Workshop shop;
  CHECK(contains(shop.replay({"good.safetensors", "--buffer", "010"}).out,
                 "buffer 10"));  // not octal
  CHECK(contains(shop.replay({"good.safetensors", "--epsilon", ".5"}).out, "epsilon 0.5"));
  CHECK(contains(shop.replay({"good.safetensors", "--epsilon", "0"}).out, "epsilon 0,"));
  CHECK(contains(shop.replay({"good.safetensors", "--prefill=2"}).out, "prefill 2"));
  CHECK(shop.replay({"good.safetensors", "--policy", "dense-buffered"}).code == 0);
  CHECK(shop.replay({"--buffer", "3", "--", "good.safetensors"}).code == 0);
}

TEST_CASE("tensors of no use are named, after the work") {
  const Workshop shop;
  const Trace trace = small_trace();
  const std::vector<float> one = {1.0f};
  AtomicFile file(shop.directory / "more.safetensors");
  write_safetensors(
      file, {{"format", "sinkstate-trace-1"}, {"rule", "gated_delta"}, {"head_map", "tiled"}},
      {{"q", FloatType::f32, {tokens, key_heads, d_k}, &trace.q},
       {"k", FloatType::f32, {tokens, key_heads, d_k}, &trace.k},
       {"v", FloatType::f32, {tokens, value_heads, d_v}, &trace.v},
       {"log_decay", FloatType::f32, {tokens, value_heads}, &trace.log_decay},
       {"beta", FloatType::f32, {tokens, value_heads}, &trace.beta},
       {"inital\nstate", FloatType::f32, {1}, &one}});
  file.commit();
  const Run run = shop.replay({"more.safetensors"});
  CHECK(run.code == 0);
  CHECK(run.err ==
        "replay: note: more.safetensors: tensor \"inital\\nstate\" is not part of a trace, "
        "ignored\n");
  CHECK(contains(run.out, "more"));
}

TEST_CASE("--help explains every option and succeeds") {
  const Workshop shop;
  for (const char* flag : {"--help", "-h"}) {
    const Run run = shop.replay({flag});
    CHECK(run.code == 0);
    CHECK(run.err.empty());
    for (const char* option : {"trace",
                               "--policy",
                               "--epsilon",
                               "--active",
                               "--recompress-growth",
                               "--recompress-slack",
                               "--tail-share",
                               "--tail-period",
                               "--buffer",
                               "--rank",
                               "--rank-cap",
                               "--no-dense-fallback",
                               "--sink",
                               "--prefill",
                               "--seed",
                               "--threads",
                               "--outputs",
                               "--json",
                               "--svg",
                               "--profile",
                               "--profile-error",
                               "--storage",
                               "--rounding",
                               "--backend"}) {
      CHECK(contains(run.out, option));
    }
    CHECK(contains(run.out, "docs/traces.md"));
  }
}

TEST_CASE("a table that cannot be printed is an error") {
  if (!fs::exists("/dev/full")) return;
  const Workshop shop;
  const Run run = shell(shop.folder, command_line({"good.safetensors"}) + " >/dev/full");
  CHECK(run.code == 1);
  CHECK(run.err == "replay: standard output: the table cannot be written\n");
}

TEST_CASE("a bar is drawn on a terminal, and wiped") {
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  if (terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) {
    WARN("no pseudo-terminal here: not tested");
    return;
  }
  const std::string name = ptsname(terminal);
  const int slave =
      open(name.c_str(), O_RDWR | O_NOCTTY);  // open meanwhile, so that what is written stays
  REQUIRE(slave >= 0);
  const Workshop shop;
  const Run run =
      shell(shop.folder, command_line({"good.safetensors"}) + " 2>" + shell_quote(name));
  CHECK(run.code == 0);
  CHECK(contains(run.out, "good"));
  CHECK(run.out.find_first_of("\r\033") == std::string::npos);
  std::string drawn(4096, '\0');
  const auto count = read(terminal, &drawn[0], drawn.size());
  REQUIRE(count > 0);
  drawn.resize(static_cast<std::size_t>(count));
  CHECK(contains(drawn, "\r["));
  CHECK(contains(drawn, "%"));
  CHECK(drawn.substr(drawn.size() - 4) == "\r\033[K");
  close(slave);
  close(terminal);
}
