// The figure of `replay`: which lines there are, and that they are what was measured.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "replay/replay.hpp"
#include "replay/report.hpp"
#include "replay/trace.hpp"
#include "support/catch.hpp"

using namespace sinkstate::tools;

namespace {

using Line = std::vector<std::pair<double, double>>;

constexpr double bottom = 465, top = 40, left = 70, right = 640;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The lines of each chart in pixels, in the order of the heads; those of the legend lie further to
// the right.
std::vector<std::vector<Line>> lines_of(const std::string& svg) {
  std::vector<std::vector<Line>> charts;
  std::istringstream rows(svg);
  const std::string start = "<polyline points=\"";
  for (std::string row; std::getline(rows, row);) {
    if (row.rfind("<g ", 0) == 0) charts.emplace_back();
    if (row.rfind(start, 0) != 0) continue;
    std::istringstream points(row.substr(start.size(), row.find('"', start.size()) - start.size()));
    Line line;
    char comma;
    for (double x, y; points >> x >> comma >> y;) line.emplace_back(x, y);
    if (line.empty() || line.front().first <= right) charts.back().push_back(line);
  }
  return charts;
}

TraceReport report_of(const std::string& trace, const std::vector<HeadSeries>& series) {
  TraceReport report;
  report.trace = trace;
  report.series = series;
  return report;
}

}  // namespace

TEST_CASE("figure: two charts a trace, a line a head, a point a token") {
  const HeadSeries grows{{0, 2, 4}, {0, 1e-4, 1e-1}};
  const HeadSeries exact{{5, 5, 5}, {0, 0, 0}};
  const std::string svg =
      figure({report_of("folder/one.safetensors", {grows, exact}), report_of("two", {exact})}, {});
  for (const char* words : {">&quot;one&quot;, local-svd, epsilon 0.01, buffer 8: stored rank<",
                            ">&quot;one&quot;, local-svd, epsilon 0.01, buffer 8: output error<",
                            ">&quot;two&quot;, local-svd, epsilon 0.01, buffer 8: stored rank<",
                            ">head 0<", ">head 1<", ">token<", ">1e-4<", ">1e-1<"}) {
    INFO(words);
    CHECK(contains(svg, words));
  }
  const auto charts = lines_of(svg);
  REQUIRE(charts.size() == 4);
  REQUIRE(charts[0].size() == 2);
  CHECK((charts[0][0] == Line{{left, bottom}, {355, 295}, {right, 125}}));
  CHECK((charts[0][1] == Line{{left, top}, {355, top}, {right, top}}));
  // A logarithmic axis has no 0.
  REQUIRE(charts[1].size() == 2);
  CHECK((charts[1][0] == Line{{355, bottom}, {right, top}}));
  CHECK(charts[1][1].empty());
  CHECK(charts[2].size() == 1);
  CHECK(charts[3].size() == 1);
  CHECK_FALSE(contains(svg, "<circle"));
}

TEST_CASE("figure: errors relative to nothing, and no tokens, break nothing") {
  const std::string svg =
      figure({report_of("", {{{1, 1}, {INFINITY, std::nan("")}}, {{}, {}}})}, {});
  CHECK_FALSE(contains(svg, "nan"));
  CHECK_FALSE(contains(svg, "inf"));
  const auto charts = lines_of(svg);
  REQUIRE(charts.size() == 2);
  CHECK(charts[0][0].size() == 2);
  CHECK(charts[1][0].empty());
  CHECK(charts[0][1].empty());
}

TEST_CASE("figure: names of any bytes") {
  const std::string svg = figure({report_of("a<\xff\x01\n.safetensors", {})}, {});
  CHECK(contains(svg, "&quot;a&lt;\\ufffd\\u0001\\n&quot;"));
}

