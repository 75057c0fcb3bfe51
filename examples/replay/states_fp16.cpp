#include "state_of_policy.hpp"

namespace sinkstate::tools {

template MadeState make_state_with_rule<Fp16>(Rule, const ReplayOptions&, const StateConfig&,
                                              const float*);

}  // namespace sinkstate::tools
