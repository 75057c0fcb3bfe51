#include "evaluate.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

#include "replay/thread_time.hpp"

namespace sinkstate::hybrid_lm {
namespace {

using tools::thread_seconds;

/// Log probabilities, in double.
Eigen::VectorXd log_softmax(const Vector& logits) {
  const Eigen::VectorXd x = logits.cast<double>();
  const double largest = x.maxCoeff();
  return x.array() - (largest + std::log((x.array() - largest).exp().sum()));
}

const char* name_of(Mixer mixer) {
  return mixer == Mixer::gated_delta  ? "gdn"
         : mixer == Mixer::kimi_delta ? "kda"
         : mixer == Mixer::mamba2     ? "mamba2"
                                      : "attn";
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
    reading.costs.push_back(recurrent ? decoder.states(n).costs() : StateCosts{});
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
    result.kl_worst = std::max(result.kl_worst, kl);
    if (i % 1024 == 0) result.kl_per_1024.push_back(0);
    const std::ptrdiff_t part = std::min<std::ptrdiff_t>(1024, reading.bytes - i / 1024 * 1024);
    result.kl_per_1024.back() += kl / static_cast<double>(part);
    Eigen::Index best = 0, dense_best = 0;
    dense_logits.maxCoeff(&dense_best);
    logits.maxCoeff(&best);
    result.top1_agreement += best == dense_best ? 1 : 0;
    result.logit_error = std::max(
        result.logit_error, static_cast<double>((logits - dense_logits).cwiseAbs().maxCoeff()));
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
    result.layers.push_back({n, name_of(mixer), reading.costs[n], decoder.states(n).costs()});
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

double state_bytes_in_use(const Model& model, Decoder& decoder) {
  double bytes = 0;
  for (std::size_t n = 0; n < model.layers.size(); ++n) {
    if (model.layers[n].mixer != Mixer::attention) bytes += decoder.states(n).bytes();
  }
  return bytes;
}

GoldenCheck check_golden(const Model& model, const std::filesystem::path& path) {
  tools::SafetensorsFile golden(path);
  const auto fail = [&](const std::string& what) { throw tools::ToolError(path, what); };
  // Bytes are read as they are: the reader's floats are for weights.
  const tools::TensorInfo& info = golden.info("input_bytes");
  if (info.dtype != "U8" || info.shape.size() != 1 || info.elements == 0) {
    fail("input_bytes: wanted a list of U8, given " + info.dtype + " " +
         tools::to_string(info.shape));
  }
  std::string text(info.elements, '\0');
  std::ifstream stream(path, std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(info.offset));
  if (!stream.read(text.data(), static_cast<std::streamsize>(text.size()))) fail("cannot be read");

  const auto vocabulary = static_cast<std::size_t>(model.config.vocabulary);
  const std::vector<float> logits = golden.to_float("logits");
  if (logits.size() != text.size() * vocabulary) {
    fail("logits: wanted shape " + tools::to_string({text.size(), vocabulary}) + ", given " +
         tools::to_string(golden.info("logits").shape));
  }
  GoldenCheck check;
  check.bytes = static_cast<std::ptrdiff_t>(text.size());
  Decoder decoder(model);
  struct Sequence {
    std::size_t layer;
    std::vector<float> outputs;
    std::size_t width;
    double difference = 0, largest = 0;
  };
  std::vector<Sequence> sequences;
  for (std::size_t n = 0; n < model.layers.size(); ++n) {
    const Mixer mixer = model.layers[n].mixer;
    const std::string name =
        "layers." + std::to_string(n) + ".head0." + (mixer == Mixer::mamba2 ? "y" : "o");
    if (mixer == Mixer::attention || !golden.contains(name)) continue;
    const auto width = static_cast<std::size_t>(model.config.heads(mixer).d_v);
    if (golden.info(name).shape.size() != 2 || golden.info(name).shape[1] != width) {
      fail(name + ": wanted rows of " + std::to_string(width) + ", given " +
           tools::to_string(golden.info(name).shape));
    }
    sequences.push_back({n, golden.to_float(name), width});
  }
  for (std::size_t t = 0; t < text.size(); ++t) {
    const Vector& given = decoder.read(static_cast<std::uint8_t>(text[t]));
    for (std::size_t j = 0; j < vocabulary; ++j) {
      const double difference = std::abs(static_cast<double>(given[static_cast<Eigen::Index>(j)]) -
                                         static_cast<double>(logits[t * vocabulary + j]));
      if (!(difference <= check.logits)) check.logits = difference;
    }
    for (Sequence& sequence : sequences) {
      if ((t + 1) * sequence.width > sequence.outputs.size()) continue;
      const float* const output = decoder.tokens(sequence.layer).front().output;
      for (std::size_t j = 0; j < sequence.width; ++j) {
        const double wanted = sequence.outputs[t * sequence.width + j];
        sequence.largest = std::max(sequence.largest, std::abs(wanted));
        sequence.difference =
            std::max(sequence.difference, std::abs(static_cast<double>(output[j]) - wanted));
      }
    }
    for (std::size_t n = 0; n < model.layers.size(); ++n) {
      const std::string name = "layers." + std::to_string(n) + ".state_" + std::to_string(t + 1);
      if (!golden.contains(name)) continue;
      const std::vector<float> wanted = golden.to_float(name);
      const HeadShape& shape = model.config.heads(model.layers[n].mixer);
      const auto size = static_cast<std::size_t>(shape.d_k * shape.d_v);
      if (wanted.size() != size * static_cast<std::size_t>(shape.heads)) {
        fail(name + ": wanted the states of " + std::to_string(shape.heads) + " heads, given " +
             tools::to_string(golden.info(name).shape));
      }
      double difference = 0, norm = 0;
      for (int h = 0; h < shape.heads; ++h) {
        const std::vector<float> state = decoder.states(n).dense(h);
        for (std::size_t i = 0; i < size; ++i) {
          const double exact = wanted[static_cast<std::size_t>(h) * size + i];
          difference += std::pow(static_cast<double>(state[i]) - exact, 2);
          norm += exact * exact;
        }
      }
      check.states = std::max(check.states, std::sqrt(difference / norm));
    }
  }
  for (const Sequence& sequence : sequences) {
    check.sequences = std::max(check.sequences, sequence.difference / sequence.largest);
  }
  return check;
}

}  // namespace sinkstate::hybrid_lm
