// A pool under 200,000 random operations is to the bit a map of single states.
#include "support/catch.hpp"
#include "support/pool_run.hpp"
#include "support/sanitized.hpp"
#include "support/state_runner.hpp"
#include "support/streams.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

template <class P>
void run(int variant, Rounding rounding, PoolTally& tally) {
  const std::uint64_t seed = derived_seed(test_seed(), static_cast<std::uint64_t>(variant));
  PoolConfig config = small_pool(variant);
  config.state.rounding = rounding;
  const Index operations = Index{test_scale()} * (sanitized ? 12000 : 34000);
  const std::string failure = run_pool<P>(config, 1, operations, seed, tally);
  INFO(policy_name<P>() << ", variant " << variant << ", " << seed_note(test_seed()));
  CHECK(failure == "");
}

}  // namespace

TEST_CASE("pool: random operations against single states", "[pool]") {
  PoolTally tally;
  run<Policy<Mamba2, Host, Fp32, LocalSvd, NoSink>>(0, Rounding::nearest, tally);
  run<Policy<KimiDelta, Host, Fp32, LocalSvd, MeanValueSink>>(1, Rounding::nearest, tally);
  run<Policy<GatedDelta, Host, Precision<float, Float16, BFloat16>, LocalSvd, NoSink>>(
      2, Rounding::nearest, tally);
  run<Policy<GatedDelta, Host, Fp8, FullSvd, MeanValueSink>>(3, Rounding::stochastic, tally);
  run<Policy<KimiDelta, Host, Bf16, FixedRank, NoSink>>(4, Rounding::stochastic, tally);
  run<Policy<Mamba2, Host, Fp8, DenseBuffered, MeanValueSink>>(5, Rounding::nearest, tally);

  // What the operations have met.
  for (const auto& [name, statuses] : tally) {
    for (const auto& [status, count] : statuses) {
      UNSCOPED_INFO(name << ": " << count << " x " << to_string(status));
    }
  }
  const auto met = [&](const char* name, std::initializer_list<Status> statuses) {
    for (const Status status : statuses) {
      INFO(name << ": " << to_string(status));
      CHECK(tally[name][status] > 0);
    }
  };
  met("step",
      {Status::ok, Status::buffer_full, Status::non_finite_input, Status::positive_log_decay,
       Status::overflow, Status::invalid_argument, Status::invalid_slot, Status::pool_exhausted});
  met("advance", {Status::ok, Status::non_finite_input, Status::workspace_too_small});
  met("step into another slot", {Status::ok});
  met("compact_due", {Status::ok, Status::truncated, Status::invalid_slot, Status::overflow});
  met("compact", {Status::ok, Status::truncated, Status::draft_open, Status::overflow});
  met("turned dense", {Status::ok});
  met("second try", {Status::ok});
  met("admit", {Status::ok, Status::slot_in_use, Status::invalid_slot});
  met("release", {Status::ok, Status::invalid_slot});
  met("reset", {Status::ok});
  met("roll_back", {Status::ok, Status::nothing_to_roll_back});
  met("open_draft", {Status::ok, Status::draft_open});
  met("close_draft", {Status::ok, Status::draft_open, Status::nothing_to_roll_back});
  met("fork", {Status::ok, Status::slot_in_use, Status::pool_exhausted, Status::invalid_slot});
  met("snapshot", {Status::ok});
  met("restore",
      {Status::ok, Status::wrong_snapshot, Status::damaged_snapshot, Status::pool_exhausted});
  met("cut and join", {Status::ok, Status::pool_exhausted});
  met("cut, differ and join", {Status::ok, Status::wrong_snapshot});
  met("materialize", {Status::ok, Status::invalid_slot, Status::workspace_too_small});
  met("initialize", {Status::overflow, Status::ok, Status::truncated, Status::non_finite_input,
                     Status::draft_open});
}
