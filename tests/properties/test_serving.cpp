// Continuous batching: what a seed fixes, and what drafts, evictions and forks must not change.
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "hybrid_lm/evaluate.hpp"
#include "serving/report.hpp"
#include "serving/server.hpp"
#include "support/catch.hpp"

using namespace sinkstate;
using namespace sinkstate::serving;

namespace {

const hybrid_lm::Model& model() {
  static const hybrid_lm::Model loaded = hybrid_lm::load_model(SINKSTATE_HYBRID_LM_MODEL);
  return loaded;
}

std::vector<Arrival> arrivals() {
  std::ifstream stream(std::string(SINKSTATE_HYBRID_LM_MODEL) + "/text.txt", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  ArrivalOptions options;
  options.requests = 5;
  options.rate = 0.5;
  options.prompt_bytes = options.output_bytes = 32;
  options.fork_share = 0.5;
  return make_arrivals(text, options);
}

Setting factored(bool staggered = false, bool consolidated = false) {
  tools::ReplayOptions options;
  options.epsilon = 0.1;
  return {"factored", hybrid_lm::Policies{options, options, options}, staggered, consolidated};
}
const Setting dense{"dense", {}, false, false};

ServingOptions roomy() {
  ServingOptions options;
  options.budget = 1e12;
  options.compared = 1;
  return options;
}

ServingResult served(const Setting& setting, const ServingOptions& options) {
  return serve(model(), arrivals(), setting, options, [](std::ptrdiff_t) {});
}

using Texts = std::map<std::pair<std::size_t, int>, std::string>;
Texts texts(const ServingResult& result) {
  Texts texts;
  for (const FinishedRequest& request : result.finished) {
    texts[{request.arrival, request.sample}] = request.text;
  }
  return texts;
}

}  // namespace

TEST_CASE("a seed fixes the schedule and the texts, with consolidation too") {
  ServingOptions options = roomy();
  options.budget = 2.5 * hybrid_lm::dense_state_bytes(model());
  const ServingResult first = served(factored(true, true), options);
  options.threads = 2;
  const ServingResult second = served(factored(true, true), options);
  CHECK(texts(first) == texts(second));
  REQUIRE(first.steps.size() == second.steps.size());
  for (std::size_t i = 0; i < first.steps.size(); ++i) {
    CHECK(first.steps[i].bytes == second.steps[i].bytes);
    CHECK(first.steps[i].requests == second.steps[i].requests);
  }
  CHECK(first.consolidations.done > 0);
}

TEST_CASE("drafts change no text: dense, and factored when all of them are rejected") {
  ServingOptions options = roomy();
  const ServingResult drafted = served(dense, options);
  CHECK(drafted.accepted > 0);
  CHECK(drafted.accepted < drafted.drafted);
  CHECK(drafted.drift.kl_worst == 0);
  ServingOptions plain = options;
  plain.draft = 0;
  CHECK(texts(drafted) == texts(served(dense, plain)));
  // A byte that the model does not write: compactions are where they are without drafts.
  options.drafter = [](const std::string&, std::size_t most) { return std::string(most, '\1'); };
  const ServingResult rejected = served(factored(), options);
  CHECK(rejected.drafted > 0);
  CHECK(rejected.accepted == 0);
  CHECK(texts(rejected) == texts(served(factored(), plain)));
}

TEST_CASE("evictions change no text, and keep the budget") {
  ServingOptions options = roomy();
  const ServingResult free = served(factored(), options);
  CHECK(free.evictions == 0);
  CHECK(free.forks > 0);
  options.budget = 2 * hybrid_lm::dense_state_bytes(model());
  const ServingResult tight = served(factored(), options);
  CHECK(tight.evictions > 0);
  CHECK(texts(free) == texts(tight));
  for (const StepFigures& step : tight.steps) {
    if (step.bytes_kept > options.budget) CHECK(step.measured == 1 + step.evicted);
  }
  std::size_t samples = 0;
  for (const Arrival& arrival : arrivals()) samples += static_cast<std::size_t>(arrival.samples);
  CHECK(texts(free).size() == samples);
  for (const auto& [request, text] : texts(free)) {
    const Arrival arrival = arrivals()[request.first];
    CHECK(text.size() == arrival.prompt.size() + arrival.output);
    CHECK(text.compare(0, arrival.prompt.size(), arrival.prompt) == 0);
  }
}

TEST_CASE("what it writes for programs, and what it refuses") {
  ServingOptions uncompared = roomy();
  uncompared.compared = 0;
  const auto document = nlohmann::json::parse(
      json({served(dense, roomy()), served(dense, uncompared)}, ArrivalOptions{}, roomy()));
  CHECK(document["options"]["arrival_seed"] == 1);
  CHECK(document["options"]["recompressions"].is_null());
  CHECK(document["settings"][1]["kl_mean"].is_null());
  double bytes = 0, left = 0;
  for (const auto& step : document["settings"][0]["steps"]) {
    bytes += step["bytes"].get<double>();
    left += step["left"].get<double>();
  }
  CHECK(bytes / left == Catch::Approx(document["settings"][0]["request_bytes_mean"].get<double>()));
  CHECK(document["settings"][0]["name"] == "dense");
  CHECK(document["settings"][0]["kl_worst"] == 0.0);
  for (const char* const flags : {"--slots 0",
                                  "--budget 0",
                                  "--budget -1",
                                  "--budget nan",
                                  "--draft -1",
                                  "--arrival-rate 0",
                                  "--fork-share 2",
                                  "--chunk 0",
                                  "--recompressions -1",
                                  "--requests 0",
                                  "--temperature -1",
                                  "--prompt-bytes 100000",
                                  "--epsilon 2",
                                  "--text /no/such/file",
                                  "--no-such-flag",
                                  "--json ''",
                                  "--text /",
                                  "--steps 1 --arrival-rate 0.001",
                                  "--consolidation-delay 8",
                                  "--consolidation-delay 4 --gdn '--buffer 4'",
                                  "--policy fixed-rank --recompressions 4",
                                  "--policy full-svd --consolidation-delay 1",
                                  "--svg '" SINKSTATE_HYBRID_LM_MODEL "/config.json'",
                                  "--json '" SINKSTATE_HYBRID_LM_MODEL "/text.txt'"}) {
    CAPTURE(flags);
    const int status = std::system(
        ("'" SINKSTATE_TEST_SERVING "' " + std::string(flags) + " >/dev/null 2>&1").c_str());
    CHECK(status == 2 << 8);
  }
}
