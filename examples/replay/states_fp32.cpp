#include "pool_of_policy.hpp"
#include "state_of_policy.hpp"

namespace sinkstate::tools {

template MadeState make_state_with_rule<Fp32>(Rule, const ReplayOptions&, const StateConfig&,
                                              const float*);
template MadePool make_pool_with_rule<Fp32>(Rule, const ReplayOptions&, const PoolConfig&,
                                            const MatrixView<const float>&);

}  // namespace sinkstate::tools
