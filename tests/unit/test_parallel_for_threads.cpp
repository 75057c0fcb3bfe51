// Work on threads: each piece once, and errors come back.
#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "replay/parallel_for.hpp"
#include "support/catch.hpp"

using sinkstate::tools::parallel_for;

TEST_CASE("parallel_for: every piece once, for any number of threads") {
  for (const std::ptrdiff_t threads : {1, 2, 5, 40}) {
    for (const std::ptrdiff_t count : {0, 1, 33}) {
      std::vector<int> done(static_cast<std::size_t>(count));
      parallel_for(count, threads, [&](std::ptrdiff_t i) { ++done[static_cast<std::size_t>(i)]; });
      CHECK(done == std::vector<int>(static_cast<std::size_t>(count), 1));
    }
  }
}

TEST_CASE("parallel_for: the first exception comes back, and little is begun after it") {
  for (const std::ptrdiff_t threads : {1, 3}) {
    std::atomic<int> begun{0};
    std::string error;
    try {
      parallel_for(1000000, threads, [&](std::ptrdiff_t i) {
        ++begun;
        if (i == 10) throw std::runtime_error("ten");
      });
    } catch (const std::runtime_error& caught) {
      error = caught.what();
    }
    CHECK(error == "ten");
    CHECK(begun < 1000000);
  }
}
