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
