// With nothing truncated every fp64 state is the dense recurrence, up to rounding:
// 1e-12 of the largest norm so far.
#include "support/catch.hpp"
#include "support/exactness.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// Differs from rule to rule, so that shapes and scenarios pair differently.
template <class Rule>
constexpr std::uint64_t number_of = static_cast<std::uint64_t>(Rule::decay) + 3 * Rule::corrects;

}  // namespace

TEMPLATE_LIST_TEST_CASE("exactness, fp64: every scenario", "[exactness]", AllRules) {
  INFO(seed_note(test_seed()));
  check_every_scenario<TestType, Fp64>(number_of<TestType>);
}

TEMPLATE_LIST_TEST_CASE("exactness, fp64: shapes of real heads", "[exactness]", AllRules) {
  INFO(seed_note(test_seed()));
  check_large_shapes<TestType, Fp64>(number_of<TestType>);
}

TEMPLATE_LIST_TEST_CASE("exactness, fp64: a given initial state", "[exactness]", AllRules) {
  INFO(seed_note(test_seed()));
  check_given_initial_state<TestType, Fp64>(number_of<TestType>);
}

TEMPLATE_LIST_TEST_CASE("exactness, fp64: a fixed rank found by projection", "[exactness]",
                        AllRules) {
  INFO(seed_note(test_seed()));
  check_projected<TestType, Fp64>(derived_seed(test_seed(), 300 + number_of<TestType>));
}
