// Whether a sanitizer slows this build down: tests that compute a lot compute less.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define SINKSTATE_TEST_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SINKSTATE_TEST_SANITIZED
#endif
#endif

namespace sinkstate::testing {

#ifdef SINKSTATE_TEST_SANITIZED
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace sinkstate::testing
