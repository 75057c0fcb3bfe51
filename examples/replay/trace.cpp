#include "trace.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace sinkstate::tools {

namespace {

using Shape = std::vector<std::size_t>;

constexpr const char* format_name = "sinkstate-trace-1";
constexpr Rule rules[] = {Rule::mamba2, Rule::gated_delta, Rule::kimi_delta};
constexpr HeadMap head_maps[] = {HeadMap::interleaved, HeadMap::tiled};

// One tensor of a trace, for reading, checking and writing alike.
struct Field {
  const char* name;
  std::vector<float> Trace::*values;
  FloatType TraceTypes::*stored;  // null: always F32
  bool optional;
  Shape shape;
};

std::vector<Field> fields_of(const Trace& trace) {
  const auto tokens = static_cast<std::size_t>(trace.tokens);
  const auto key_heads = static_cast<std::size_t>(trace.key_heads);
  const auto value_heads = static_cast<std::size_t>(trace.value_heads);
  const auto d_k = static_cast<std::size_t>(trace.d_k);
  const auto d_v = static_cast<std::size_t>(trace.d_v);
  const Shape decays =
      trace.per_channel_decay() ? Shape{tokens, value_heads, d_k} : Shape{tokens, value_heads};
  const Shape states = {value_heads, d_k, d_v};
  return {
      {"q", &Trace::q, &TraceTypes::q, false, {tokens, key_heads, d_k}},
      {"k", &Trace::k, &TraceTypes::k, false, {tokens, key_heads, d_k}},
      {"v", &Trace::v, &TraceTypes::v, false, {tokens, value_heads, d_v}},
      {"log_decay", &Trace::log_decay, &TraceTypes::log_decay, false, decays},
      {"beta", &Trace::beta, &TraceTypes::beta, false, {tokens, value_heads}},
      {"initial_state", &Trace::initial_state, nullptr, true, states},
      {"sink_direction", &Trace::sink_direction, nullptr, true, {value_heads, d_v}},
      {"state_end", &Trace::state_end, nullptr, true, states},
  };
}

// The metadata value of `key` as one of `known`.
template <class Enum, std::size_t Count>
Enum read_choice(const SafetensorsFile& file, const char* key, const Enum (&known)[Count]) {
  const auto given = file.metadata().find(key);
  std::string wanted;
  for (const Enum choice : known) {
    if (given != file.metadata().end() && given->second == to_string(choice)) return choice;
    wanted += std::string(wanted.empty() ? "" : " or ") + to_string(choice);
  }
  throw ToolError(file.path(),
                  std::string("metadata ") + key + ": wanted " + wanted + ", given " +
                      (given == file.metadata().end() ? "none" : quote(given->second)));
}

const Shape& require_rank_3(const SafetensorsFile& file, const char* name, const char* axes) {
  const Shape& shape = file.info(name).shape;
  if (shape.size() != 3 || std::count(shape.begin(), shape.end(), 0u) > 0) {
    throw ToolError(file.path(), std::string("tensor \"") + name + "\": wanted shape " + axes +
                                     ", each at least 1, given " + to_string(shape));
  }
  return shape;
}

void read_sizes(const SafetensorsFile& file, Trace& trace) {
  const Shape& q = require_rank_3(file, "q", "[tokens, key heads, d_k]");
  const Shape& v = require_rank_3(file, "v", "[tokens, value heads, d_v]");
  trace.tokens = static_cast<std::ptrdiff_t>(q[0]);
  trace.key_heads = static_cast<std::ptrdiff_t>(q[1]);
  trace.d_k = static_cast<std::ptrdiff_t>(q[2]);
  trace.value_heads = static_cast<std::ptrdiff_t>(v[1]);
  trace.d_v = static_cast<std::ptrdiff_t>(v[2]);
  // The exact recurrence holds its states in double.
  constexpr std::size_t most = std::size_t{1} << 24;
  if (q[2] > most / v[2]) {
    throw ToolError(file.path(), "d_k x d_v: wanted a state of at most " + std::to_string(most) +
                                     " numbers, given " + std::to_string(q[2]) + " x " +
                                     std::to_string(v[2]));
  }
  if (trace.value_heads % trace.key_heads != 0) {
    throw ToolError(file.path(),
                    "heads: wanted value heads that are a multiple of the key heads, given " +
                        std::to_string(trace.value_heads) + " and " +
                        std::to_string(trace.key_heads));
  }
}

void require_shapes(const SafetensorsFile& file, Trace& trace, const std::vector<Field>& fields) {
  for (const auto& entry : file.tensors()) {
    const std::string& name = entry.first;
    const TensorInfo& tensor = entry.second;
    const auto known =
        std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return name == f.name; });
    if (known == fields.end()) {
      trace.ignored.push_back(name);
      continue;
    }
    if (tensor.shape == known->shape) continue;
    std::string hint;
    if (known->values == &Trace::log_decay) {
      hint = std::string(" (") + to_string(trace.rule) + " has one log decay per token" +
             (trace.per_channel_decay() ? ", head and key channel)" : " and head)");
    }
    throw ToolError(file.path(), "tensor " + quote(name) + ": wanted shape " +
                                     to_string(known->shape) + ", given " +
                                     to_string(tensor.shape) + hint);
  }
}

