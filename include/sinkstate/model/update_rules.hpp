/// @file
/// The recurrences: docs/mathematics.md, equation (1).
#pragma once

#include "../config.hpp"
#include "../core/matrix_view.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// How a rule forgets: not at all, by one number a head, or by one number a key channel.
enum class Decay { none, scalar, per_channel };

/// One member of the family
///
///     S_t = L S_{t-1} + b k (v - theta S_{t-1}^T L k)^T
///
/// with theta = 1 when the rule corrects what the key already recalls, else 0, and L = I, exp(g) I
/// or diag(exp(g)). The decay comes before the correction.
template <bool Corrects, Decay Forgets>
struct UpdateRule {
  static constexpr bool corrects = Corrects;
  static constexpr Decay decay = Forgets;

  /// Numbers in the log decay of one token.
  SINKSTATE_HOST_DEVICE static constexpr Index log_decays(Index d_k) {
    return Forgets == Decay::none ? 0 : Forgets == Decay::scalar ? 1 : d_k;
  }
};

/// Mamba-2 (Dao and Gu, 2024): key = B, value = x, query = C, write strength = dt, log decay = dt *
/// A. The D skip stays outside.
struct Mamba2 : UpdateRule<false, Decay::scalar> {};
/// Gated DeltaNet (Yang et al., 2025).
struct GatedDelta : UpdateRule<true, Decay::scalar> {};
/// Kimi Delta Attention (Kimi Linear, 2025): one log decay per key channel.
struct KimiDelta : UpdateRule<true, Decay::per_channel> {};
/// Linear attention without decay (Katharopoulos et al., 2020).
struct LinearAttention : UpdateRule<false, Decay::none> {};
/// Gated linear attention (Yang et al., 2024): per-channel decay, no correction.
struct GatedLinearAttention : UpdateRule<false, Decay::per_channel> {};
/// DeltaNet (Schlag et al., 2021): correction, no decay.
struct DeltaNet : UpdateRule<true, Decay::none> {};

/// What one token writes. Pointers to contiguous numbers that the caller keeps alive during the
/// call.
///
/// Any finite write strength is followed exactly (the usual range is [0, 2]; Mamba-2's has no upper
/// end), and so are keys of any norm: the state then grows as the recurrence says. A log decay lies
/// in [-inf, 0], others are refused.
template <class T>
struct Token {
  const T* key = nullptr;        ///< d_k numbers
  const T* value = nullptr;      ///< d_v numbers
  const T* log_decay = nullptr;  ///< `Rule::log_decays(d_k)` numbers; null only if that is none
  T write_strength = 1;
};

/// Consecutive tokens of one head, each array `stride` numbers apart from token to token.
template <class T>
struct Tokens {
  MatrixView<const T> keys;        ///< count x d_k
  MatrixView<const T> values;      ///< count x d_v
  MatrixView<const T> log_decays;  ///< count x Rule::log_decays(d_k)
  const T* write_strengths = nullptr;
  Index write_strength_stride = 1;

  SINKSTATE_HOST_DEVICE Index count() const { return keys.rows; }
  SINKSTATE_HOST_DEVICE Token<T> operator[](Index t) const {
    return {keys.row(t), values.row(t), log_decays.data == nullptr ? nullptr : log_decays.row(t),
            write_strengths[t * write_strength_stride]};
  }
};

SINKSTATE_NAMESPACE_END
