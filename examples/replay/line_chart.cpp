#include "line_chart.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <iterator>

namespace sinkstate::tools {
namespace {

constexpr double width = 920, height = 520;
constexpr double left = 70, right = 640, top = 40, bottom = 465;

// Okabe and Ito's colours, which colour-blind people can tell apart; then the same, darker.
const char* const colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
                               "#000000", "#00466e", "#8a3d00", "#00664b", "#85506d", "#8f6300"};

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

bool drawable(const ChartPoint& point) {
  return std::isfinite(point.x) && point.x >= 0 && std::isfinite(point.y) && point.y > 0;
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

}  // namespace

std::string to_svg(const LineChart& chart) {
  double x_end = 0, y_least = HUGE_VAL, y_most = 0;
  for (const ChartSeries& series : chart.series) {
    for (const ChartPoint& point : series.points) {
      if (!drawable(point)) continue;
      x_end = std::max(x_end, point.x);
      y_least = std::min(y_least, point.y);
      y_most = std::max(y_most, point.y);
    }
  }
  if (!(x_end > 0)) x_end = 1;
  if (!(y_most > 0)) y_least = y_most = 1;
  const double tick = tick_of(x_end);
  x_end = tick * std::ceil(x_end / tick - 1e-9);
  const double first = std::floor(std::log10(y_least));
  const double last = std::max(first + 1, std::ceil(std::log10(y_most)));
  const auto x_of = [&](double x) { return left + (right - left) * x / x_end; };
  const auto y_of = [&](double decade) {
    return bottom - (bottom - top) * (decade - first) / (last - first);
  };

  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " +
                    number("%.0f", width) + " " + number("%.0f", height) +
                    "\" font-family=\"sans-serif\" font-size=\"12\">\n"
                    "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  svg += words((left + right) / 2, top - 16, "middle", chart.title);
  const double ticks = std::round(x_end / tick);
  for (double i = 0; i <= ticks; ++i) {
    const double x = x_of(i * tick);
    svg += line(x, top, x, bottom, "#e0e0e0");
    svg += words(x, bottom + 18, "middle", number("%g", i * tick));
  }
  for (double decade = first; decade <= last; ++decade) {
    const double y = y_of(decade);
    svg += line(left, y, right, y, "#e0e0e0");
    svg += words(left - 8, y + 4, "end", number("1e%g", decade));
  }
  svg += line(left, bottom, right, bottom, "black") + line(left, top, left, bottom, "black");
  svg += words((left + right) / 2, bottom + 42, "middle", chart.x_label);
  const std::string middle = at((top + bottom) / 2);
  svg += "<text text-anchor=\"middle\" transform=\"translate(18 " + middle + ") rotate(-90)\">" +
         escape(chart.y_label) + "</text>\n";

  for (std::size_t s = 0; s < chart.series.size(); ++s) {
    const ChartSeries& series = chart.series[s];
    const std::string colour = colours[s % std::size(colours)];
    std::string path, marks;
    for (const ChartPoint& point : series.points) {
      if (!drawable(point)) continue;
      const std::string x = at(x_of(point.x)), y = at(y_of(std::log10(point.y)));
      path += (path.empty() ? "" : " ") + x + "," + y;
      marks += "<circle cx=\"" + x + "\" cy=\"" + y + "\" r=\"3\" fill=\"" + colour + "\"><title>" +
               escape(point.label) + "</title></circle>\n";
    }
    const std::string stroke = "fill=\"none\" stroke=\"" + colour + "\" stroke-width=\"1.5\"" +
                               (series.dashed ? " stroke-dasharray=\"5 3\"" : "");
    svg += "<polyline points=\"" + path + "\" " + stroke + "/>\n" + marks;
    const double y = top + 10 + 18 * static_cast<double>(s);
    svg += "<polyline points=\"" + at(right + 14) + "," + at(y) + " " + at(right + 40) + "," +
           at(y) + "\" " + stroke + "/>\n" + words(right + 46, y + 4, "start", series.name);
  }
  return svg + "</svg>\n";
}

}  // namespace sinkstate::tools
