#include "states.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "model.hpp"
#include "replay/any_pool.hpp"
#include "replay/dense_step.hpp"
#include "replay/thread_time.hpp"

namespace sinkstate::hybrid_lm {
namespace {

using tools::thread_seconds;

std::size_t index(int i) { return static_cast<std::size_t>(i); }

/// States that are dense matrices.
template <class Rule>
class DenseLayer : public LayerStates {
 public:
  DenseLayer(Mixer mixer, const HeadShape& shape, int slots)
      : LayerStates(mixer, shape, slots),
        texts_(index(slots)),
        drafting_(index(slots)),
        before_(index(slots)) {}

  void admit(int slot) override {
    texts_[index(slot)].assign(index(shape().heads),
                               tools::DenseStep<Rule>(shape().d_k, shape().d_v));
  }
  void fork(int from, int to) override { texts_[index(to)] = texts_[index(from)]; }
  void release(int slot) override {
    LayerStates::release(slot);
    texts_[index(slot)].clear();
  }
  void initialize(HostTeams&, int slot, const std::vector<float>& dense, std::int64_t) override {
    auto first = dense.begin();
    for (tools::DenseStep<Rule>& head : texts_[index(slot)]) {
      const auto last = first + shape().d_k * shape().d_v;
      head.state().assign(first, last);
      first = last;
    }
  }
  std::vector<float> dense(HostTeams&, int slot) override {
    std::vector<float> numbers;
    for (tools::DenseStep<Rule>& head : texts_[index(slot)]) {
      numbers.insert(numbers.end(), head.state().begin(), head.state().end());
    }
    return numbers;
  }
  void step(HostTeams& teams, const std::vector<std::int32_t>& slots) override {
    teams.for_each(static_cast<Index>(slots.size()), [&](HostTeam&, Index i) {
      const int slot = slots[static_cast<std::size_t>(i)];
      if (drafting_[index(slot)] != 0) before_[index(slot)].push_back(texts_[index(slot)]);
      const double begin = thread_seconds();
      for (int h = 0; h < shape().heads; ++h) {
        const HeadToken now = token(slot, h);
        texts_[index(slot)][index(h)](now.key, now.value, now.log_decay, now.write_strength,
                                      now.query, now.output);
      }
      CostSums& costs = costs_of(slot);
      costs.add_seconds(thread_seconds() - begin, 0);
      costs.begin_token();
      for (int h = 0; h < shape().heads; ++h) {
        costs.add_head(h, 4.0 * shape().d_k * shape().d_v, std::min(shape().d_k, shape().d_v),
                       true);
      }
    });
  }

  // A dense state forgets what it overwrites: each token of a draft keeps the state before it.
  void open_draft(int slot) override { drafting_[index(slot)] = 1; }
  void close_draft(int slot, int rejected) override {
    Texts& before = before_[index(slot)];
    if (rejected > 0) texts_[index(slot)] = std::move(before[before.size() - index(rejected)]);
    before.clear();
    drafting_[index(slot)] = 0;
  }
  AlignedBytes snapshot(int slot) override {
    AlignedBytes bytes(static_cast<std::size_t>(slot_bytes(slot)));
    Workspace memory = bytes.workspace();
    for (tools::DenseStep<Rule>& head : texts_[index(slot)]) {
      const std::vector<float>& state = head.state();
      std::copy(state.begin(), state.end(), memory.pack<float>(static_cast<Index>(state.size())));
    }
    return bytes;
  }
  void restore(int slot, const AlignedBytes& bytes, std::int64_t) override {
    admit(slot);
    const auto* next = static_cast<const float*>(bytes.data());
    for (tools::DenseStep<Rule>& head : texts_[index(slot)]) {
      std::copy_n(next, head.state().size(), head.state().begin());
      next += head.state().size();
    }
  }
  double slot_bytes(int) override { return 4.0 * shape().heads * shape().d_k * shape().d_v; }
  double mean_rank(int) override { return std::min(shape().d_k, shape().d_v); }

 private:
  using Texts = std::vector<std::vector<tools::DenseStep<Rule>>>;

