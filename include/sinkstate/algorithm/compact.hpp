/// @file
/// The buffer folded into the body.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"
#include "compress_dense.hpp"
#include "fixed_rank.hpp"
#include "keep.hpp"
#include "local_svd.hpp"
#include "materialize.hpp"
#include "randomized_svd.hpp"
#include "scaling.hpp"
#include "terms.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Scratch of `compact`.
template <class Policy>
struct CompactScratch {
  using T = typename Policy::Compute;
  using View = SinkStateView<Policy>;

  CurrentTerms<Policy> terms;
  DenseSvdScratch<T, typename Policy::Backend::Core> dense;
  SubspaceScratch<T> subspace;

  SINKSTATE_HOST_DEVICE CompactScratch(const StateConfig& config, Workspace& memory)
      : terms(config, memory) {
    if constexpr (!Policy::Compaction::low_rank) {
      dense = decltype(dense)::carve(memory, config, 0, 0);
    } else if constexpr (!Policy::Compaction::adaptive) {
      const Index rank = View::rank_capacity(config);
      subspace = decltype(subspace)::carve(memory, config, rank, rank + config.buffer_capacity());
    } else if (View::may_be_dense(config)) {
      dense = decltype(dense)::carve(memory, config, returning_rank(config), RandomizedSvd{}.block);
    }
  }
};

/// Folds the buffer into factors.
/// @param scratch  its terms are consumed
/// @returns false, and nothing is written, when the body has to become dense or overflows
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE bool fold_into_factors(Team& team, const SinkStateView<Policy>& state,
                                             CompactScratch<Policy>& scratch,
                                             const StorageRounding& storage, Index active, T sink,
                                             CompactionReport& report,
                                             CompactionRounding<T>& rounding) {
  auto& terms = scratch.terms;
  if constexpr (Policy::Compaction::adaptive) {
    const bool all = active == state.rank();
    if (!merge_active(team, state, terms, storage, active, sink, report, rounding)) {
      if (all) return false;
      // More terms than fit: all of them, once more.
      report.recompressed = true;
      gather_terms(team, state, terms, state.rank());
      return merge_active(team, state, terms, storage, state.rank(), sink, report, rounding);
    }
    const Index period = state.config.tail_period;
    if (!all && period > 0 && (state.record->compactions + 1) % period == 0) {
      recompress_tail(team, state, terms, storage, sink, report, rounding);
    }
    return true;
  } else {
    return keep_fixed_rank(team, state, terms, scratch.subspace, storage, sink, report, rounding);
  }
}

}  // namespace detail

