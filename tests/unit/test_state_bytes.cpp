// What a state occupies, part by part: by hand, as it grows, and against the figures of the papers.
#include <cstddef>
#include <sinkstate/sinkstate.hpp>

#include "support/catch.hpp"
#include "support/streams.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class Rule, class Compaction, class Sink = NoSink, class Precision = Fp32>
using View = SinkStateView<Policy<Rule, Host, Precision, Compaction, Sink>>;

}  // namespace

TEST_CASE("state bytes: by hand", "[bytes]") {
  StateConfig config = config_of(5, 3, 0, 4);
  config.draft = 2;
  const auto check = [&](const StateBytes& bytes, std::size_t rank, bool dense, std::size_t sink,
                         std::size_t log_decays) {
    CHECK(bytes.factors == rank * 8 * 4);
    CHECK(bytes.strengths == rank * 4);
    CHECK(bytes.dense == (dense ? 60 : 0));
    CHECK(bytes.sink == sink);
    CHECK(bytes.buffer_keys == 6 * 5 * 4);
    CHECK(bytes.buffer_corrections == 6 * 3 * 4);
    CHECK(bytes.log_decays == log_decays);
    CHECK(bytes.bookkeeping == 2 * 7 * 4 + 32 + 8);  // per-token bounds, record, two counters
    CHECK(bytes.total() == rank * 36 + (dense ? 60 : 0) + sink + 120 + 72 + log_decays + 96);
  };
  check(View<LinearAttention, FullSvd>::bytes_at(config, 2, false), 2, false, 0, 0);
  check(View<DeltaNet, FullSvd>::bytes_at(config, 0, false), 0, false, 0, 0);
  check(View<Mamba2, FullSvd>::bytes_at(config, 0, true), 0, true, 0, 6 * 4);
  check(View<GatedDelta, FullSvd, MeanValueSink>::bytes_at(config, 1, false), 1, false, 20, 6 * 4);
  check(View<KimiDelta, LocalSvd>::bytes_at(config, 1, false), 1, false, 0, 6 * 5 * 4);
  check(View<GatedLinearAttention, DenseBuffered>::bytes_at(config, 0, true), 0, true, 0, 120);
  using Wide = View<Mamba2, LocalSvd, NoSink, Fp64>;
  constexpr StateBytes none = Wide::bytes_at(StateConfig{}, 0, false);  // a constant expression
  CHECK(none.factors == 0);
  CHECK(Wide::bytes_at(config, 2, false).factors == 2 * 8 * 8);
  CHECK(Wide::bytes_at(config, 2, false).bookkeeping == 2 * 7 * 8 + 32 + 8);
}

TEST_CASE("state bytes: a state reports its present rank and form", "[bytes]") {
  TrackedState<Policy<Mamba2, Host, Fp32, FullSvd>> s(config_of(16, 16));
  Random random(test_seed());
  CHECK(s.view.bytes().factors == 0);
  feed(s, random, 3);
  s.compact();
  CHECK(s.view.bytes().factors == 3 * 32 * 4);
  CHECK(s.view.bytes().strengths == 3 * 4);
  feed(s, random, 8);
  s.compact();
  REQUIRE(s.view.dense());
  CHECK(s.view.bytes().dense == 16 * 16 * 4);
  CHECK(s.view.bytes().factors + s.view.bytes().strengths == 0);
}

