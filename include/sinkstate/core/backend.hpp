/// @file
/// Where a state lives and who works on it.
#pragma once

#include "../config.hpp"

SINKSTATE_NAMESPACE_BEGIN

class HostTeam;
class WarpTeam;

/// States in host memory, worked on by Eigen; one thread is one team.
///
/// A backend is a tag that names its `Team`, the hands that do the work of one state, and the
/// `Core` numbers in which small cores are decomposed. Algorithms are written once over a team and
/// never see a backend. They run their scalar code once per state and leave the vector work to the
/// team, which provides, over float and double:
///
///     workspace()                   its scratch, a fresh Workspace each time
///     dot(n, x, y)   norm(n, x)     sums over vectors; norm neither over- nor underflows
///     max(n, x)   max_abs(n, x)     NaN if there is one; max_abs also for infinities
///     finite(n, x)
///     project(rows, x, z)           z_i  = row_i . x
///     add_combination(rows, z, y)   y   += sum_i z_i row_i
///     fill, copy, scale, multiply, add, rotate
///     widen(format, n, scale, x, y)             codes to numbers, and back
///     narrow(format, n, factor, x, rounding, y)
///     expect, expect_rows, forget, fetch_now    hints about memory; they may do nothing
///     exp_decay(x)                  exp of log decays, exactly 0 before numbers turn subnormal
///     exp_decay(n, x, y)
struct Host {
  using Team = HostTeam;
  /// A core goes through thousands of rotations, each of which rounds: with fp32 states they would
  /// make most of the error of a compaction (docs/numerics.md, section 3).
  using Core = double;
};

/// States in the memory of a CUDA device: pools with the verbs of sinkstate_cuda.cuh, or single
/// states inside a kernel, where one warp is one team (cuda/warp_team.cuh).
struct Cuda {
  using Team = WarpTeam;
  using Core = double;
};

SINKSTATE_NAMESPACE_END
