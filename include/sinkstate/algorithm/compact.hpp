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
#include "materialize.hpp"
#include "randomized_svd.hpp"
#include "recompress.hpp"
#include "scaling.hpp"
#include "terms.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// What a compaction, or an initialisation, did.
struct CompactionReport {
  Index rank_before = 0;  ///< terms of the body and buffered tokens that went in
  Index rank_after = 0;   ///< terms kept; 0 when the body is dense
  double dropped = 0;     ///< Frobenius norm of what was truncated
  int sweeps = 0;         ///< of the Jacobi iteration
  bool capped = false;    ///< the rank cap dropped terms that epsilon would have kept
  bool dense = false;     ///< the body is dense now
};

namespace detail {

/// Empties the buffer behind a body and sink that are new.
/// @param error  certificate of the new state
template <class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void commit(const SinkStateView<Policy>& state, T error, T mass) {
  state.buffer.certificates[0] = round_up(error);
  state.buffer.masses[0] = round_up(mass);
  *state.buffer.count = 0;
}

/// Writes the strongest terms of a decomposition as the body, as many as the configuration wants.
/// @param sink      strength of the sink, to which epsilon is relative as well
/// @returns false, and nothing is written, when the strongest term overflows, or more than `most`
///          terms are wanted and `may_refuse`
template <class Team, class Policy, class Core, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE bool keep_strongest(Team& team, const SinkStateView<Policy>& state,
                                          const Decomposition<T, Core>& terms, T sink, Index most,
                                          bool may_refuse, CompactionReport& report) {
  report.sweeps = terms.sweeps;
  const T strongest = terms.count > 0 ? terms.strength(0) : T(0);
  if (!std::isfinite(strongest)) return false;
  const T reference = strongest > sink ? strongest : sink;
  const Index wanted = terms.above(static_cast<T>(state.config.epsilon) * reference);
  if (wanted > most && may_refuse) return false;
  const Index rank = wanted < most ? wanted : most;
  *state.factors.rank = static_cast<std::int32_t>(rank);
  for (Index i = 0; i < rank; ++i) {
    terms.form(team, i, state.factors.keys().row(i), state.factors.values().row(i));
    state.factors.strengths[i] = terms.strength(i);
  }
  state.record->dense = 0;
  report.rank_after = rank;
  report.dropped = static_cast<double>(terms.norm_from(rank)) *
                   (1.0 + unit_roundoff<T> * tail_roundoffs(state.config.d_k, state.config.d_v,
                                                            terms.value_basis.rows, terms.sweeps));
  report.capped = wanted > rank;
  report.dense = false;
  return true;
}

/// Writes a dense body. Rows that are about to become subnormal are dropped.
/// @returns its Frobenius norm
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE T keep_dense(Team& team, const SinkStateView<Policy>& state,
                                   const MatrixView<T>& content, CompactionReport& report) {
  T norm = T(0);
  report.dropped = 0;
  for (Index i = 0; i < content.rows; ++i) {
    const T row = team.norm(content.cols, content.row(i));
    if (row < smallest_kept<T>) {
      team.fill(content.cols, T(0), content.row(i));
      report.dropped += static_cast<double>(row);
    } else {
      norm = std::hypot(norm, row);
    }
    team.copy(content.cols, content.row(i), state.matrix.row(i));
  }
  if (state.record->dense == 0) state.record->dense_age = 0;
  state.record->dense = 1;
  *state.factors.rank = 0;
  report.rank_after = 0;
  report.dense = true;
  return norm;
}

/// Drops a sink that is about to become subnormal.
/// @returns the norm of what was dropped
template <class Team, class T>
SINKSTATE_HOST_DEVICE T drop_faded_sink(Team& team, Index d_k, T* coefficients, T& strength) {
  if (!(strength < smallest_kept<T>)) return T(0);
  const T dropped = strength;
  team.fill(d_k, T(0), coefficients);
  strength = T(0);
  return dropped;
}

template <class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE T strengths_sum(const SinkStateView<Policy>& state) {
  T sum = T(0);
  for (Index i = 0; i < state.rank(); ++i) sum += state.factors.strengths[i];
  return sum;
}

/// Scratch of the randomized block SVD of a dense content.
template <class T, class Core>
struct DenseSvdScratch {
  MatrixView<T> content;  // d_k x d_v
  RangeFinderScratch<T> range;
  TermList<T, Core> list;

