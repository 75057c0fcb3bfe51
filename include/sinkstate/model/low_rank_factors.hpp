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
/// is one stretch of memory. Term i lies in row i, or in the one that a list names: a pool keeps
/// the rows of all its states in one store. After a compaction the strengths fall and are positive;
/// whether the terms are orthonormal is the compaction's business, not this type's. In a narrow
/// format vectors are of unit length, and strengths in order, up to its rounding.
///
/// @tparam T       of the strengths
/// @tparam Stored  of the components: T or a narrow format
template <class T, class Stored = T>
struct LowRankFactorsView {
  using Storage = detail::StoredAs<Stored>;
  using Code = typename Storage::Code;

  Code* components = nullptr;          ///< rows of d_k + d_v numbers
  float* scales = nullptr;             ///< of key and value of each, if `Storage::scaled`
  T* strengths = nullptr;              ///< one a row
  const std::int32_t* list = nullptr;  ///< the row of each term; null: term i is in row i
  std::int32_t* rank = nullptr;
  Index d_k = 0;
  Index d_v = 0;
  Index capacity = 0;  ///< terms for which there is room

  SINKSTATE_HOST_DEVICE StoredListedRows<Stored> keys() const {
    return Storage::listed({components, *rank, d_k, d_k + d_v, list},
                           {scales, *rank, 1, scale_stride(), list});
  }
  SINKSTATE_HOST_DEVICE StoredListedRows<Stored> values() const {
    return Storage::listed({components + d_k, *rank, d_v, d_k + d_v, list},
                           {scales + (Storage::scaled ? 1 : 0), *rank, 1, scale_stride(), list});
  }
  SINKSTATE_HOST_DEVICE T& strength(Index i) const {
    return strengths[list == nullptr ? i : Index{list[i]}];
  }
  /// A matrix of `rows` x d_v in the place of the terms: without a list one stretch, else as many
  /// whole rows of it in each listed row as fit.
  SINKSTATE_HOST_DEVICE StoredListedRows<Stored> matrix(Index rows) const {
    if (list == nullptr) {
      return Storage::listed({components, rows, d_v, d_v}, {scales, rows, 1, 1});
    }
    const Index per_row = matrix_rows_per_row(d_k, d_v);
    return Storage::listed({components, rows, d_v, d_k + d_v, list, per_row},
                           {scales, rows, 1, scale_stride(), list, per_row});
  }

  /// Whole matrix rows of d_v numbers that fit a component row.
  SINKSTATE_HOST_DEVICE static constexpr Index matrix_rows_per_row(Index d_k, Index d_v) {
    return (d_k + d_v) / d_v;
  }
  /// Scales of a listed row: of key and value, or of the matrix rows in it.
  SINKSTATE_HOST_DEVICE static constexpr Index row_scales(Index d_k, Index d_v) {
    const Index of_matrix = matrix_rows_per_row(d_k, d_v);
    return !Storage::scaled ? 0 : of_matrix > 2 ? of_matrix : 2;
  }

  /// @param dense_rows  of the largest matrix for which there is to be room
  static LowRankFactorsView carve(Workspace& memory, Index d_k, Index d_v, Index capacity,
                                  Index dense_rows = 0) {
    LowRankFactorsView view;
    const auto larger = [](Index a, Index b) { return a < b ? b : a; };
    view.components = memory.take<Code>(larger(capacity * (d_k + d_v), dense_rows * d_v));
    if (Storage::scaled) {
      view.scales = memory.take<float>(larger(2 * capacity, dense_rows));
    }
    view.strengths = memory.take<T>(capacity);
    view.rank = memory.take<std::int32_t>(1);
    view.d_k = d_k;
    view.d_v = d_v;
    view.capacity = capacity;
    return view;
  }

 private:
  SINKSTATE_HOST_DEVICE Index scale_stride() const {
    return list == nullptr ? 2 : row_scales(d_k, d_v);
  }
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
