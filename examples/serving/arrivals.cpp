#include "arrivals.hpp"

#include <cmath>
#include <random>

#include "replay/policy_flags.hpp"

namespace sinkstate::serving {
namespace {

/// The standard fixes the numbers of this generator, not those of its distributions.
class Random {
 public:
  explicit Random(std::uint64_t seed) : random_(seed) {}

  std::uint64_t bits() { return random_(); }
  /// In [0, 1).
  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  /// In [least, most].
  std::size_t between(std::size_t least, std::size_t most) {
    return least + static_cast<std::size_t>(uniform() * static_cast<double>(most - least + 1));
  }
  /// As many factors as keep the product of uniform numbers above exp(-mean).
  int poisson(double mean) {
    const double bar = std::exp(-mean);
    int count = 0;
    for (double product = uniform(); product > bar; product *= uniform()) ++count;
    return count;
  }

 private:
  std::mt19937_64 random_;
};

std::size_t length(Random& random, std::ptrdiff_t most) {
  const auto bytes = static_cast<std::size_t>(most);
  return random.between((bytes + 3) / 4, bytes);
}

}  // namespace

std::vector<Arrival> make_arrivals(const std::string& text, const ArrivalOptions& options) {
  if (static_cast<std::ptrdiff_t>(text.size()) < options.prompt_bytes) {
    tools::refuse(
        "--text",
        "at least the " + std::to_string(options.prompt_bytes) + " bytes of --prompt-bytes",
        std::to_string(text.size()));
  }
  Random random(options.seed);
  std::vector<Arrival> arrivals;
  const auto wanted = static_cast<std::size_t>(options.requests);
  for (std::int64_t step = 0; arrivals.size() < wanted; ++step) {
    for (int left = random.poisson(options.rate); left > 0 && arrivals.size() < wanted; --left) {
      Arrival arrival;
      arrival.step = step;
      const std::size_t bytes = length(random, options.prompt_bytes);
      arrival.prompt = text.substr(random.between(0, text.size() - bytes), bytes);
      arrival.output = length(random, options.output_bytes);
      arrival.samples = random.uniform() < options.fork_share ? 2 : 1;
      for (std::uint64_t& seed : arrival.seeds) seed = random.bits();
      arrivals.push_back(std::move(arrival));
    }
  }
  return arrivals;
}

}  // namespace sinkstate::serving
