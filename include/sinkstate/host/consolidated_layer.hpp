/// @file
/// What a consolidator works on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../config.hpp"
#include "../core/matrix_view.hpp"
#include "../core/workspace.hpp"
#include "host_team.hpp"

SINKSTATE_NAMESPACE_BEGIN

/// How the frozen parts of a layer come to the consolidator and go back: what a backend brings.
///
/// All stages of one slot run one after the other, each on any thread, and may throw. Stages of
/// different slots run at the same time, and beside stepping.
class ConsolidatedLayer {
 public:
  /// What a download found.
  enum class Found { something, nothing, stale };

  virtual ~ConsolidatedLayer() = default;

  virtual Index slots() const = 0;
  virtual Index heads() const = 0;
  /// Of the memory in which the frozen parts of a slot are on their way.
  virtual std::size_t staging_bytes() const = 0;
  /// Scratch of each team.
  virtual std::size_t workspace_bytes() const = 0;

  /// Whether a slot holds a request whose states can be consolidated. On the thread that decodes;
  /// before the answer changes, so does the version.
  virtual bool ready(Index slot) const = 0;
  /// Goes up before bodies of a slot change: a result of another version is stale. On any thread.
  virtual std::uint64_t version(Index slot) const = 0;
  /// Tokens of the request. On the thread that decodes.
  virtual std::int64_t tokens(Index slot) const = 0;

  virtual Found download(HostTeam& team, Index slot, std::uint64_t version, Workspace staging) = 0;
  /// Of one head; several at a time.
  virtual void decompose(HostTeam& team, Index head, Workspace staging) = 0;
  virtual void upload(HostTeam& team, Workspace staging) = 0;
  /// On the thread that decodes, while the version is that of the download.
  /// @returns terms fewer
  virtual Index swap(Index slot, Workspace staging) = 0;
};

SINKSTATE_NAMESPACE_END
