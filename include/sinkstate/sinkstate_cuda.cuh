/// @file
/// The library in a kernel: nvcc as C++17, no Eigen.
#pragma once

#include "algorithm/advance.hpp"
#include "algorithm/compact.hpp"
#include "algorithm/consolidate.hpp"
#include "algorithm/initialize.hpp"
#include "algorithm/materialize.hpp"
#include "algorithm/pool_compact.hpp"
#include "algorithm/pool_dense.hpp"
#include "algorithm/pool_snapshot.hpp"
#include "algorithm/pool_step.hpp"
#include "algorithm/read_out.hpp"
#include "algorithm/stagger.hpp"
#include "algorithm/workspace_bytes.hpp"
#include "core/policy.hpp"
#include "cuda/warp_team.cuh"
#include "model/pool_slots.hpp"
#include "model/sink_state.hpp"
#include "model/state_pool.hpp"
#include "version.hpp"