// Paper 2, Table 2: MB a request right after a compression, in the middle of a window and at its
// end. It counts factors, whose strengths are inside them, and sink, at R plus the tokens since.
TEST_CASE("state bytes: five models of paper 2", "[bytes]") {
  struct Published {
    const char* model;
    Index d_v;  // d_k is 128
    double states;
    Index rank;  // and buffer
    double dense, least, mean, peak;
  };
  const Published published[] = {
      {"Qwen3.8-Flash-Next", 128, 36 * 48, 16, 113.2, 29.2, 43.4, 57.5},
      {"Nemotron-3.5-Lightning", 64, 23 * 64, 16, 48.2, 18.8, 27.9, 36.9},
      {"Kimi-Linear", 128, 20 * 32, 32, 41.9, 21.3, 31.8, 42.3},
      {"GLM-5.3-Flash", 128, 34 * 64, 32, 142.6, 72.4, 108.1, 143.7},
      {"Nemotron-3.5-Super", 64, 40 * 128, 16, 167.8, 65.5, 97.0, 128.5},
  };
  for (const Published& row : published) {
    INFO(row.model);
    // The rule does not enter what the paper counts.
    using State = View<Mamba2, FixedRank, MeanValueSink>;
    const StateConfig config = config_of(128, row.d_v, 0, row.rank);
    const StateBytes bytes = State::bytes_at(config, row.rank, false);
    const auto megabytes = [&](double each) { return row.states * each / 1e6; };
    const auto after = static_cast<double>(bytes.factors + bytes.sink);
    const auto buffer = static_cast<double>(bytes.buffer_keys + bytes.buffer_corrections);
    const auto dense = static_cast<double>(State::bytes_at(config, 0, true).dense);
    CHECK(megabytes(dense) == Catch::Approx(row.dense).margin(0.051));
    CHECK(megabytes(after) == Catch::Approx(row.least).margin(0.051));
    CHECK(megabytes(after + buffer / 2) == Catch::Approx(row.mean).margin(0.051));
    CHECK(megabytes(after + buffer) == Catch::Approx(row.peak).margin(0.051));
  }
}

// Paper 2, Table 9, last row: KB a head in 16 bits, dense and right after a compression.
TEST_CASE("state bytes: 16 bits in paper 2", "[bytes]") {
  struct Published {
    const char* model;
    Index d_v, rank;
    double dense, after;
  };
  const Published published[] = {{"Qwen3.8-Flash-Next", 128, 16, 32.8, 8.4},
                                 {"Nemotron-3.5-Lightning", 64, 16, 16.4, 6.4},
                                 {"Kimi-Linear", 128, 32, 32.8, 16.6},
                                 {"GLM-5.3-Flash", 128, 32, 32.8, 16.6},
                                 {"Nemotron-3.5-Super", 64, 16, 16.4, 6.4}};
  for (const Published& row : published) {
    INFO(row.model);
    using State = SinkStateView<Policy<Mamba2, Host, Fp16, FixedRank, MeanValueSink>>;
    const StateConfig config = config_of(128, row.d_v);
    const StateBytes bytes = State::bytes_at(config, row.rank, false);
    const auto after = static_cast<double>(bytes.factors + bytes.sink);
    const auto dense = static_cast<double>(State::bytes_at(config, 0, true).dense);
    CHECK(dense / 1e3 == Catch::Approx(row.dense).margin(0.051));
    CHECK(after / 1e3 == Catch::Approx(row.after).margin(0.051));
  }
}

TEST_CASE("state bytes: narrow bodies and buffers, and the scales of fp8", "[bytes]") {
  const StateConfig config = config_of(10, 6, 0, 3);
  using Both = SinkStateView<
      Policy<KimiDelta, Host, Precision<float, Float8E4M3, BFloat16>, LocalSvd, MeanValueSink>>;
  const StateBytes bytes = Both::bytes_at(config, 2, false);
  CHECK(bytes.factors == 2 * 16);
  CHECK(bytes.strengths == 2 * 4);
  CHECK(bytes.sink == 10);
  CHECK(bytes.scales == (2 * 2 + 1) * 4);
  CHECK(bytes.buffer_keys == 3 * 10 * 2);
  CHECK(bytes.buffer_corrections == 3 * 6 * 2);
  CHECK(bytes.log_decays == 3 * 10 * 4);
  const StateBytes dense = Both::bytes_at(config, 0, true);
  CHECK(dense.dense == 10 * 6);
  CHECK(dense.scales == (10 + 1) * 4);
  using Half = SinkStateView<Policy<Mamba2, Host, Fp16, LocalSvd>>;
  CHECK(Half::bytes_at(config, 2, false).factors == 2 * 16 * 2);
  CHECK(Half::bytes_at(config, 2, false).scales == 0);
  CHECK(Half::bytes_at(config, 2, false).buffer_keys == 3 * 10 * 4);
}

// Paper 1, as explained: a Nemotron-3-Nano-4B state at rank 8, eight buffered tokens with a weight
// each.
TEST_CASE("state bytes: the worked example of paper 1", "[bytes]") {
  const StateBytes bytes = View<Mamba2, LocalSvd>::bytes_at(config_of(128, 80), 8, false);
  CHECK(bytes.factors + bytes.strengths + bytes.buffer_keys + bytes.buffer_corrections +
            bytes.log_decays ==
        13376);
}
