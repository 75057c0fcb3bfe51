// What a pool takes, for the shapes and ranks of a real model.
#include <cstdio>
#include <sinkstate/sinkstate.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// Nemotron-3-Nano-4B: 96 heads of 80 x 128 in 8 groups, eight buffered tokens.
PoolConfig nemotron(Index slots) {
  PoolConfig config;
  config.state.d_k = 128;
  config.state.d_v = 80;
  config.state.buffer = 8;
  config.slots = slots;
  config.key_heads = 8;
  config.value_heads = 96;
  return config;
}

// 22 % in 4-8, 38 % in 9-16, 27 % in 17-32, 13 % in 33-48, uniform within each.
std::vector<Index> drawn_ranks(Index count) {
  Random random(7);
  std::vector<Index> ranks;
  const auto within = [&](Index low, Index high) {
    const auto step = static_cast<Index>(random.uniform() * static_cast<double>(high - low + 1));
    return low + (step > high - low ? high - low : step);
  };
  for (Index i = 0; i < count; ++i) {
    const double part = random.uniform();
    ranks.push_back(part < 0.22   ? within(4, 8)
                    : part < 0.60 ? within(9, 16)
                    : part < 0.87 ? within(17, 32)
                                  : within(33, 48));
  }
  return ranks;
}

constexpr double dense_bytes = 4.0 * 80 * 128;

// A pool with room for exactly these ranks, every byte of it counted, over dense states.
template <class Precision>
double share_of_dense(Index slots, const std::vector<Index>& ranks) {
  PoolConfig config = nemotron(slots);
  config.quota = 4;
  for (const Index rank : ranks) config.reserve += rank - config.quota;
  const PoolBytes bytes = pool_bytes<Policy<Mamba2, Host, Precision, LocalSvd>>(config);
  return static_cast<double>(bytes.total) / (static_cast<double>(ranks.size()) * dense_bytes);
}

}  // namespace

TEST_CASE("pool bytes: Nemotron-3-Nano-4B at the ranks of a decode", "[bytes]") {
  const Index slots = 512;
  const std::vector<Index> ranks = drawn_ranks(slots * 96);
  double mean = 0;
  for (const Index rank : ranks)
    mean += static_cast<double>(rank) / static_cast<double>(ranks.size());
  const double fp32 = share_of_dense<Fp32>(slots, ranks);
  const double fp16 = share_of_dense<Fp16>(slots, ranks);
  const double both = share_of_dense<sinkstate::Precision<float, Float16, BFloat16>>(slots, ranks);
  // Paper 1 keeps key, value and a weight of each term and each buffered token, all in fp32 and for
  // each head alone, without bookkeeping.
  const double paper = (mean + 8) * (80 + 128 + 1) * 4 / dense_bytes;
  std::printf(
      "mean rank %.3f; share of dense: fp32 %.4f, fp16 factors %.4f, 16-bit buffer too %.4f; "
      "laid out as in paper 1: %.4f\n",
      mean, fp32, fp16, both, paper);
  CHECK(fp32 <= 0.45);
  CHECK(fp16 <= 0.27);
  CHECK(both <= 0.24);
  CHECK(fp32 < paper);
}
