/// @file
/// Between the dense states of a prefill and the states of a pool.
#pragma once

#include <cmath>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../model/state_pool.hpp"
#include "initialize.hpp"
#include "materialize.hpp"
#include "pool_compact.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// The dense states of a request's value heads, in a tensor of any strides.
template <class T>
struct DenseStates {
  T* data = nullptr;
  Index head_stride = 0;
  Index key_stride = 0;    ///< between neighbouring key channels
  Index value_stride = 1;  ///< between neighbouring value channels

  /// Contiguous [heads, K, V].
  static DenseStates keys_by_values(T* data, Index d_k, Index d_v) {
    return {data, d_k * d_v, d_v, 1};
  }
  /// Contiguous [heads, V, K].
  static DenseStates values_by_keys(T* data, Index d_k, Index d_v) {
    return {data, d_k * d_v, 1, d_k};
  }

  SINKSTATE_HOST_DEVICE StridedMatrix<T> head(Index h, const StateConfig& config) const {
    return {data + h * head_stride, config.d_k, config.d_v, key_stride, value_stride};
  }
};

/// Replaces the states of a request by dense matrices, each compressed as `initialize` does: at the
/// end of a prefill, or of a further prompt, to which `materialize` is the way out.
///
/// @param slot          in use
/// @param tokens        that the dense states have seen
/// @param certificates  value_heads numbers: how far the dense states themselves may be from exact
///                      ones, as `materialize` reports it; null: exact
/// @returns invalid_slot, draft_open, invalid_argument (tokens, method or a certificate);
///          non_finite_input; truncated as in `compact`; overflow, workspace_too_small. If some heads
///          fail and others do not, the slot goes no further until it is released, reset or
///          initialised.
/// Allocates nothing.
template <class Teams, class Policy, class Method = RandomizedSvd>
Status initialize(Teams& teams, StatePoolView<Policy> pool, Index slot,
                  const DenseStates<const typename Policy::Compute>& dense, Index tokens = 0,
                  const Method& method = {},
                  const typename Policy::Compute* certificates = nullptr) noexcept {
  using T = typename Policy::Compute;
  if (!pool.in_use(slot)) return Status::invalid_slot;
  SlotRecord& record = pool.slot(slot);
  if (record.draft >= 0) return Status::draft_open;
  const StateConfig& config = pool.config.state;
  const Index heads = pool.config.value_heads;
  if (tokens < 0 || !detail::usable(method)) return Status::invalid_argument;
  for (Index h = 0; certificates != nullptr && h < heads; ++h) {
    if (!(certificates[h] >= T(0))) return Status::invalid_argument;
  }
  // All heads are looked at before the first is replaced.
  teams.for_each(heads, [&](auto&, Index h) {
    const auto matrix = dense.head(h, config);
    for (Index i = 0; i < config.d_k; ++i) {
      for (Index j = 0; j < config.d_v; ++j) {
        if (std::isfinite(matrix(i, j))) continue;
        detail::raise(record.failed, Status::non_finite_input);
        return;
      }
    }
  });
  const Status checked = detail::take_failure(record.failed);
  if (checked != Status::ok) return checked;

  record.bodies.change();
  detail::rewrite_bodies(
      teams, pool, heads, [&](Index) { return slot; },
      [](const auto& view) { return StatePoolView<Policy>::most_rows(view.config); },
      [&](auto& team, Index h, const auto& view) {
        CompactionReport done;
        const T certificate = certificates == nullptr ? T(0) : certificates[h];
        const Status status =
            initialize(team, view, dense.head(h, config), method, certificate, &done);
        return status == Status::ok && detail::lacked_rows(view, done) ? Status::truncated : status;
      });
  const Status status = detail::settle_slot(pool, slot);
  if (status == Status::ok || status == Status::truncated) record.tokens = tokens;
  return status;
}

/// The states of a request as dense matrices, pending decays applied; the states are unchanged.
///
/// @param certificates  if not null, value_heads numbers as `materialize` on single states reports
///                      them
/// @returns invalid_slot, overflow, workspace_too_small; heads may have been written then
template <class Teams, class Policy>
Status materialize(Teams& teams, StatePoolView<Policy> pool, Index slot,
                   const DenseStates<typename Policy::Compute>& dense,
                   typename Policy::Compute* certificates = nullptr) noexcept {
  if (!pool.in_use(slot)) return Status::invalid_slot;
  SlotRecord& record = pool.slot(slot);
  teams.for_each(pool.config.value_heads, [&](auto& team, Index h) {
    const Status status = materialize(team, pool.state(slot, h), dense.head(h, pool.config.state),
                                      certificates == nullptr ? nullptr : certificates + h);
    if (status != Status::ok) detail::raise(record.failed, status);
  });
  return detail::take_failure(record.failed);
}

SINKSTATE_NAMESPACE_END
