/// @file
/// Settings beside each other: for people, for programs, and as a figure.
#pragma once

#include <string>
#include <vector>

#include "server.hpp"

namespace sinkstate::serving {

std::string text(const std::vector<ServingResult>& results);
/// The object of docs/serving.md.
std::string json(const std::vector<ServingResult>& results, const ArrivalOptions& arrivals,
                 const ServingOptions& options);
/// An SVG: bytes of states and mean rank over the steps.
std::string figure(const std::vector<ServingResult>& results);

}  // namespace sinkstate::serving
