// docs/traces.md against what it describes: its tables against the reader, the report and the
// outputs file, and its Python block against both, where python3 has torch and safetensors.
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "replay/error_ladder.hpp"
#include "replay/profile.hpp"
#include "replay/replay.hpp"
#include "replay/report.hpp"
#include "replay/safetensors.hpp"
#include "replay/trace.hpp"
#include "support/catch.hpp"
#include "support/temporary_directory.hpp"

using namespace sinkstate::tools;
using sinkstate::testing::read_file;
using sinkstate::testing::TemporaryDirectory;
using sinkstate::testing::write_file;
using Json = nlohmann::json;

namespace {

const std::string& document() {
  static const std::string text = read_file(SINKSTATE_TEST_DATA "/../../docs/traces.md");
  return text;
}

// From a heading up to the next of the same or a higher level.
std::string section(const std::string& heading) {
  const std::string start = "\n" + heading + "\n";
  const std::size_t begin = document().find(start);
  REQUIRE(begin != std::string::npos);
  std::size_t end = document().size();
  for (std::string level = "\n# "; level.size() <= heading.find(' ') + 2; level.insert(1, "#")) {
    end = std::min(end, document().find(level, begin + start.size()));
  }
  return document().substr(begin, end - begin);
}

using Row = std::vector<std::string>;

// The rows of every table of a text, without heads and rules.
std::vector<std::vector<Row>> tables(const std::string& text) {
  std::vector<std::vector<Row>> found;
  std::istringstream lines(text);
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    const bool row = !line.empty() && line.front() == '|';
    if (row && !inside) found.emplace_back();
    inside = row;
    if (!row) continue;
    Row cells;
    std::string cell;
    for (std::size_t i = 1; i < line.size(); ++i) {
      if (line[i] == '|' && line[i - 1] != '\\') {
        const std::size_t first = cell.find_first_not_of(' ');
        cells.push_back(first == std::string::npos
                            ? ""
                            : cell.substr(first, cell.find_last_not_of(' ') + 1 - first));
        cell.clear();
      } else {
        cell += line[i];
      }
    }
    found.back().push_back(cells);
  }
  for (std::vector<Row>& table : found) {
    REQUIRE(table.size() > 2);
    table.erase(table.begin(), table.begin() + 2);
  }
  return found;
}

// What stands between backquotes.
std::vector<std::string> code(const std::string& text) {
  std::vector<std::string> pieces;
  for (std::size_t begin = text.find('`'); begin != std::string::npos;) {
    const std::size_t end = text.find('`', begin + 1);
    REQUIRE(end != std::string::npos);
    pieces.push_back(text.substr(begin + 1, end - begin - 1));
    begin = text.find('`', end + 1);
  }
  return pieces;
}

std::string name_in(const std::string& cell) {
  const std::vector<std::string> pieces = code(cell);
  REQUIRE(pieces.size() == 1);
  return pieces.front();
}

std::set<std::string> first_column(const std::vector<Row>& table) {
  std::set<std::string> names;
  for (const Row& row : table) CHECK(names.insert(name_in(row.front())).second);
  return names;
}

