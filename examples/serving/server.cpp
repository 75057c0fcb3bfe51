#include "server.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <sinkstate/algorithm/stagger.hpp>
#include <utility>

#include "hybrid_lm/evaluate.hpp"
#include "hybrid_lm/worst.hpp"

namespace sinkstate::serving {
namespace {

using hybrid_lm::CompactionWork;
using hybrid_lm::Decoder;
using hybrid_lm::Model;
using hybrid_lm::ModelStates;
using hybrid_lm::Policies;
using hybrid_lm::Sampler;
using hybrid_lm::Vector;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// A sample of a request, from its arrival to its end.
struct Request {
  Request(std::size_t place, const Arrival& from, int which, const ServingOptions& options)
      : arrival(place),
        sample(which),
        samples(which == 0 ? from.samples : 1),
        text(from.prompt),
        prompt(from.prompt.size()),
        wanted(from.prompt.size() + from.output),
        sampler({options.sampling.temperature, options.sampling.top_p, from.seeds[which]}) {}

  std::size_t arrival;
  int sample;
  int samples;  // that are still to be made of it
  std::string text;
  std::size_t prompt, wanted;  // bytes
  std::size_t read = 0;
  Sampler sampler;
  std::unique_ptr<Decoder> decoder;  // none before it is admitted
  double bytes = 0;                  // of its states, behind the last step
  int evictions = 0;
  bool compared = false;
  std::vector<Vector> logits;  // that each byte was sampled from

  // Of the step under way:
  std::string coming;       // bytes to read
  std::size_t drafted = 0;  // the last of them
  std::size_t accepted = 0;
  bool matches = true;  // as far as it has been read

  bool prefilling() const { return read < prompt; }
  bool finished() const { return text.size() == wanted; }
  bool younger_than(const Request& other) const {
    return arrival != other.arrival ? arrival > other.arrival : sample > other.sample;
  }
};

using Owned = std::unique_ptr<Request>;

class Server {
 public:
  Server(const Model& model, const std::vector<Arrival>& arrivals, const Setting& setting,
         const ServingOptions& options)
      : model_(model),
        arrivals_(arrivals),
        setting_(setting),
        options_(options),
        states_(make_states(model, options.slots, options.threads,
                            setting.policies ? &*setting.policies : nullptr, options.draft)) {
    states_->defer_compactions();
    for (std::size_t n = 0; n < states_->layers(); ++n) {
      if (states_->layer(n) != nullptr) layers_.push_back(n);
    }
    result_.name = setting.name;
    result_.factored = setting.policies.has_value();
    result_.consolidated = setting.consolidated;
    stagger_ = {static_cast<Index>(layers_.size()),
                setting.policies ? period_of(*setting.policies) : 1};
    if (setting.consolidated) start_consolidator();
    if (options.compared > 0) {
      const std::size_t stride = std::max<std::size_t>(1, arrivals.size() / options.compared);
      for (std::size_t i = 0; i < options.compared && i * stride < arrivals.size(); ++i) {
        compared_.push_back(i * stride);
      }
    }
  }

  ServingResult run(const std::function<void(std::ptrdiff_t)>& progress) {
    const auto begin = std::chrono::steady_clock::now();
    std::int64_t shown = 0;
    for (; !ended(); ++step_) {
      for (; next_ < arrivals_.size() && arrivals_[next_].step <= step_; ++next_) {
        queue_.push_back(std::make_unique<Request>(next_, arrivals_[next_], 0, options_));
      }
      admit();
      if (running_.empty()) continue;
      step();
      progress(result_.generated - shown);
      shown = result_.generated;
    }
    result_.seconds = seconds_since(begin);
    if (consolidator_) result_.consolidations = consolidator_->statistics();
    for (const Owned& request : done_) compare(*request);
    finish_drift();
    return std::move(result_);
  }

