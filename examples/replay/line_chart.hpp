/// @file
/// Figures as SVG.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace sinkstate::tools {

/// Colours of series; the next one begins anew.
inline constexpr std::size_t chart_colours = 12;

struct ChartPoint {
  double x = 0;
  double y = 0;
  std::string label;  // shown when the mouse rests on it
};

struct ChartSeries {
  std::string name;
  std::vector<ChartPoint> points;  // joined in this order
  bool dashed = false;
  bool marks = true;                                 // a disc at each point
  std::optional<std::size_t> colour = std::nullopt;  // of the series at that place, not of this one
};

struct LineChart {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<ChartSeries> series;
  bool linear = false;  // y from 0 on instead of whole decades of a logarithmic axis
};

/// x from 0 on. Points that the axes do not have (x or y below 0, y = 0 on a logarithmic axis, NaN,
/// infinity) are left out, and the line goes on at the next.
std::string to_svg(const LineChart& chart);

/// Several charts, one below the other.
std::string to_svg(const std::vector<LineChart>& column);

}  // namespace sinkstate::tools