  SINKSTATE_HOST_DEVICE static DenseSvdScratch carve(Workspace& memory, const StateConfig& config,
                                                     Index most, Index block) {
    DenseSvdScratch scratch;
    scratch.content = memory.take_matrix<T>(config.d_k, config.d_v);
    scratch.range = RangeFinderScratch<T>::carve(memory, block, config.d_v);
    scratch.list = TermList<T, Core>::carve(memory, most + block, config.d_k, config.d_v);
    return scratch;
  }
};

/// Terms with which a dense body returns to low-rank form: below the capacity, so that it does not
/// go back at once.
SINKSTATE_HOST_DEVICE constexpr Index returning_rank(const StateConfig& config) {
  return (config.rank_capacity() * 3 + 3) / 4;
}

/// Scratch of `compact`.
template <class Policy>
struct CompactScratch {
  using T = typename Policy::Compute;

  CurrentTerms<Policy> terms;
  DenseSvdScratch<T, typename Policy::Backend::Core> dense;

  SINKSTATE_HOST_DEVICE CompactScratch(const StateConfig& config, Workspace& memory)
      : terms(config, memory) {
    if (!Policy::Compaction::low_rank) {
      dense = decltype(dense)::carve(memory, config, 0, 0);
    } else if (config.dense_fallback) {
      dense = decltype(dense)::carve(memory, config, returning_rank(config), RandomizedSvd{}.block);
    }
  }
};

/// |content - body|_F, computed: docs/numerics.md, (N9). Overwrites `content`.
/// @param scale  the power of two by which `content` was divided
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE T residual_norm(Team& team, const SinkStateView<Policy>& state,
                                      const MatrixView<T>& content, T scale, T* coefficients) {
  T norm = T(0);
  for (Index i = 0; i < content.rows; ++i) {
    for (Index t = 0; t < state.rank(); ++t) {
      coefficients[t] = -(state.factors.strengths[t] / scale) * state.factors.keys()(t, i);
    }
    team.add_combination(state.factors.values(), coefficients, content.row(i));
    norm = std::hypot(norm, team.norm(content.cols, content.row(i)));
  }
  // (N9) Joining the rows is one operation a row.
  const double roundoffs = 2.0 * static_cast<double>(content.rows) + dot_roundoffs(content.cols);
  return norm * scale * (T(1) + unit_roundoff<T> * static_cast<T>(roundoffs));
}

/// The terms of a content: all of them ...
template <class Team, class T, class Core>
SINKSTATE_HOST_DEVICE bool list_terms(Team& team, ExactSvd, T, T, Index,
                                      DenseSvdScratch<T, Core>& scratch) {
  auto& list = scratch.list;
  list.count = scratch.content.rows;
  for (Index i = 0; i < list.count; ++i) {
    team.fill(list.keys.cols, T(0), list.keys.row(i));
    list.keys(i, i) = T(1);
    team.copy(list.values.cols, scratch.content.row(i), list.values.row(i));
  }
  return true;
}
/// ... or the strongest. See `find_range` for the rest.
template <class Team, class T, class Core>
SINKSTATE_HOST_DEVICE bool list_terms(Team& team, const RandomizedSvd& options, T epsilon, T least,
                                      Index most, DenseSvdScratch<T, Core>& scratch) {
  return find_range(team, MatrixView<const T>(scratch.content), options, epsilon, least, most,
                    scratch.range, scratch.list);
}

/// Compresses a content and makes the result the body.
///
/// @param method   ExactSvd or RandomizedSvd
/// @param scale    what undoes the scaling of `normalize_matrix`
/// @param scratch  holds the content, which is overwritten when the result is true
/// @param sink, most, may_refuse as in `keep_strongest`
/// @returns as `keep_strongest`; `report.dropped` is then the computed residual
template <class Team, class Policy, class Method, class Core, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE bool compress_dense(Team& team, const SinkStateView<Policy>& state,
                                          const Method& method, T scale, T sink, Index most,
                                          bool may_refuse, DenseSvdScratch<T, Core>& scratch,
                                          CompactionReport& report) {
  const bool complete =
      list_terms(team, method, static_cast<T>(state.config.epsilon), sink / scale, most, scratch);
  if (!complete && may_refuse) return false;
  for (Index i = 0; i < scratch.list.count; ++i) scratch.list.weights[i] = scale;
  const auto terms = decompose(team, scratch.list);
  if (!keep_strongest(team, state, terms, sink, most, may_refuse, report)) return false;
  report.capped = report.capped || !complete;
  report.dropped = static_cast<double>(
      residual_norm(team, state, scratch.content, scale, scratch.list.coefficients));
  return true;
}

}  // namespace detail