// "log_decay[12, 0]" for the element at `flat`.
std::string element_name(const Field& field, std::size_t flat) {
  std::string index;
  for (std::size_t axis = field.shape.size(); axis-- > 0;) {
    index = std::to_string(flat % field.shape[axis]) + (index.empty() ? "" : ", ") + index;
    flat /= field.shape[axis];
  }
  return std::string(field.name) + "[" + index + "]";
}

void require_values(const SafetensorsFile& file, const Trace& trace, const Field& field) {
  const std::vector<float>& values = trace.*field.values;
  const bool is_decay = field.values == &Trace::log_decay;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float x = values[i];
    const char* wanted = nullptr;
    if (is_decay) {
      if (!(x <= 0)) wanted = "at most 0 (the logarithm of the decay, not the decay)";
    } else if (!std::isfinite(x)) {
      wanted = "a finite number";
    }
    if (wanted == nullptr) continue;
    char given[32];
    std::snprintf(given, sizeof given, "%g", static_cast<double>(x));
    throw ToolError(file.path(), element_name(field, i) + ": wanted " + wanted + ", given " +
                                     (std::isnan(x) ? "NaN" : given));
  }
}

// From an array [at least count, heads, width]: [count, picked, width].
std::vector<float> gather(const std::vector<float>& from, std::ptrdiff_t count,
                          std::ptrdiff_t heads, std::ptrdiff_t width,
                          const std::vector<std::ptrdiff_t>& picked) {
  std::vector<float> part;
  for (std::ptrdiff_t i = 0; i < count; ++i) {
    for (const std::ptrdiff_t head : picked) {
      const float* row = from.data() + (i * heads + head) * width;
      part.insert(part.end(), row, row + width);
    }
  }
  return part;
}

}  // namespace

const char* to_string(Rule rule) {
  return rule == Rule::mamba2 ? "mamba2" : rule == Rule::gated_delta ? "gated_delta" : "kimi_delta";
}

const char* to_string(HeadMap map) { return map == HeadMap::interleaved ? "interleaved" : "tiled"; }

Trace load_trace(const std::filesystem::path& path) {
  SafetensorsFile file(path);
  const auto& metadata = file.metadata();
  const auto format = metadata.find("format");
  if (format == metadata.end() || format->second != format_name) {
    throw ToolError(path, std::string("metadata format: wanted ") + format_name + ", given " +
                              (format == metadata.end() ? "none" : quote(format->second)));
  }
  Trace trace;
  trace.rule = read_choice(file, "rule", rules);
  trace.head_map = read_choice(file, "head_map", head_maps);
  const auto source = metadata.find("source");
  if (source != metadata.end()) trace.source = source->second;

  read_sizes(file, trace);
  const std::vector<Field> fields = fields_of(trace);
  require_shapes(file, trace, fields);
  for (const Field& field : fields) {
    if (field.optional && !file.contains(field.name)) continue;
    if (field.stored != nullptr) trace.stored.*field.stored = file.float_type(field.name);
    trace.*field.values = file.to_float(field.name);
    require_values(file, trace, field);
  }
  return trace;
}

