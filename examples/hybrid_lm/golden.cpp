#include "golden.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "worst.hpp"

namespace sinkstate::hybrid_lm {
namespace {

double relative(double difference, double scale) {
  return scale > 0 ? difference / scale : difference;
}

class Golden {
 public:
  explicit Golden(const std::filesystem::path& path) : file_(path) {}

  bool contains(const std::string& name) const { return file_.contains(name); }
  /// The reader's floats are for weights; bytes are read as they are.
  std::string input() const {
    const tools::TensorInfo& info = file_.info("input_bytes");
    if (info.dtype != "U8" || info.shape.size() != 1 || info.elements == 0) {
      fail("input_bytes: wanted a list of U8, given " + info.dtype + " " +
           tools::to_string(info.shape));
    }
    std::string bytes(info.elements, '\0');
    std::ifstream stream(file_.path(), std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(info.offset));
    if (!stream.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
      fail("cannot be read");
    }
    return bytes;
  }
  std::vector<float> tensor(const std::string& name, const std::vector<std::size_t>& shape) {
    if (file_.info(name).shape != shape) {
      fail(name + ": wanted shape " + tools::to_string(shape) + ", given " +
           tools::to_string(file_.info(name).shape));
    }
    return file_.to_float(name);
  }
  /// Rows of a width, at most so many.
  std::vector<float> rows(const std::string& name, std::size_t most, std::size_t width) {
    const std::vector<std::size_t>& shape = file_.info(name).shape;
    const std::size_t given = shape.empty() ? 0 : shape[0];
    return tensor(name, {std::clamp<std::size_t>(given, 1, most), width});
  }
  /// States are asked for by name, so one of a layer or a moment that does not exist would go unseen.
  void require_states_known(const Model& model, std::size_t bytes) const {
    std::size_t known = 0, there = 0;
    for (std::size_t n = 0; n < model.layers.size(); ++n) {
      if (model.layers[n].mixer == Mixer::attention) continue;
      for (std::size_t t = 1; t <= bytes; ++t) known += contains(state_name(n, t)) ? 1 : 0;
    }
    for (const auto& tensor : file_.tensors()) {
      there += tensor.first.find(".state_") != std::string::npos ? 1 : 0;
    }
    if (known != there) {
      fail("wanted states of recurrent layers after 1 to " + std::to_string(bytes) +
           " bytes, given " + std::to_string(there - known) + " others");
    }
  }
  static std::string state_name(std::size_t layer, std::size_t bytes) {
    return "layers." + std::to_string(layer) + ".state_" + std::to_string(bytes);
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw tools::ToolError(file_.path(), what);
  }

 private:
  tools::SafetensorsFile file_;
};

/// Of all heads of a layer.
double state_difference(const std::vector<float>& states, const std::vector<float>& wanted) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const double exact = wanted[i];
    difference += std::pow(static_cast<double>(states[i]) - exact, 2);
    norm += exact * exact;
  }
  return relative(std::sqrt(difference), std::sqrt(norm));
}

struct Sequence {
  std::size_t layer;
  std::size_t width;
  std::vector<float> outputs;
  double difference = 0, largest = 0;
};

}  // namespace

GoldenCheck check_golden(const Model& model, const std::filesystem::path& path) {
  Golden golden(path);
  const std::string text = golden.input();
  golden.require_states_known(model, text.size());
  GoldenCheck check;
  check.bytes = static_cast<std::ptrdiff_t>(text.size());
  std::vector<float> logits;
  const auto vocabulary = static_cast<std::size_t>(model.config.vocabulary);
  if (golden.contains("logits")) logits = golden.tensor("logits", {text.size(), vocabulary});
  std::vector<Sequence> sequences;
  for (std::size_t n = 0; n < model.layers.size(); ++n) {
    const Mixer mixer = model.layers[n].mixer;
    const std::string name =
        "layers." + std::to_string(n) + ".head0." + (mixer == Mixer::mamba2 ? "y" : "o");
    if (mixer == Mixer::attention || !golden.contains(name)) continue;
    const auto width = static_cast<std::size_t>(model.config.heads(mixer).d_v);
    sequences.push_back({n, width, golden.rows(name, text.size(), width)});
  }

  const auto compare = [](Compared& part, double difference, std::size_t numbers) {
    include_worst(part.difference, difference);
    part.numbers += static_cast<std::ptrdiff_t>(numbers);
  };
  Decoder decoder(model);
  for (std::size_t t = 0; t < text.size(); ++t) {
    const Vector& given = decoder.read(static_cast<std::uint8_t>(text[t]));
    if (!logits.empty()) {
      const Eigen::Map<const Vector> wanted(logits.data() + t * vocabulary, given.size());
      for (Eigen::Index i = 0; i < given.size(); ++i) {
        compare(check.logits, std::abs(static_cast<double>(given[i]) - wanted[i]), 1);
      }
    }
    for (Sequence& sequence : sequences) {
      if (t * sequence.width >= sequence.outputs.size()) continue;
      const float* const output = decoder.token(sequence.layer, 0).output;
      const float* const wanted = sequence.outputs.data() + t * sequence.width;
      for (std::size_t i = 0; i < sequence.width; ++i) {
        include_worst(sequence.largest, std::abs(wanted[i]));
        include_worst(sequence.difference, std::abs(static_cast<double>(output[i]) - wanted[i]));
      }
    }
    for (std::size_t n = 0; n < model.layers.size(); ++n) {
      const std::string name = Golden::state_name(n, t + 1);
      if (!golden.contains(name)) continue;
      const HeadShape& shape = model.config.heads(model.layers[n].mixer);
      const auto size = [](int count) { return static_cast<std::size_t>(count); };
      const std::vector<float> wanted =
          golden.tensor(name, {size(shape.heads), size(shape.d_k), size(shape.d_v)});
      compare(check.states, state_difference(decoder.dense_states(n), wanted), wanted.size());
    }
  }
  for (const Sequence& sequence : sequences) {
    compare(check.sequences, relative(sequence.difference, sequence.largest),
            sequence.outputs.size());
  }
  if (check.logits.numbers + check.states.numbers + check.sequences.numbers == 0) {
    golden.fail("wanted logits, states or outputs of head 0, given none");
  }
  return check;
}

}  // namespace sinkstate::hybrid_lm
