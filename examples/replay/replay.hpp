/// @file
/// A trace through a policy, beside the exact recurrence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <sinkstate/model/state_config.hpp>
#include <string>
#include <vector>

#include "trace.hpp"

namespace sinkstate::tools {

enum class Compaction { local_svd, full_svd, fixed_rank, dense_buffered };

inline constexpr Compaction all_compactions[] = {Compaction::local_svd, Compaction::full_svd,
                                                 Compaction::fixed_rank,
                                                 Compaction::dense_buffered};

const char* to_string(Compaction compaction);

/// The format of body and sink.
enum class Storage { fp32, fp16, bf16, fp8 };

inline constexpr Storage all_storages[] = {Storage::fp32, Storage::fp16, Storage::bf16,
                                           Storage::fp8};

const char* to_string(Storage storage);

inline constexpr Rounding all_roundings[] = {Rounding::nearest, Rounding::stochastic};

const char* to_string(Rounding rounding);

/// Where states live.
enum class Backend { host, cuda };

inline constexpr Backend all_backends[] = {Backend::host, Backend::cuda};

const char* to_string(Backend backend);

struct ReplayOptions {
  Compaction compaction = Compaction::local_svd;
  double epsilon = 1e-2;
  std::ptrdiff_t buffer = 8;
  std::ptrdiff_t rank_cap = 0;  // 0: as StateConfig, as all that follow
  std::ptrdiff_t active = 0;
  double recompress_growth = StateConfig{}.recompress_growth;
  std::ptrdiff_t recompress_slack = StateConfig{}.recompress_slack;
  double tail_share = StateConfig{}.tail_share;
  std::ptrdiff_t tail_period = 0;
  bool dense_fallback = true;
  bool sink = false;
  Storage storage = Storage::fp32;
  Rounding rounding = Rounding::nearest;
  std::uint64_t seed = 0;
  Backend backend = Backend::host;
  std::ptrdiff_t prefill = 0;  // tokens that run dense and are then compressed
  int threads = 1;
  bool series = false;  // keep what a figure shows
};

/// Figures of one value head, or of all heads of a trace together.
///
/// Norms of several heads add as squares, bytes add, ranks and times are means over heads; the
/// worst output is the worst of all. A dense body counts as rank min(d_k, d_v).
struct ReplayFigures {
  double output_error_rms = 0;    // RMS over tokens of |o~ - o|, over RMS of |o|
  double output_error_worst = 0;  // largest |o~ - o| of a token, over RMS of |o|
  std::ptrdiff_t output_error_worst_token = 0;
  double state_error_rel = 0;        // |S~ - S|_F / |S|_F after the last token
  double state_error_abs = 0;        // |S~ - S|_F
  double certificate = 0;            // the state's own bound of it
  bool certificate_holds = true;     // after every compaction and at the end
  double certificate_looseness = 0;  // median of bound over error, at the same moments
  double rank_mean = 0;
  std::ptrdiff_t rank_peak = 0;
  double rank_final = 0;
  std::vector<std::ptrdiff_t> rank_histogram;  // [r] = tokens at rank r
  double bytes_mean = 0;
  double bytes_peak = 0;
  double bytes_dense = 0;
  std::ptrdiff_t compactions = 0;
  // Compactions that decomposed all terms of a state; none: nobody counts them on a device.
  std::optional<std::ptrdiff_t> recompressions = 0;
  double dense_fallback = 0;  // share of tokens with a dense body
  // NaN: not taken. One state at a time, with copies in between, is no timing of a device.
  double ns_per_token_dense = 0;
  double ns_per_token_step = 0;
  double ns_per_token_compaction = 0;

  double ratio_mean() const { return bytes_mean / bytes_dense; }
  double ratio_peak() const { return bytes_peak / bytes_dense; }
};

/// A head token by token, from the first after the prefill.
struct HeadSeries {
  std::vector<double> rank;          // with which the output was read
  std::vector<double> output_error;  // |o~ - o|, over RMS of |o| of the head
};

struct TraceReport {
  std::string trace;
  std::string rule;
  std::ptrdiff_t tokens = 0;
  std::ptrdiff_t heads = 0;
  std::ptrdiff_t d_k = 0;
  std::ptrdiff_t d_v = 0;
  StateConfig config;  // with the policy's own rank cap and active terms in the place of zeros
  ReplayFigures total;
  std::vector<ReplayFigures> per_head;
  std::vector<HeadSeries> series;  // of each head, if asked for
};

/// What the factored states gave, as a file wants it.
struct ReplayOutputs {
  std::vector<float> output;  // [tokens, value_heads, d_v]; of a prefill, the exact outputs
  std::vector<float> state;   // [value_heads, d_k, d_v], dense, after the last token
};

/// Refuses options that do not fit a trace.
/// @throws ToolError
void check_options(const std::string& name, const Trace& trace, const ReplayOptions& options);

/// Replays every value head of a trace, `options.threads` at a time. All figures but the times
/// depend on the arguments alone, to the bit.
///
/// @param name      of the trace, for the report and for errors
/// @param outputs   filled if not null
/// @param progress  called now and then, from any thread, with the tokens done since the last call
/// @throws ToolError when the options do not fit the trace, or the trace contradicts itself
/// (`state_end`)
TraceReport replay(const std::string& name, const Trace& trace, const ReplayOptions& options,
                   ReplayOutputs* outputs, const std::function<void(std::ptrdiff_t)>& progress);

}  // namespace sinkstate::tools