TEST_CASE("figure: of a long trace, means of ranks and the largest errors") {
  HeadSeries series;
  for (int t = 0; t < 1000; ++t) {
    series.rank.push_back(t);
    series.output_error.push_back(1e-3);
  }
  series.output_error[503] = 1;
  ReplayOptions options;
  options.prefill = 1000;
  const std::string svg = figure({report_of("long", {series})}, options);
  CHECK(svg.size() < 20000);
  CHECK(contains(svg, ", prefill 1000: "));
  const auto charts = lines_of(svg);
  const Line& rank = charts.at(0).at(0);
  const Line& error = charts.at(1).at(0);
  REQUIRE(rank.size() == 200);
  REQUIRE(error.size() == 200);
  // Five tokens a point: 1000 to 1004 first, of ranks 0 to 4; both axes end at round numbers.
  const auto x_of = [](double token) { return left + (right - left) * token / 2000; };
  const auto y_of = [](double terms) { return bottom - (bottom - top) * terms / 1000; };
  CHECK(rank[0].first == Catch::Approx(x_of(1002)).margin(0.051));
  CHECK(rank[0].second == Catch::Approx(y_of(2)).margin(0.051));
  CHECK(rank[199].first == Catch::Approx(x_of(1997)).margin(0.051));
  CHECK(rank[199].second == Catch::Approx(y_of(997)).margin(0.051));
  for (std::size_t i = 0; i < 200; ++i) CHECK(error[i].second == (i == 100 ? top : bottom));

  // Parts that are not all of one length still hold every token once.
  series.rank.resize(399, 0);
  const auto uneven = lines_of(figure({report_of("long", {series})}, {}));
  CHECK(uneven.at(0).at(0).size() == 200);
  CHECK(uneven.at(0).at(0).back().second ==
        Catch::Approx(bottom - (bottom - top) * 397.5 / 400).margin(0.051));
}

TEST_CASE("figure: it shows the figures of the report") {
  const Trace trace = cut(load_trace(SINKSTATE_TEST_DATA "/mamba2.safetensors"), 150, {0, 2});
  ReplayOptions options;
  options.prefill = 10;
  const auto run = [&] { return replay("mamba2", trace, options, nullptr, [](std::ptrdiff_t) {}); };
  const TraceReport plain = run();
  CHECK(plain.series.empty());
  options.series = true;
  const TraceReport report = run();
  REQUIRE(report.series.size() == 2);
  const auto charts = lines_of(figure({report}, options));
  REQUIRE(charts.size() == 2);
  REQUIRE(charts[0].size() == 2);
  for (std::size_t h = 0; h < 2; ++h) {
    const ReplayFigures& figures = report.per_head[h];
    const HeadSeries& series = report.series[h];
    CHECK(figures.rank_histogram == plain.per_head[h].rank_histogram);
    CHECK(figures.output_error_rms == plain.per_head[h].output_error_rms);

    REQUIRE(series.rank.size() == 140);
    REQUIRE(series.output_error.size() == 140);
    CHECK(std::accumulate(series.rank.begin(), series.rank.end(), 0.0) / 140 ==
          Catch::Approx(figures.rank_mean).epsilon(1e-12));
    const auto worst = std::max_element(series.output_error.begin(), series.output_error.end());
    CHECK(*worst == figures.output_error_worst);
    CHECK(worst - series.output_error.begin() + 10 == figures.output_error_worst_token);
    double squares = 0;
    for (const double error : series.output_error) squares += error * error;
    CHECK(std::sqrt(squares / 140) == Catch::Approx(figures.output_error_rms).epsilon(1e-9));

    // Back from pixels: the highest point of all is the peak of all.
    double highest = bottom;
    for (const Line& line : charts[0]) {
      for (const auto& point : line) highest = std::min(highest, point.second);
    }
    double sum = 0;
    for (const auto& [x, y] : charts[0][h]) sum += (bottom - y) / (bottom - highest);
    REQUIRE(charts[0][h].size() == 140);
    CHECK(sum / 140 * static_cast<double>(report.total.rank_peak) ==
          Catch::Approx(figures.rank_mean).epsilon(1e-3));
  }
}
