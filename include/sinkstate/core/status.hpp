/// @file
/// What a stepping function answers.
#pragma once

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Outcome of a verb that works on a state. Whenever it is not `ok`, the state is as it was before
/// the call, and no output was written (of several rows the first may have been, where a verb says
/// so).
enum class [[nodiscard]] Status : int{
    ok = 0,
    /// The buffer has no room for the token(s): compact first.
    buffer_full,
    /// A key, value, query, write strength or dense entry is NaN or infinite, or a log decay is
    /// NaN.
    non_finite_input,
    /// A log decay is positive. The usual cause is a decay in (0, 1] passed where its logarithm is
    /// expected.
    positive_log_decay,
    /// Finite input whose result does not fit the arithmetic type.
    overflow,
    /// More tokens were to be rolled back than are buffered.
    nothing_to_roll_back,
    /// A matrix of the wrong shape, or an option outside its range.
    invalid_argument,
    /// The team's scratch is smaller than `workspace_bytes` of this policy and shape.
    workspace_too_small,
};

/// One line for logs and exceptions.
SINKSTATE_HOST_DEVICE constexpr const char* to_string(Status status) {
  switch (status) {
    case Status::ok:
      return "ok";
    case Status::buffer_full:
      return "the buffer has no room left: compact the state first";
    case Status::non_finite_input:
      return "an input is NaN or infinite";
    case Status::positive_log_decay:
      return "a log decay is positive: pass the logarithm of the decay, in [-inf, 0]";
    case Status::overflow:
      return "the result does not fit the arithmetic type";
    case Status::nothing_to_roll_back:
      return "fewer tokens are buffered than were to be rolled back";
    case Status::invalid_argument:
      return "a matrix has the wrong shape, or an option is outside its range";
    case Status::workspace_too_small:
      return "the team's scratch is smaller than workspace_bytes(config)";
  }
  return "unknown status";
}

SINKSTATE_NAMESPACE_END
