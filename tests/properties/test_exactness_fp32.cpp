// With nothing truncated every fp32 state is the dense recurrence, up to rounding:
// 3x (uncompacted) and 6x (compacted) the error of a plain fp32 recurrence, + 1e-6.
#include "support/catch.hpp"
#include "support/exactness.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// Differs from rule to rule, so that shapes and scenarios pair differently.
template <class Rule>
constexpr std::uint64_t number_of = static_cast<std::uint64_t>(Rule::decay) + 3 * Rule::corrects;

}  // namespace

TEMPLATE_LIST_TEST_CASE("exactness, fp32: every scenario", "[exactness]", AllRules) {
  INFO(seed_note(test_seed()));
  check_every_scenario<TestType, Fp32>(number_of<TestType>);
}

TEMPLATE_LIST_TEST_CASE("exactness, fp32: shapes of real heads", "[exactness]", AllRules) {
  INFO(seed_note(test_seed()));
  check_large_shapes<TestType, Fp32>(number_of<TestType>);
}

TEMPLATE_LIST_TEST_CASE("exactness, fp32: a given initial state", "[exactness]", AllRules) {
  INFO(seed_note(test_seed()));
  check_given_initial_state<TestType, Fp32>(number_of<TestType>);
}

TEMPLATE_LIST_TEST_CASE("exactness, fp32: a fixed rank found by projection", "[exactness]",
                        AllRules) {
  INFO(seed_note(test_seed()));
  check_projected<TestType, Fp32>(derived_seed(test_seed(), 300 + number_of<TestType>));
}
