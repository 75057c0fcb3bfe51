/// @file
/// The singular value decomposition of a sum of rank-one terms, and its truncation.
#pragma once

#include <cmath>
#include <limits>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"
#include "../model/certificate.hpp"
#include "orthogonalize.hpp"
#include "scaling.hpp"
#include "small_svd.hpp"
#include "storage.hpp"

SINKSTATE_NAMESPACE_BEGIN
namespace detail {

/// Rank-one terms weight_i key_i value_i^T, and the scratch in which they are decomposed.
///
/// @tparam Core  the numbers of the core and its rotations; T or wider
template <class T, class Core = T>
struct TermList {
  Index count = 0;
  MatrixView<T> keys;    // most x d_k
  MatrixView<T> values;  // most x d_v
  T* weights = nullptr;

  int* exponents = nullptr;
  Index* order = nullptr;
  MatrixView<T> mixed_keys;    // M, one row per independent value
  MatrixView<T> value_coords;  // R_v
  MatrixView<T> key_coords;    // R_k
  MatrixView<Core> core;       // G, transposed R_k
  MatrixView<Core> rotations;  // Y
  Core* strengths = nullptr;
  T* coefficients = nullptr;
  TermScratch<T> formed;

  SINKSTATE_HOST_DEVICE static TermList carve(Workspace& memory, Index most, Index d_k, Index d_v) {
    const Index independent_values = most < d_v ? most : d_v;
    const Index independent = independent_values < d_k ? independent_values : d_k;
    TermList list;
    list.keys = memory.take_matrix<T>(most, d_k);
    list.values = memory.take_matrix<T>(most, d_v);
    list.weights = memory.take<T>(most);
    list.exponents = memory.take<int>(most);
    list.order = memory.take<Index>(independent);
    list.mixed_keys = memory.take_matrix<T>(independent_values, d_k);
    list.value_coords = memory.take_matrix<T>(most, independent_values);
    list.key_coords = memory.take_matrix<T>(independent_values, independent);
    list.core = memory.take_matrix<Core>(independent, independent_values);
    list.rotations = memory.take_matrix<Core>(independent, independent);
    list.strengths = memory.take<Core>(independent);
    list.coefficients = memory.take<T>(most);
    list.formed = TermScratch<T>::carve(memory, d_k, d_v);
    return list;
  }

  /// The terms from `first` on, in the same scratch.
  SINKSTATE_HOST_DEVICE TermList from(Index first) const {
    TermList rest = *this;
    rest.count = count - first;
    rest.keys = keys.middle_rows(first, rest.count);
    rest.values = values.middle_rows(first, rest.count);
    rest.weights += first;
    rest.exponents += first;
    return rest;
  }
};

/// The terms of a list over an orthonormal basis of their values: their sum is 2^exponent
/// keys^T value_basis.
template <class T>
struct MixedTerms {
  MatrixView<T> keys;         // M
  MatrixView<T> value_basis;  // Q_v
  int exponent = 0;
};

/// The decomposition of a list of terms, in the list's scratch: its singular values are 2^exponent
/// s_i, falling.
template <class T, class Core = T>
struct Decomposition {
  MatrixView<T> key_basis;     // Q_k
  MatrixView<T> value_basis;   // Q_v
  MatrixView<Core> core;       // row i = s_i x_i, over the value basis
  MatrixView<Core> rotations;  // row i = y_i, over the key basis
  const Core* strengths = nullptr;
  T* coefficients = nullptr;     // scratch of `form`
  TermScratch<T> formed;         // room for a term
  const Index* order = nullptr;  // of the rows, strongest first
  Index count = 0;
  Index orthogonalized = 0;  // vectors of either side that went in
  int exponent = 0;
  int sweeps = 0;
  T rotation_error = 0;  // (N6) rounding of the rotations, a Frobenius norm

  SINKSTATE_HOST_DEVICE T strength(Index i) const {
    return static_cast<T>(std::ldexp(strengths[order[i]], exponent));
  }

  /// How many singular values are above rounding, at least `least`, and not about to become
  /// subnormal.
  SINKSTATE_HOST_DEVICE Index above(T least) const {
    if (count == 0) return 0;
    const Core noise = negligible * Core(unit_roundoff<T>) * strengths[order[0]];
    if (least < smallest_kept<T>) least = smallest_kept<T>;
    Index rank = 0;
    while (rank < count && strengths[order[rank]] > noise && strength(rank) >= least) ++rank;
    return rank;
  }

  /// Frobenius norm of the terms from `rank` on. It needs an orthogonal key side only, which a
  /// product of rotations is whatever sweep it stopped at.
  SINKSTATE_HOST_DEVICE T norm_from(Index rank) const {
    Core squares = Core(0);
    for (Index i = rank; i < count; ++i) squares += strengths[order[i]] * strengths[order[i]];
    return static_cast<T>(std::ldexp(std::sqrt(squares), exponent));
  }

