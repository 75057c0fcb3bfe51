/// @file
/// The tokens since the last compaction.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/owner.hpp"
#include "../core/stored_rows.hpp"
#include "../core/workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Buffered tokens over memory of somebody else: docs/mathematics.md, equations (2) and (3).
///
/// Token j wrote key_j correction_j^T, and its own log decay is kept beside it, so that decays are
/// suffix sums of non-positive numbers. Nothing in the buffer is rewritten before it is emptied: to
/// roll back is to lower `count`.
///
/// @tparam Buffered  of keys and corrections: T or a narrow format without scale
template <class T, class Buffered = T>
struct UpdateBufferView {
  StoredRows<Buffered> keys;         ///< capacity x d_k
  StoredRows<Buffered> corrections;  ///< capacity x d_v, b (v - theta S^T L k)
  MatrixView<T> log_decays;          ///< capacity x (0, 1 or d_k)
  /// capacity + 1 numbers each: [0] after the last compaction, [j] after j buffered tokens
  /// (docs/numerics.md).
  T* certificates = nullptr;
  T* masses = nullptr;
  std::int32_t* count = nullptr;
  /// Keys belong to several states, as in a pool: whoever steps those has written the key before.
  bool shared_keys = false;

  SINKSTATE_HOST_DEVICE Index capacity() const { return log_decays.rows; }

  static UpdateBufferView carve(Workspace& memory, Index d_k, Index d_v, Index log_decays,
                                Index capacity) {
    UpdateBufferView view;
    using Storage = detail::StoredAs<Buffered>;
    const auto rows = [&](Index cols) {
      using Code = typename Storage::Code;
      return Storage::rows({memory.take<Code>(capacity * cols), capacity, cols, cols}, nullptr);
    };
    view.keys = rows(d_k);
    view.corrections = rows(d_v);
    view.log_decays = {memory.take<T>(capacity * log_decays), capacity, log_decays, log_decays};
    view.certificates = memory.take<T>(capacity + 1);
    view.masses = memory.take<T>(capacity + 1);
    view.count = memory.take<std::int32_t>(1);
    return view;
  }
};

/// Owner of an update buffer, empty at first.
template <class T, class Buffered = T>
class UpdateBuffer : public Owner<UpdateBufferView<T, Buffered>, Index, Index, Index, Index> {
 public:
  /// @param log_decays numbers in one token's log decay: `Rule::log_decays(d_k)`
  /// @throws Error for a size below 1 or a negative number of log decays
  UpdateBuffer(Index d_k, Index d_v, Index log_decays, Index capacity)
      : Owner<UpdateBufferView<T, Buffered>, Index, Index, Index, Index>(
            detail::in_range(1, detail::largest_size, "d_k of UpdateBuffer", d_k),
            detail::in_range(1, detail::largest_size, "d_v of UpdateBuffer", d_v),
            detail::in_range(0, detail::largest_size, "log decays of UpdateBuffer", log_decays),
            detail::in_range(1, detail::largest_size, "capacity of UpdateBuffer", capacity)) {}
};

SINKSTATE_NAMESPACE_END
