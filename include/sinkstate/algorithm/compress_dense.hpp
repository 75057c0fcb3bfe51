/// @file
/// A dense content in low-rank form, by a decomposition of its own.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"
#include "keep.hpp"
#include "randomized_svd.hpp"
#include "recompress.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

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

/// |content - body|_F, computed: docs/numerics.md, (N9). Overwrites `content`.
/// @param scale  the power of two by which `content` was divided
/// @param list   scratch
template <class Team, class Policy, class Core, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE T residual_norm(Team& team, const SinkStateView<Policy>& state,
                                      const MatrixView<T>& content, T scale,
                                      const TermList<T, Core>& list) {
  T norm = T(0);
  const auto keys = read_rows(team, state.factors.keys(), list.keys);
  const auto values = read_rows(team, state.factors.values(), list.values);
  for (Index i = 0; i < content.rows; ++i) {
    for (Index t = 0; t < state.rank(); ++t) {
      list.coefficients[t] = -(state.factors.strength(t) / scale) * keys(t, i);
    }
    team.add_combination(values, list.coefficients, content.row(i));
    norm = std::hypot(norm, team.norm(content.cols, content.row(i)));
  }
  return bound_of_rows(content, norm) * scale;  // (N9)
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
/// @returns as `keep_strongest`; `report.dropped` is then the computed residual, rounding included
template <class Team, class Policy, class Method, class Core, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE bool compress_dense(Team& team, const SinkStateView<Policy>& state,
                                          const Method& method, const StorageRounding& storage,
                                          T scale, T sink, Index most, bool may_refuse,
                                          DenseSvdScratch<T, Core>& scratch,
                                          CompactionReport& report) {
  const Index sought = may_refuse ? most : most + oversampling;
  const double epsilon = epsilon_of<Policy>(state.config);
  const bool complete =
      list_terms(team, method, static_cast<T>(epsilon), sink / scale, sought, scratch);
  if (!complete && may_refuse) return false;
  for (Index i = 0; i < scratch.list.count; ++i) scratch.list.weights[i] = scale;
  const auto terms = decompose(team, scratch.list);
  if (!keep_strongest(team, state, terms, {}, storage, epsilon, sink, most, may_refuse, report)) {
    return false;
  }
  report.capped = report.capped || !complete;
  report.dropped =
      static_cast<double>(residual_norm(team, state, scratch.content, scale, scratch.list));
  report.rounded = 0;
  return true;
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
