// A pool under random operations beside what it stands for: single states in a plain map.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/same_state.hpp"
#include "support/streams.hpp"

namespace sinkstate::testing {

// One request as single states, and the few facts that its heads share.
template <class P>
struct ModelRequest {
  std::vector<SinkState<P>> heads;
  Index tokens = 0;
  Index buffered = 0;
  Index draft = -1;
  Status blocked = Status::ok;
};

// The rule of component rows, stated once more: a state has as many as its terms, or `dense`; what is
// above the quota comes out of the reserve.
template <class P>
struct RowRule {
  PoolConfig config;

  Index rows(const SinkStateView<P>& state) const {
    return state.dense() ? StatePoolView<P>::dense_rows(config.state) : state.rank();
  }
  Index beyond(Index rows) const {
    return std::max(Index{0}, rows - StatePoolView<P>::quota(config));
  }
  // A state that can have no more than `held` rows.
  SinkStateView<P> limited(SinkStateView<P> view, Index held) const {
    view.factors.capacity = std::min(view.factors.capacity, held);
    if (held < StatePoolView<P>::dense_rows(config.state))
      view.matrix = view.matrix.middle_rows(0, 0);
    return view;
  }
};

template <class P>
class PoolModel {
 public:
  using Request = ModelRequest<P>;

  PoolModel(const PoolConfig& config, const MatrixView<const float>& directions)
      : rule_{config},
        directions_(directions),
        team_(workspace_bytes<P>(config.state)),
        starved_team_(64),
        requests_(static_cast<std::size_t>(config.slots)) {}

  const PoolConfig& config() const { return rule_.config; }
  const RowRule<P>& rule() const { return rule_; }
  HostTeam& team() { return starved_ ? starved_team_ : team_; }
  // From here on with a team that has no scratch to speak of, or with the usual one again.
  void starve(bool starved) { starved_ = starved; }
  // Of the verbs since the last call: states that overflowed with the rows of their terms, and were
  // tried again with more.
  Index take_second_tries() { return std::exchange(second_tries_, 0); }
  const MatrixView<const float>& directions() const { return directions_; }
  bool in_use(Index slot) const { return config().is_slot(slot) && at(slot).has_value(); }
  std::optional<Request>& at(Index slot) { return requests_[static_cast<std::size_t>(slot)]; }
  const std::optional<Request>& at(Index slot) const {
    return requests_[static_cast<std::size_t>(slot)];
  }

  Request empty_request() {
    Request request;
    for (Index h = 0; h < config().value_heads; ++h) {
      request.heads.emplace_back(config().state_of(h),
                                 P::Sink::present ? directions_.row(h) : nullptr);
    }
    return request;
  }
  Index beyond(Request& request) const {
    Index sum = 0;
    for (auto& head : request.heads) sum += rule_.beyond(rule_.rows(head.view()));
    return sum;
  }
  // What is left of the reserve.
  Index reserve() {
    Index left = config().reserve;
    for (auto& request : requests_) {
      if (request) left -= beyond(*request);
    }
    return left;
  }
  // Whether `request` could take the place of what `slot` holds.
  bool has_room(Request& request, Index slot) {
    return beyond(request) <= reserve() + (in_use(slot) ? beyond(*at(slot)) : 0);
  }

