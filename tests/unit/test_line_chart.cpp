// Figures: what is drawn where, and what is left out.
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "replay/line_chart.hpp"
#include "support/catch.hpp"

using namespace sinkstate::tools;

namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

bool contains(const std::string& text, const std::string& part) { return count(text, part) > 0; }

}  // namespace

TEST_CASE("line chart: decades on y, a linear x from zero") {
  // x: 0 to 1 between 70 and 640; y: 1e-4 to 1e-1 between 465 and 40.
  const std::string svg =
      to_svg({"t", "x", "y", {{"a", {{0, 1e-4, "first"}, {0.5, 1e-1, ""}, {1, 1e-3, ""}}, false}}});
  CHECK(contains(svg, "<circle cx=\"70.0\" cy=\"465.0\""));
  CHECK(contains(svg, "<circle cx=\"355.0\" cy=\"40.0\""));
  CHECK(contains(svg, "<circle cx=\"640.0\" cy=\"323.3\""));
  CHECK(contains(svg, "points=\"70.0,465.0 355.0,40.0 640.0,323.3\""));
  CHECK(contains(svg, "<title>first</title>"));
  for (const char* tick : {">1e-4<", ">1e-3<", ">1e-2<", ">1e-1<", ">0<", ">0.1<", ">1<"}) {
    CHECK(contains(svg, tick));
  }
  CHECK_FALSE(contains(svg, "stroke-dasharray"));
}

TEST_CASE("line chart: a linear y from zero, without marks") {
  LineChart chart{"t", "x", "y", {{"a", {{0, 0, ""}, {1, 12, ""}, {2, 30, ""}}, false, false}}};
  chart.linear = true;
  const std::string svg = to_svg(chart);
  CHECK(contains(svg, "points=\"70.0,465.0 355.0,295.0 640.0,40.0\""));
  for (const char* tick : {">0<", ">5<", ">30<"}) CHECK(contains(svg, tick));
  CHECK(count(svg, "<circle") == 0);
  CHECK_FALSE(contains(svg, "1e"));

  chart.series[0].points = {{1, -1, ""}, {1, std::numeric_limits<double>::quiet_NaN(), ""}};
  CHECK(contains(to_svg(chart), "<polyline points=\"\" "));
  CHECK(contains(to_svg(chart), ">1<"));
}

TEST_CASE("line chart: a column, where a long legend takes its room") {
  const ChartSeries series{"a", {{1, 1, ""}}, false};
  const LineChart chart{"one", "", "", {series}};
  const LineChart crowded{"two", "", "", std::vector<ChartSeries>(40, series)};
  const std::string svg = to_svg({chart, crowded, chart});
  CHECK(count(svg, "<svg ") == 1);
  CHECK(count(svg, "<g transform=") == 3);
  CHECK(contains(svg, "translate(0 0.0)"));
  CHECK(contains(svg, "translate(0 520.0)"));
  CHECK(contains(svg, "translate(0 1290.0)"));  // 520 and 40 + 10 + 40 * 18
  CHECK(contains(svg, "viewBox=\"0 0 920 1810\""));
  CHECK(svg.rfind("</g>\n</svg>\n") == svg.size() - 12);
}

TEST_CASE("line chart: points that the axes do not have are left out") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::string svg = to_svg({"",
                                  "",
                                  "",
                                  {{"a",
                                    {{0.5, 0, ""},
                                     {0.5, -1, ""},
                                     {-1, 1, ""},
                                     {nan, 1, ""},
                                     {1, nan, ""},
                                     {infinity, 1, ""},
                                     {1, infinity, ""},
                                     {1, 1, ""}},
                                    true}}});
  CHECK(count(svg, "<circle") == 1);
  CHECK(contains(svg, "stroke-dasharray"));
  CHECK_FALSE(contains(svg, "nan"));
  CHECK_FALSE(contains(svg, "inf"));
}

TEST_CASE("line chart: without points there are axes") {
  const std::string svg = to_svg({"empty", "x", "y", {{"nothing", {}, false}}});
  CHECK(contains(svg, ">nothing</text>"));
  CHECK(count(svg, "<circle") == 0);
  CHECK_FALSE(contains(svg, "nan"));
}

TEST_CASE("line chart: words are escaped") {
  const std::string svg = to_svg({"<&\">", "x", "y", {{"a<b", {{1, 1, "c&d"}}, false}}});
  CHECK(contains(svg, ">&lt;&amp;&quot;&gt;</text>"));
  CHECK(contains(svg, ">a&lt;b</text>"));
  CHECK(contains(svg, "<title>c&amp;d</title>"));
}

TEST_CASE("line chart: at most ten steps of 1, 2 or 5 on x") {
  const auto last_tick = [](double end, const char* tick, std::size_t steps) {
    const std::string svg = to_svg({"", "", "", {{"", {{end, 1, ""}}, false}}});
    INFO(svg);
    CHECK(contains(svg, std::string(">") + tick + "<"));
    CHECK(count(svg, "y=\"483.0\"") == steps + 1);
  };
  last_tick(1.64, "1.8", 9);
  last_tick(0.93, "1", 10);
  last_tick(37, "40", 8);
  last_tick(1, "1", 10);
}