std::set<std::string> keys_of(const Json& object) {
  std::set<std::string> keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

// "[T, Hv, d_v]" with sizes of no two axes alike.
using Shape = std::vector<std::size_t>;
const std::map<std::string, std::size_t> sizes = {
    {"T", 7}, {"Hk", 2}, {"Hv", 4}, {"d_k", 5}, {"d_v", 3}};

Shape shape_of(const std::string& text) {
  REQUIRE(text.size() > 2);
  Shape shape;
  std::istringstream axes(text.substr(1, text.size() - 2));
  for (std::string axis; std::getline(axes >> std::ws, axis, ',');) shape.push_back(sizes.at(axis));
  return shape;
}

// The tensors of the document, for one rule.
struct Field {
  Shape shape;
  bool needed = false;
};

std::map<std::string, Field> fields_for(const std::string& rule) {
  std::map<std::string, Field> fields;
  const std::vector<Row> table = tables(section("### Tensors")).front();
  for (const Row& row : table) {
    REQUIRE(row.size() == 4);
    // "`[T, Hv]`, for `kimi_delta` `[T, Hv, d_k]`"
    const std::vector<std::string> shapes = code(row[1]);
    std::string shape = shapes.front();
    for (std::size_t i = 1; i + 1 < shapes.size(); i += 2) {
      if (shapes[i] == rule) shape = shapes[i + 1];
    }
    REQUIRE((row[2] == "yes" || row[2] == "no"));
    fields[name_in(row[0])] = {shape_of(shape), row[2] == "yes"};
  }
  return fields;
}

std::map<std::string, std::vector<std::string>> metadata_values() {
  std::map<std::string, std::vector<std::string>> values;
  const std::vector<Row> table = tables(section("### Metadata")).front();
  for (const Row& row : table) {
    values[name_in(row[0])] = code(row[1]);
  }
  return values;
}

// The error with which a trace of these fields is refused, empty when it is not.
std::string error_of(const std::map<std::string, Field>& fields,
                     const std::map<std::string, std::string>& metadata, FloatType type) {
  const TemporaryDirectory directory;
  std::map<std::string, std::vector<float>> values;
  std::vector<OutputTensor> tensors;
  for (const auto& [name, field] : fields) {
    std::size_t count = 1;
    for (const std::size_t extent : field.shape) count *= extent;
    values[name].assign(count, -0.5f);
    tensors.push_back({name, type, field.shape, &values[name]});
  }
  AtomicFile file(directory / "trace.safetensors");
  write_safetensors(file, metadata, tensors);
  file.commit();
  try {
    const Trace trace = load_trace(directory / "trace.safetensors");
    return trace.ignored.empty() ? "" : "ignored: " + trace.ignored.front();
  } catch (const ToolError& error) {
    return error.what();
  }
}

Trace full_trace(Rule rule) {
  const auto size = [](const char* axis) { return static_cast<std::ptrdiff_t>(sizes.at(axis)); };
  const auto filled = [](std::ptrdiff_t count, float value) {
    return std::vector<float>(static_cast<std::size_t>(count), value);
  };
  Trace trace;
  trace.rule = rule;
  trace.tokens = size("T");
  trace.key_heads = size("Hk");
  trace.value_heads = size("Hv");
  trace.d_k = size("d_k");
  trace.d_v = size("d_v");
  trace.q = trace.k = filled(trace.tokens * trace.key_heads * trace.d_k, 0.25f);
  trace.v = filled(trace.tokens * trace.value_heads * trace.d_v, 1.0f);
  trace.log_decay = filled(trace.tokens * trace.value_heads * trace.decays_per_token(), -0.5f);
  trace.beta = filled(trace.tokens * trace.value_heads, 0.5f);
  trace.initial_state = filled(trace.value_heads * trace.d_k * trace.d_v, 0.0f);
  trace.sink_direction = filled(trace.value_heads * trace.d_v, 1.0f);
  return trace;
}

int run(const std::string& command) {
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string python_block() {
  const std::string fence = "\n```python\n";
  const std::size_t begin = document().find(fence);
  REQUIRE(begin != std::string::npos);
  REQUIRE(document().find(fence, begin + 1) == std::string::npos);
  const std::size_t end = document().find("\n```\n", begin + fence.size());
  REQUIRE(end != std::string::npos);
  return document().substr(begin + fence.size(), end + 1 - begin - fence.size());
}

// Calls what the document defines as its text says, with kernels that are the recurrences
// themselves in float64. Leaves, per case, a trace and what its kernel returned:
// "NAME.safetensors", "NAME.result.safetensors".
const char* const driver = R"(
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from capture import l2norm, recording_delta_rule, recording_mamba2, save_trace

torch.manual_seed(1)
T, HK, HV, K, V = 40, 2, 4, 6, 5


def recurrence(name, q, k, v, log_decay, beta, delta, state=None):
    q, k, v, log_decay, beta = (x[0].double() for x in (q, k, v, log_decay, beta))
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q, k))
    S = torch.zeros(heads, k.shape[2], v.shape[2], dtype=torch.float64) if state is None else state[0].double()
    out = []
    for t in range(v.shape[0]):
        g = log_decay[t].exp()
        S = S * (g[:, None, None] if g.dim() == 1 else g[:, :, None])
        write = v[t] - torch.einsum("hkv,hk->hv", S, k[t]) if delta else v[t]
        S = S + torch.einsum("h,hk,hv->hkv", beta[t], k[t], write)
        out.append(torch.einsum("hkv,hk->hv", S, q[t]))
    save_file({"output": torch.stack(out).float(), "state": S.float().contiguous()}, name + ".result.safetensors")
    return torch.stack(out)[None], S[None]