void save_trace(const std::filesystem::path& path, const Trace& trace) {
  AtomicFile file(path);
  save_trace(file, trace);
  file.commit();
}

void save_trace(AtomicFile& file, const Trace& trace) {
  std::vector<OutputTensor> tensors;
  for (const Field& field : fields_of(trace)) {
    const std::vector<float>& values = trace.*field.values;
    if (field.optional && values.empty()) continue;
    const FloatType type = field.stored == nullptr ? FloatType::f32 : trace.stored.*field.stored;
    tensors.push_back({field.name, type, field.shape, &values});
  }
  write_safetensors(file,
                    {{"format", format_name},
                     {"rule", to_string(trace.rule)},
                     {"head_map", to_string(trace.head_map)},
                     {"source", trace.source}},
                    std::move(tensors));
}

Trace cut(const Trace& trace, std::ptrdiff_t tokens, const std::vector<std::ptrdiff_t>& heads) {
  if (tokens < 1 || tokens > trace.tokens) {
    throw ToolError("tokens: wanted 1 to " + std::to_string(trace.tokens) + ", given " +
                    std::to_string(tokens));
  }
  if (heads.empty()) throw ToolError("heads: wanted at least one, given none");
  std::vector<std::ptrdiff_t> key_heads;
  for (const std::ptrdiff_t head : heads) {
    if (head < 0 || head >= trace.value_heads) {
      throw ToolError("heads: wanted 0 to " + std::to_string(trace.value_heads - 1) + ", given " +
                      std::to_string(head));
    }
    const std::ptrdiff_t key_head = trace.key_head(head);
    if (std::find(key_heads.begin(), key_heads.end(), key_head) == key_heads.end()) {
      key_heads.push_back(key_head);
    }
  }

  Trace part;
  part.rule = trace.rule;
  part.head_map = trace.head_map;
  part.source = trace.source;
  part.stored = trace.stored;
  part.tokens = tokens;
  part.value_heads = static_cast<std::ptrdiff_t>(heads.size());
  part.key_heads = static_cast<std::ptrdiff_t>(key_heads.size());
  part.d_k = trace.d_k;
  part.d_v = trace.d_v;

  // Where the head map leads elsewhere among the heads kept, each value head gets its own copy.
  bool same_map = part.value_heads % part.key_heads == 0;
  for (std::size_t i = 0; same_map && i < heads.size(); ++i) {
    const auto mapped = static_cast<std::size_t>(part.key_head(static_cast<std::ptrdiff_t>(i)));
    same_map = key_heads[mapped] == trace.key_head(heads[i]);
  }
  if (!same_map) {
    part.key_heads = part.value_heads;
    key_heads.clear();
    for (const std::ptrdiff_t head : heads) key_heads.push_back(trace.key_head(head));
  }

  part.q = gather(trace.q, tokens, trace.key_heads, trace.d_k, key_heads);
  part.k = gather(trace.k, tokens, trace.key_heads, trace.d_k, key_heads);
  part.v = gather(trace.v, tokens, trace.value_heads, trace.d_v, heads);
  part.log_decay =
      gather(trace.log_decay, tokens, trace.value_heads, trace.decays_per_token(), heads);
  part.beta = gather(trace.beta, tokens, trace.value_heads, 1, heads);
  if (!trace.initial_state.empty()) {
    part.initial_state =
        gather(trace.initial_state, 1, trace.value_heads, trace.d_k * trace.d_v, heads);
  }
  if (!trace.sink_direction.empty()) {
    part.sink_direction = gather(trace.sink_direction, 1, trace.value_heads, trace.d_v, heads);
  }
  return part;
}

}  // namespace sinkstate::tools
