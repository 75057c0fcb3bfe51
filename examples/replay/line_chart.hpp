/// @file
/// Figures as SVG.
#pragma once

#include <string>
#include <vector>

namespace sinkstate::tools {

struct ChartPoint {
  double x = 0;
  double y = 0;
  std::string label;  // shown when the mouse rests on it
};

struct ChartSeries {
  std::string name;
  std::vector<ChartPoint> points;  // joined in this order
  bool dashed = false;
};

struct LineChart {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<ChartSeries> series;
};

/// x from 0 on, y on a logarithmic axis of whole decades. Points that such axes do not have (y not
/// above 0, x below 0, NaN) are left out.
std::string to_svg(const LineChart& chart);

}  // namespace sinkstate::tools
