/// @file
/// Pools of host states under a consolidator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "../algorithm/consolidate.hpp"
#include "../algorithm/workspace_bytes.hpp"
#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/status.hpp"
#include "../core/workspace.hpp"
#include "../model/state_pool.hpp"
#include "consolidated_layer.hpp"
#include "host_team.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// A pool of host states under a consolidator. The pool outlives it.
template <class Policy>
class ConsolidatedPool : public ConsolidatedLayer {
  static_assert(detail::freezes<Policy>, "ConsolidatedPool: only LocalSvd has frozen terms");

 public:
  explicit ConsolidatedPool(StatePoolView<Policy> pool) : pool_(pool) {
    Workspace count;
    detail::FrozenPart<Policy>::carve(count, pool_.config.state);
    part_bytes_ = count.used();
  }

  Index slots() const override { return pool_.config.slots; }
  Index heads() const override { return pool_.config.value_heads; }
  std::size_t staging_bytes() const override {
    return static_cast<std::size_t>(heads()) * part_bytes_;
  }
  std::size_t workspace_bytes() const override {
    return sinkstate::workspace_bytes<Policy>(pool_.config.state);
  }
  bool ready(Index slot) const override {
    return pool_.in_use(slot) && pool_.slot(slot).blocked == Status::ok;
  }
  std::uint64_t version(Index slot) const override { return pool_.slot(slot).bodies.now(); }
  std::int64_t tokens(Index slot) const override { return pool_.slot(slot).tokens; }

  Found download(HostTeam& team, Index slot, std::uint64_t version, Workspace staging) override {
    bool found = false;
    for (Index h = 0; h < heads(); ++h) {
      const auto part = part_of(h, staging);
      BodyVersion& bodies = pool_.slot(slot).bodies;
      if (!bodies.begin_read(version)) return Found::stale;
      detail::download(team, pool_.state(slot, h), part);
      bodies.end_read();
      found = found || part.record->before > 1;
    }
    return found ? Found::something : Found::nothing;
  }
  void decompose(HostTeam& team, Index head, Workspace staging) override {
    (void)detail::decompose_part(team, pool_.config.state_of(head), part_of(head, staging));
  }
  void upload(HostTeam& team, Workspace staging) override {
    for (Index h = 0; h < heads(); ++h) {
      (void)detail::store_part(team, pool_.config.state_of(h), part_of(h, staging));
    }
  }
  Index swap(Index slot, Workspace staging) override {
    pool_.slot(slot).bodies.change();
    for (Index h = 0; h < heads(); ++h) detail::swap_part(pool_, slot, h, part_of(h, staging));
    return detail::trim_slot(pool_, slot);
  }

 private:
  detail::FrozenPart<Policy> part_of(Index head, Workspace staging) const {
    staging.take<unsigned char>(head * static_cast<Index>(part_bytes_));
    return detail::FrozenPart<Policy>::carve(staging, pool_.config.state);
  }

  StatePoolView<Policy> pool_;
  std::size_t part_bytes_ = 0;
};

/// The same, for the constructor of `Consolidator`.
template <class Policy>
std::unique_ptr<ConsolidatedLayer> consolidated(StatePoolView<Policy> pool) {
  return std::make_unique<ConsolidatedPool<Policy>>(pool);
}

SINKSTATE_NAMESPACE_END
