/// @file
/// What `replay --profile` adds to the table, the JSON and the figure.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "line_chart.hpp"
#include "profile.hpp"

namespace sinkstate::tools {

/// Three tables, of vectors, states and what states capture, and what an error asks for; each with
/// its legend.
std::string profile_table(const std::vector<TraceReport>& reports,
                          const std::vector<TraceProfile>& profiles);

/// The object of docs/traces.md, section "The profile".
nlohmann::ordered_json to_json(const TraceProfile& profile);

/// The spectra at the end, and the stored rank beside the exact one.
///
/// @param name    of the trace
/// @param policy  that stored
std::vector<LineChart> charts_of(const TraceProfile& profile, const std::string& name,
                                 const std::string& policy);

}  // namespace sinkstate::tools
