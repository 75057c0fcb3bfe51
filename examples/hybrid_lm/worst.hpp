/// @file
/// The largest of some errors, when one of them may not be a number.
#pragma once

#include <cmath>

namespace sinkstate::hybrid_lm {

/// `worst` becomes the larger one; NaN is worse than anything, where std::max may lose it.
inline void include_worst(double& worst, double error) {
  if (std::isnan(error) || error > worst) worst = error;
}

}  // namespace sinkstate::hybrid_lm
