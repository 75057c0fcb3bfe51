/// @file
/// Tables for people, as text.
#pragma once

#include <string>
#include <vector>

namespace sinkstate::tools {

/// printf of one number.
std::string format(const char* pattern, double value);

/// Rows of equally many cells under each other: the first column to the left, the others to the
/// right.
std::string aligned(const std::vector<std::vector<std::string>>& rows);

}  // namespace sinkstate::tools
