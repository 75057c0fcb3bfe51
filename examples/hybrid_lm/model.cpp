#include "model.hpp"

#include <cmath>
#include <string>
#include <utility>

namespace sinkstate::hybrid_lm {
namespace {

Vector rms_norm(const Vector& x, const Vector& weight) {
  const float mean = x.squaredNorm() / static_cast<float>(x.size());
  return (x / std::sqrt(mean + norm_epsilon)).cwiseProduct(weight);
}
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
Vector silu(const Vector& x) { return x.array() / (1.0f + (-x.array()).exp()); }

/// Each head of x to length 1.
void normalize_heads(Vector& x, int width) {
  for (Eigen::Index h = 0; h < x.size(); h += width) {
    auto head = x.segment(h, width);
    head /= std::sqrt(head.squaredNorm() + norm_epsilon);
  }
}

LayerWeights load_layer(Weights& file, const Config& config, std::size_t index) {
  LayerWeights layer;
  layer.mixer = config.layers[index];
  const int width = config.width;
  const std::string base = "layers." + std::to_string(index) + ".";
  layer.norm1 = file.vector(base + "norm1.weight", width);
  layer.norm2 = file.vector(base + "norm2.weight", width);
  layer.gate = file.matrix(base + "mlp.gate_proj.weight", config.hidden, width);
  layer.up = file.matrix(base + "mlp.up_proj.weight", config.hidden, width);
  layer.down = file.matrix(base + "mlp.down_proj.weight", width, config.hidden);

  const std::string mixer = base + "mixer.";
  const auto linear = [&](const char* name, int rows, int cols) {
    return file.matrix(mixer + name + ".weight", rows, cols);
  };
  if (layer.mixer == Mixer::attention) {
    const int heads = config.attention_heads * config.attention_width;
    layer.q = linear("q_proj", heads, width);
    layer.k = linear("k_proj", heads, width);
    layer.v = linear("v_proj", heads, width);
    layer.out = linear("o_proj", width, heads);
    return layer;
  }
  const HeadShape& shape = config.heads(layer.mixer);
  const int keys = shape.key_heads * shape.d_k;
  const int values = shape.heads * shape.d_v;
  layer.out = linear("o_proj", width, values);
  layer.decay_scale = file.vector(mixer + "A_log", shape.heads).array().exp();
  layer.value_mean = file.matrix(mixer + "v_mean", shape.heads, shape.d_v);
  if (layer.mixer == Mixer::mamba2) {
    const int channels = values + 2 * keys;
    layer.v = linear("xBC_proj", channels, width);
    layer.v_conv = {linear("conv", channels, conv_kernel),
                    file.vector(mixer + "conv.bias", channels)};
    layer.z = linear("z_proj", values, width);
    layer.decay = linear("dt_proj", shape.heads, width);
    layer.decay_bias = file.vector(mixer + "dt_bias", shape.heads);
    layer.skip = file.vector(mixer + "D", shape.heads);
    layer.out_norm = file.vector(mixer + "o_norm.weight", values);
    return layer;
  }
  layer.q = linear("q_proj", keys, width);
  layer.k = linear("k_proj", keys, width);
  layer.v = linear("v_proj", values, width);
  layer.q_conv = {linear("q_conv", keys, conv_kernel), Vector::Zero(keys)};
  layer.k_conv = {linear("k_conv", keys, conv_kernel), Vector::Zero(keys)};
  layer.v_conv = {linear("v_conv", values, conv_kernel), Vector::Zero(values)};
  layer.strength = linear("b_proj", shape.heads, width);
  layer.out_norm = file.vector(mixer + "o_norm.weight", shape.d_v);
  if (layer.mixer == Mixer::gated_delta) {
    layer.z = linear("z_proj", values, width);
    layer.decay = linear("a_proj", shape.heads, width);
    layer.decay_bias = file.vector(mixer + "dt_bias", shape.heads);
  } else {
    layer.z_first = linear("g_a_proj", config.kimi_gate_rank, width);
    layer.z = linear("g_b_proj", values, config.kimi_gate_rank);
    layer.decay_first = linear("f_a_proj", config.kimi_decay_rank, width);
    layer.decay = linear("f_b_proj", keys, config.kimi_decay_rank);
    layer.decay_bias = file.vector(mixer + "dt_bias", keys);
  }
  return layer;
}

}  // namespace

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void ShortConvolution::operator()(Vector& u, Matrix& past) const {
  Vector y = taps.col(3).cwiseProduct(u) + bias;
  for (int t = 0; t < 3; ++t) y += taps.col(t).cwiseProduct(past.row(t).transpose());
  past.row(0) = past.row(1);
  past.row(1) = past.row(2);
  past.row(2) = u.transpose();
  u = silu(y);
}

Model load_model(const std::filesystem::path& folder) {
  Model model;
  model.config = load_config(folder / "config.json");
  Weights file(folder / "model.safetensors");
  model.embedding = file.matrix("embed.weight", model.config.vocabulary, model.config.width);
  model.final_norm = file.vector("final_norm.weight", model.config.width);
  for (std::size_t n = 0; n < model.config.layers.size(); ++n) {
    model.layers.push_back(load_layer(file, model.config, n));
  }
  file.require_all_used();
  return model;
}

Decoder::Decoder(const Model& model, std::shared_ptr<ModelStates> states)
    : model_(model),
      states_(std::move(states)),
      slot_(states_->admit()),
      memories_(model.layers.size()) {
  for (std::size_t n = 0; n < memories_.size(); ++n) {
    const LayerWeights& layer = model.layers[n];
    if (layer.mixer == Mixer::attention) continue;
    memories_[n].q_past = Matrix::Zero(3, layer.q.rows());
    memories_[n].k_past = Matrix::Zero(3, layer.k.rows());
    memories_[n].v_past = Matrix::Zero(3, layer.v.rows());
  }
}

Decoder::Decoder(Decoder& other, std::shared_ptr<ModelStates> states)
    : model_(other.model_),
      states_(std::move(states)),
      slot_(states_->admit(*other.states_, other.slot_, other.position_)),
      memories_(other.memories_),
      position_(other.position_),
      logits_(other.logits_) {}

Decoder::Decoder(const Decoder& other, Suspended)
    : model_(other.model_),
      states_(other.states_),
      slot_(-1),
      memories_(other.memories_),
      position_(other.position_),
      suspended_(other.slot_ < 0 ? other.suspended_ : states_->snapshot(other.slot_)),
      logits_(other.logits_) {}

void Decoder::suspend() {
  suspended_ = states_->snapshot(slot_);
  states_->release(slot_);
  slot_ = -1;
}

void Decoder::resume() {
  slot_ = states_->admit(suspended_, position_);
  suspended_.clear();
}

void Decoder::open_draft() {
  states_->open_draft(slot_);
  drafting_ = true;
}

void Decoder::close_draft(int rejected) {
  states_->close_draft(slot_, rejected);
  if (rejected > 0) {
    Mark& mark = marks_[marks_.size() - static_cast<std::size_t>(rejected)];
    for (std::size_t n = 0; n < memories_.size(); ++n) {
      memories_[n].q_past.swap(mark.pasts[n].q_past);
      memories_[n].k_past.swap(mark.pasts[n].k_past);
      memories_[n].v_past.swap(mark.pasts[n].v_past);
    }
    logits_.swap(mark.logits);
    position_ -= rejected;
  }
  marks_.clear();
  drafting_ = false;
}

const Vector& Decoder::read(std::uint8_t byte) {
  read_together({this}, {byte});
  return logits_;
}

void Decoder::read_together(const std::vector<Decoder*>& decoders,
                            const std::vector<std::uint8_t>& bytes) {
  if (decoders.empty()) return;
  ModelStates& states = *decoders.front()->states_;
  std::vector<std::int32_t> slots;
  for (const Decoder* const decoder : decoders) {
    if (decoder->slot_ < 0) throw tools::ToolError("a suspended text cannot be read on");
    if (decoder->states_.get() != &states) {
      throw tools::ToolError("decoders that read together share their states");
    }
    slots.push_back(decoder->slot_);
  }
  const std::size_t count = decoders.size();
  states.for_each(count, [&](std::size_t i) { decoders[i]->begin(bytes[i]); });
  for (std::size_t n = 0; n < decoders.front()->model_.layers.size(); ++n) {
    states.for_each(count, [&](std::size_t i) { decoders[i]->before_states(n); });
    states.step(n, slots);
    states.for_each(count, [&](std::size_t i) { decoders[i]->after_states(n); });
  }
  states.for_each(count, [&](std::size_t i) { decoders[i]->end(); });
  for (const Decoder* const decoder : decoders) {
    if (decoder->logits_.allFinite()) continue;
    throw tools::ToolError("the logits behind byte " + std::to_string(decoder->position_) +
                           " are not finite");
  }
}

void Decoder::begin(std::uint8_t byte) {
  if (drafting_) {
    Mark mark;
    for (const LayerMemory& memory : memories_) {
      mark.pasts.push_back({memory.q_past, memory.k_past, memory.v_past, {}, {}});
    }
    mark.logits = logits_;
    marks_.push_back(std::move(mark));
  }
  residual_ = model_.embedding.row(byte).transpose();
}

void Decoder::before_states(std::size_t n) {
  input_ = rms_norm(residual_, model_.layers[n].norm1);
  switch (model_.layers[n].mixer) {
    case Mixer::gated_delta:
    case Mixer::kimi_delta:
      return before_delta_rule(n);
    case Mixer::mamba2:
      return before_mamba2(n);
    case Mixer::attention:
      return;
  }
}

void Decoder::after_states(std::size_t n) {
  const LayerWeights& layer = model_.layers[n];
  switch (layer.mixer) {
    case Mixer::gated_delta:
    case Mixer::kimi_delta:
      after_delta_rule(n);
      break;
    case Mixer::mamba2:
      after_mamba2(n);
      break;
    case Mixer::attention:
      attention(n);
      break;
  }
  residual_ += mixed_;
  const Vector y = rms_norm(residual_, layer.norm2);
  Vector hidden = silu(layer.gate * y);
  hidden = hidden.cwiseProduct(layer.up * y);
  residual_.noalias() += layer.down * hidden;
}

void Decoder::end() {
  ++position_;
  logits_.noalias() = model_.embedding * rms_norm(residual_, model_.final_norm);
}

void Decoder::before_delta_rule(std::size_t n) {
  const LayerWeights& layer = model_.layers[n];
  const Vector& x = input_;
  LayerMemory& memory = memories_[n];
  const HeadShape& shape = model_.config.heads(layer.mixer);
  const bool kimi = layer.mixer == Mixer::kimi_delta;
  Vector q = layer.q * x;
  Vector k = layer.k * x;
  Vector v = layer.v * x;
  layer.q_conv(q, memory.q_past);
  layer.k_conv(k, memory.k_past);
  layer.v_conv(v, memory.v_past);
  normalize_heads(q, shape.d_k);
  normalize_heads(k, shape.d_k);
  q /= std::sqrt(static_cast<float>(shape.d_k));

  const Vector strength = (layer.strength * x).unaryExpr(&sigmoid);
  Vector decay = kimi ? Vector(layer.decay * (layer.decay_first * x)) : Vector(layer.decay * x);
  const int decays = kimi ? shape.d_k : 1;
  for (Eigen::Index i = 0; i < decay.size(); ++i) {
    decay[i] = -layer.decay_scale[i / decays] * softplus(decay[i] + layer.decay_bias[i]);
  }
  LayerTokens& tokens = states_->layer(n)->tokens();
  tokens.queries.row(slot_) = q.transpose();
  tokens.keys.row(slot_) = k.transpose();
  tokens.values.row(slot_) = v.transpose();
  tokens.log_decays.row(slot_) = decay.transpose();
  tokens.write_strengths.row(slot_) = strength.transpose();
}

void Decoder::after_delta_rule(std::size_t n) {
  const LayerWeights& layer = model_.layers[n];
  const Vector& x = input_;
  const HeadShape& shape = model_.config.heads(layer.mixer);
  const bool kimi = layer.mixer == Mixer::kimi_delta;
  const Vector o = states_->layer(n)->tokens().outputs.row(slot_).transpose();
  const Vector z = kimi ? Vector(layer.z * (layer.z_first * x)) : Vector(layer.z * x);
  const Vector gate = kimi ? Vector(z.unaryExpr(&sigmoid)) : silu(z);
  Vector y(o.size());
  for (int h = 0; h < shape.heads; ++h) {
    y.segment(h * shape.d_v, shape.d_v) =
        rms_norm(o.segment(h * shape.d_v, shape.d_v), layer.out_norm);
  }
  mixed_.noalias() = layer.out * y.cwiseProduct(gate);
}

void Decoder::before_mamba2(std::size_t n) {
  const LayerWeights& layer = model_.layers[n];
  const Vector& x = input_;
  const HeadShape& shape = model_.config.mamba2;
  const int values = shape.heads * shape.d_v;
  const int keys = shape.key_heads * shape.d_k;
  Vector xbc = layer.v * x;
  layer.v_conv(xbc, memories_[n].v_past);
  const Vector dt = (layer.decay * x + layer.decay_bias).unaryExpr(&softplus);

  LayerTokens& tokens = states_->layer(n)->tokens();
  tokens.values.row(slot_) = xbc.head(values).transpose();
  tokens.keys.row(slot_) = xbc.segment(values, keys).transpose();
  tokens.queries.row(slot_) = xbc.tail(keys).transpose();
  tokens.log_decays.row(slot_) = -layer.decay_scale.cwiseProduct(dt).transpose();
  tokens.write_strengths.row(slot_) = dt.transpose();
}

void Decoder::after_mamba2(std::size_t n) {
  const LayerWeights& layer = model_.layers[n];
  const HeadShape& shape = model_.config.mamba2;
  const int values = shape.heads * shape.d_v;
  const LayerTokens& tokens = states_->layer(n)->tokens();
  const Vector v = tokens.values.row(slot_).transpose();
  const Vector y = tokens.outputs.row(slot_).transpose();
  const Vector z = layer.z * input_;
  Vector u(values);
  for (int h = 0; h < shape.heads; ++h) {
    u.segment(h * shape.d_v, shape.d_v) =
        y.segment(h * shape.d_v, shape.d_v) + layer.skip[h] * v.segment(h * shape.d_v, shape.d_v);
  }
  u = u.cwiseProduct(silu(z));
  const int group = values / model_.config.norm_groups;
  for (int g = 0; g < values; g += group) {
    u.segment(g, group) = rms_norm(u.segment(g, group), layer.out_norm.segment(g, group));
  }
  mixed_.noalias() = layer.out * u;
}

void Decoder::attention(std::size_t n) {
  const LayerWeights& layer = model_.layers[n];
  const Vector& x = input_;
  LayerMemory& memory = memories_[n];
  const int heads = model_.config.attention_heads;
  const int width = model_.config.attention_width;
  const int half = width / 2;
  Vector q = layer.q * x;
  Vector k = layer.k * x;
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(position_) * std::pow(model_.config.rope_theta, -2.0 * i / width);
      const auto cosine = static_cast<float>(std::cos(angle));
      const auto sine = static_cast<float>(std::sin(angle));
      for (Vector* const u : {&q, &k}) {
        float& a = (*u)[h * width + i];
        float& b = (*u)[h * width + i + half];
        const float turned = a * cosine - b * sine;
        b = b * cosine + a * sine;
        a = turned;
      }
    }
  }
  if (position_ == memory.keys.rows()) {
    const Eigen::Index rows = std::max<Eigen::Index>(256, 2 * position_);
    memory.keys.conservativeResize(rows, q.size());
    memory.values.conservativeResize(rows, q.size());
  }
  memory.keys.row(position_) = k.transpose();
  memory.values.row(position_) = (layer.v * x).transpose();

  Vector o(q.size());
  for (int h = 0; h < heads; ++h) {
    const auto keys = memory.keys.block(0, h * width, position_ + 1, width);
    const auto values = memory.values.block(0, h * width, position_ + 1, width);
    Vector weights = keys * q.segment(h * width, width) / std::sqrt(static_cast<float>(width));
    weights = (weights.array() - weights.maxCoeff()).exp();
    o.segment(h * width, width) = values.transpose() * (weights / weights.sum());
  }
  mixed_.noalias() = layer.out * o;
}

}  // namespace sinkstate::hybrid_lm