# A kernel as FLA's: everything inside, state with the values first.
def kernel(name):
    def call(q, k, v, g, beta, scale=None, initial_state=None, use_qk_l2norm_in_kernel=False,
             use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
             A_log=None, dt_bias=None, state_v_first=False, output_final_state=False, cu_seqlens=None):
        if use_qk_l2norm_in_kernel:
            q, k = (x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if use_gate_in_kernel:
            a = A_log.double().exp()
            x = F.softplus(g.double() + dt_bias.double().view(g.shape[2:]))
            g = -x * (a if g.dim() == 3 else a[:, None])
        if use_beta_sigmoid_in_kernel:
            beta = beta.double().sigmoid() * (2 if allow_neg_eigval else 1)
        if initial_state is not None and state_v_first:
            initial_state = initial_state.transpose(2, 3)
        q = q.double() * (k.shape[-1] ** -0.5 if scale is None else scale)
        return recurrence(name, q, k, v, g, beta, True, initial_state)
    return call


def tensors(heads_k=HK):
    return torch.randn(1, T, heads_k, K), torch.randn(1, T, heads_k, K), torch.randn(1, T, HV, V)


# transformers: positional, heads repeated, gates outside.
q, k, v = tensors(HV)
rule = recording_delta_rule(kernel("transformers"), "gated_delta", "transformers{}.safetensors".replace("{}", ""))
o, s = rule(q, k, v, g=-F.softplus(torch.randn(1, T, HV)), beta=torch.rand(1, T, HV), initial_state=None,
            output_final_state=True, use_qk_l2norm_in_kernel=True)
assert o.shape == (1, T, HV, V) and s.shape == (1, HV, K, V)

# FLA: by name, fewer key heads, gates inside; two layers through one function.
rule = recording_delta_rule(kernel("fla"), "gated_delta", "fla.{}.safetensors")
for layer in range(2):
    q, k, v = tensors()
    rule(q=q, k=k, v=v, g=torch.randn(1, T, HV), beta=torch.randn(1, T, HV), A_log=torch.randn(HV),
         dt_bias=torch.randn(HV), initial_state=torch.randn(1, HV, V, K), use_qk_l2norm_in_kernel=True,
         use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True,
         cu_seqlens=torch.tensor([0, T]))
    import os
    os.rename("fla.result.safetensors", f"fla.{layer}.result.safetensors")
try:
    rule(q=q, k=k, v=v, g=k, beta=k, cu_seqlens=torch.tensor([0, 3, T]))
    raise SystemExit("several sequences were taken for one")
except NotImplementedError:
    pass

# KDA, inputs in 16 bits.
q, k, v = (x.bfloat16() for x in tensors(HV))
rule = recording_delta_rule(kernel("kda"), "kimi_delta", "kda.safetensors")
rule(q=q, k=k, v=v, g=torch.randn(1, T, HV, K), beta=torch.rand(1, T, HV), A_log=torch.randn(HV),
     dt_bias=torch.randn(HV * K), scale=0.3, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True)
assert load_file("kda.safetensors")["v"].dtype == torch.bfloat16


# Mamba-2, raw steps inside.
def scan(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, dt_softplus=False,
         dt_limit=(0.0, float("inf"))):
    dt = F.softplus(dt.double() + dt_bias.double()).clamp(*dt_limit) if dt_softplus else dt.double()
    return recurrence("mamba2", C, B, x, dt * A.double(), dt, False, initial_states.transpose(2, 3))


recording_mamba2(scan, "mamba2.safetensors")(
    torch.randn(1, T, HV, V), torch.randn(1, T, HV), -torch.rand(HV).exp(), B=torch.randn(1, T, HK, K),
    C=torch.randn(1, T, HK, K), chunk_size=16, D=torch.ones(HV), dt_bias=torch.randn(HV),
    initial_states=torch.randn(1, HV, V, K), dt_softplus=True, dt_limit=(0.01, 1.0))

# Your own layer, without a batch axis, tiled.
q, k, v = (x[0] for x in tensors())
a, b, A_log, dt_bias = torch.randn(T, HV), torch.randn(T, HV), torch.randn(HV), torch.randn(HV)
decay, beta = -A_log.float().exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()
q, k = l2norm(q), l2norm(k)
_, state = recurrence("own", q.repeat(1, HV // HK, 1)[None], k.repeat(1, HV // HK, 1)[None], v[None], decay[None],
                      beta[None], True)
save_trace("own.safetensors", "gated_delta", q, k, v, log_decay=decay, beta=beta, head_map="tiled", source="a layer",
           state_end=state)
for bad in (lambda: save_trace("bad.safetensors", "gated_delta", q, k, v, decay[:, :, None, None], beta),
            lambda: save_trace("bad.safetensors", "gated_delta", torch.stack([q, q]), k, v, decay, beta)):
    try:
        bad()
        raise SystemExit("a wrong shape was taken")
    except ValueError:
        pass
)";

}  // namespace

