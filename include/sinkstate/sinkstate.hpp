/// @file
/// The host library: any C++17 compiler and Eigen, no CUDA.
#pragma once

#include "algorithm/advance.hpp"
#include "algorithm/compact.hpp"
#include "algorithm/initialize.hpp"
#include "algorithm/materialize.hpp"
#include "algorithm/read_out.hpp"
#include "algorithm/workspace_bytes.hpp"
#include "host/host_team.hpp"
#include "model/sink_state.hpp"
#include "version.hpp"
