// Whether two states are equal to the bit.
#pragma once

#include <algorithm>
#include <cstring>
#include <sinkstate/sinkstate.hpp>

namespace sinkstate::testing {

template <class View>
bool same_rows(const View& a, const View& b, Index rows) {
  for (Index i = 0; i < rows; ++i) {
    if (!std::equal(a.row(i), a.row(i) + a.cols, b.row(i))) return false;
  }
  return true;
}

template <class Format>
bool same_rows(const NarrowRows<Format>& a, const NarrowRows<Format>& b, Index rows) {
  return same_rows(a.codes, b.codes, rows) &&
         (!Format::scaled || same_rows(a.scales, b.scales, rows));
}

template <class Factors>
bool same_strengths(const Factors& a, const Factors& b, Index rank) {
  for (Index i = 0; i < rank; ++i) {
    if (a.strength(i) != b.strength(i)) return false;
  }
  return true;
}

// All that lies below the cursors. What is beyond belongs to nobody: rolling back does not wipe it.
template <class P>
bool same_state(const SinkStateView<P>& a, const SinkStateView<P>& b) {
  const Index n = a.buffered();
  return std::memcmp(a.record, b.record, sizeof(StateRecord)) == 0 && n == b.buffered() &&
         a.rank() == b.rank() &&
         (a.dense() ? same_rows(a.matrix, b.matrix, a.config.d_k)
                    : same_rows(a.factors.keys(), b.factors.keys(), a.rank()) &&
                          same_rows(a.factors.values(), b.factors.values(), a.rank())) &&
         same_strengths(a.factors, b.factors, a.rank()) &&
         same_rows(a.sink, b.sink, P::Sink::present ? 1 : 0) &&
         same_rows(a.buffer.keys, b.buffer.keys, n) &&
         same_rows(a.buffer.corrections, b.buffer.corrections, n) &&
         same_rows(a.buffer.log_decays, b.buffer.log_decays, n) &&
         std::equal(a.buffer.certificates, a.buffer.certificates + n + 1, b.buffer.certificates) &&
         std::equal(a.buffer.masses, a.buffer.masses + n + 1, b.buffer.masses);
}

}  // namespace sinkstate::testing