/// Folds the buffered tokens into the body and truncates by the policy: docs/mathematics.md,
/// section 4.
///
/// FullSvd keeps the terms of the singular value decomposition that are at least epsilon times the
/// strongest (or the sink); what is dropped has spectral norm at most that. LocalSvd decomposes the
/// buffer with the `active` strongest terms only and drops by the same rule; norms of what it drops
/// add up. All terms are decomposed when the rank has grown past what `recompress_growth` and
/// `recompress_slack` allow, or when there are more than fit. If more are wanted even then, the
/// body goes dense, exactly, or without `dense_fallback` loses its weakest terms. A dense body is
/// tried in low-rank form again every `dense_retry` compactions and returns when three quarters of
/// the capacity suffice. FixedRank keeps the `rank_cap` strongest terms, found by subspace
/// iteration. DenseBuffered adds the buffer to the matrix.
///
/// @param report          if not null, what was done
/// @param may_recompress  false: LocalSvd leaves a rank that has grown too far to the next
///                        compaction, as long as all terms fit
/// @returns overflow, workspace_too_small; ok without effect when nothing is buffered
/// Allocates nothing. O((d_k + d_v) c^2 + c^3) for c = rank + buffered, LocalSvd mostly for c =
/// active + buffered; dense O(d_k d_v buffered).
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status compact(Team& team, SinkStateView<Policy> state,
                                     CompactionReport* report = nullptr,
                                     bool may_recompress = true) noexcept {
  using T = typename Policy::Compute;
  using Stored = typename Policy::Stored;
  const StateConfig& config = state.config;
  const Index buffered = state.buffered();
  CompactionReport done;
  done.rank_before = done.rank_after = state.rank();
  done.dense = state.dense();
  if (buffered == 0) {
    if (report != nullptr) *report = done;
    return Status::ok;
  }
  done.rank_before += buffered;

  Workspace memory = team.workspace();
  detail::CompactScratch<Policy> scratch(config, memory);
  if (memory.exhausted()) return Status::workspace_too_small;
  auto& terms = scratch.terms;

  const Index active = detail::active_terms(state, may_recompress);
  done.recompressed = may_recompress && detail::overgrowth(state) > 0;
  if (!detail::gather_terms(team, state, terms, active)) return Status::overflow;
  T sink = T(0);
  if constexpr (Policy::Sink::present) {
    sink = terms.split.strength(team, config.d_k, terms.sink);
    if (!std::isfinite(sink) || !detail::fits<Stored>(team, config.d_k, terms.sink)) {
      return Status::overflow;
    }
  }
  const detail::StorageRounding storage(config, state.record->compactions + 1);
  detail::CompactionRounding<T> rounding;
  rounding.roundoffs = detail::fold_roundoffs(buffered);
  if (detail::StoredAs<Stored>::narrow) rounding.roundoffs += 8.0;  // (N15), of the differences
  bool low_rank = false;
  if constexpr (Policy::Compaction::low_rank) {
    if (!state.dense()) {
      low_rank =
          detail::fold_into_factors(team, state, scratch, storage, active, sink, done, rounding);
      if (!low_rank) {
        if (!state.may_turn_dense()) return Status::overflow;
        // The decomposition has consumed the terms, and nothing of it is kept.
        done.decomposed = 0;
        done.recompressed = false;
        done.sweeps = 0;
        detail::gather_terms(team, state, terms, state.rank());
      }
    }
  }
  T body = T(0);
  if (!low_rank) {
    auto& content = scratch.dense.content;
    for (Index i = 0; i < config.d_k; ++i) {
      detail::content_row(team, state, terms, i, content.row(i));
      if (!team.finite(config.d_v, content.row(i)) ||
          !detail::fits<Stored>(team, config.d_v, content.row(i))) {
        return Status::overflow;
      }
    }
    rounding.roundoffs += static_cast<double>(done.rank_before);
    body = detail::keep_dense(team, state, content, storage, terms.list.formed, done);
    if constexpr (Policy::Compaction::adaptive) {
      const double faded = done.dropped;
      if (++state.record->dense_age >= config.dense_retry) {
        state.record->dense_age = 0;
        RandomizedSvd options;
        options.seed = config.seed;
        low_rank = detail::compress_dense(
            team, state, options, storage, detail::normalize_matrix(team, content), sink,
            detail::returning_rank(config), true, scratch.dense, done);
        if (low_rank) {
          rounding.roundoffs += 2.0 * static_cast<double>(done.rank_after + 1);
          state.record->settled_rank = done.rank_after;
          done.dropped += faded;
        }
      }
    }
  }
  if (low_rank) body = detail::strengths_sum(state);

  if constexpr (Policy::Sink::present) {
    done.dropped +=
        static_cast<double>(detail::drop_faded_sink(team, config.d_k, terms.sink, sink));
    done.rounded +=
        static_cast<double>(terms.split.length() *
                            detail::keep_sink(team, state, terms.sink, storage, terms.list.formed));
  }
  const T rounded =
      detail::unit_roundoff<T> *
      detail::bound_product(static_cast<T>(rounding.roundoffs), state.buffer.masses[buffered]);
  const T error = state.certificate() + static_cast<T>(done.dropped + done.rounded) +
                  rounding.rotations + rounded;
  detail::commit(state, error, body + sink);
  state.record->compactions += 1;
  if (report != nullptr) *report = done;
  return Status::ok;
}

SINKSTATE_NAMESPACE_END
