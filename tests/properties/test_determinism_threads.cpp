// Heads on several threads, each with its own team and states, give the bits of one thread.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

constexpr int heads = 8;
constexpr int tokens = 40;

template <class T>
struct HeadResult {
  std::vector<T> outputs;
  std::vector<T> state;
  T certificate = 0;
  Index projected = 0;

  bool operator==(const HeadResult& other) const {
    return same_bits(outputs, other.outputs) && same_bits(state, other.state) &&
           same_bits({certificate}, {other.certificate}) && projected == other.projected;
  }

 private:
  static bool same_bits(const std::vector<T>& x, const std::vector<T>& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(T)) == 0;
  }
};

template <class P>
HeadResult<typename P::Compute> run_head(const Stream& stream) {
  StateConfig config;
  config.d_k = stream.d_k;
  config.d_v = stream.d_v;
  config.dense_retry = 2;
  if (!P::Compaction::adaptive) config.rank_cap = 5;  // so that it is found by projection
  StateRunner<P> runner(stream, config);
  HeadResult<typename P::Compute> result;
  for (int t = 0; t < stream.tokens; ++t) {
    const auto& output = runner.step(t);
    result.outputs.insert(result.outputs.end(), output.begin(), output.end());
    if (runner.view().due()) result.projected += runner.compact().projected;
  }
  result.state = runner.dense(&result.certificate);
  runner.start_from_own(result.state, RandomizedSvd{});
  result.state = runner.dense();
  return result;
}

// Head h goes to thread h % threads.
template <class P>
std::vector<HeadResult<typename P::Compute>> run_heads(const std::vector<Stream>& streams,
                                                       std::size_t threads) {
  std::vector<HeadResult<typename P::Compute>> results(streams.size());
  std::vector<std::thread> workers;
  for (std::size_t worker = 0; worker < threads; ++worker) {
    workers.emplace_back([&, worker] {
      for (std::size_t head = worker; head < streams.size(); head += threads) {
        results[head] = run_head<P>(streams[head]);
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  return results;
}

}  // namespace

TEMPLATE_TEST_CASE("determinism: threads", "[determinism][threads]", Mamba2, GatedDelta,
                   KimiDelta) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  std::vector<Stream> streams;
  for (int head = 0; head < heads; ++head) {
    // Realistic heads stay low-rank, random ones go dense.
    streams.push_back(scenario_stream(head % 2, traits_of<TestType>, 24, 18, tokens,
                                      derived_seed(seed, static_cast<std::uint64_t>(head))));
  }
  const auto check = [&](auto tag) {
    using P = typename decltype(tag)::type;
    INFO(policy_name<P>());
    const auto expected = run_heads<P>(streams, 1);
    CHECK((expected[0].projected > 0) == (P::Compaction::low_rank && !P::Compaction::adaptive));
    for (const std::size_t threads : {2U, 3U, 8U}) {
      const bool same = run_heads<P>(streams, threads) == expected;
      CHECK(same);
    }
  };
  for_each_policy<TestType, Fp32>(check);
  for_each_policy<TestType, Fp64>(check);
}