  /// Term i with unit vectors: strength(i) key value^T.
  template <class Team>
  SINKSTATE_HOST_DEVICE void form(Team& team, Index i, T* key, T* value) const {
    const Index row = order[i];
    for (Index l = 0; l < count; ++l) coefficients[l] = static_cast<T>(rotations(row, l));
    team.fill(key_basis.cols, T(0), key);
    team.add_combination(key_basis, coefficients, key);
    for (Index l = 0; l < value_basis.rows; ++l) {
      coefficients[l] = static_cast<T>(core(row, l) / strengths[row]);
    }
    team.fill(value_basis.cols, T(0), value);
    team.add_combination(value_basis, coefficients, value);
  }
};

/// The first half of a decomposition: values = R_v Q_v and M = R_v^T diag(weights) keys. Values and
/// weights are consumed; keys become shorter by the zero terms and are scaled by powers of two.
template <class Team, class T, class Core>
SINKSTATE_HOST_DEVICE MixedTerms<T> mix_terms(Team& team, TermList<T, Core>& list) {
  // Terms with magnitudes near 1, and the powers of two apart.
  int top = 0;
  Index count = 0;
  for (Index i = 0; i < list.count; ++i) {
    int key = 0;
    int value = 0;
    int own = 0;
    const bool nonzero = list.weights[i] != T(0) &&
                         normalize_exponent(team, list.keys.cols, list.keys.row(i), key) &&
                         normalize_exponent(team, list.values.cols, list.values.row(i), value);
    if (!nonzero) continue;
    list.weights[count] = std::frexp(list.weights[i], &own);
    list.exponents[count] = key + value + own;
    if (count == 0 || list.exponents[count] > top) top = list.exponents[count];
    if (count != i) {
      team.copy(list.keys.cols, list.keys.row(i), list.keys.row(count));
      team.copy(list.values.cols, list.values.row(i), list.values.row(count));
    }
    ++count;
  }
  // Far below the rounding of the strongest term nothing is left, and inverse norms would overflow.
  constexpr int invisible = -3 * std::numeric_limits<T>::digits;
  for (Index i = 0; i < count; ++i) {
    const int exponent = list.exponents[i] - top;
    list.weights[i] = exponent < invisible ? T(0) : std::ldexp(list.weights[i], exponent);
  }

  list.count = count;
  const auto keys = list.keys.middle_rows(0, count);
  auto value_coords = list.value_coords.middle_rows(0, count);
  const Index values =
      orthogonalize(team, list.values.middle_rows(0, count), 0, value_coords, list.coefficients);
  const auto mixed = list.mixed_keys.middle_rows(0, values);
  for (Index l = 0; l < values; ++l) {
    for (Index i = 0; i < count; ++i) list.coefficients[i] = list.weights[i] * value_coords(i, l);
    team.fill(mixed.cols, T(0), mixed.row(l));
    team.add_combination(keys, list.coefficients, mixed.row(l));
  }
  return {mixed, list.values.middle_rows(0, values), top};
}

/// The second half: M = R_k Q_k and R_k^T = Y^T diag(s) X. Consumes the keys.
template <class Team, class T, class Core>
SINKSTATE_HOST_DEVICE Decomposition<T, Core> decompose(Team& team, const MixedTerms<T>& terms,
                                                       TermList<T, Core>& list) {
  const Index values = terms.keys.rows;
  auto key_coords = list.key_coords.middle_rows(0, values);
  const Index independent = orthogonalize(team, terms.keys, 0, key_coords, list.coefficients);

  Decomposition<T, Core> result;
  result.count = independent;
  result.orthogonalized = values;
  result.exponent = terms.exponent;
  result.key_basis = terms.keys.middle_rows(0, independent);
  result.value_basis = terms.value_basis;
  // Padded with zeros to whole rows: they change no sum, and the sweeps run without remainders.
  const auto padded = [](const MatrixView<Core>& m, Index rows, Index cols) {
    return MatrixView<Core>{m.data, rows, (cols + 15) / 16 * 16, m.stride};
  };
  result.core = padded(list.core, independent, values);
  result.rotations = padded(list.rotations, independent, independent);
  result.strengths = list.strengths;
  result.coefficients = list.coefficients;
  result.formed = list.formed;
  result.order = list.order;
  for (Index i = 0; i < independent; ++i) {
    team.fill(result.core.cols, Core(0), result.core.row(i));
    for (Index l = 0; l < values; ++l) result.core(i, l) = key_coords(l, i);
  }
  const JacobiOutcome<Core> jacobi =
      one_sided_jacobi(team, result.core, result.rotations, list.strengths, Core(unit_roundoff<T>));
  result.sweeps = jacobi.sweeps;
  result.rotation_error =
      static_cast<T>(std::ldexp(unit_roundoff<Core> * jacobi.roundoffs, terms.exponent));

  for (Index i = 0; i < independent; ++i) {
    Index place = i;
    for (; place > 0 && list.strengths[list.order[place - 1]] < list.strengths[i]; --place) {
      list.order[place] = list.order[place - 1];
    }
    list.order[place] = i;
  }
  return result;
}

/// Singular value decomposition of sum_i weight_i key_i value_i^T: docs/numerics.md, (N7).
///
///     values = R_v Q_v,   M = R_v^T diag(weights) keys = R_k Q_k,   R_k^T = Y^T diag(s) X
///
/// The second QR is the preconditioner of Drmac and Veselic, the last step is Jacobi on the rows of
/// R_k^T. All vectors are orthogonalised, those of an earlier decomposition too: frozen or decayed
/// terms are not orthogonal to anything. Consumes the list.
template <class Team, class T, class Core>
SINKSTATE_HOST_DEVICE Decomposition<T, Core> decompose(Team& team, TermList<T, Core>& list) {
  const MixedTerms<T> terms = mix_terms(team, list);
  return decompose(team, terms, list);
}

}  // namespace detail
SINKSTATE_NAMESPACE_END
