/// @file
/// The recurrent states of the model, for several texts at once: dense, or in pools of sinkstate. It
/// takes from replay the options of a command line, a pool whose policy they choose (`any_pool.hpp`,
/// over the verbs of the library), and the dense step to compare with. An engine has its own of the
/// three.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <sinkstate/core/owner.hpp>
#include <sinkstate/host/consolidated_layer.hpp>
#include <sinkstate/host/host_teams.hpp>
#include <vector>

#include "weights.hpp"

namespace sinkstate::hybrid_lm {

struct Model;
struct Policies;

/// What one token of a text writes to, and asks of, one head.
struct HeadToken {
  const float* key;        // d_k
  const float* value;      // d_v
  const float* log_decay;  // 1, or d_k for Kimi Delta Attention
  float write_strength;
  const float* query;  // d_k
  float* output;       // d_v
};

/// The same of all heads of a layer and all texts, as projections leave it: a row for each slot.
struct LayerTokens {
  Matrix keys, queries;    // of key_heads x d_k
  Matrix values, outputs;  // of heads x d_v
  Matrix log_decays;       // of heads, or heads x d_k for Kimi Delta Attention
  Matrix write_strengths;  // of heads
};

/// What the states of a text in a layer have cost since they began to decode.
struct StateCosts {
  double bytes_mean = 0;    // per token, of all heads
  double step_seconds = 0;  // of the thread that reads; its share when texts are read together
  double compaction_seconds = 0;
  std::vector<double> rank_mean;       // per head; dense: min(d_k, d_v)
  std::vector<double> dense_fallback;  // per head, share of tokens
};

/// Sums of them over tokens; the means are taken when asked for.
class CostSums {
 public:
  explicit CostSums(int heads)
      : rank_(static_cast<std::size_t>(heads)), dense_(static_cast<std::size_t>(heads)) {}

  void begin_token();
  void add_head(int head, double bytes, double rank, bool dense);
  void add_seconds(double step, double compaction);
  StateCosts means() const;
  /// At the last token, of all heads.
  double bytes() const { return bytes_; }

 private:
  double tokens_ = 0;
  double bytes_ = 0;
  std::vector<double> rank_, dense_;
  StateCosts sums_;
};

/// What compactions of one step have done, over layers.
struct CompactionWork {
  std::int64_t compacted = 0;       // states
  std::int64_t recompressed = 0;    // of them, for their rank
  Index* recompressions = nullptr;  // that the step still allows; null: all
  std::vector<std::int32_t> slots;  // of the last call: those whose states were compacted
};

/// Of one layer, with a slot for each text.
class LayerStates {
 public:
  LayerStates(Mixer mixer, const HeadShape& shape, int slots);
  virtual ~LayerStates() = default;

  /// Gives a free slot to a text, with empty states.
  virtual void admit(int slot) = 0;
  /// Gives it to an equal copy of another.
  virtual void fork(int from, int to) = 0;
  virtual void release(int slot);
  /// Replaces the states of a text that has so many tokens by heads x d_k x d_v numbers.
  virtual void initialize(HostTeams& teams, int slot, const std::vector<float>& dense,
                          std::int64_t tokens) = 0;
  /// These numbers.
  virtual std::vector<float> dense(HostTeams& teams, int slot) = 0;
  /// The token of every head of these texts that is in `tokens`, where the outputs go too.
  /// @throws tools::ToolError when a state overflows
  virtual void step(HostTeams& teams, const std::vector<std::int32_t>& slots) = 0;
  /// Compacts these texts, or those whose buffers are full; not those with a draft.
  virtual void compact(HostTeams&, const std::vector<std::int32_t>&, bool /*all*/,
                       CompactionWork&) {}

  /// Tokens from here on may be taken back.
  virtual void open_draft(int slot);
  /// Ends a draft and takes its last tokens back.
  virtual void close_draft(int slot, int rejected);
  /// The states of a text as bytes, and again: for a text that has so many tokens, in a free slot.
  virtual AlignedBytes snapshot(int slot);
  virtual void restore(int slot, const AlignedBytes& bytes, std::int64_t tokens);
  /// For a consolidator, which they outlive; null where nothing is frozen.
  virtual std::unique_ptr<ConsolidatedLayer> consolidated() { return nullptr; }
  /// Bytes that a text takes now, as memory is given out.
  virtual double slot_bytes(int slot);
  /// Mean of its heads; a dense state counts as min(d_k, d_v).
  virtual double mean_rank(int slot);
  /// Scratch of each team.
  virtual std::size_t workspace_bytes() const { return 0; }

  LayerTokens& tokens() { return tokens_; }
  HeadToken token(int slot, int head);
  const CostSums& costs(int slot) const { return costs_[static_cast<std::size_t>(slot)]; }

 protected:
  CostSums& costs_of(int slot) { return costs_[static_cast<std::size_t>(slot)]; }
  const HeadShape& shape() const { return shape_; }

 private:
  HeadShape shape_;
  LayerTokens tokens_;
  std::vector<CostSums> costs_;
};

/// Of all layers, and the threads that work on them. One thread at a time uses it.
class ModelStates {
 public:
  /// @param layers   as many as the model has; null for attention
  /// @param threads  the caller's included
  ModelStates(std::vector<std::unique_ptr<LayerStates>> layers, int slots, int threads);

  /// A slot for a text.
  /// @throws tools::ToolError when none is free
  int admit();
  /// A slot for a text whose states are these bytes of each layer, and that has so many tokens.
  int admit(const std::vector<AlignedBytes>& snapshots, std::int64_t tokens);
  /// A slot for a text that has states already: an equal copy when they are among these, otherwise
  /// they are taken dense and compressed.
  int admit(ModelStates& from, int slot, std::int64_t tokens);
  void release(int slot);
  std::vector<AlignedBytes> snapshot(int slot);
  void open_draft(int slot);
  void close_draft(int slot, int rejected);

  std::size_t layers() const { return layers_.size(); }
  /// Null for attention.
  LayerStates* layer(std::size_t n) { return layers_[n].get(); }
  std::vector<float> dense(std::size_t n, int slot) { return layers_[n]->dense(teams_, slot); }
  void step(std::size_t n, const std::vector<std::int32_t>& slots) {
    if (!layers_[n]) return;
    layers_[n]->step(teams_, slots);
    if (!deferred_) compact(n, slots, false, ignored_);
  }
  /// From here on `step` leaves compactions to whoever calls `compact`.
  void defer_compactions() { deferred_ = true; }
  void compact(std::size_t n, const std::vector<std::int32_t>& slots, bool all,
               CompactionWork& work) {
    if (layers_[n]) layers_[n]->compact(teams_, slots, all, work);
  }
  /// task(0) to task(count - 1), spread over the threads. They throw nothing.
  template <class Task>
  void for_each(std::size_t count, const Task& task) {
    teams_.for_each(static_cast<Index>(count),
                    [&](HostTeam&, Index i) { task(static_cast<std::size_t>(i)); });
  }

 private:
  int free_slot() const;

  std::vector<std::unique_ptr<LayerStates>> layers_;
  std::vector<bool> taken_;
  bool deferred_ = false;
  CompactionWork ignored_;
  HostTeams teams_;
};

/// @param model     outlives them
/// @param policies  of factored states, in pools; null: they are dense matrices
/// @param draft     most tokens that a draft may have
std::shared_ptr<ModelStates> make_states(const Model& model, int slots, int threads,
                                         const Policies* policies = nullptr, int draft = 0);

}  // namespace sinkstate::hybrid_lm
