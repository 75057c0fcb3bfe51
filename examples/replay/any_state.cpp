#include "any_state.hpp"

#include "device_state.hpp"
#include "state_of_policy.hpp"

namespace sinkstate::tools {

StateConfig config_of(const ReplayOptions& options, Index d_k, Index d_v) {
  StateConfig config;
  config.d_k = d_k;
  config.d_v = d_v;
  config.buffer = options.buffer;
  config.epsilon = options.epsilon;
  config.rank_cap = options.rank_cap;
  config.active = options.active;
  config.recompress_growth = options.recompress_growth;
  config.recompress_slack = options.recompress_slack;
  config.tail_share = options.tail_share;
  config.tail_period = options.tail_period;
  config.dense_fallback = options.dense_fallback;
  config.rounding = options.rounding;
  config.seed = options.seed;
  return config;
}

std::unique_ptr<AnyState> make_state(Rule rule, const ReplayOptions& options, Index d_k, Index d_v,
                                     const float* sink_direction) {
  const StateConfig config = config_of(options, d_k, d_v);
  if (options.backend == Backend::cuda) {
    check_backend(options);
    return make_device_state(rule, options, config, sink_direction);
  }
  switch (options.storage) {
    case Storage::fp32:
      return make_state_with_rule<Fp32>(rule, options, config, sink_direction);
    case Storage::fp16:
      return make_state_with_rule<Fp16>(rule, options, config, sink_direction);
    case Storage::bf16:
      return make_state_with_rule<Bf16>(rule, options, config, sink_direction);
    case Storage::fp8:
      return make_state_with_rule<Fp8>(rule, options, config, sink_direction);
  }
  return nullptr;
}

}  // namespace sinkstate::tools
