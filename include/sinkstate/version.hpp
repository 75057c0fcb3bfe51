/// @file
/// The version, written here and nowhere else: CMake reads it from these three lines.
#pragma once

#define SINKSTATE_VERSION_MAJOR 0
#define SINKSTATE_VERSION_MINOR 1
#define SINKSTATE_VERSION_PATCH 0

#define SINKSTATE_DETAIL_QUOTE(x) #x
#define SINKSTATE_DETAIL_DOTTED(a, b, c) \
  SINKSTATE_DETAIL_QUOTE(a) "." SINKSTATE_DETAIL_QUOTE(b) "." SINKSTATE_DETAIL_QUOTE(c)

namespace sinkstate {

/// "MAJOR.MINOR.PATCH".
inline constexpr char version[] = SINKSTATE_DETAIL_DOTTED(
    SINKSTATE_VERSION_MAJOR, SINKSTATE_VERSION_MINOR, SINKSTATE_VERSION_PATCH);

}  // namespace sinkstate

#undef SINKSTATE_DETAIL_DOTTED
#undef SINKSTATE_DETAIL_QUOTE