  Status admit(Index slot) {
    if (!config().is_slot(slot)) return Status::invalid_slot;
    if (in_use(slot)) return Status::slot_in_use;
    at(slot) = empty_request();
    return Status::ok;
  }
  Status reset(Index slot) {
    if (!in_use(slot)) return Status::invalid_slot;
    at(slot) = empty_request();
    return Status::ok;
  }
  Status release(Index slot) {
    if (!in_use(slot)) return Status::invalid_slot;
    at(slot).reset();
    return Status::ok;
  }
  Status fork(Index from, Index to) {
    if (!in_use(from) || !config().is_slot(to)) return Status::invalid_slot;
    if (in_use(to)) return Status::slot_in_use;
    if (!has_room(*at(from), to)) return Status::pool_exhausted;
    at(to) = at(from);
    at(to)->draft = -1;
    return Status::ok;
  }
  Status roll_back(Index slot, Index tokens) {
    if (!in_use(slot)) return Status::invalid_slot;
    Request& request = *at(slot);
    if (tokens < 0 || tokens > request.buffered || request.blocked != Status::ok) {
      return Status::nothing_to_roll_back;
    }
    for (auto& head : request.heads) {
      if (sinkstate::roll_back(head.view(), tokens) != Status::ok) {
        return Status::nothing_to_roll_back;
      }
    }
    request.buffered -= tokens;
    request.tokens -= tokens;
    request.draft = std::min(request.draft, request.buffered);
    return Status::ok;
  }
  Status open_draft(Index slot) {
    if (!in_use(slot)) return Status::invalid_slot;
    if (at(slot)->draft >= 0) return Status::draft_open;
    at(slot)->draft = at(slot)->buffered;
    return Status::ok;
  }
  Status close_draft(Index slot, Index rejected) {
    if (!in_use(slot)) return Status::invalid_slot;
    if (at(slot)->draft < 0) return Status::draft_open;
    if (rejected > at(slot)->buffered - at(slot)->draft) return Status::nothing_to_roll_back;
    const Status status = roll_back(slot, rejected);
    if (status == Status::ok) at(slot)->draft = -1;
    return status;
  }

  // `rewrite(view, head)` on states of one slot after the other, each with the rows that it may have:
  // states are served in order, and as long as everyone can be promised all that it may need nobody
  // waits for what others give back.
  template <class Need, class Rewrite>
  std::vector<Status> rewrite(const std::vector<std::pair<Index, Index>>& states, const Need& need,
                              const Rewrite& body,
                              std::vector<CompactionReport>* reports = nullptr) {
    std::vector<Status> statuses(states.size(), Status::ok);
    if (reports != nullptr) reports->resize(states.size());
    Index left = reserve();
    const Index quota = StatePoolView<P>::quota(config());
    const Index most = StatePoolView<P>::most_rows(config().state);
    std::size_t next = 0;
    while (next < states.size()) {
      const std::size_t begin = next;
      std::vector<Index> held;
      std::vector<bool> promised;
      for (; next < states.size(); ++next) {
        const auto view = state(states[next]);
        const Index has = rule_.rows(view);
        const Index may = std::max(has, quota) + left;
        const Index wanted = need(view);
        if (wanted > may && next > begin) break;
        held.push_back(std::max(has, std::min(wanted, may)));
        promised.push_back(wanted <= held.back());
        left -= rule_.beyond(held.back()) - rule_.beyond(has);
      }
      const auto run = [&](std::size_t i) {
        const Index own = held[i - begin];
        const Index capacity = SinkStateView<P>::rank_capacity(config().state);
        const bool may_be_dense = SinkStateView<P>::may_be_dense(config().state);
        const bool no_dense = may_be_dense && own < StatePoolView<P>::dense_rows(config().state);
        const auto rewrite_one = [&](SinkStateView<P> view) {
          CompactionReport done;
          statuses[i] = body(view, states[i].second, &done);
          if (reports != nullptr) (*reports)[i] = done;
          return statuses[i] == Status::ok && done.capped;
        };
        SinkState<P>& state =
            at(states[i].first)->heads[static_cast<std::size_t>(states[i].second)];
        if (promised[i - begin]) {
          // What it may need is what a state alone needs, which knows of no rows.
          const SinkState<P> before = state;
          const bool was_dense = state.view().dense();
          (void)rewrite_one(state.view());
          const bool overflowed =
              statuses[i] == Status::overflow || (no_dense && !was_dense && state.view().dense());
          if (!overflowed || own >= most) return;
          state = before;
        }
        if (rewrite_one(rule_.limited(state.view(), own)) && (own < capacity || no_dense)) {
          statuses[i] = Status::truncated;
        }
      };
      for (std::size_t i = begin; i < next; ++i) run(i);
      for (std::size_t i = begin; i < next; ++i) {
        Index& own = held[i - begin];
        const Index may = std::max(own, quota) + left;
        if (statuses[i] == Status::overflow && own < most && own < may) {
          left += rule_.beyond(own);
          own = std::min(most, may);
          left -= rule_.beyond(own);
          promised[i - begin] = own == most;
          second_tries_ += 1;
          run(i);
        }
        left += rule_.beyond(own) - rule_.beyond(rule_.rows(state(states[i])));
      }
    }
    return statuses;
  }

