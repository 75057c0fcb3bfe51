/// @file
/// The host library: any C++17 compiler and Eigen, no CUDA.
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
#include "host/consolidated_pool.hpp"
#include "host/consolidator.hpp"
#include "host/host_team.hpp"
#include "host/host_teams.hpp"
#include "model/pool_slots.hpp"
#include "model/sink_state.hpp"
#include "model/state_pool.hpp"
#include "version.hpp"
