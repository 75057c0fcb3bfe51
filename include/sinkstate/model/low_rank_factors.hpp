/// @file
/// A matrix as a sum of few rank-one terms.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/owner.hpp"
#include "../core/stored_rows.hpp"
#include "../core/workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// sum_{i < rank} strength_i key_i value_i^T over memory of somebody else: docs/mathematics.md,
/// equation (2).
///
/// A component row holds the d_k numbers of key_i and then the d_v numbers of value_i, so one term
/// is one stretch of memory. After a compaction the strengths fall and are positive; whether the
/// terms are orthonormal is the compaction's business, not this type's. In a narrow format vectors
/// are of unit length, and strengths in order, up to its rounding.
///
/// @tparam T       of the strengths
/// @tparam Stored  of the components: T or a narrow format
template <class T, class Stored = T>
struct LowRankFactorsView {
  using Storage = detail::StoredAs<Stored>;
  using Code = typename Storage::Code;

  Code* components = nullptr;  ///< capacity rows of d_k + d_v numbers
  float* scales = nullptr;     ///< of capacity keys, then of as many values, if `Storage::scaled`
  T* strengths = nullptr;      ///< capacity numbers
  std::int32_t* rank = nullptr;
  Index d_k = 0;
  Index d_v = 0;
  Index capacity = 0;

  /// The terms; those behind the rank may be written before it is raised.
  SINKSTATE_HOST_DEVICE StoredRows<Stored> keys() const {
    return Storage::rows({components, *rank, d_k, d_k + d_v}, scales);
  }
  SINKSTATE_HOST_DEVICE StoredRows<Stored> values() const {
    return Storage::rows({components + d_k, *rank, d_v, d_k + d_v}, scales + value_scales());
  }
  /// A matrix of `rows` x d_v in the place of the terms.
  SINKSTATE_HOST_DEVICE StoredRows<Stored> matrix(Index rows) const {
    return Storage::rows({components, rows, d_v, d_v}, scales);
  }

  /// @param dense_rows  of the largest matrix for which there is to be room
  static LowRankFactorsView carve(Workspace& memory, Index d_k, Index d_v, Index capacity,
                                  Index dense_rows = 0) {
    LowRankFactorsView view;
    const auto larger = [](Index a, Index b) { return a < b ? b : a; };
    view.components = memory.take<Code>(larger(capacity * (d_k + d_v), dense_rows * d_v));
    if (Storage::scaled) view.scales = memory.take<float>(larger(2 * capacity, dense_rows));
    view.strengths = memory.take<T>(capacity);
    view.rank = memory.take<std::int32_t>(1);
    view.d_k = d_k;
    view.d_v = d_v;
    view.capacity = capacity;
    return view;
  }

 private:
  SINKSTATE_HOST_DEVICE Index value_scales() const { return Storage::scaled ? capacity : 0; }
};

/// Owner of low-rank factors, of rank 0 at first.
template <class T, class Stored = T>
class LowRankFactors : public Owner<LowRankFactorsView<T, Stored>, Index, Index, Index> {
 public:
  /// @throws Error for a size below 1 or a negative capacity
  LowRankFactors(Index d_k, Index d_v, Index capacity)
      : Owner<LowRankFactorsView<T, Stored>, Index, Index, Index>(
            detail::in_range(1, detail::largest_size, "d_k of LowRankFactors", d_k),
            detail::in_range(1, detail::largest_size, "d_v of LowRankFactors", d_v),
            detail::in_range(0, detail::largest_size, "capacity of LowRankFactors", capacity)) {}
};

SINKSTATE_NAMESPACE_END
