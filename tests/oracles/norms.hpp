// Norms in double for comparisons against an oracle. A NaN on either side makes every result NaN
// or infinite, so that `error <= tolerance` fails.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <vector>

namespace sinkstate::oracle {

template <class T>
double frobenius_norm(const T* x, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  return std::sqrt(sum);
}

template <class T>
double frobenius_norm(const std::vector<T>& x) {
  return frobenius_norm(x.data(), x.size());
}

template <class T, class U>
double frobenius_distance(const T* x, const U* y, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double difference = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

template <class T, class U>
double frobenius_distance(const std::vector<T>& x, const std::vector<U>& y) {
  if (x.size() != y.size()) throw std::invalid_argument("frobenius_distance: sizes differ");
  return frobenius_distance(x.data(), y.data(), x.size());
}

// Error relative to a given norm, such as the largest norm that a state had so far: a state that
// has decayed to nothing is not expected to be right in digits that it no longer has.
template <class T, class U>
double relative_error(const std::vector<T>& approximate, const std::vector<U>& exact,
                      double reference_norm) {
  const double distance = frobenius_distance(approximate, exact);
  if (distance == 0) return 0;
  return reference_norm > 0 ? distance / reference_norm : std::numeric_limits<double>::infinity();
}

template <class T, class U>
double relative_error(const std::vector<T>& approximate, const std::vector<U>& exact) {
  return relative_error(approximate, exact, frobenius_norm(exact));
}

}  // namespace sinkstate::oracle