 private:
  bool ended() const {
    if (options_.steps > 0 && step_ >= options_.steps) return true;
    return next_ == arrivals_.size() && queue_.empty() && running_.empty();
  }

  void start_consolidator() {
    std::vector<std::unique_ptr<ConsolidatedLayer>> sources;
    for (const std::size_t n : layers_) {
      sources.push_back(states_->layer(n)->consolidated());
      if (!sources.back()) {
        throw tools::ToolError("consolidation: wanted local-svd in every layer, given another");
      }
    }
    ConsolidatorOptions options;
    options.threads = options_.consolidation_threads;
    options.delay = options_.consolidation_delay;
    consolidator_ = std::make_unique<Consolidator>(std::move(sources), options);
  }

  // --- who is served ---

  /// Of a request's states: what they take, and what one is known to take in the mean.
  double projected(double bytes) const {
    const double usual =
        observed_ > 0 ? observed_bytes_ / observed_ : hybrid_lm::dense_state_bytes(model_);
    return std::max(bytes, usual);
  }
  /// Whether one more would fit, as far as can be foreseen. Somebody is always served.
  bool fits(const Request& request) const {
    if (running_.empty()) return true;
    if (static_cast<int>(running_.size()) == options_.slots) return false;
    double bytes = projected(request.bytes);
    for (const Owned& other : running_) bytes += projected(other->bytes);
    return bytes <= options_.budget;
  }
  void admit() {
    while (!queue_.empty() && fits(*queue_.front())) {
      Owned request = std::move(queue_.front());
      queue_.pop_front();
      if (request->decoder) {
        request->decoder->resume();
      } else {
        request->decoder = std::make_unique<Decoder>(model_, states_);
      }
      running_.push_back(std::move(request));
    }
  }
  /// The youngest wait as bytes until there is room again.
  void evict(double& bytes) {
    while (bytes > options_.budget && running_.size() > 1) {
      const auto youngest =
          std::max_element(running_.begin(), running_.end(),
                           [](const Owned& a, const Owned& b) { return b->younger_than(*a); });
      Owned request = std::move(*youngest);
      running_.erase(youngest);
      bytes -= request->bytes;
      request->decoder->suspend();
      ++request->evictions;
      ++result_.evictions;
      queue_.push_front(std::move(request));
    }
  }
  /// Further samples of requests that have read their prompt: beside them, or first in the queue.
  void fork() {
    for (std::size_t i = 0; i < running_.size(); ++i) {
      Request& request = *running_[i];
      if (request.prefilling() || request.samples == 1) continue;
      request.samples = 1;
      ++result_.forks;
      auto other =
          std::make_unique<Request>(request.arrival, arrivals_[request.arrival], 1, options_);
      other->read = request.read;
      other->bytes = bytes_of(*request.decoder);
      if (fits(*other)) {
        other->decoder = std::make_unique<Decoder>(*request.decoder, states_);
        sample(*other);
        if (!other->finished()) running_.push_back(std::move(other));
      } else {
        other->decoder = std::make_unique<Decoder>(*request.decoder, Decoder::Suspended::yes);
        sample(*other);
        if (!other->finished()) queue_.push_front(std::move(other));
      }
      if (other) finish(std::move(other));
    }
  }
  void finish(Owned request) {
    request->decoder.reset();
    result_.finished.push_back(
        {request->arrival, request->sample, step_, request->evictions, request->text});
    if (request->compared) done_.push_back(std::move(request));
  }

  // --- a step ---

  void step() {
    StepFigures figures;
    const auto begin = std::chrono::steady_clock::now();
    figures.step = step_;
    figures.requests = static_cast<int>(running_.size());
    CompactionWork work;
    Index recompressions = options_.recompressions.value_or(0);
    if (setting_.staggered && options_.recompressions) work.recompressions = &recompressions;
    read(work);
    compact(work);
    fork();  // behind it, so that a copy which waits is compacted when one which runs is
    for (Owned& request : running_) {
      if (request->finished()) finish(std::move(request));
    }
    running_.erase(std::remove(running_.begin(), running_.end(), nullptr), running_.end());
    figures.seconds = seconds_since(begin);
    figures.compacted = work.compacted;
    figures.recompressed = work.recompressed;
    measure(figures);
    figures.bytes_kept = figures.bytes;
    const std::int64_t evictions = result_.evictions;
    evict(figures.bytes_kept);
    figures.evicted = static_cast<int>(result_.evictions - evictions);
    result_.steps.push_back(figures);
  }

