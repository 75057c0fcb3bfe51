#include "text_table.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>

namespace sinkstate::tools {

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

std::string aligned(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths(rows.front().size());
  for (const auto& cells : rows) {
    for (std::size_t c = 0; c < cells.size(); ++c) widths[c] = std::max(widths[c], cells[c].size());
  }
  std::string text;
  for (const auto& cells : rows) {
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - cells[c].size(), ' ');
      const bool left = c == 0;
      text += left ? cells[c] + padding : "  " + padding + cells[c];
    }
    text += "\n";
  }
  return text;
}

}  // namespace sinkstate::tools
