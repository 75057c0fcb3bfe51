#include "weights.hpp"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

namespace sinkstate::hybrid_lm {
namespace {

using tools::ToolError;
using Json = nlohmann::json;

Mixer mixer_of(const std::filesystem::path& path, const std::string& name) {
  for (const Mixer mixer :
       {Mixer::gated_delta, Mixer::kimi_delta, Mixer::mamba2, Mixer::attention}) {
    if (name == to_string(mixer)) return mixer;
  }
  throw ToolError(path,
                  "/layer_kinds: wanted gdn, kda, mamba2 or attn, given " + tools::quote(name));
}

/// What this program computes and a configuration could say otherwise.
const char* const expected[][2] = {
    {"/mlp/kind", "\"swiglu\""},
    {"/mlp/bias", "false"},
    {"/norm/kind", "\"rmsnorm\""},
    {"/norm/placement", "\"pre\""},
    {"/norm/eps", "1e-06"},
    {"/qk_l2norm_eps", "1e-06"},
    {"/tie_embeddings", "true"},
    {"/conv_kernel", "4"},
    {"/vocab", "\"bytes\""},
    {"/vocab_size", "256"},
    {"/gdn/conv_bias", "false"},
    {"/gdn/decay", "\"scalar per value head\""},
    {"/gdn/order", "\"decay, then delta correction, then read\""},
    {"/gdn/output_gate", "\"silu\""},
    {"/kda/conv_bias", "false"},
    {"/kda/decay", "\"per key channel\""},
    {"/kda/order", "\"decay, then delta correction, then read\""},
    {"/kda/output_gate", "\"sigmoid\""},
    {"/kda/lower_bound", "null"},
    {"/mamba2/conv_bias", "true"},
    {"/mamba2/dt_limit", "null"},
    {"/mamba2/norm_before_gate", "false"},
    {"/attn/rope_style", "\"rotate_half\""},
    {"/attn/bias", "false"},
};

}  // namespace

const char* to_string(Mixer mixer) {
  return mixer == Mixer::gated_delta  ? "gdn"
         : mixer == Mixer::kimi_delta ? "kda"
         : mixer == Mixer::mamba2     ? "mamba2"
                                      : "attn";
}

const HeadShape& Config::heads(Mixer mixer) const {
  return mixer == Mixer::gated_delta  ? gated_delta
         : mixer == Mixer::kimi_delta ? kimi_delta
                                      : mamba2;
}

Config load_config(const std::filesystem::path& path) {
  std::ifstream stream(path);
  if (!stream) throw ToolError(path, "cannot be read");
  const Json json = Json::parse(stream, nullptr, false);
  if (!json.is_object()) throw ToolError(path, "wanted a JSON object");
  const auto at = [&](const char* pointer) -> const Json& {
    const Json::json_pointer where(pointer);
    if (!json.contains(where)) throw ToolError(path, std::string(pointer) + ": wanted, not there");
    return json[where];
  };
  const auto size = [&](const char* pointer) {
    const Json& value = at(pointer);
    if (!value.is_number_integer() || value < 1 || value > 65536) {
      throw ToolError(path, std::string(pointer) + ": wanted a number in [1, 65536], given " +
                                tools::quote(value.dump()));
    }
    return value.get<int>();
  };
  const auto equal = [&](const char* pointer, const Json& wanted) {
    if (at(pointer) == wanted) return;
    throw ToolError(path, std::string(pointer) + ": wanted " + wanted.dump() + ", given " +
                              tools::quote(at(pointer).dump()));
  };
  const auto divides = [&](const char* pointer, int parts, int whole) {
    if (whole % parts == 0) return;
    throw ToolError(path, std::string(pointer) + ": wanted a divisor of " + std::to_string(whole) +
                              ", given " + std::to_string(parts));
  };
  // 1 / sqrt(width), as far as a configuration spells it out.
  const auto scale = [&](const char* pointer, int width) {
    const Json& value = at(pointer);
    const double wanted = 1 / std::sqrt(width);
    if (value.is_number() && std::abs(value.get<double>() - wanted) <= 1e-6 * wanted) return;
    throw ToolError(path, std::string(pointer) + ": wanted " + std::to_string(wanted) + ", given " +
                              tools::quote(value.dump()));
  };
  for (const auto& [pointer, wanted] : expected) equal(pointer, Json::parse(wanted));
  Config config;
  config.vocabulary = size("/vocab_size");
  config.width = size("/d_model");
  config.hidden = size("/mlp/hidden");
  const Json& kinds = at("/layer_kinds");
  if (!kinds.is_array() || kinds.empty()) throw ToolError(path, "/layer_kinds: wanted a list");
  equal("/n_layers", kinds.size());
  for (const Json& kind : kinds) {
    config.layers.push_back(mixer_of(path, kind.is_string() ? kind.get<std::string>() : ""));
  }
  config.gated_delta = {size("/gdn/v_heads"), size("/gdn/k_heads"), size("/gdn/d_k"),
                        size("/gdn/d_v")};
  config.kimi_delta = {size("/kda/heads"), size("/kda/heads"), size("/kda/d_k"), size("/kda/d_v")};
  config.mamba2 = {size("/mamba2/heads"), size("/mamba2/n_groups"), size("/mamba2/d_state"),
                   size("/mamba2/head_dim")};
  divides("/gdn/k_heads", config.gated_delta.key_heads, config.gated_delta.heads);
  divides("/mamba2/n_groups", config.mamba2.key_heads, config.mamba2.heads);
  const auto head_map = [](const HeadShape& shape) {
    return "h // " + std::to_string(shape.heads / shape.key_heads);
  };
  equal("/gdn/value_head_to_key_head", head_map(config.gated_delta));
  equal("/mamba2/head_to_group", head_map(config.mamba2));
  for (const Mixer mixer : {Mixer::gated_delta, Mixer::kimi_delta, Mixer::mamba2}) {
    const HeadShape& shape = config.heads(mixer);
    constexpr int most = 1 << 20;  // sizes are ints
    if (shape.heads <= most / shape.d_k && shape.heads <= most / shape.d_v) continue;
    throw ToolError(path, "wanted layers of at most " + std::to_string(most) + " channels, given " +
                              std::to_string(shape.heads) + " heads of " +
                              std::to_string(shape.d_k) + " x " + std::to_string(shape.d_v));
  }
  scale("/gdn/q_scale", config.gated_delta.d_k);
  scale("/kda/q_scale", config.kimi_delta.d_k);
  config.kimi_decay_rank = size("/kda/f_rank");
  config.kimi_gate_rank = size("/kda/g_rank");
  const int inner = config.mamba2.heads * config.mamba2.d_v;
  equal("/mamba2/d_inner", inner);
  config.norm_groups = size("/mamba2/norm_groups");
  divides("/mamba2/norm_groups", config.norm_groups, inner);
  config.attention_heads = size("/attn/heads");
  config.attention_width = size("/attn/head_dim");
  if (config.attention_width % 2 != 0 || config.attention_width > 4096) {
    throw ToolError(path, "/attn/head_dim: wanted an even number up to 4096, given " +
                              std::to_string(config.attention_width));
  }
  scale("/attn/scale", config.attention_width);
  const Json& theta = at("/attn/rope_theta");
  if (!theta.is_number() || !(theta.get<double>() > 1)) {
    throw ToolError(path, "/attn/rope_theta: wanted a number above 1");
  }
  config.rope_theta = theta.get<double>();
  return config;
}

std::vector<float> Weights::take(const std::string& name, const std::vector<std::size_t>& shape) {
  const tools::TensorInfo& info = file_.info(name);
  used_.insert(name);
  if (info.shape != shape) {
    throw ToolError(file_.path(), "tensor " + tools::quote(name) + ": wanted shape " +
                                      tools::to_string(shape) + ", given " +
                                      tools::to_string(info.shape));
  }
  std::vector<float> values = file_.to_float(name);
  for (const float value : values) {
    if (!std::isfinite(value)) {
      throw ToolError(file_.path(), "tensor " + tools::quote(name) + ": wanted finite numbers");
    }
  }
  return values;
}

void Weights::require_all_used() const {
  for (const auto& tensor : file_.tensors()) {
    if (used_.count(tensor.first) > 0) continue;
    throw ToolError(file_.path(), "tensor " + tools::quote(tensor.first) +
                                      ": the configuration has no use for it");
  }
}

Matrix Weights::matrix(const std::string& name, int rows, int cols) {
  const std::vector<float> values =
      take(name, {static_cast<std::size_t>(rows), static_cast<std::size_t>(cols)});
  return Eigen::Map<const Matrix>(values.data(), rows, cols);
}

Vector Weights::vector(const std::string& name, int size) {
  const std::vector<float> values = take(name, {static_cast<std::size_t>(size)});
  return Eigen::Map<const Vector>(values.data(), size);
}

}  // namespace sinkstate::hybrid_lm
