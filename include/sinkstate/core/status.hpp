/// @file
/// What a stepping function answers.
#pragma once

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Outcome of a verb that works on a state. Whenever it is neither `ok` nor `truncated`, the state
/// is as it was before the call, and no output was written (of several rows the first may have
/// been, where a verb says so).
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

    // Of pools:

    /// Done, but for want of component rows the weakest terms of a state were dropped. Its
    /// certificate holds their norm.
    truncated,
    /// The reserve has not as many component rows as a copy needs.
    pool_exhausted,
    /// Not a slot of the pool, or one that holds no request, or one that two entries would write.
    invalid_slot,
    /// The slot holds a request already: release it first.
    slot_in_use,
    /// A draft is open: close it first. Or none is, and one was to be closed.
    draft_open,
    /// Not the bytes of a snapshot, or of one that was cut or changed.
    damaged_snapshot,
    /// A snapshot of another policy, shape, range of heads or number of tokens.
    wrong_snapshot,
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
    case Status::truncated:
      return "done, but too few component rows were free: the weakest terms were dropped";
    case Status::pool_exhausted:
      return "too few component rows are free";
    case Status::invalid_slot:
      return "not a slot that holds a request, or one that two entries would write";
    case Status::slot_in_use:
      return "the slot holds a request already";
    case Status::draft_open:
      return "a draft is open that must be closed first, or none is that could be closed";
    case Status::damaged_snapshot:
      return "not the bytes of a snapshot, or they were cut or changed";
    case Status::wrong_snapshot:
      return "a snapshot of another policy, shape, range of heads or number of tokens";
  }
  return "unknown status";
}

SINKSTATE_NAMESPACE_END
