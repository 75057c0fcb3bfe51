#include "sweep.hpp"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <utility>

#include "replay/parallel_for.hpp"
#include "worst.hpp"

namespace sinkstate::hybrid_lm {

std::vector<Setting> default_settings() {
  std::vector<Setting> settings;
  const auto add = [&](const std::string& series, const std::string& flags, const char* varied,
                       std::initializer_list<const char*> values) {
    for (const char* const value : values) {
      settings.push_back({series, flags + " " + varied + " " + value});
    }
  };
  add("local-svd", "--policy local-svd", "--epsilon",
      {"0.003", "0.01", "0.02", "0.03", "0.05", "0.07", "0.1", "0.15", "0.2", "0.3"});
  add("local-svd, sink", "--policy local-svd --sink", "--epsilon",
      {"0.01", "0.03", "0.07", "0.1", "0.2"});
  add("local-svd, buffer 2", "--policy local-svd --buffer 2", "--epsilon",
      {"0.03", "0.07", "0.1", "0.2"});
  add("local-svd, buffer 4", "--policy local-svd --buffer 4", "--epsilon",
      {"0.03", "0.07", "0.1", "0.2"});
  add("local-svd, buffer 16", "--policy local-svd --buffer 16", "--epsilon",
      {"0.03", "0.07", "0.1", "0.2"});
  for (const auto& [common, kimi] :
       {std::pair("0.05", "0.017"), std::pair("0.1", "0.033"), std::pair("0.15", "0.05"),
        std::pair("0.2", "0.067"), std::pair("0.3", "0.1")}) {
    // Kimi Delta Attention makes most of this model's drift, and little of its bytes.
    add("local-svd, buffer 4, KDA at a third",
        std::string("--policy local-svd --buffer 4 --epsilon ") + common, "--kda",
        {("\"--buffer 4 --epsilon " + std::string(kimi) + "\"").c_str()});
  }
  add("full-svd", "--policy full-svd", "--epsilon", {"0.01", "0.03", "0.1", "0.2"});
  add("full-svd, sink", "--policy full-svd --sink", "--epsilon", {"0.01", "0.03", "0.1", "0.2"});
  add("fixed-rank", "--policy fixed-rank", "--rank", {"4", "8", "12", "16", "24", "32", "48"});
  add("fixed-rank, sink", "--policy fixed-rank --sink", "--rank", {"8", "16", "32"});
  add("fixed-rank, buffer 16", "--policy fixed-rank --buffer 16", "--rank", {"8", "16", "32"});
  add("dense-buffered", "--policy dense-buffered", "--buffer", {"8", "32"});
  return settings;
}

std::vector<SweepRow> sweep(const Model& model, const std::vector<std::string>& passages,
                            std::ptrdiff_t prefill, std::ptrdiff_t bytes,
                            const std::vector<Setting>& settings, std::ptrdiff_t threads,
                            const Progress& progress) {
  std::vector<Policies> policies;
  for (const Setting& setting : settings) {
    policies.push_back(parse_policies("--setting", setting.flags));
  }
  const auto index = [](std::ptrdiff_t i) { return static_cast<std::size_t>(i); };
  std::vector<DenseReading> readings(passages.size());
  const auto count = static_cast<std::ptrdiff_t>(passages.size());
  tools::parallel_for(count, threads, [&](std::ptrdiff_t i) {
    readings[index(i)] = read_dense(model, passages[index(i)], prefill, bytes, progress);
  });
  std::vector<Evaluation> evaluations(settings.size() * passages.size());
  tools::parallel_for(
      static_cast<std::ptrdiff_t>(evaluations.size()), threads, [&](std::ptrdiff_t i) {
        evaluations[index(i)] =
            evaluate(model, readings[index(i % count)], policies[index(i / count)], progress);
      });

  std::vector<SweepRow> rows;
  const double share = 1.0 / static_cast<double>(count);
  for (std::size_t s = 0; s < settings.size(); ++s) {
    SweepRow row;
    row.setting = settings[s];
    for (std::size_t i = 0; i < passages.size(); ++i) {
      const Evaluation& e = evaluations[s * passages.size() + i];
      row.state_ratio_mean += share * e.state_ratio_mean;
      row.state_ratio_peak = std::max(row.state_ratio_peak, e.state_ratio_peak);
      row.kl_mean += share * e.kl_mean;
      include_worst(row.kl_worst, e.kl_worst);
      row.kl_per_1024.resize(e.kl_per_1024.size());
      for (std::size_t k = 0; k < e.kl_per_1024.size(); ++k) {
        row.kl_per_1024[k] += share * e.kl_per_1024[k];
      }
      row.top1_agreement += share * e.top1_agreement;
      row.bits_lost += share * (e.bits_per_byte - e.bits_per_byte_dense);
      for (const LayerFigures& layer : e.layers) {
        const auto heads = static_cast<double>(layer.factored.rank_mean.size());
        const double part = share / (heads * static_cast<double>(e.layers.size()));
        for (const double rank : layer.factored.rank_mean) row.rank_mean += part * rank;
        for (const double dense : layer.factored.dense_fallback) row.dense_fallback += part * dense;
      }
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace sinkstate::hybrid_lm