  /// Plans what each request reads, and reads it, a byte of each at a time.
  void read(CompactionWork& work) {
    std::size_t most = 0;
    for (const Owned& owned : running_) {
      Request& request = *owned;
      request.drafted = request.accepted = 0;
      request.matches = true;
      if (request.prefilling()) {
        request.coming = request.text.substr(
            request.read,
            std::min(request.prompt - request.read, static_cast<std::size_t>(options_.chunk)));
      } else {
        request.coming = request.text.substr(request.read);
        // One byte comes out of each that is read, and no more than are wanted.
        const std::size_t left = request.wanted - request.text.size();
        const auto draft = std::min(static_cast<std::size_t>(options_.draft), left - 1);
        const std::string proposed =
            draft > 0 ? options_.drafter(request.text, draft).substr(0, draft) : std::string();
        request.drafted = proposed.size();
        request.coming += proposed;
      }
      most = std::max(most, request.coming.size());
    }
    for (std::size_t i = 0; i < most; ++i) read_bytes(i, work);
    for (const Owned& request : running_) {
      if (request->drafted == 0) continue;
      request->decoder->close_draft(static_cast<int>(request->drafted - request->accepted));
      result_.drafted += static_cast<std::int64_t>(request->drafted);
      result_.accepted += static_cast<std::int64_t>(request->accepted);
    }
  }

  /// Byte i of the step, of those who have one.
  void read_bytes(std::size_t i, CompactionWork& work) {
    std::vector<Decoder*> decoders;
    std::vector<std::uint8_t> bytes;
    std::vector<std::int32_t> going_on;  // in a prompt
    for (const Owned& request : running_) {
      if (i >= request->coming.size()) continue;
      if (i == 1 && request->drafted > 0) request->decoder->open_draft();
      decoders.push_back(request->decoder.get());
      bytes.push_back(static_cast<std::uint8_t>(request->coming[i]));
      const bool last = i + 1 == request->coming.size();
      if (request->prefilling() && !last) going_on.push_back(request->decoder->slot());
    }
    Decoder::read_together(decoders, bytes);
    // A chunk may be longer than what is left of a buffer.
    for (const std::size_t n : layers_) states_->compact(n, going_on, false, work);
    for (const Owned& request : running_) {
      if (i >= request->coming.size()) continue;
      if (request->drafted == 0) {
        if (i + 1 < request->coming.size()) continue;
        request->read += request->coming.size();
        if (!request->prefilling()) sample(*request);
      } else if (request->matches) {
        // The rest of a draft that differs is read too, as an engine does that reads it at once.
        ++request->read;
        sample(*request);
        request->matches =
            i + 1 < request->coming.size() && request->text.back() == request->coming[i + 1];
        request->accepted += request->matches ? 1 : 0;
      }
    }
  }

  void sample(Request& request) {
    request.compared = request.sample == 0 && std::find(compared_.begin(), compared_.end(),
                                                        request.arrival) != compared_.end();
    const Vector& logits = request.decoder->logits();
    request.text += static_cast<char>(request.sampler(logits));
    if (request.compared) request.logits.push_back(logits);
    ++result_.generated;
  }

