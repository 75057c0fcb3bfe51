#include "line_chart.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>

namespace sinkstate::tools {
namespace {

constexpr double width = 920, least_height = 520;
constexpr double left = 70, right = 640, top = 40, bottom = 465;

// Okabe and Ito's colours, which colour-blind people can tell apart; then the same, darker.
const char* const colours[chart_colours] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                            "#e69f00", "#56b4e9", "#000000", "#00466e",
                                            "#8a3d00", "#00664b", "#85506d", "#8f6300"};

std::string number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}
std::string at(double pixels) { return number("%.1f", pixels); }

std::string escape(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

bool drawable(const LineChart& chart, const ChartPoint& point) {
  return std::isfinite(point.x) && point.x >= 0 && std::isfinite(point.y) &&
         (chart.linear ? point.y >= 0 : point.y > 0);
}

std::string line(double x1, double y1, double x2, double y2, const char* colour) {
  return "<line x1=\"" + at(x1) + "\" y1=\"" + at(y1) + "\" x2=\"" + at(x2) + "\" y2=\"" + at(y2) +
         "\" stroke=\"" + colour + "\"/>\n";
}
std::string words(double x, double y, const char* anchor, const std::string& text) {
  return "<text x=\"" + at(x) + "\" y=\"" + at(y) + "\" text-anchor=\"" + anchor + "\">" +
         escape(text) + "</text>\n";
}

/// 1, 2 or 5 times a power of ten, at most ten of them up to `end`.
double tick_of(double end) {
  const double power = std::pow(10.0, std::floor(std::log10(end / 10)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power * 10 >= end) return factor * power;
  }
  return 10 * power;
}

/// Numbers in equal steps, of a logarithmic axis the exponents.
struct Axis {
  double first, last, tick;

  double share(double value) const { return (value - first) / (last - first); }
  double steps() const { return std::round((last - first) / tick); }
};

Axis linear_axis(double end) {
  if (!(end > 0)) end = 1;
  const double tick = tick_of(end);
  return {0, tick * std::ceil(end / tick - 1e-9), tick};
}

Axis decades(double least, double most) {
  if (!(most > 0)) least = most = 1;
  const double first = std::floor(std::log10(least));
  return {first, std::max(first + 1, std::ceil(std::log10(most))), 1};
}

double legend_y(std::size_t series) { return top + 10 + 18 * static_cast<double>(series); }

double height_of(const LineChart& chart) {
  return std::max(least_height, legend_y(chart.series.size()));
}

/// The chart without the document around it.
std::string draw(const LineChart& chart) {
  double x_end = 0, y_least = HUGE_VAL, y_most = 0;
  for (const ChartSeries& series : chart.series) {
    for (const ChartPoint& point : series.points) {
      if (!drawable(chart, point)) continue;
      x_end = std::max(x_end, point.x);
      y_least = std::min(y_least, point.y);
      y_most = std::max(y_most, point.y);
    }
  }
  const Axis x_axis = linear_axis(x_end);
  const Axis y_axis = chart.linear ? linear_axis(y_most) : decades(y_least, y_most);
  const auto x_of = [&](double x) { return left + (right - left) * x_axis.share(x); };
  const auto y_of = [&](double y) { return bottom - (bottom - top) * y_axis.share(y); };

  std::string svg = words((left + right) / 2, top - 16, "middle", chart.title);
  for (double i = 0; i <= x_axis.steps(); ++i) {
    const double x = x_of(i * x_axis.tick);
    svg += line(x, top, x, bottom, "#e0e0e0");
    svg += words(x, bottom + 18, "middle", number("%g", i * x_axis.tick));
  }
  for (double i = 0; i <= y_axis.steps(); ++i) {
    const double value = y_axis.first + i * y_axis.tick;
    const double y = y_of(value);
    svg += line(left, y, right, y, "#e0e0e0");
    svg += words(left - 8, y + 4, "end", number(chart.linear ? "%g" : "1e%g", value));
  }
  svg += line(left, bottom, right, bottom, "black") + line(left, top, left, bottom, "black");
  svg += words((left + right) / 2, bottom + 42, "middle", chart.x_label);
  const std::string middle = at((top + bottom) / 2);
  svg += "<text text-anchor=\"middle\" transform=\"translate(18 " + middle + ") rotate(-90)\">" +
         escape(chart.y_label) + "</text>\n";

  for (std::size_t s = 0; s < chart.series.size(); ++s) {
    const ChartSeries& series = chart.series[s];
    const std::string colour = colours[series.colour.value_or(s) % chart_colours];
    std::string path, marks;
    for (const ChartPoint& point : series.points) {
      if (!drawable(chart, point)) continue;
      const std::string x = at(x_of(point.x));
      const std::string y = at(y_of(chart.linear ? point.y : std::log10(point.y)));
      path += (path.empty() ? "" : " ") + x + "," + y;
      if (!series.marks && series.points.size() > 1) continue;
      marks += "<circle cx=\"" + x + "\" cy=\"" + y + "\" r=\"3\" fill=\"" + colour + "\"><title>" +
               escape(point.label) + "</title></circle>\n";
    }
    const std::string stroke = "fill=\"none\" stroke=\"" + colour + "\" stroke-width=\"1.5\"" +
                               (series.dashed ? " stroke-dasharray=\"5 3\"" : "");
    svg += "<polyline points=\"" + path + "\" " + stroke + "/>\n" + marks;
    const double y = legend_y(s);
    svg += "<polyline points=\"" + at(right + 14) + "," + at(y) + " " + at(right + 40) + "," +
           at(y) + "\" " + stroke + "/>\n" + words(right + 46, y + 4, "start", series.name);
  }
  return svg;
}

}  // namespace

std::string to_svg(const LineChart& chart) { return to_svg(std::vector<LineChart>{chart}); }

std::string to_svg(const std::vector<LineChart>& column) {
  double height = 0;
  std::string charts;
  for (const LineChart& chart : column) {
    charts += "<g transform=\"translate(0 " + at(height) + ")\">\n" + draw(chart) + "</g>\n";
    height += height_of(chart);
  }
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + number("%.0f", width) + " " +
         number("%.0f", height) +
         "\" font-family=\"sans-serif\" font-size=\"12\">\n"
         "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n" +
         charts + "</svg>\n";
}

}  // namespace sinkstate::tools