  static Status worst(const std::vector<Status>& statuses, std::size_t from, std::size_t count) {
    Status result = Status::ok;
    for (std::size_t i = from; i < from + count; ++i) {
      const Status status = statuses[i];
      if (status == Status::ok) continue;
      if (result == Status::ok || result == Status::truncated ||
          (status != Status::truncated && status > result)) {
        result = status;
      }
    }
    return result;
  }

  // What becomes of a request whose heads ended so.
  static Status settle(Request& request, const std::vector<Status>& statuses, std::size_t from) {
    const std::size_t count = request.heads.size();
    const Status status = worst(statuses, from, count);
    std::size_t failures = 0;
    for (std::size_t i = from; i < from + count; ++i) {
      failures += statuses[i] != Status::ok && statuses[i] != Status::truncated ? 1 : 0;
    }
    if (failures == 0) {
      request.blocked = Status::ok;
      request.buffered = 0;
    } else if (failures < count) {
      request.blocked = status;
    }
    return status;
  }

  // @param reports  become entries x value_heads; those of entries that are left out stay as they are
  std::vector<Status> compact(const std::vector<std::int32_t>& slots, bool only_due,
                              std::vector<CompactionReport>& reports) {
    std::vector<Status> outcome;
    std::vector<std::pair<Index, Index>> states;
    std::vector<std::size_t> first(slots.size(), SIZE_MAX);
    std::set<Index> named;
    for (std::size_t b = 0; b < slots.size(); ++b) {
      const Index slot = slots[b];
      outcome.push_back(Status::ok);
      if (config().is_padding(slot)) continue;
      if (!in_use(slot) || named.count(slot) != 0) {
        outcome.back() = Status::invalid_slot;
        continue;
      }
      const Request& request = *at(slot);
      const bool due = request.buffered >= config().state.buffer && request.draft < 0;
      if (only_due && !due) continue;
      if (request.blocked != Status::ok) {
        outcome.back() = request.blocked;
        continue;
      }
      if (request.draft >= 0) {
        outcome.back() = Status::draft_open;
        continue;
      }
      named.insert(slot);
      first[b] = states.size();
      for (Index h = 0; h < config().value_heads; ++h) states.emplace_back(slot, h);
    }
    std::vector<CompactionReport> done_reports;
    const auto statuses = rewrite(
        states,
        [&](const SinkStateView<P>& view) {
          const Index terms = view.rank() + view.buffered();
          const bool fits =
              !view.dense() && terms <= SinkStateView<P>::rank_capacity(config().state);
          return fits ? terms : StatePoolView<P>::most_rows(config().state);
        },
        [&](const SinkStateView<P>& view, Index, CompactionReport* done) {
          return sinkstate::compact(team(), view, done);
        },
        &done_reports);
    for (std::size_t b = 0; b < slots.size(); ++b) {
      if (first[b] == SIZE_MAX) continue;
      const auto heads = static_cast<std::size_t>(config().value_heads);
      outcome[b] = settle(*at(slots[b]), statuses, first[b]);
      for (std::size_t h = 0; h < heads; ++h) {
        const Status status = statuses[first[b] + h];
        if (status == Status::ok || status == Status::truncated) {
          reports[b * heads + h] = done_reports[first[b] + h];
        }
      }
    }
    return outcome;
  }

  Status initialize(Index slot, const DenseStates<const float>& dense, Index tokens,
                    const std::vector<float>& certificates) {
    if (!in_use(slot)) return Status::invalid_slot;
    Request& request = *at(slot);
    if (request.draft >= 0) return Status::draft_open;
    for (Index h = 0; h < config().value_heads; ++h) {
      const auto matrix = dense.head(h, config().state);
      for (Index i = 0; i < matrix.rows; ++i) {
        for (Index j = 0; j < matrix.cols; ++j) {
          if (!std::isfinite(matrix(i, j))) return Status::non_finite_input;
        }
      }
    }
    std::vector<std::pair<Index, Index>> states;
    for (Index h = 0; h < config().value_heads; ++h) states.emplace_back(slot, h);
    const auto statuses = rewrite(
        states,
        [&](const SinkStateView<P>&) { return StatePoolView<P>::most_rows(config().state); },
        [&](const SinkStateView<P>& view, Index h, CompactionReport* done) {
          return sinkstate::initialize(team(), view, dense.head(h, config().state), RandomizedSvd{},
                                       certificates[static_cast<std::size_t>(h)], done);
        });
    const Status status = settle(request, statuses, 0);
    if (status == Status::ok || status == Status::truncated) request.tokens = tokens;
    return status;
  }

