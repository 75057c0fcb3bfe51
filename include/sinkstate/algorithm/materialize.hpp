/// @file
/// The dense matrix of a state.
#pragma once

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "../model/sink_state.hpp"
#include "terms.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Row i of diag(body_decay) matrix + terms: the content, without the sink.
template <class Team, class Policy, class T = typename Policy::Compute>
SINKSTATE_HOST_DEVICE void content_row(Team& team, const SinkStateView<Policy>& state,
                                       const CurrentTerms<Policy>& terms, Index i, T* row) {
  const auto& list = terms.list;
  if (state.dense()) {
    team.scale(state.config.d_v, terms.body_decay[i], read_row(team, state.matrix, i, row), row);
  } else {
    team.fill(state.config.d_v, T(0), row);
  }
  for (Index t = 0; t < list.count; ++t) list.coefficients[t] = list.weights[t] * list.keys(t, i);
  team.add_combination(list.values.middle_rows(0, list.count), list.coefficients, row);
}

/// Rounding errors of forming a dense row from what is stored, in units of u m.
template <class Policy>
SINKSTATE_HOST_DEVICE double materialize_roundoffs(const SinkStateView<Policy>& state) {
  return fold_roundoffs(state.buffered()) + static_cast<double>(state.rank() + state.buffered());
}

}  // namespace detail

/// S as a dense matrix [K,V], pending decays applied; the state is unchanged.
///
/// @param dense        d_k x d_v, any strides, apart from the state
/// @param certificate  if not null: upper bound of the Frobenius norm of `dense` minus the exact
///                     state. To carry an error over a further prompt, pass it on to `initialize`.
/// @returns invalid_argument, overflow (rows before the one that overflows have been written),
///          workspace_too_small
/// Allocates nothing; O(d_k d_v (rank + buffered)).
template <class Team, class Policy>
SINKSTATE_HOST_DEVICE Status materialize(Team& team, SinkStateView<Policy> state,
                                         const StridedMatrix<typename Policy::Compute>& dense,
                                         typename Policy::Compute* certificate = nullptr) noexcept {
  using T = typename Policy::Compute;
  if (dense.rows != state.config.d_k || dense.cols != state.config.d_v) {
    return Status::invalid_argument;
  }
  Workspace memory = team.workspace();
  detail::CurrentTerms<Policy> terms(state.config, memory);
  T* const row = memory.take<T>(state.config.d_v);
  if (memory.exhausted()) return Status::workspace_too_small;

  if (!detail::gather_terms(team, state, terms, state.rank())) return Status::overflow;
  for (Index i = 0; i < state.config.d_k; ++i) {
    detail::content_row(team, state, terms, i, row);
    if constexpr (Policy::Sink::present) {
      const MatrixView<const T> direction{state.sink_direction, 1, state.config.d_v,
                                          state.config.d_v};
      team.add_combination(direction, terms.sink + i, row);
    }
    if (!team.finite(state.config.d_v, row)) return Status::overflow;
    for (Index j = 0; j < dense.cols; ++j) dense(i, j) = row[j];
  }
  if (certificate != nullptr) {
    const T roundoffs = static_cast<T>(detail::materialize_roundoffs(state));
    *certificate =
        detail::round_up(state.certificate() + detail::unit_roundoff<T> * roundoffs *
                                                   state.buffer.masses[state.buffered()]);
  }
  return Status::ok;
}

SINKSTATE_NAMESPACE_END
