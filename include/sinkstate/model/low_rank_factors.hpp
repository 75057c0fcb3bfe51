/// @file
/// A matrix as a sum of few rank-one terms.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"
#include "../core/owner.hpp"
#include "../core/workspace.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// sum_{i < rank} strength_i key_i value_i^T over memory of somebody else: docs/mathematics.md,
/// equation (2).
///
/// A component row holds the d_k numbers of key_i and then the d_v numbers of value_i, so one term
/// is one stretch of memory. After a compaction the strengths fall and are positive; whether the
/// terms are orthonormal is the compaction's business, not this type's.
template <class T>
struct LowRankFactorsView {
  T* components = nullptr;  ///< capacity rows of d_k + d_v numbers
  T* strengths = nullptr;   ///< capacity numbers
  std::int32_t* rank = nullptr;
  Index d_k = 0;
  Index d_v = 0;
  Index capacity = 0;

  SINKSTATE_HOST_DEVICE MatrixView<T> keys() const { return {components, *rank, d_k, d_k + d_v}; }
  SINKSTATE_HOST_DEVICE MatrixView<T> values() const {
    return {components + d_k, *rank, d_v, d_k + d_v};
  }

  /// @param least numbers to take for the components even if the capacity needs fewer
  static LowRankFactorsView carve(Workspace& memory, Index d_k, Index d_v, Index capacity,
                                  Index least = 0) {
    LowRankFactorsView view;
    const Index numbers = capacity * (d_k + d_v);
    view.components = memory.take<T>(numbers < least ? least : numbers);
    view.strengths = memory.take<T>(capacity);
    view.rank = memory.take<std::int32_t>(1);
    view.d_k = d_k;
    view.d_v = d_v;
    view.capacity = capacity;
    return view;
  }
};

/// Owner of low-rank factors, of rank 0 at first.
template <class T>
class LowRankFactors : public Owner<LowRankFactorsView<T>, Index, Index, Index> {
 public:
  /// @throws Error for a size below 1 or a negative capacity
  LowRankFactors(Index d_k, Index d_v, Index capacity)
      : Owner<LowRankFactorsView<T>, Index, Index, Index>(
            detail::in_range(1, detail::largest_size, "d_k of LowRankFactors", d_k),
            detail::in_range(1, detail::largest_size, "d_v of LowRankFactors", d_v),
            detail::in_range(0, detail::largest_size, "capacity of LowRankFactors", capacity)) {}
};

SINKSTATE_NAMESPACE_END
