#include "weights.hpp"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

namespace sinkstate::hybrid_lm {
namespace {

using tools::ToolError;
using Json = nlohmann::json;

Mixer mixer_of(const std::filesystem::path& path, const std::string& name) {
  if (name == "gdn") return Mixer::gated_delta;
  if (name == "kda") return Mixer::kimi_delta;
  if (name == "mamba2") return Mixer::mamba2;
  if (name == "attn") return Mixer::attention;
  throw ToolError(path,
                  "layer_kinds: wanted gdn, kda, mamba2 or attn, given " + tools::quote(name));
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
    {"/gdn/output_gate", "\"silu\""},
    {"/kda/conv_bias", "false"},
    {"/kda/output_gate", "\"sigmoid\""},
    {"/kda/lower_bound", "null"},
    {"/mamba2/conv_bias", "true"},
    {"/mamba2/dt_limit", "null"},
    {"/mamba2/norm_before_gate", "false"},
    {"/attn/rope_style", "\"rotate_half\""},
    {"/attn/bias", "false"},
};

}  // namespace

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
  const auto groups = [&](const HeadShape& shape, const char* name) {
    if (shape.heads % shape.key_heads == 0) return;
    throw ToolError(path, std::string(name) + ": wanted value heads that the " +
                              std::to_string(shape.key_heads) + " key heads divide, given " +
                              std::to_string(shape.heads));
  };
  for (const auto& [pointer, wanted] : expected) {
    if (at(pointer) != Json::parse(wanted)) {
      throw ToolError(path, std::string(pointer) + ": wanted " + wanted + ", given " +
                                tools::quote(at(pointer).dump()));
    }
  }
  Config config;
  config.vocabulary = size("/vocab_size");
  config.width = size("/d_model");
  config.hidden = size("/mlp/hidden");
  const Json& kinds = at("/layer_kinds");
  if (!kinds.is_array() || kinds.empty()) throw ToolError(path, "layer_kinds: wanted a list");
  for (const Json& kind : kinds) {
    config.layers.push_back(mixer_of(path, kind.is_string() ? kind.get<std::string>() : ""));
  }
  config.gated_delta = {size("/gdn/v_heads"), size("/gdn/k_heads"), size("/gdn/d_k"),
                        size("/gdn/d_v")};
  config.kimi_delta = {size("/kda/heads"), size("/kda/heads"), size("/kda/d_k"), size("/kda/d_v")};
  config.mamba2 = {size("/mamba2/heads"), size("/mamba2/n_groups"), size("/mamba2/d_state"),
                   size("/mamba2/head_dim")};
  groups(config.gated_delta, "gdn");
  groups(config.mamba2, "mamba2");
  config.kimi_rank = size("/kda/f_rank");
  config.norm_groups = size("/mamba2/norm_groups");
  config.attention_heads = size("/attn/heads");
  config.attention_width = size("/attn/head_dim");
  const Json& theta = at("/attn/rope_theta");
  if (!theta.is_number() || !(theta.get<double>() > 1)) {
    throw ToolError(path, "/attn/rope_theta: wanted a number above 1");
  }
  config.rope_theta = theta.get<double>();
  return config;
}

std::vector<float> Weights::take(const std::string& name, const std::vector<std::size_t>& shape) {
  const tools::TensorInfo& info = file_.info(name);
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
