/// @file
/// What is chosen at compile time.
#pragma once

#include <type_traits>

#include "../config.hpp"
#include "backend.hpp"
#include "matrix_view.hpp"
#include "stored_rows.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// A precision: the arithmetic is in `ComputeType`; body and sink are stored in `StoredType`, to
/// which each compaction rounds them, and buffered tokens in `BufferedType`. Strengths, log decays
/// and the certificate, which counts all rounding, are of the arithmetic type.
///
/// @tparam StoredType    ComputeType, or over float: Float16, BFloat16, Float8E4M3 (a power of two
///                       as scale a vector)
/// @tparam BufferedType  ComputeType, or over float: Float16, BFloat16. Keys that an engine has in
///                       this format are held exactly, corrections are rounded to nearest.
template <class ComputeType, class StoredType = ComputeType, class BufferedType = ComputeType>
struct Precision {
  using Compute = ComputeType;
  using Stored = StoredType;
  using Buffered = BufferedType;

  static_assert(std::is_same_v<Compute, float> || std::is_same_v<Compute, double>,
                "Precision: the arithmetic is in float or double");
  static_assert(std::is_same_v<Stored, Compute> ||
                    (std::is_same_v<Compute, float> && detail::StoredAs<Stored>::narrow),
                "Precision: a state is stored in the arithmetic type or, over float, in Float16, "
                "BFloat16 or Float8E4M3");
  static_assert(
      std::is_same_v<Buffered, Compute> ||
          (std::is_same_v<Compute, float> && detail::StoredAs<Buffered>::narrow &&
           !detail::StoredAs<Buffered>::scaled),
      "Precision: tokens are buffered in the arithmetic type or, over float, in Float16 or "
      "BFloat16");
};

using Fp32 = Precision<float>;
using Fp64 = Precision<double>;
/// Stored in 16 or 8 bits, buffered in fp32.
using Fp16 = Precision<float, Float16>;
using Bf16 = Precision<float, BFloat16>;
using Fp8 = Precision<float, Float8E4M3>;

/// Compaction by the singular value decomposition of the strongest terms and the buffer (paper 1,
/// section 4.2): the other terms stay frozen until they have become too many. The rank adapts to
/// each state, and a state whose rank does not pay is kept in dense form. The policy to decode
/// with.
struct LocalSvd {
  static constexpr bool low_rank = true;
  static constexpr bool adaptive = true;
};

/// Compaction by the truncated singular value decomposition of all terms: the Eckart-Young answer,
/// otherwise as LocalSvd. The reference for the others.
struct FullSvd {
  static constexpr bool low_rank = true;
  static constexpr bool adaptive = true;
};

/// Compaction to a fixed rank by subspace iteration from the terms kept last (paper 2, section
/// 5.1): a state of a fixed size, never dense.
struct FixedRank {
  static constexpr bool low_rank = true;
  static constexpr bool adaptive = false;
};

/// The dense matrix, with a buffer of writes that is folded in every few tokens (as ReplaySSM
/// does): nothing is dropped.
struct DenseBuffered {
  static constexpr bool low_rank = false;
  static constexpr bool adaptive = false;
};

/// No part of the state is set apart.
struct NoSink {
  static constexpr bool present = false;
};

/// The part of the state along the head's mean value is held as one exact row of d_k numbers (paper
/// 2, Lemmas 1, 2).
struct MeanValueSink {
  static constexpr bool present = true;
};

namespace detail {

template <class Rule, class = void>
struct IsUpdateRule : std::false_type {};
template <class Rule>
struct IsUpdateRule<Rule, std::void_t<decltype(Rule::corrects), decltype(Rule::decay),
                                      decltype(Rule::log_decays(Index{}))>> : std::true_type {};

template <class Word>
struct IsPrecision : std::false_type {};
template <class Compute, class Stored, class Buffered>
struct IsPrecision<Precision<Compute, Stored, Buffered>> : std::true_type {};

template <class Backend, class = void>
struct IsBackend : std::false_type {};
template <class Backend>
struct IsBackend<Backend, std::void_t<typename Backend::Team, typename Backend::Core>>
    : std::true_type {};

}  // namespace detail

/// The five words that describe a kind of state; sizes, epsilon, rank cap and seed are in
/// `StateConfig`.
///
/// @tparam RuleTag       Mamba2, GatedDelta, KimiDelta, LinearAttention, GatedLinearAttention,
/// DeltaNet
/// @tparam BackendTag    Host, Cuda
/// @tparam PrecisionTag  Fp32, Fp64, Fp16, Bf16, Fp8 or another Precision
/// @tparam CompactionTag LocalSvd, FullSvd, FixedRank, DenseBuffered
/// @tparam SinkTag       NoSink, MeanValueSink
template <class RuleTag, class BackendTag = Host, class PrecisionTag = Fp32,
          class CompactionTag = LocalSvd, class SinkTag = NoSink>
struct Policy {
  using Rule = RuleTag;
  using Backend = BackendTag;
  using Precision = PrecisionTag;
  using Compaction = CompactionTag;
  using Sink = SinkTag;

  using Compute = typename Precision::Compute;
  using Stored = typename Precision::Stored;
  using Buffered = typename Precision::Buffered;

  static_assert(detail::IsUpdateRule<Rule>::value,
                "Policy: the first parameter must be an update rule, such as GatedDelta");
  static_assert(detail::IsPrecision<Precision>::value,
                "Policy: the third parameter must be a precision, such as Fp32 or Fp16");
  static_assert(detail::IsBackend<Backend>::value,
                "Policy: the second parameter must be a backend, such as Host");
  static_assert(std::is_same_v<Compaction, LocalSvd> || std::is_same_v<Compaction, FullSvd> ||
                    std::is_same_v<Compaction, FixedRank> ||
                    std::is_same_v<Compaction, DenseBuffered>,
                "Policy: the fourth parameter must be LocalSvd, FullSvd, FixedRank or "
                "DenseBuffered");
  static_assert(std::is_same_v<Sink, NoSink> || std::is_same_v<Sink, MeanValueSink>,
                "Policy: the fifth parameter must be NoSink or MeanValueSink");
};

SINKSTATE_NAMESPACE_END