TEST_CASE("the tensors of the document are those of the reader") {
  const auto values = metadata_values();
  REQUIRE(values.at("format").size() == 1);
  CHECK(values.at("rule") == std::vector<std::string>{"mamba2", "gated_delta", "kimi_delta"});
  CHECK(values.at("head_map") == std::vector<std::string>{"interleaved", "tiled"});
  const std::string types = section("### Tensors");
  CHECK(types.find("F32, F16 or BF16") != std::string::npos);

  for (const std::string& rule : values.at("rule")) {
    const std::map<std::string, Field> fields = fields_for(rule);
    REQUIRE(fields.size() == 8);
    for (const std::string& map : values.at("head_map")) {
      const std::map<std::string, std::string> metadata = {
          {"format", values.at("format").front()}, {"rule", rule}, {"head_map", map}};
      for (const FloatType type : {FloatType::f32, FloatType::f16, FloatType::bf16}) {
        CHECK(error_of(fields, metadata, type).empty());
      }
      for (const auto& [name, field] : fields) {
        INFO(rule << ", " << name);
        auto changed = fields;
        changed.erase(name);
        CHECK(error_of(changed, metadata, FloatType::f32).empty() == !field.needed);
        // The axes in another order, and one more.
        changed = fields;
        std::reverse(changed[name].shape.begin(), changed[name].shape.end());
        CHECK(!error_of(changed, metadata, FloatType::f32).empty());
        changed = fields;
        changed[name].shape.push_back(1);
        CHECK(!error_of(changed, metadata, FloatType::f32).empty());
      }
    }
  }
}

TEST_CASE("the metadata of the document is that of the reader") {
  const std::vector<Row> table = tables(section("### Metadata")).front();
  std::map<std::string, std::string> metadata = {
      {"format", "sinkstate-trace-1"}, {"rule", "mamba2"}, {"head_map", "tiled"}, {"source", "x"}};
  REQUIRE(table.size() == metadata.size());
  const auto fields = fields_for("mamba2");
  for (const Row& row : table) {
    const std::string key = name_in(row[0]);
    INFO(key);
    REQUIRE(metadata.count(key) == 1);
    auto without = metadata;
    without.erase(key);
    CHECK(error_of(fields, without, FloatType::f32).empty() == (row[2] == "no"));
    if (code(row[1]).empty()) continue;
    auto other = metadata;
    other[key] = "something else";
    CHECK(!error_of(fields, other, FloatType::f32).empty());
  }
}

TEST_CASE("what the writer writes is what the document names") {
  const TemporaryDirectory directory;
  for (const Rule rule : {Rule::mamba2, Rule::gated_delta, Rule::kimi_delta}) {
    Trace trace = full_trace(rule);
    trace.state_end = trace.initial_state;
    save_trace(directory / "trace.safetensors", trace);
    const SafetensorsFile file(directory / "trace.safetensors");
    const auto fields = fields_for(to_string(rule));
    CHECK(file.tensors().size() == fields.size());
    for (const auto& [name, tensor] : file.tensors()) {
      INFO(name);
      REQUIRE(fields.count(name) == 1);
      CHECK(tensor.shape == fields.at(name).shape);
    }
    const auto values = metadata_values();
    CHECK(file.metadata().size() == values.size());
    for (const auto& [key, value] : file.metadata()) CHECK(values.count(key) == 1);
  }
}

