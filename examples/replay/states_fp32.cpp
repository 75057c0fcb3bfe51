#include "state_of_policy.hpp"

namespace sinkstate::tools {

template MadeState make_state_with_rule<Fp32>(Rule, const ReplayOptions&, const StateConfig&,
                                              const float*);

}  // namespace sinkstate::tools
