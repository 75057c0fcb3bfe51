/// @file
/// The mistakes of a caller who builds something: thrown, with the wanted and the given value.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "../config.hpp"
#include "matrix_view.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Thrown by constructors and sizing functions only. Stepping functions return a `Status`.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace detail {

/// Throws an `Error` that reads "<what>: wanted <wanted>, given <given>". A program built without
/// exceptions prints the line and aborts.
[[noreturn]] inline void refuse(const std::string& what, const std::string& wanted,
                                const std::string& given) {
  const std::string message = what + ": wanted " + wanted + ", given " + given;
#if defined(__cpp_exceptions)
  throw Error(message);
#else
  std::fprintf(stderr, "sinkstate: %s\n", message.c_str());
  std::abort();
#endif
}

/// The largest size that a shape may have: products of three of them do not wrap.
inline constexpr Index largest_size = Index{1} << 20;

/// `given`, or an `Error` when it is outside [least, most].
inline Index in_range(Index least, Index most, const char* what, Index given) {
  if (given < least || given > most) {
    refuse(what, "a number in [" + std::to_string(least) + ", " + std::to_string(most) + "]",
           std::to_string(given));
  }
  return given;
}

}  // namespace detail

SINKSTATE_NAMESPACE_END