TEST_CASE("the keys of the document are those of the report") {
  const std::vector<std::vector<Row>> documented = tables(section("## The report"));
  REQUIRE(documented.size() == 3);
  std::set<std::string> policy_keys;
  for (const Compaction compaction : all_compactions) {
    ReplayOptions options;
    options.compaction = compaction;
    const TraceReport report =
        replay("trace", full_trace(Rule::mamba2), options, nullptr, [](std::ptrdiff_t) {});
    const Json object = Json::parse(json({report}, options));
    CHECK(keys_of(object) == std::set<std::string>{"traces"});
    const Json& entry = object["traces"][0];
    CHECK(first_column(documented[0]) == keys_of(entry));
    CHECK(first_column(documented[2]) == keys_of(entry["total"]));
    CHECK(first_column(documented[2]) == keys_of(entry["per_head"][0]));
    for (const Row& row : documented[1]) {
      INFO(row.front());
      // "(`a`, `b`)" at the end: of these policies only.
      const std::size_t users = row[1].rfind("(`");
      const std::string name = std::string("`") + to_string(compaction) + "`";
      CHECK(entry["policy"].contains(name_in(row.front())) ==
            (users == std::string::npos || row[1].find(name, users) != std::string::npos));
    }
    policy_keys.merge(keys_of(entry["policy"]));
  }
  CHECK(first_column(documented[1]) == policy_keys);
}

TEST_CASE("the keys of the document are those of the profile") {
  const std::vector<std::vector<Row>> documented = tables(section("## The profile"));
  REQUIRE(documented.size() == 5);  // the last compares numbers
  Trace trace = full_trace(Rule::mamba2);
  ReplayOptions options;
  options.series = true;
  const auto progress = [](std::ptrdiff_t) {};
  for (const bool sink : {true, false}) {
    if (!sink) trace.sink_direction.clear();
    const TraceReport report = replay("trace", trace, options, nullptr, progress);
    TraceProfile profile = sinkstate::tools::profile("trace", trace, options, report, progress);
    profile.error = climb("trace", trace, options, 0.01, progress);
    const Json entry = Json::parse(json({report}, options, {profile}))["traces"][0]["profile"];
    CHECK(first_column(documented[0]) == keys_of(entry));
    const Json& head = entry["per_head"][0];
    auto head_keys = first_column(documented[1]);
    auto moment_keys = first_column(documented[3]);
    if (!sink) {
      CHECK(head_keys.erase("content_singular_values") == 1);
      for (const char* key : {"sink", "sink_cosine", "content_r99"}) moment_keys.erase(key);
    }
    CHECK(head_keys == keys_of(head));
    for (const char* vectors : {"q", "k", "v"}) {
      CHECK(first_column(documented[2]) == keys_of(head[vectors]));
    }
    CHECK(moment_keys == keys_of(head["moments"][0]));

    // Those of the error stand in the text.
    const std::vector<std::string> words = code(section("## The profile"));
    const auto named = [&](const Json& object) {
      for (const std::string& key : keys_of(object)) {
        INFO(key);
        CHECK(std::count(words.begin(), words.end(), key) > 0);
      }
    };
    named(entry["error"]);
    for (const char* ladder : {"epsilon", "rank"}) {
      named(entry["error"][ladder]);
      named(entry["error"][ladder]["tried"][0]);
    }
  }
}

TEST_CASE("the tensors of the outputs file are as documented") {
  const TemporaryDirectory directory;
  const std::string path = (directory / "trace.safetensors").string();
  const std::string outputs = (directory / "outputs.safetensors").string();
  save_trace(path, full_trace(Rule::kimi_delta));
  REQUIRE(run("'" SINKSTATE_TEST_REPLAY "' '" + path + "' --outputs '" + outputs +
              "' >/dev/null") == 0);
  const SafetensorsFile file(outputs);
  const std::vector<Row> table = tables(section("## The outputs file")).front();
  CHECK(table.size() == file.tensors().size());
  for (const Row& row : table) {
    const TensorInfo& tensor = file.info(name_in(row[0]));
    CHECK(tensor.shape == shape_of(code(row[1]).front()));
    CHECK(tensor.dtype == row[2]);
  }
  const std::vector<std::string> words = code(section("## The outputs file"));
  CHECK(std::count(words.begin(), words.end(), file.metadata().at("format")) == 1);
}