  Texts texts_;  // of each slot, its heads
  std::vector<char> drafting_;
  std::vector<Texts> before_;  // of each slot, each token of its draft
};

void require_ok(Status status) {
  if (status != Status::ok) {
    throw tools::ToolError(std::string("a recurrent state: ") + to_string(status));
  }
}

tools::Rule rule_of(Mixer mixer) {
  if (mixer == Mixer::gated_delta) return tools::Rule::gated_delta;
  if (mixer == Mixer::kimi_delta) return tools::Rule::kimi_delta;
  return tools::Rule::mamba2;
}

/// States under a policy, in a pool.
class PooledLayer : public LayerStates {
 public:
  /// @param directions  v_mean, heads x d_v, which outlives it; used with options.sink
  PooledLayer(Mixer mixer, const HeadShape& shape, int slots, const tools::ReplayOptions& options,
              const Matrix& directions, int draft)
      : LayerStates(mixer, shape, slots), seed_(options.seed), ones_(index(slots), 1) {
    PoolConfig config;
    config.state.d_k = shape.d_k;
    config.state.d_v = shape.d_v;
    config.state.draft = draft;
    config.slots = slots;
    config.key_heads = shape.key_heads;
    config.value_heads = shape.heads;
    config.head_map = HeadMap::interleaved;  // as HeadShape::key_head
    config.seed_stride = 0;                  // replay's heads have one seed too
    pool_ = tools::make_pool(
        rule_of(mixer), options, config,
        {directions.data(), directions.rows(), directions.cols(), directions.cols()});
  }

  void admit(int slot) override { require_ok(pool_->admit(slot)); }
  void fork(int from, int to) override { require_ok(pool_->fork(from, to)); }
  void release(int slot) override {
    LayerStates::release(slot);
    (void)pool_->release(slot);  // nothing can be done about it
  }
  void initialize(HostTeams& teams, int slot, const std::vector<float>& dense,
                  std::int64_t tokens) override {
    RandomizedSvd method;
    method.seed = seed_;
    require_ok(pool_->initialize(teams, slot, matrices(dense.data()), tokens, method));
  }
  std::vector<float> dense(HostTeams& teams, int slot) override {
    std::vector<float> numbers(index(shape().heads * shape().d_k * shape().d_v));
    require_ok(pool_->materialize(teams, slot, matrices(numbers.data())));
    return numbers;
  }
  void step(HostTeams& teams, const std::vector<std::int32_t>& slots) override {
    const double begin = thread_seconds();
    require_ok(pool_->step(teams, batch(slots)));
    const double stepped = thread_seconds();
    const double share = 1.0 / static_cast<double>(slots.size());
    for (const int slot : slots) {
      costs_of(slot).add_seconds(share * (stepped - begin), 0);
      count(slot);
    }
  }
  void compact(HostTeams& teams, const std::vector<std::int32_t>& slots, bool all,
               CompactionWork& work) override {
    work.slots.clear();
    if (slots.empty()) return;
    const auto entries = static_cast<Index>(slots.size());
    CompactionReport untouched;
    untouched.rank_before = -1;
    reports_.assign(slots.size() * index(shape().heads), untouched);
    const double begin = thread_seconds();
    require_ok(
        all ? pool_->compact(teams, slots.data(), entries, reports_.data(), work.recompressions)
            : pool_->compact_due(teams, slots.data(), entries, reports_.data(),
                                 work.recompressions));
    const double share = (thread_seconds() - begin) / static_cast<double>(slots.size());
    for (const int slot : slots) costs_of(slot).add_seconds(0, share);
    for (std::size_t i = 0; i < reports_.size(); ++i) {
      if (reports_[i].rank_before < 0) continue;
      work.compacted += 1;
      work.recompressed += reports_[i].recompressed ? 1 : 0;
      if (i % index(shape().heads) == 0) work.slots.push_back(slots[i / index(shape().heads)]);
    }
  }

  void open_draft(int slot) override { require_ok(pool_->open_draft(slot)); }
  void close_draft(int slot, int rejected) override {
    require_ok(pool_->close_draft(slot, rejected));
  }
  AlignedBytes snapshot(int slot) override {
    AlignedBytes bytes(pool_->snapshot_bytes(slot));
    Workspace memory = bytes.workspace();
    require_ok(pool_->snapshot(slot, memory.take<unsigned char>(static_cast<Index>(bytes.size())),
                               bytes.size()));
    return bytes;
  }
  void restore(int slot, const AlignedBytes& bytes, std::int64_t tokens) override {
    require_ok(pool_->restore(slot, {bytes.data(), bytes.size()}, tokens));
  }
  std::unique_ptr<ConsolidatedLayer> consolidated() override { return pool_->consolidated(); }
  double slot_bytes(int slot) override { return static_cast<double>(pool_->slot_bytes(slot)); }
  double mean_rank(int slot) override {
    double sum = 0;
    for (int h = 0; h < shape().heads; ++h) sum += static_cast<double>(pool_->rank(slot, h));
    return sum / shape().heads;
  }
  std::size_t workspace_bytes() const override { return pool_->workspace_bytes(); }

