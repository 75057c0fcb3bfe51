// cut_trace IN OUT --tokens N [--heads a,b] [--source TEXT]
//
// Keeps the first tokens and some heads of a trace, in the types that it is stored in. The final
// state is computed anew, in double from the numbers as stored.
#include <CLI/CLI.hpp>
#include <cstddef>
#include <exception>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include "../tests/oracles/dense_recurrence.hpp"
#include "replay/trace.hpp"

namespace {

namespace tools = sinkstate::tools;
namespace oracle = sinkstate::oracle;

oracle::RuleTraits traits_of(tools::Rule rule) {
  switch (rule) {
    case tools::Rule::mamba2:
      return oracle::mamba2;
    case tools::Rule::gated_delta:
      return oracle::gated_delta;
    case tools::Rule::kimi_delta:
      return oracle::kimi_delta;
  }
  return oracle::mamba2;
}

std::vector<float> end_state(const tools::Trace& trace) {
  std::vector<float> states;
  for (std::ptrdiff_t h = 0; h < trace.value_heads; ++h) {
    oracle::DenseRecurrence<double> head(traits_of(trace.rule), static_cast<int>(trace.d_k),
                                         static_cast<int>(trace.d_v));
    if (!trace.initial_state.empty()) {
      const std::ptrdiff_t size = trace.d_k * trace.d_v;
      const float* initial = trace.initial_state.data() + h * size;
      head.state().assign(initial, initial + size);
    }
    for (std::ptrdiff_t t = 0; t < trace.tokens; ++t) {
      head.step(trace.key(t, h), trace.value(t, h), trace.log_decays(t, h),
                trace.write_strength(t, h));
    }
    for (const double x : head.state()) states.push_back(static_cast<float>(x));
  }
  return states;
}

std::string join(const std::vector<std::ptrdiff_t>& numbers) {
  std::string text;
  for (const std::ptrdiff_t x : numbers) text += (text.empty() ? "" : ", ") + std::to_string(x);
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Cuts the first tokens, and some heads, out of a trace.", "cut_trace");
  std::string in;
  std::string out;
  std::string source;
  std::ptrdiff_t tokens = 0;
  std::vector<std::ptrdiff_t> heads;
  app.add_option("IN", in, "trace to read")->required();
  app.add_option("OUT", out, "trace to write")->required();
  app.add_option("--tokens", tokens, "how many tokens to keep")->required();
  app.add_option("--heads", heads, "value heads to keep, as a,b (default: all)")
      ->delimiter(',')
      ->allow_extra_args(false);
  app.add_option("--source", source, "what OUT says about where it comes from");
  try {
    app.parse(argc, argv);
    const tools::Trace trace = tools::load_trace(in);
    std::string what_was_cut = "first " + std::to_string(tokens) + " tokens";
    if (heads.empty()) {
      heads.resize(static_cast<std::size_t>(trace.value_heads));
      std::iota(heads.begin(), heads.end(), 0);
    } else {
      what_was_cut += " of heads " + join(heads);
    }
    tools::Trace part = tools::cut(trace, tokens, heads);
    part.state_end = end_state(part);
    part.source = source.empty() ? trace.source + "; " + what_was_cut : source;
    tools::save_trace(out, part);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const std::exception& error) {
    std::cerr << "cut_trace: " << error.what() << '\n';
    return 2;
  }
}