  void compact(CompactionWork& work) {
    if (consolidator_) consolidator_->swap();
    std::vector<std::int32_t> slots;
    for (const Owned& request : running_) {
      if (request->finished() && request->samples == 1) continue;
      slots.push_back(request->decoder->slot());
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      // Layers that are due together take turns at what the cap allows.
      const Index layer = (static_cast<Index>(i) + step_ / stagger_.period) % stagger_.layers;
      const std::size_t n = layers_[static_cast<std::size_t>(layer)];
      const bool all = setting_.staggered && stagger_.due(layer, step_);
      states_->compact(n, slots, all, work);
      if (consolidator_ && !work.slots.empty()) {
        consolidator_->request(layer, work.slots.data(), static_cast<Index>(work.slots.size()));
      }
    }
  }

  double bytes_of(const Decoder& decoder) const {
    double bytes = 0;
    for (const std::size_t n : layers_) bytes += states_->layer(n)->slot_bytes(decoder.slot());
    return bytes;
  }
  void measure(StepFigures& figures) {
    for (const Owned& request : running_) {
      request->bytes = bytes_of(*request->decoder);
      figures.bytes += request->bytes;
      observed_bytes_ += request->bytes;
      observed_ += 1;
      for (const std::size_t n : layers_) {
        figures.rank += states_->layer(n)->mean_rank(request->decoder->slot());
      }
    }
    figures.measured = static_cast<int>(running_.size());
    if (running_.empty()) return;
    figures.rank /= static_cast<double>(running_.size() * layers_.size());
  }

  // --- what the dense model says of it ---

  void compare(const Request& request) {
    Decoder dense(model_);
    for (std::size_t i = 0; i + 1 < request.text.size(); ++i) {
      const Vector& wanted = dense.read(static_cast<std::uint8_t>(request.text[i]));
      if (i + 1 < request.prompt) continue;
      const Vector& given = request.logits[i + 1 - request.prompt];
      const double kl = hybrid_lm::kl_divergence(wanted, given);
      Eigen::Index best = 0, dense_best = 0;
      wanted.maxCoeff(&dense_best);
      given.maxCoeff(&best);
      result_.drift.bytes += 1;
      result_.drift.kl_mean += kl;
      hybrid_lm::include_worst(result_.drift.kl_worst, kl);
      result_.drift.top1_agreement += best == dense_best ? 1 : 0;
    }
  }
  void finish_drift() {
    if (result_.drift.bytes == 0) return;
    result_.drift.kl_mean /= static_cast<double>(result_.drift.bytes);
    result_.drift.top1_agreement /= static_cast<double>(result_.drift.bytes);
  }

  const Model& model_;
  const std::vector<Arrival>& arrivals_;
  const Setting& setting_;
  const ServingOptions& options_;
  std::shared_ptr<ModelStates> states_;
  std::vector<std::size_t> layers_;  // recurrent ones
  Stagger stagger_;
  std::unique_ptr<Consolidator> consolidator_;  // gone before the states
  std::vector<std::size_t> compared_;           // arrivals

  std::int64_t step_ = 0;
  std::size_t next_ = 0;  // arrival
  std::deque<Owned> queue_;
  std::vector<Owned> running_;
  std::vector<Owned> done_;  // that are to be compared
  double observed_ = 0, observed_bytes_ = 0;
  ServingResult result_;
};

}  // namespace

Index period_of(const Policies& policies) {
  return std::min(
      {policies.gated_delta.buffer, policies.kimi_delta.buffer, policies.mamba2.buffer});
}

std::string look_up_draft(const std::string& text, std::size_t most) {
  constexpr std::size_t known = 3;
  if (text.size() <= known) return {};
  const std::string end = text.substr(text.size() - known);
  const std::size_t found = text.rfind(end, text.size() - known - 1);
  return found == std::string::npos ? std::string() : text.substr(found + known, most);
}

ServingResult serve(const Model& model, const std::vector<Arrival>& arrivals,
                    const Setting& setting, const ServingOptions& options,
                    const std::function<void(std::ptrdiff_t)>& progress) {
  return Server(model, arrivals, setting, options).run(progress);
}

}  // namespace sinkstate::serving
