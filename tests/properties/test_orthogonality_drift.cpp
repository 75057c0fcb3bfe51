// The bases of a state stay orthogonal: over time, and when they are large.
#include <algorithm>
#include <cstdint>
#include <sinkstate/sinkstate.hpp>

#include "support/catch.hpp"
#include "support/matrices.hpp"
#include "support/tracked_state.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

// One Gram-Schmidt pass per update, and the bases drift.
TEMPLATE_TEST_CASE("B79: 10,000 compactions of near-parallel keys stay orthogonal", "[drift]",
                   Full32<Mamba2>, Full32<GatedDelta>, Full32<KimiDelta>, Fixed32<KimiDelta>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = config_of(12, 10, 0, 2);
  config.dense_fallback = false;
  TrackedState<TestType> s(config);
  const auto base = unit(random, 12);
  const int compactions = 10000 * test_scale();
  double worst = 0;
  for (int i = 0; i < compactions; ++i) {
    for (int t = 0; t < 2; ++t) {
      auto key = base;
      for (double& element : key) element += 1e-4 * random.normal();
      REQUIRE(s.try_advance(key, unit(random, 10), {-0.05}, 0.5) == Status::ok);
    }
    REQUIRE(compact(s.team, s.view) == Status::ok);
    const Matrix keys = wide(s.view.factors.keys()), values = wide(s.view.factors.values());
    const Matrix identity = Matrix::Identity(s.view.rank(), s.view.rank());
    // The Frobenius norm is the larger one, and cheaper 10,000 times.
    const double key_error = (keys * keys.transpose() - identity).norm();
    const double value_error = (values * values.transpose() - identity).norm();
    // Not std::max: a NaN must stay.
    for (const double error : {key_error, value_error}) {
      if (!(error <= worst)) worst = error;
    }
    if (!(worst <= orthogonality_bound<float>)) break;
  }
  CHECK(worst <= orthogonality_bound<float>);
  CHECK(s.view.record->compactions == compactions);
}

// The cosines that a decomposition leaves add up over its terms, so many terms are the hard case.
TEMPLATE_TEST_CASE("orthogonality: 128 terms of a 128 x 128 head", "[drift]", Full32<DeltaNet>,
                   Full32<KimiDelta>, Fixed32<DeltaNet>) {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Random random(seed);
  StateConfig config = config_of(128, 128);
  config.dense_fallback = false;
  config.rank_cap = 128;
  TrackedState<TestType> s(config);
  for (int compaction = 0; compaction < 24; ++compaction) {
    for (int t = 0; t < 8; ++t) {
      REQUIRE(s.try_advance(unit(random, 128), unit(random, 128), {-0.01}, 0.5) == Status::ok);
    }
    s.compact();
    s.check_factors();
  }
  CHECK(s.view.rank() == 128);
}
