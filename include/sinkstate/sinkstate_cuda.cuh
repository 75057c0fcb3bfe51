/// @file
/// Pools on a device, and the library in a kernel: nvcc as C++17, no Eigen.
#pragma once

#include "algorithm/advance.hpp"
#include "algorithm/compact.hpp"
#include "algorithm/initialize.hpp"
#include "algorithm/materialize.hpp"
#include "algorithm/read_out.hpp"
#include "algorithm/workspace_bytes.hpp"
#include "core/policy.hpp"
#include "cuda/cuda_teams.hpp"
#include "cuda/pool_compact.cuh"
#include "cuda/pool_dense.cuh"
#include "cuda/pool_slots.cuh"
#include "cuda/pool_step.cuh"
#include "cuda/warp_team.cuh"
#include "model/sink_state.hpp"
#include "model/state_pool.hpp"
#include "version.hpp"
