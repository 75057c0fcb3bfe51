/// @file
/// Which layers compact at which step.
#pragma once

#include <cstdint>

#include "../config.hpp"
#include "../core/error.hpp"
#include "../core/matrix_view.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// Compactions of the layers of a model, spread evenly over the steps of a period: every layer once
/// a period, at each step as many as at any other or one more (paper 1, section 4.2).
///
/// At a step a layer that is due compacts all of its requests, however many tokens they have
/// buffered (`compact`), the others those whose buffers are full (`compact_due`), after drafts. Of a
/// request whose draft is open `compact` says so and leaves it alone.
struct Stagger {
  Index layers = 1;
  Index period = 1;  ///< steps; as many as `StateConfig::buffer` has tokens

  /// @returns *this
  /// @throws Error naming the first field that cannot be used
  const Stagger& checked() const {
    detail::in_range(1, detail::largest_size, "Stagger::layers", layers);
    detail::in_range(1, detail::largest_size, "Stagger::period", period);
    return *this;
  }

  /// @param layer  0 to layers - 1; neighbours are due at different steps
  /// @param step   0 or more
  constexpr bool due(Index layer, std::int64_t step) const { return (layer + step) % period == 0; }

  /// Layers that are due at a step.
  constexpr Index due_count(std::int64_t step) const {
    const Index first = (period - step % period) % period;
    return first < layers ? 1 + (layers - 1 - first) / period : 0;
  }
};

SINKSTATE_NAMESPACE_END