TEST_CASE("the refusal in the document is the one that is printed") {
  const TemporaryDirectory directory;
  Trace trace = full_trace(Rule::mamba2);
  trace = cut(trace, 3, {0, 1, 2, 3});
  save_trace(directory / "trace.safetensors", trace);
  const std::string text = section("## Bad input");
  const std::string prompt = "\n    $ replay ";
  const std::size_t begin = text.find(prompt);
  REQUIRE(begin != std::string::npos);
  const std::size_t end = text.find('\n', begin + 1);
  const std::string arguments = text.substr(begin + prompt.size(), end - begin - prompt.size());
  const std::string expected = text.substr(end + 5, text.find('\n', end + 1) - end - 5);
  const std::string folder = (directory / "").string();
  CHECK(run("cd '" + folder + "' && '" SINKSTATE_TEST_REPLAY "' " + arguments + " 2>error") == 2);
  CHECK(read_file(directory / "error") == expected + "\n");
}

TEST_CASE("the Python of the document captures what replay reproduces") {
  // SINKSTATE_TEST_PYTHON: another interpreter than python3, say that of a virtual environment.
  const char* const given = std::getenv("SINKSTATE_TEST_PYTHON");
  const std::string python = given == nullptr ? "python3" : given;
  const std::string block = python_block();
  CHECK(block.find("def save_trace(path, rule, q, k, v, log_decay, beta,") != std::string::npos);
  // Without torch too, the names that the block writes are those of the reader.
  for (const auto& [name, field] : fields_for("mamba2")) {
    CHECK(block.find("\"" + name + "\": (") != std::string::npos);
  }
  for (const auto& [key, values] : metadata_values()) {
    CHECK(block.find("\"" + key + "\": ") != std::string::npos);
  }
  CHECK(block.find("\"sinkstate-trace-1\"") != std::string::npos);

  if (run("'" + python + "' -c 'import torch, safetensors.torch' >/dev/null 2>&1") != 0) {
    std::cout << "skipped: running the Python block of docs/traces.md, as '" << python
              << "' has no torch or no safetensors\n";
    return;
  }
  const TemporaryDirectory directory;
  const std::string folder = (directory / "").string();
  write_file(directory / "capture.py", block);
  write_file(directory / "driver.py", driver);
  REQUIRE(run("cd '" + folder + "' && '" + python + "' -W ignore driver.py") == 0);

  for (const std::string name : {"transformers", "fla.0", "fla.1", "kda", "mamba2", "own"}) {
    INFO(name);
    const Trace trace = load_trace(directory / (name + ".safetensors"));
    CHECK(trace.ignored.empty());
    ReplayOptions options;
    options.epsilon = 0;
    options.dense_fallback = false;
    options.sink = !trace.sink_direction.empty();
    ReplayOutputs outputs;
    const TraceReport report = replay(name, trace, options, &outputs, [](std::ptrdiff_t) {});
    CHECK(report.total.certificate_holds);

    SafetensorsFile kernel(directory / (name + ".result.safetensors"));
    const auto distance = [](const std::vector<float>& a, const std::vector<float>& b) {
      REQUIRE(a.size() == b.size());
      double error = 0, norm = 0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        error += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
        norm += std::pow(static_cast<double>(b[i]), 2);
      }
      return std::sqrt(error / norm);
    };
    CHECK(distance(outputs.output, kernel.to_float("output")) < 1e-5);
    CHECK(distance(outputs.state, kernel.to_float("state")) < 1e-5);
  }
  CHECK(load_trace(directory / "own.safetensors").head_map == HeadMap::tiled);
  CHECK(load_trace(directory / "own.safetensors").source == "a layer");
  CHECK(!load_trace(directory / "own.safetensors").state_end.empty());
  CHECK(load_trace(directory / "fla.1.safetensors").key_heads == 2);
}
