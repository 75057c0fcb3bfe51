// Where the component rows of a pool are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <vector>

namespace sinkstate::testing {

// What is wrong with the rows, or nothing: rows of a quota lie at the place of their state, and every
// row of the reserve is either free, once, or in the list of a state, once.
template <class P>
std::string check_rows(StatePoolView<P> pool) {
  const Index quota = pool.quota(pool.config);
  const Index quotas = pool.config.slots * pool.config.value_heads * quota;
  const Index rows = pool.row_count(pool.config);
  if (rows != quotas + pool.config.reserve) return "the number of rows";
  std::vector<char> found(static_cast<std::size_t>(rows - quotas));
  const auto once = [&](Index row) {
    if (row < quotas || row >= rows) return false;
    char& here = found[static_cast<std::size_t>(row - quotas)];
    const bool first = here == 0;
    here = 1;
    return first;
  };
  for (Index i = 0; i < *pool.reserve.free; ++i) {
    if (!once(pool.reserve.rows[i])) return "a row is free twice, or not of the reserve";
  }
  Index beyond = 0;
  for (Index s = 0; s < pool.config.slots; ++s) {
    for (Index h = 0; h < pool.config.value_heads; ++h) {
      const auto head = pool.head(s, h);
      if (!pool.in_use(s) && *head.held != 0) return "a free slot holds rows";
      for (Index i = 0; i < *head.held; ++i) {
        const Index row = head.list[i];
        if (i < quota && row != (s * pool.config.value_heads + h) * quota + i) {
          return "a row of a quota is not at its place";
        }
        if (i >= quota && !once(row)) {
          return "a row of the reserve is held twice, or free, or not of the reserve";
        }
        beyond += i >= quota ? 1 : 0;
      }
    }
  }
  return *pool.reserve.free + beyond == pool.config.reserve ? "" : "rows are lost";
}

}  // namespace sinkstate::testing
