// The one header that knows whether Catch2 is version 2 or 3. Tests keep to what both have:
// TEST_CASE, SECTION, TEMPLATE_TEST_CASE, INFO, CAPTURE, CHECK*, REQUIRE*, GENERATE, Catch::Approx,
// Catch::Matchers::WithinAbs and WithinRel.
//
// SINKSTATE_TEST_SCALE (an integer in the environment, 1 by default) multiplies the length of the
// property tests.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators_all.hpp>
#include <catch2/matchers/catch_matchers_all.hpp>
#else
#include <catch2/catch.hpp>
namespace Catch {
using Detail::Approx;  // where Catch2 3 has it
}
#endif
