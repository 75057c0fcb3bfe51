#include "replay.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <sinkstate/host/host_team.hpp>
#include <sinkstate/model/update_rules.hpp>

#include "any_state.hpp"
#include "dense_step.hpp"
#include "oracles/dense_recurrence.hpp"
#include "oracles/norms.hpp"
#include "parallel_for.hpp"
#include "thread_time.hpp"

namespace sinkstate::tools {
namespace {

double square(double x) { return x * x; }

std::size_t size(std::ptrdiff_t count) { return static_cast<std::size_t>(count); }

/// A sum of squares and what else two heads need to be put together.
struct Sums {
  double output_error = 0;
  double output = 0;
  double state_error = 0;
  double state = 0;
  std::vector<double> looseness;
};

struct HeadResult {
  StateConfig config;
  ReplayFigures figures;
  Sums sums;
  HeadSeries series;
};

double ratio(double part, double whole) {
  return whole > 0 ? part / whole : part > 0 ? INFINITY : 0;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The verbs are given checked input and a workspace of the right size; what is left is overflow.
void require_ok(Status status, const std::string& name, std::ptrdiff_t head, std::ptrdiff_t token) {
  if (status == Status::ok) return;
  throw ToolError(name + ": head " + std::to_string(head) + ", token " + std::to_string(token) +
                  ": " + to_string(status));
}

oracle::RuleTraits traits_of(Rule rule) {
  using Traits = oracle::RuleTraits;
  const bool per_channel = rule == Rule::kimi_delta;
  return {rule != Rule::mamba2, per_channel ? Traits::Decay::per_channel : Traits::Decay::scalar};
}

class HeadReplay {
 public:
  HeadReplay(const std::string& name, const Trace& trace, std::ptrdiff_t head,
             const ReplayOptions& options, ReplayOutputs* outputs,
             const std::function<void(std::ptrdiff_t)>& progress)
      : name_(name),
        trace_(trace),
        head_(head),
        options_(options),
        outputs_(outputs),
        progress_(progress),
        state_(make_state(trace.rule, options, trace.d_k, trace.d_v,
                          options.sink ? trace.sink_direction.data() + head * trace.d_v : nullptr)),
        team_(state_->workspace_bytes()),
        exact_(traits_of(trace.rule), static_cast<int>(trace.d_k), static_cast<int>(trace.d_v)) {}

  HeadResult run() {
    result_.figures.bytes_dense = 4.0 * static_cast<double>(trace_.d_k * trace_.d_v);
    start();
    std::ptrdiff_t first = options_.prefill;
    while (first < trace_.tokens) {
      const std::ptrdiff_t count = std::min(options_.buffer, trace_.tokens - first);
      window(first, count);
      first += count;
    }
    finish();
    if (options_.backend == Backend::host) {
      result_.figures.ns_per_token_dense = dense_ns_per_token();
    } else {
      leave_out_of_reach();
    }
    result_.config = state_->config();
    return std::move(result_);
  }

 private:
  Token<float> token(std::ptrdiff_t t) const {
    return {trace_.key(t, head_), trace_.value(t, head_), trace_.log_decays(t, head_),
            trace_.write_strength(t, head_)};
  }

  void exact_step(std::ptrdiff_t t, double* output) {
    const Token<float> now = token(t);
    exact_.step_read(now.key, now.value, now.log_decay, now.write_strength, trace_.query(t, head_),
                     output);
  }

  float* output_row(std::ptrdiff_t t) {
    return outputs_->output.data() + (t * trace_.value_heads + head_) * trace_.d_v;
  }

  /// The initial state and the prefill: dense, then compressed.
  void start() {
    if (!trace_.initial_state.empty()) {
      const auto begin = trace_.initial_state.begin() + head_ * trace_.d_k * trace_.d_v;
      std::copy(begin, begin + trace_.d_k * trace_.d_v, exact_.state().begin());
    }
    std::vector<double> output(size(trace_.d_v));
    for (std::ptrdiff_t t = 0; t < options_.prefill; ++t) {
      exact_step(t, output.data());
      if (outputs_ != nullptr) {
        std::transform(output.begin(), output.end(), output_row(t),
                       [](double x) { return static_cast<float>(x); });
      }
    }
    progress_(options_.prefill);
    if (options_.prefill == 0 && trace_.initial_state.empty()) return;

    const std::vector<double>& exact = exact_.state();
    const std::vector<float> dense(exact.begin(), exact.end());
    // The library sees the rounded matrix; the certificate starts with how far that is from the
    // exact one.
    double rounding = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) rounding += square(exact[i] - double{dense[i]});
    RandomizedSvd method;
    method.seed = options_.seed;
    require_ok(state_->initialize(
                   team_, MatrixView<const float>{dense.data(), trace_.d_k, trace_.d_v, trace_.d_v},
                   method, std::nextafter(static_cast<float>(std::sqrt(rounding)), INFINITY)),
               name_, head_, options_.prefill);
    check_state(options_.prefill);
  }

  /// The tokens between two compactions, and the one after them. Only library calls are inside the
  /// timed stretches.
  void window(std::ptrdiff_t first, std::ptrdiff_t count) {
    std::vector<float> outputs(size(count * trace_.d_v));
    std::vector<Status> statuses(size(count));
    const double begin = 1e9 * thread_seconds();
    for (std::ptrdiff_t t = 0; t < count; ++t) {
      statuses[size(t)] = state_->step(team_, token(first + t), trace_.query(first + t, head_),
                                       outputs.data() + t * trace_.d_v);
    }
    step_ns_ += 1e9 * thread_seconds() - begin;

    std::vector<double> exact(size(trace_.d_v));
    for (std::ptrdiff_t t = 0; t < count; ++t) {
      require_ok(statuses[size(t)], name_, head_, first + t);
      exact_step(first + t, exact.data());
      compare_output(first + t, exact.data(), outputs.data() + t * trace_.d_v);
      count_memory();
    }
    if (state_->due()) {
      CompactionReport report;
      const double compaction = 1e9 * thread_seconds();
      const Status status = state_->compact(team_, &report);
      compaction_ns_ += 1e9 * thread_seconds() - compaction;
      require_ok(status, name_, head_, first + count - 1);
      ++result_.figures.compactions;
      if (report.decomposed > 0 && report.decomposed == report.rank_before) {
        ++*result_.figures.recompressions;
      }
      check_state(first + count);
    }
    progress_(count);
  }

  void compare_output(std::ptrdiff_t t, const double* exact, const float* output) {
    double error = 0;
    for (std::ptrdiff_t j = 0; j < trace_.d_v; ++j) {
      error += square(double{output[j]} - exact[j]);
      result_.sums.output += square(exact[j]);
    }
    result_.sums.output_error += error;
    if (error > worst_) {
      worst_ = error;
      result_.figures.output_error_worst_token = t;
    }
    if (options_.series) result_.series.output_error.push_back(std::sqrt(error));
    if (outputs_ != nullptr) std::copy(output, output + trace_.d_v, output_row(t));
  }

  /// After each token, with the rank that its read-out used.
  void count_memory() {
    ReplayFigures& figures = result_.figures;
    const auto rank = static_cast<std::ptrdiff_t>(state_->rank());
    if (figures.rank_histogram.size() <= size(rank)) figures.rank_histogram.resize(size(rank) + 1);
    ++figures.rank_histogram[size(rank)];
    figures.rank_mean += static_cast<double>(rank);
    if (options_.series) result_.series.rank.push_back(static_cast<double>(rank));
    figures.rank_peak = std::max(figures.rank_peak, rank);
    const auto bytes = static_cast<double>(state_->bytes().total());
    figures.bytes_mean += bytes;
    figures.bytes_peak = std::max(figures.bytes_peak, bytes);
    figures.dense_fallback += state_->dense() ? 1 : 0;
  }

  /// The certificate against the true error.
  double check_state(std::ptrdiff_t token) {
    dense_.resize(size(trace_.d_k * trace_.d_v));
    float bound = 0;
    const MatrixView<float> dense{dense_.data(), trace_.d_k, trace_.d_v, trace_.d_v};
    require_ok(state_->materialize(team_, dense, &bound), name_, head_, token);
    double error = 0;
    for (std::size_t i = 0; i < dense_.size(); ++i) {
      error += square(double{dense_[i]} - exact_.state()[i]);
    }
    error = std::sqrt(error);
    if (!(double{bound} >= error)) result_.figures.certificate_holds = false;
    if (error > 0) result_.sums.looseness.push_back(double{bound} / error);
    result_.figures.certificate = double{bound};
    return error;
  }

  void finish() {
    ReplayFigures& figures = result_.figures;
    Sums& sums = result_.sums;
    figures.state_error_abs = check_state(trace_.tokens);
    const double norm = oracle::frobenius_norm(exact_.state());
    sums.state_error = square(figures.state_error_abs);
    sums.state = square(norm);
    figures.state_error_rel = ratio(figures.state_error_abs, norm);
    check_state_end(norm);
    if (outputs_ != nullptr) {
      std::copy(dense_.begin(), dense_.end(),
                outputs_->state.begin() + head_ * trace_.d_k * trace_.d_v);
    }

    const auto tokens = static_cast<double>(trace_.tokens - options_.prefill);
    figures.output_error_rms = ratio(std::sqrt(sums.output_error), std::sqrt(sums.output));
    const double output = std::sqrt(sums.output / tokens);
    figures.output_error_worst = ratio(std::sqrt(worst_), output);
    for (double& error : result_.series.output_error) error = ratio(error, output);
    figures.certificate_looseness = median(sums.looseness);
    figures.rank_final = static_cast<double>(state_->rank());
    figures.rank_mean /= tokens;
    figures.bytes_mean /= tokens;
    figures.dense_fallback /= tokens;
    figures.ns_per_token_step = step_ns_ / tokens;
    figures.ns_per_token_compaction = compaction_ns_ / tokens;
  }

  /// What is not known of a device.
  void leave_out_of_reach() {
    ReplayFigures& figures = result_.figures;
    figures.recompressions.reset();
    figures.ns_per_token_dense = std::numeric_limits<double>::quiet_NaN();
    figures.ns_per_token_step = std::numeric_limits<double>::quiet_NaN();
    figures.ns_per_token_compaction = std::numeric_limits<double>::quiet_NaN();
  }

  /// A trace that carries its exact final state must agree with the recurrence, or something was
  /// captured wrongly.
  void check_state_end(double norm) const {
    if (trace_.state_end.empty()) return;
    const float* const end = trace_.state_end.data() + head_ * trace_.d_k * trace_.d_v;
    double distance = 0;
    for (std::size_t i = 0; i < exact_.state().size(); ++i) {
      distance += square(double{end[i]} - exact_.state()[i]);
    }
    const double relative = ratio(std::sqrt(distance), norm);
    // Room for sequences or states that an engine rounded to 16 bits; a mistake is off by far more.
    constexpr double rounding = 2e-3;
    if (relative <= rounding) return;
    throw ToolError(name_ + ": state_end of head " + std::to_string(head_) +
                    ": wanted the state that the recurrence reaches, to " +
                    std::to_string(rounding) + ", given one " + std::to_string(relative) +
                    " away (a wrong rule, head map, sign of the decay or layout?)");
  }

  double dense_ns_per_token() const {
    switch (trace_.rule) {
      case Rule::mamba2:
        return dense_ns_per_token<Mamba2>();
      case Rule::gated_delta:
        return dense_ns_per_token<GatedDelta>();
      case Rule::kimi_delta:
        return dense_ns_per_token<KimiDelta>();
    }
    return 0;
  }

  template <class RuleTag>
  double dense_ns_per_token() const {
    DenseStep<RuleTag> dense(trace_.d_k, trace_.d_v);
    std::vector<float> output(size(trace_.d_v));
    const double begin = 1e9 * thread_seconds();
    for (std::ptrdiff_t t = 0; t < trace_.tokens; ++t) {
      const Token<float> now = token(t);
      dense(now.key, now.value, now.log_decay, now.write_strength, trace_.query(t, head_),
            output.data());
    }
    return (1e9 * thread_seconds() - begin) / static_cast<double>(trace_.tokens);
  }

  const std::string& name_;
  const Trace& trace_;
  std::ptrdiff_t head_;
  const ReplayOptions& options_;
  ReplayOutputs* outputs_;
  const std::function<void(std::ptrdiff_t)>& progress_;

  std::unique_ptr<AnyState> state_;
  HostTeam team_;
  oracle::DenseRecurrence<double> exact_;
  std::vector<float> dense_;
  HeadResult result_;
  double worst_ = -1;  // below any error, so that the first token is the worst until another one is
  double step_ns_ = 0;
  double compaction_ns_ = 0;
};

ReplayFigures combine(const std::vector<HeadResult>& heads) {
  ReplayFigures total;
  Sums sums;
  double worst = -1;
  double certificate = 0;
  const auto count = static_cast<double>(heads.size());
  for (const HeadResult& head : heads) {
    const ReplayFigures& f = head.figures;
    sums.output_error += head.sums.output_error;
    sums.output += head.sums.output;
    sums.state_error += head.sums.state_error;
    sums.state += head.sums.state;
    sums.looseness.insert(sums.looseness.end(), head.sums.looseness.begin(),
                          head.sums.looseness.end());
    if (f.output_error_worst > worst) {
      worst = f.output_error_worst;
      total.output_error_worst = f.output_error_worst;
      total.output_error_worst_token = f.output_error_worst_token;
    }
    certificate += square(f.certificate);
    total.certificate_holds = total.certificate_holds && f.certificate_holds;
    total.rank_mean += f.rank_mean / count;
    total.rank_peak = std::max(total.rank_peak, f.rank_peak);
    total.rank_final += f.rank_final / count;
    if (total.rank_histogram.size() < f.rank_histogram.size()) {
      total.rank_histogram.resize(f.rank_histogram.size());
    }
    for (std::size_t r = 0; r < f.rank_histogram.size(); ++r) {
      total.rank_histogram[r] += f.rank_histogram[r];
    }
    total.bytes_mean += f.bytes_mean;
    total.bytes_peak += f.bytes_peak;
    total.bytes_dense += f.bytes_dense;
    total.compactions += f.compactions;
    if (total.recompressions && f.recompressions) {
      *total.recompressions += *f.recompressions;
    } else {
      total.recompressions.reset();
    }
    total.dense_fallback += f.dense_fallback / count;
    total.ns_per_token_dense += f.ns_per_token_dense / count;
    total.ns_per_token_step += f.ns_per_token_step / count;
    total.ns_per_token_compaction += f.ns_per_token_compaction / count;
  }
  total.output_error_rms = ratio(std::sqrt(sums.output_error), std::sqrt(sums.output));
  total.state_error_abs = std::sqrt(sums.state_error);
  total.state_error_rel = ratio(total.state_error_abs, std::sqrt(sums.state));
  total.certificate = std::sqrt(certificate);
  total.certificate_looseness = median(sums.looseness);
  return total;
}

}  // namespace

void check_options(const std::string& name, const Trace& trace, const ReplayOptions& options) {
  if (options.prefill >= trace.tokens) {
    throw ToolError(name + ": --prefill: wanted fewer than the " + std::to_string(trace.tokens) +
                    " tokens of the trace, given " + std::to_string(options.prefill));
  }
  constexpr std::ptrdiff_t most_channels = 256;  // of a pool on a device
  if (const auto channels = std::max(trace.d_k, trace.d_v);
      options.backend == Backend::cuda && channels > most_channels) {
    throw ToolError(name + ": --backend: cuda wants a d_k and d_v of at most " +
                    std::to_string(most_channels) + ", given " + std::to_string(channels));
  }
  if (options.sink && trace.sink_direction.empty()) {
    throw ToolError(name + ": --sink: wanted a tensor sink_direction in the trace, given none");
  }
}

const char* to_string(Compaction compaction) {
  switch (compaction) {
    case Compaction::local_svd:
      return "local-svd";
    case Compaction::full_svd:
      return "full-svd";
    case Compaction::fixed_rank:
      return "fixed-rank";
    case Compaction::dense_buffered:
      return "dense-buffered";
  }
  return "";
}

const char* to_string(Storage storage) {
  switch (storage) {
    case Storage::fp32:
      return "fp32";
    case Storage::fp16:
      return "fp16";
    case Storage::bf16:
      return "bf16";
    case Storage::fp8:
      return "fp8";
  }
  return "";
}

const char* to_string(Rounding rounding) {
  return rounding == Rounding::nearest ? "nearest" : "stochastic";
}

const char* to_string(Backend backend) { return backend == Backend::host ? "host" : "cuda"; }

TraceReport replay(const std::string& name, const Trace& trace, const ReplayOptions& options,
                   ReplayOutputs* outputs, const std::function<void(std::ptrdiff_t)>& progress) {
  check_options(name, trace, options);
  if (outputs != nullptr) {
    outputs->output.assign(size(trace.tokens * trace.value_heads * trace.d_v), 0.0f);
    outputs->state.assign(size(trace.value_heads * trace.d_k * trace.d_v), 0.0f);
  }
  std::vector<HeadResult> heads(size(trace.value_heads));
  parallel_for(trace.value_heads, options.threads, [&](std::ptrdiff_t head) {
    heads[size(head)] = HeadReplay(name, trace, head, options, outputs, progress).run();
  });

  TraceReport report{name,
                     to_string(trace.rule),
                     trace.tokens,
                     trace.value_heads,
                     trace.d_k,
                     trace.d_v,
                     heads.front().config,
                     combine(heads),
                     {},
                     {}};
  for (HeadResult& head : heads) {
    report.per_head.push_back(std::move(head.figures));
    if (options.series) report.series.push_back(std::move(head.series));
  }
  return report;
}

}  // namespace sinkstate::tools
