#include "policy_flags.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace sinkstate::tools {
namespace {

/// Options that mean something to some policies only.
struct Restricted {
  const char* name;
  std::vector<Compaction> policies;
};
const Restricted restricted[] = {
    {"--epsilon", {Compaction::local_svd, Compaction::full_svd}},
    {"--rank-cap", {Compaction::local_svd, Compaction::full_svd}},
    {"--no-dense-fallback", {Compaction::local_svd, Compaction::full_svd}},
    {"--active", {Compaction::local_svd}},
    {"--recompress-growth", {Compaction::local_svd}},
    {"--recompress-slack", {Compaction::local_svd}},
    {"--tail-share", {Compaction::local_svd}},
    {"--tail-period", {Compaction::local_svd}},
    {"--rank", {Compaction::fixed_rank}},
};

/// The word of that name among all of its kind.
template <class Word, std::size_t Count>
Word named(const std::string& option, const Word (&all)[Count], const std::string& given) {
  std::string names;
  for (std::size_t i = 0; i < Count; ++i) {
    if (given == to_string(all[i])) return all[i];
    names += (i == 0 ? "" : i + 1 == Count ? " or " : ", ") + std::string(to_string(all[i]));
  }
  refuse(option, names, given);
}

}  // namespace

void refuse(const std::string& option, const std::string& wanted, const std::string& given) {
  throw ToolError(option + ": wanted " + wanted + ", given " + given);
}

void at_least(const std::string& option, std::ptrdiff_t least, std::ptrdiff_t given) {
  if (given < least) refuse(option, "at least " + std::to_string(least), std::to_string(given));
}

std::string check_real_number(const std::string& text) {
  char* end = nullptr;
  std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' ? std::string() : "wanted a number, given " + quote(text);
}

PolicyFlags::PolicyFlags(CLI::App& app, ReplayOptions& options) : app_(app), options_(options) {
  app.add_option("--policy", policy_, "local-svd, full-svd, fixed-rank or dense-buffered");
  app.add_option("--epsilon", options.epsilon,
                 "terms below this share of the strongest are dropped (local-svd, full-svd)")
      ->check(check_real_number);
  app.add_option("--buffer", options.buffer, "tokens between two compactions")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--active", options.active,
                 "strongest terms, decomposed with the buffer (local-svd; default: 8, Kimi Delta "
                 "Attention 16)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--recompress-growth", options.recompress_growth,
                 "all terms are decomposed once they are this many times what the last time left, "
                 "plus the slack; 0: only when they no longer fit (local-svd)")
      ->check(check_real_number);
  app.add_option("--recompress-slack", options.recompress_slack, "that slack (local-svd)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--tail-share", options.tail_share,
                 "until then, the share of epsilon below which terms are dropped (local-svd)")
      ->check(check_real_number);
  app.add_option("--tail-period", options.tail_period,
                 "compactions after which the other terms are decomposed among themselves; 0: "
                 "never (local-svd)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option("--rank", options.rank_cap,
                 "the rank (fixed-rank; default: 16, Kimi Delta Attention 32)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_option(
         "--rank-cap", options.rank_cap,
         "most terms; beyond them a state goes dense (local-svd, full-svd; default: as many "
         "as pay)")
      ->transform(whole_number<std::ptrdiff_t>());
  app.add_flag("--no-dense-fallback", no_dense_fallback_,
               "never go dense: keep up to min(d_k, d_v) terms (local-svd, full-svd)");
  app.add_flag("--sink", options.sink,
               "keep the part along a head's sink direction, its mean value, apart");
  app.add_option("--storage", storage_,
                 "of factors, dense bodies and sink: fp32, fp16, bf16 or fp8 (e4m3, a scale a "
                 "vector)");
  app.add_option("--rounding", rounding_,
                 "to it, at each compaction: nearest or stochastic (all but fp32)");
  app.add_option("--seed", options.seed,
                 "of random sketches (all but dense-buffered) and of stochastic rounding")
      ->transform(whole_number<std::uint64_t>());
}

void PolicyFlags::resolve() {
  options_.compaction = named("--policy", all_compactions, policy_);
  options_.storage = named("--storage", all_storages, storage_);
  options_.rounding = named("--rounding", all_roundings, rounding_);
  options_.dense_fallback = !no_dense_fallback_;
  if (app_.count("--rounding") > 0 && options_.storage == Storage::fp32) {
    throw ToolError("--rounding: fp32 storage does not round, it belongs to fp16, bf16 and fp8");
  }
  if (app_.count("--seed") > 0 && options_.compaction == Compaction::dense_buffered &&
      options_.rounding == Rounding::nearest) {
    throw ToolError(
        "--seed: dense-buffered has no use for it unless it rounds stochastically, it belongs to "
        "local-svd, full-svd, fixed-rank and --rounding stochastic");
  }
  for (const Restricted& option : restricted) {
    const auto& users = option.policies;
    const bool used = std::find(users.begin(), users.end(), options_.compaction) != users.end();
    if (used || app_.count(option.name) == 0) continue;
    std::string names;
    for (const Compaction user : users) {
      names += (names.empty() ? "" : ", ") + std::string(to_string(user));
    }
    throw ToolError(std::string(option.name) + ": " + to_string(options_.compaction) +
                    " has no use for it, it belongs to " + names);
  }
  const auto number = [](double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", value);
    return std::string(text);
  };
  if (!(options_.epsilon >= 0 && options_.epsilon < 1)) {
    refuse("--epsilon", "a number in [0, 1)", number(options_.epsilon));
  }
  if (options_.recompress_growth != 0 &&
      !(options_.recompress_growth >= 1 && options_.recompress_growth <= 1e6)) {
    refuse("--recompress-growth", "0 or a number in [1, 1e6]", number(options_.recompress_growth));
  }
  at_least("--buffer", 1, options_.buffer);
  if (options_.buffer > 65536) refuse("--buffer", "at most 65536", std::to_string(options_.buffer));
  if (!(options_.tail_share >= 0 && options_.tail_share <= 1)) {
    refuse("--tail-share", "a number in [0, 1]", number(options_.tail_share));
  }
  constexpr std::ptrdiff_t most = std::ptrdiff_t{1} << 20;  // of a StateConfig
  const auto in_range = [&](const char* option, std::ptrdiff_t least, std::ptrdiff_t given) {
    if (app_.count(option) == 0) return;
    at_least(option, least, given);
    if (given > most) refuse(option, "at most " + std::to_string(most), std::to_string(given));
  };
  if (app_.count("--rank-cap") > 0) at_least("--rank-cap", 1, options_.rank_cap);
  if (app_.count("--rank") > 0) at_least("--rank", 1, options_.rank_cap);
  in_range("--active", 1, options_.active);
  in_range("--recompress-slack", 0, options_.recompress_slack);
  in_range("--tail-period", 0, options_.tail_period);
}

}  // namespace sinkstate::tools