 private:
  template <class T>
  DenseStates<T> matrices(T* numbers) const {
    return DenseStates<T>::keys_by_values(numbers, shape().d_k, shape().d_v);
  }

  /// One token of each text, in the row of its slot.
  TokenBatch<float> batch(const std::vector<std::int32_t>& slots) {
    LayerTokens& all = tokens();
    const auto rows = [](auto& matrix, Index width) {
      return HeadVectors<const float>{matrix.data(), matrix.cols(), width};
    };
    TokenBatch<float> batch;
    batch.entries = static_cast<Index>(slots.size());
    batch.slots = slots.data();
    batch.starts = slots.data();
    batch.counts = ones_.data();
    batch.keys = rows(all.keys, shape().d_k);
    batch.queries = rows(all.queries, shape().d_k);
    batch.values = rows(all.values, shape().d_v);
    batch.log_decays = rows(all.log_decays, all.log_decays.cols() / shape().heads);
    batch.write_strengths = rows(all.write_strengths, 1);
    batch.outputs = {all.outputs.data(), all.outputs.cols(), shape().d_v};
    return batch;
  }

  void count(int slot) {
    CostSums& costs = costs_of(slot);
    costs.begin_token();
    for (int h = 0; h < shape().heads; ++h) {
      costs.add_head(h, static_cast<double>(pool_->bytes(slot, h).total()),
                     static_cast<double>(pool_->rank(slot, h)), pool_->dense(slot, h));
    }
  }

