#include "any_pool.hpp"

#include "any_state.hpp"
#include "pool_of_policy.hpp"

namespace sinkstate::tools {

std::unique_ptr<AnyPool> make_pool(Rule rule, const ReplayOptions& options, PoolConfig config,
                                   const MatrixView<const float>& sink_directions) {
  const Index draft = config.state.draft;
  config.state = config_of(options, config.state.d_k, config.state.d_v);
  config.state.draft = draft;
  switch (options.storage) {
    case Storage::fp32:
      return make_pool_with_rule<Fp32>(rule, options, config, sink_directions);
    case Storage::fp16:
      return make_pool_with_rule<Fp16>(rule, options, config, sink_directions);
    case Storage::bf16:
      return make_pool_with_rule<Bf16>(rule, options, config, sink_directions);
    case Storage::fp8:
      return make_pool_with_rule<Fp8>(rule, options, config, sink_directions);
  }
  return nullptr;
}

}  // namespace sinkstate::tools
