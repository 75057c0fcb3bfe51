#include "evaluate.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "replay/thread_time.hpp"
#include "worst.hpp"

namespace sinkstate::hybrid_lm {
namespace {

using tools::thread_seconds;

/// Log probabilities, in double.
Eigen::VectorXd log_softmax(const Vector& logits) {
  const Eigen::VectorXd x = logits.cast<double>();
  const double largest = x.maxCoeff();
  return x.array() - (largest + std::log((x.array() - largest).exp().sum()));
}

}  // namespace

DenseReading read_dense(const Model& model, std::string text, std::ptrdiff_t prefill,
                        std::ptrdiff_t bytes, const Progress& progress) {
  DenseReading reading;
  reading.text = std::move(text);
  reading.prefill = prefill;
  reading.bytes = bytes;
  reading.prompt = std::make_unique<Decoder>(model);
  for (std::ptrdiff_t i = 0; i < prefill; ++i) {
    reading.prompt->read(reading.byte(i));
    progress(1);
  }
  Decoder decoder(*reading.prompt);
  reading.logits.resize(bytes, model.config.vocabulary);
  for (std::ptrdiff_t i = 0; i < bytes; ++i) {
    const double begin = thread_seconds();
    const Vector& logits = decoder.read(reading.byte(prefill + i));
    reading.seconds += thread_seconds() - begin;
    reading.logits.row(i) = logits.transpose();
    reading.bits_per_byte -= log_softmax(logits)[reading.byte(prefill + i + 1)] / std::log(2.0);
    progress(1);
  }
  reading.bits_per_byte /= static_cast<double>(bytes);
  for (std::size_t n = 0; n < model.layers.size(); ++n) {
    const bool recurrent = model.layers[n].mixer != Mixer::attention;
    reading.costs.push_back(recurrent ? decoder.costs(n) : StateCosts{});
  }
  return reading;
}

Evaluation evaluate(const Model& model, const DenseReading& reading, const Policies& policies,
                    const Progress& progress) {
  Decoder decoder(*reading.prompt, policies);
  Evaluation result;
  result.bytes = reading.bytes;
  result.prefill = reading.prefill;
  result.bits_per_byte_dense = reading.bits_per_byte;
  const double dense_bytes = dense_state_bytes(model);
  double seconds = 0;
  for (std::ptrdiff_t i = 0; i < reading.bytes; ++i) {
    const double begin = thread_seconds();
    const Vector& logits = decoder.read(reading.byte(reading.prefill + i));
    seconds += thread_seconds() - begin;

    const Vector dense_logits = reading.logits.row(i).transpose();
    const std::uint8_t next = reading.byte(reading.prefill + i + 1);
    result.bits_per_byte -= log_softmax(logits)[next] / std::log(2.0);
    const double kl = kl_divergence(dense_logits, logits);
    result.kl_mean += kl;
    include_worst(result.kl_worst, kl);
    if (i % 1024 == 0) result.kl_per_1024.push_back(0);
    const std::ptrdiff_t part = std::min<std::ptrdiff_t>(1024, reading.bytes - i / 1024 * 1024);
    result.kl_per_1024.back() += kl / static_cast<double>(part);
    Eigen::Index best = 0, dense_best = 0;
    dense_logits.maxCoeff(&dense_best);
    logits.maxCoeff(&best);
    result.top1_agreement += best == dense_best ? 1 : 0;
    include_worst(result.logit_error, (logits - dense_logits).cwiseAbs().maxCoeff());
    const double ratio = state_bytes_in_use(model, decoder) / dense_bytes;
    result.state_ratio_mean += ratio;
    result.state_ratio_peak = std::max(result.state_ratio_peak, ratio);
    progress(1);
  }
  const auto steps = static_cast<double>(reading.bytes);
  for (double* const sum :
       {&result.bits_per_byte, &result.kl_mean, &result.top1_agreement, &result.state_ratio_mean}) {
    *sum /= steps;
  }
  result.bytes_per_second_dense = steps / reading.seconds;
  result.bytes_per_second = steps / seconds;
  for (std::size_t n = 0; n < model.layers.size(); ++n) {
    const Mixer mixer = model.layers[n].mixer;
    if (mixer == Mixer::attention) continue;
    result.layers.push_back({n, to_string(mixer), reading.costs[n], decoder.costs(n)});
  }
  return result;
}

double kl_divergence(const Vector& wanted, const Vector& given) {
  const Eigen::VectorXd p = log_softmax(wanted), q = log_softmax(given);
  // Rounding may take it below zero; NaN stays NaN.
  const double kl = (p.array().exp() * (p - q).array()).sum();
  return kl < 0 ? 0 : kl;
}

double dense_state_bytes(const Model& model) {
  double bytes = 0;
  for (const LayerWeights& layer : model.layers) {
    if (layer.mixer == Mixer::attention) continue;
    const HeadShape& shape = model.config.heads(layer.mixer);
    bytes += 4.0 * shape.heads * shape.d_k * shape.d_v;
  }
  return bytes;
}

double state_bytes_in_use(const Model& model, const Decoder& decoder) {
  double bytes = 0;
  for (std::size_t n = 0; n < model.layers.size(); ++n) {
    if (model.layers[n].mixer != Mixer::attention) bytes += decoder.state_bytes(n);
  }
  return bytes;
}

}  // namespace sinkstate::hybrid_lm
