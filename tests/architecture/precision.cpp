// One precision, given on the command line (tests/unit/test_pool_faults.cpp, B47).
#include <sinkstate/core/policy.hpp>
#include <sinkstate/model/update_rules.hpp>

using namespace sinkstate;

using Given = Policy<GatedDelta, Host, Precision<PRECISION>>;
static_assert(sizeof(Given) > 0);
