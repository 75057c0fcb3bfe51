/// @file
/// What is chosen at run time about one state.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/number_formats.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Sizes and limits of a state. The defaults are those of paper 1 for Gated DeltaNet.
struct StateConfig {
  Index d_k = 0;
  Index d_v = 0;
  /// Tokens between two compactions.
  Index buffer = 8;
  /// Further tokens that the buffer can hold past `due()`: the longest draft that may have to be
  /// taken back, or slack for a compaction that comes late.
  Index draft = 0;
  /// Terms weaker than epsilon times the strongest (or than the sink, if that is stronger) are
  /// dropped. 0 keeps all that is above rounding. Terms below 1e-31 (fp64: 1e-292) are dropped in
  /// any case, before they turn subnormal. (LocalSvd, FullSvd)
  double epsilon = 1e-2;
  /// Most terms kept. LocalSvd, FullSvd: 0 is as many as pay, or as the state can have when the
  /// dense fallback is off. FixedRank: the rank; 0 is 16, and 32 where channels decay on their own.
  Index rank_cap = 0;
  /// A state that needs more terms than pay is kept dense, exactly. (LocalSvd, FullSvd)
  bool dense_fallback = true;
  /// Compactions after which a dense state is tried in low-rank form again. (LocalSvd, FullSvd)
  Index dense_retry = 16;
  /// The strongest terms, which are decomposed together with the buffer; the others are frozen. 0
  /// is 8, and 16 where channels decay on their own. (LocalSvd)
  Index active = 0;
  /// All terms are decomposed when there are more than `recompress_growth` times those that the
  /// last such recompression left (or fewer since) plus `recompress_slack`. A growth of 0: only
  /// when there are more than fit. (LocalSvd)
  double recompress_growth = 1.15;
  Index recompress_slack = 2;
  /// Until then only terms below this share of epsilon are dropped, so that what several buffers
  /// write along a weak direction adds up; 1: all below epsilon, as in paper 1. (LocalSvd)
  double tail_share = 0.3;
  /// Compactions after which the frozen terms are decomposed among themselves; 0: never. (LocalSvd)
  Index tail_period = 0;
  /// How a compaction rounds to a narrow format. (Fp16, Bf16, Fp8)
  Rounding rounding = Rounding::nearest;
  /// Of the random sketches of FixedRank and of the trial of a dense state, and of stochastic
  /// rounding: heads that are to round independently have seeds of their own.
  std::uint64_t seed = 0;

  /// The largest rank whose terms are smaller than the dense matrix: r (d_k + d_v) < d_k d_v.
  SINKSTATE_HOST_DEVICE constexpr Index paying_rank() const {
    return (d_k * d_v - 1) / (d_k + d_v);
  }
  SINKSTATE_HOST_DEVICE constexpr Index full_rank() const { return d_k < d_v ? d_k : d_v; }
  /// Terms for which there is room when the rank adapts.
  SINKSTATE_HOST_DEVICE constexpr Index rank_capacity() const {
    const Index useful = dense_fallback ? paying_rank() : full_rank();
    return rank_cap == 0 || rank_cap > useful ? useful : rank_cap;
  }
  SINKSTATE_HOST_DEVICE constexpr Index buffer_capacity() const { return buffer + draft; }

  /// @returns *this
  /// @throws Error naming the first field that cannot be used
  const StateConfig& checked() const {
    detail::in_range(1, detail::largest_size, "StateConfig::d_k", d_k);
    detail::in_range(1, detail::largest_size, "StateConfig::d_v", d_v);
    detail::in_range(1, detail::largest_size, "StateConfig::buffer", buffer);
    detail::in_range(0, detail::largest_size, "StateConfig::draft", draft);
    detail::in_range(0, std::numeric_limits<Index>::max(), "StateConfig::rank_cap", rank_cap);
    detail::in_range(1, detail::largest_size, "StateConfig::dense_retry", dense_retry);
    detail::in_range(0, detail::largest_size, "StateConfig::active", active);
    detail::in_range(0, detail::largest_size, "StateConfig::recompress_slack", recompress_slack);
    detail::in_range(0, detail::largest_size, "StateConfig::tail_period", tail_period);
    if (!(tail_share >= 0.0 && tail_share <= 1.0)) {
      detail::refuse("StateConfig::tail_share", "a number in [0, 1]", std::to_string(tail_share));
    }
    if (recompress_growth != 0.0 && !(recompress_growth >= 1.0 && recompress_growth <= 1e6)) {
      detail::refuse("StateConfig::recompress_growth", "0 or a number in [1, 1e6]",
                     std::to_string(recompress_growth));
    }
    if (!(epsilon >= 0.0 && epsilon < 1.0)) {
      detail::refuse("StateConfig::epsilon", "a number in [0, 1)", std::to_string(epsilon));
    }
    return *this;
  }
};

SINKSTATE_NAMESPACE_END
