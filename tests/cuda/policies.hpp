// What is tested on a device: every compaction, sinks, decays of each kind, storage in 32, 16 and 8
// bits.
#pragma once

#include <sinkstate/core/policy.hpp>
#include <sinkstate/model/update_rules.hpp>

#define SINKSTATE_FOR_DEVICE_POLICIES(DO)                      \
  DO(Policy<Mamba2, Host, Fp32, LocalSvd, NoSink>)             \
  DO(Policy<GatedDelta, Host, Fp32, LocalSvd, MeanValueSink>)  \
  DO(Policy<KimiDelta, Host, Fp32, LocalSvd, NoSink>)          \
  DO(Policy<GatedDelta, Host, Fp32, FullSvd, NoSink>)          \
  DO(Policy<KimiDelta, Host, Fp32, FixedRank, MeanValueSink>)  \
  DO(Policy<Mamba2, Host, Fp32, DenseBuffered, MeanValueSink>) \
  DO(Policy<GatedDelta, Host, Fp16, LocalSvd, NoSink>)         \
  DO(Policy<Mamba2, Host, Fp8, LocalSvd, MeanValueSink>)

// Of pools. Each is minutes of compilation: with SINKSTATE_POOL_POLICY defined as one of these
// numbers a file is compiled for that one alone, so that several can be at once.
#define SINKSTATE_POOL_POLICY_0(DO) DO(Policy<Mamba2, Host, Fp32, LocalSvd, NoSink>)
#define SINKSTATE_POOL_POLICY_1(DO) DO(Policy<GatedDelta, Host, Fp32, LocalSvd, MeanValueSink>)
#define SINKSTATE_POOL_POLICY_2(DO) DO(Policy<KimiDelta, Host, Fp32, LocalSvd, NoSink>)
#define SINKSTATE_POOL_POLICY_3(DO) DO(Policy<KimiDelta, Host, Fp32, FixedRank, MeanValueSink>)
#define SINKSTATE_POOL_POLICY_4(DO) DO(Policy<Mamba2, Host, Fp32, DenseBuffered, NoSink>)
#define SINKSTATE_POOL_POLICY_5(DO) DO(Policy<GatedDelta, Host, Fp16, LocalSvd, NoSink>)
#define SINKSTATE_POOL_POLICY_6(DO) DO(Policy<Mamba2, Host, Fp8, LocalSvd, MeanValueSink>)
#define SINKSTATE_POOL_POLICY_7(DO) \
  DO(Policy<GatedDelta, Host, Precision<float, BFloat16, BFloat16>, FullSvd, NoSink>)
#define SINKSTATE_POOL_POLICY_8(DO) DO(Policy<DeltaNet, Host, Fp32, LocalSvd, NoSink>)
#define SINKSTATE_POOL_POLICY_9(DO) \
  DO(Policy<GatedLinearAttention, Host, Fp32, DenseBuffered, MeanValueSink>)

#define SINKSTATE_PASTE_POOL_POLICY(number, DO) SINKSTATE_POOL_POLICY_##number(DO)
#define SINKSTATE_ONE_POOL_POLICY(number, DO) SINKSTATE_PASTE_POOL_POLICY(number, DO)

#if defined(SINKSTATE_POOL_POLICY)
#define SINKSTATE_FOR_DEVICE_POOLS(DO) SINKSTATE_ONE_POOL_POLICY(SINKSTATE_POOL_POLICY, DO)
#else
#define SINKSTATE_FOR_DEVICE_POOLS(DO) \
  SINKSTATE_POOL_POLICY_0(DO)          \
  SINKSTATE_POOL_POLICY_1(DO)          \
  SINKSTATE_POOL_POLICY_2(DO)          \
  SINKSTATE_POOL_POLICY_3(DO)          \
  SINKSTATE_POOL_POLICY_4(DO)          \
  SINKSTATE_POOL_POLICY_5(DO)          \
  SINKSTATE_POOL_POLICY_6(DO)          \
  SINKSTATE_POOL_POLICY_7(DO)          \
  SINKSTATE_POOL_POLICY_8(DO)          \
  SINKSTATE_POOL_POLICY_9(DO)
#endif