  // One entry's tokens, unless one of them cannot be.
  Status step(Request& request, const TokenBatch<float>& batch, Index b, float* outputs,
              Index output_stride) {
    for (Index h = 0; h < config().value_heads; ++h) {
      for (Index n = 0; n < batch.count(b); ++n) {
        const auto [token, query] = token_of(batch, batch.start(b) + n, h);
        const auto view = request.heads[static_cast<std::size_t>(h)].view();
        const Index decays = P::Rule::log_decays(view.config.d_k);
        bool finite = std::isfinite(token.write_strength);
        const bool reads = batch.outputs.data != nullptr;
        for (Index i = 0; i < decays; ++i) {
          finite = finite && !std::isnan(token.log_decay[i]);
        }
        bool positive = false;
        for (Index i = 0; i < decays; ++i) positive = positive || token.log_decay[i] > 0;
        const bool ordered = std::none_of(token.log_decay, token.log_decay + decays,
                                          [](float x) { return std::isnan(x); });
        if (positive && ordered) return Status::positive_log_decay;
        const auto all = [](const float* x, Index count) {
          return std::all_of(x, x + count, [](float y) { return std::isfinite(y); });
        };
        if (!finite || !all(token.key, view.config.d_k) || !all(token.value, view.config.d_v) ||
            (reads && !all(query, view.config.d_k))) {
          return Status::non_finite_input;
        }
      }
    }
    for (Index h = 0; h < config().value_heads; ++h) {
      for (Index n = 0; n < batch.count(b); ++n) {
        const auto [token, query] = token_of(batch, batch.start(b) + n, h);
        const auto view = request.heads[static_cast<std::size_t>(h)].view();
        float* const output = outputs + n * output_stride + h * view.config.d_v;
        const Status status = batch.outputs.data == nullptr
                                  ? sinkstate::advance(team(), view, token)
                                  : sinkstate::step(team(), view, token, query, output);
        if (status == Status::ok) continue;
        for (Index done = 0; done <= h; ++done) {
          const auto head = request.heads[static_cast<std::size_t>(done)].view();
          if (sinkstate::roll_back(head, head.buffered() - request.buffered) != Status::ok) {
            return Status::nothing_to_roll_back;
          }
        }
        return status;
      }
    }
    request.buffered += batch.count(b);
    request.tokens += batch.count(b);
    return Status::ok;
  }

 private:
  SinkStateView<P> state(const std::pair<Index, Index>& place) {
    return at(place.first)->heads[static_cast<std::size_t>(place.second)].view();
  }
  std::pair<Token<float>, const float*> token_of(const TokenBatch<float>& batch, Index t,
                                                 Index h) const {
    // B24, B25: said once more in other words.
    const Index group = config().value_heads / config().key_heads;
    Index k = 0;
    while (config().head_map == HeadMap::interleaved && (k + 1) * group <= h) ++k;
    if (config().head_map == HeadMap::tiled) k = h - h / config().key_heads * config().key_heads;
    const float one = 1.0f;
    const float* const strength =
        batch.write_strengths.data == nullptr ? &one : batch.write_strengths.at(t, h);
    return {{batch.keys.at(t, k), batch.values.at(t, h), batch.log_decays.at(t, h), *strength},
            batch.queries.at(t, k)};
  }

  RowRule<P> rule_;
  MatrixView<const float> directions_;
  HostTeam team_;
  HostTeam starved_team_;
  bool starved_ = false;
  Index second_tries_ = 0;
  std::vector<std::optional<Request>> requests_;
};

}  // namespace sinkstate::testing