  std::uint64_t seed_;
  std::vector<std::int32_t> ones_;
  std::vector<CompactionReport> reports_;
  std::unique_ptr<tools::AnyPool> pool_;
};

std::unique_ptr<LayerStates> make_dense_layer(Mixer mixer, const HeadShape& shape, int slots) {
  if (mixer == Mixer::gated_delta) {
    return std::make_unique<DenseLayer<GatedDelta>>(mixer, shape, slots);
  }
  if (mixer == Mixer::kimi_delta) {
    return std::make_unique<DenseLayer<KimiDelta>>(mixer, shape, slots);
  }
  return std::make_unique<DenseLayer<Mamba2>>(mixer, shape, slots);
}

std::size_t largest_workspace(const std::vector<std::unique_ptr<LayerStates>>& layers) {
  std::size_t bytes = 0;
  for (const auto& layer : layers) {
    if (layer) bytes = std::max(bytes, layer->workspace_bytes());
  }
  return bytes;
}

}  // namespace

void CostSums::begin_token() {
  ++tokens_;
  bytes_ = 0;
}

void CostSums::add_head(int head, double bytes, double rank, bool dense) {
  bytes_ += bytes;
  sums_.bytes_mean += bytes;
  rank_[index(head)] += rank;
  dense_[index(head)] += dense ? 1 : 0;
}

void CostSums::add_seconds(double step, double compaction) {
  sums_.step_seconds += step;
  sums_.compaction_seconds += compaction;
}

StateCosts CostSums::means() const {
  StateCosts costs = sums_;
  const double tokens = std::max(1.0, tokens_);
  costs.bytes_mean /= tokens;
  for (const double rank : rank_) costs.rank_mean.push_back(rank / tokens);
  for (const double dense : dense_) costs.dense_fallback.push_back(dense / tokens);
  return costs;
}

LayerStates::LayerStates(Mixer mixer, const HeadShape& shape, int slots)
    : shape_(shape), costs_(index(slots), CostSums(shape.heads)) {
  tokens_.keys = tokens_.queries = Matrix::Zero(slots, shape.key_heads * shape.d_k);
  tokens_.values = tokens_.outputs = Matrix::Zero(slots, shape.heads * shape.d_v);
  const int decays = mixer == Mixer::kimi_delta ? shape.d_k : 1;
  tokens_.log_decays = Matrix::Zero(slots, shape.heads * decays);
  tokens_.write_strengths = Matrix::Zero(slots, shape.heads);
}

// Only what serves requests needs these.
void LayerStates::open_draft(int) { throw tools::ToolError("these states take no drafts"); }
void LayerStates::close_draft(int, int) { throw tools::ToolError("these states take no drafts"); }
AlignedBytes LayerStates::snapshot(int) {
  throw tools::ToolError("these states cannot be written as bytes");
}
void LayerStates::restore(int, const AlignedBytes&, std::int64_t) {
  throw tools::ToolError("these states cannot be read from bytes");
}
double LayerStates::slot_bytes(int) { throw tools::ToolError("these states count no bytes"); }
double LayerStates::mean_rank(int) { throw tools::ToolError("these states count no ranks"); }

void LayerStates::release(int slot) { costs_of(slot) = CostSums(shape_.heads); }

HeadToken LayerStates::token(int slot, int head) {
  const int key = shape_.key_head(head) * shape_.d_k;
  const int value = head * shape_.d_v;
  const Eigen::Index decays = tokens_.log_decays.cols() / shape_.heads;
  return {&tokens_.keys(slot, key),
          &tokens_.values(slot, value),
          &tokens_.log_decays(slot, head * decays),
          tokens_.write_strengths(slot, head),
          &tokens_.queries(slot, key),
          &tokens_.outputs(slot, value)};
}

ModelStates::ModelStates(std::vector<std::unique_ptr<LayerStates>> layers, int slots, int threads)
    : layers_(std::move(layers)),
      taken_(index(slots)),
      teams_(threads, largest_workspace(layers_)) {}

int ModelStates::free_slot() const {
  const auto free = std::find(taken_.begin(), taken_.end(), false);
  if (free == taken_.end()) {
    throw tools::ToolError("wanted at most " + std::to_string(taken_.size()) + " texts at once");
  }
  return static_cast<int>(free - taken_.begin());
}

int ModelStates::admit() {
  const int slot = free_slot();
  for (const auto& layer : layers_) {
    if (layer) layer->admit(slot);
  }
  taken_[index(slot)] = true;
  return slot;
}

int ModelStates::admit(const std::vector<AlignedBytes>& snapshots, std::int64_t tokens) {
  const int slot = free_slot();
  for (std::size_t n = 0; n < layers_.size(); ++n) {
    if (layers_[n]) layers_[n]->restore(slot, snapshots[n], tokens);
  }
  taken_[index(slot)] = true;
  return slot;
}

std::vector<AlignedBytes> ModelStates::snapshot(int slot) {
  std::vector<AlignedBytes> snapshots;
  for (const auto& layer : layers_) {
    snapshots.push_back(layer ? layer->snapshot(slot) : AlignedBytes());
  }
  return snapshots;
}

void ModelStates::open_draft(int slot) {
  for (const auto& layer : layers_) {
    if (layer) layer->open_draft(slot);
  }
}

void ModelStates::close_draft(int slot, int rejected) {
  for (const auto& layer : layers_) {
    if (layer) layer->close_draft(slot, rejected);
  }
}

int ModelStates::admit(ModelStates& from, int slot, std::int64_t tokens) {
  if (&from == this) {
    const int copy = free_slot();
    for (const auto& layer : layers_) {
      if (layer) layer->fork(slot, copy);
    }
    taken_[index(copy)] = true;
    return copy;
  }
  const int own = admit();
  for (std::size_t n = 0; n < layers_.size() && tokens > 0; ++n) {
    if (layers_[n]) layers_[n]->initialize(teams_, own, from.dense(n, slot), tokens);
  }
  return own;
}

void ModelStates::release(int slot) {
  for (const auto& layer : layers_) {
    if (layer) layer->release(slot);
  }
  taken_[index(slot)] = false;
}

std::shared_ptr<ModelStates> make_states(const Model& model, int slots, int threads,
                                         const Policies* policies, int draft) {
  std::vector<std::unique_ptr<LayerStates>> layers;
  for (const LayerWeights& layer : model.layers) {
    if (layer.mixer == Mixer::attention) {
      layers.push_back(nullptr);
      continue;
    }
    const HeadShape& shape = model.config.heads(layer.mixer);
    if (policies == nullptr) {
      layers.push_back(make_dense_layer(layer.mixer, shape, slots));
    } else {
      layers.push_back(std::make_unique<PooledLayer>(
          layer.mixer, shape, slots, policies->of(layer.mixer), layer.value_mean, draft));
    }
  }
  return std::make_shared<ModelStates>(std::move(layers), slots, threads);
}

}  // namespace sinkstate::hybrid_lm