/// Folds the buffered tokens into the body and truncates by the policy: docs/mathematics.md,
/// section 4.
///
/// FullSvd keeps the terms of the singular value decomposition that are at least epsilon times the
/// strongest (or the sink); what is dropped has spectral norm at most that. If more terms are
/// wanted than `rank_capacity()`, the body goes dense, exactly, or without `dense_fallback` loses
/// its weakest terms. A dense body is tried in low-rank form again every `dense_retry` compactions
/// and returns when three quarters of the capacity suffice. DenseBuffered adds the buffer to the
/// matrix.
///
/// @param report  if not null, what was done
/// @returns overflow, workspace_too_small; ok without effect when nothing is buffered
/// Allocates nothing. O((d_k + d_v) c^2 + c^3) for c = rank + buffered; dense O(d_k d_v buffered).
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status compact(Team& team, SinkStateView<Policy> state,
                                     CompactionReport* report = nullptr) noexcept {
  using T = typename Policy::Compute;
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

  if (!detail::gather_terms(team, state, terms)) return Status::overflow;
  T sink = T(0);
  if constexpr (Policy::Sink::present) {
    sink = terms.split.strength(team, config.d_k, terms.sink);
    if (!std::isfinite(sink)) return Status::overflow;
  }
  double roundoffs = detail::fold_roundoffs(buffered);
  T rotations = T(0);
  bool low_rank = false;
  if (!state.dense()) {
    const auto decomposition = detail::decompose(team, terms.list);
    low_rank = detail::keep_strongest(team, state, decomposition, sink, config.rank_capacity(),
                                      config.dense_fallback, done);
    if (!low_rank && !config.dense_fallback) return Status::overflow;
    if (low_rank) {
      roundoffs += detail::recompress_roundoffs(config.d_k, config.d_v, done.rank_before);
      rotations = decomposition.rotation_error;
    } else {
      // The decomposition has consumed the terms.
      if (!detail::gather_terms(team, state, terms)) return Status::overflow;
    }
  }
  T body = T(0);
  if (!low_rank) {
    auto& content = scratch.dense.content;
    for (Index i = 0; i < config.d_k; ++i) {
      detail::content_row(team, state, terms, i, content.row(i));
      if (!team.finite(config.d_v, content.row(i))) return Status::overflow;
    }
    roundoffs += static_cast<double>(done.rank_before);
    body = detail::keep_dense(team, state, content, done);
    if constexpr (Policy::Compaction::low_rank) {
      const double faded = done.dropped;
      if (++state.record->dense_age >= config.dense_retry) {
        state.record->dense_age = 0;
        RandomizedSvd options;
        options.seed = config.seed;
        low_rank =
            detail::compress_dense(team, state, options, detail::normalize_matrix(team, content),
                                   sink, detail::returning_rank(config), true, scratch.dense, done);
        if (low_rank) {
          roundoffs += 2.0 * static_cast<double>(done.rank_after + 1);
          done.dropped += faded;
        }
      }
    }
  }
  if (low_rank) body = detail::strengths_sum(state);

  if constexpr (Policy::Sink::present) {
    done.dropped +=
        static_cast<double>(detail::drop_faded_sink(team, config.d_k, terms.sink, sink));
    team.copy(config.d_k, terms.sink, state.sink);
  }
  const T rounding =
      rotations + detail::unit_roundoff<T> * detail::bound_product(static_cast<T>(roundoffs),
                                                                   state.buffer.masses[buffered]);
  const T error = state.certificate() + static_cast<T>(done.dropped) + rounding;
  detail::commit(state, error, body + sink);
  state.record->compactions += 1;
  if (report != nullptr) *report = done;
  return Status::ok;
}

SINKSTATE_NAMESPACE_END
