// Random operations on a pool and on its model, compared after each of them.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/catch.hpp"
#include "support/pool_model.hpp"
#include "support/pool_requests.hpp"
#include "support/pool_rows.hpp"
#include "support/same_state.hpp"
#include "support/streams.hpp"

namespace sinkstate::testing {

// How often operations of each name ended with each status.
using PoolTally = std::map<std::string, std::map<Status, Index>>;

template <class P>
class PoolRun {
 public:
  PoolRun(const PoolConfig& config, Index threads, std::uint64_t seed, PoolTally& tally)
      : config_(config),
        random_(seed),
        directions_(static_cast<std::size_t>(config.value_heads * config.state.d_v)),
        model_(config, directions()),
        pool_owner_(config, P::Sink::present ? directions() : MatrixView<const float>{}),
        pool_(pool_owner_.view()),
        teams_(threads, workspace_bytes<P>(config.state)),
        starved_teams_(threads, 64),
        tally_(tally) {
    for (float& x : directions_) x = static_cast<float>(random_.normal());
  }

  // One operation. @returns what went wrong, nothing if all agrees
  std::string operate() {
    failure_.clear();
    starved_ = random_.chance(0.003);
    model_.starve(starved_);
    const double x = random_.uniform();
    if (x < 0.40) {
      step_batch();
    } else if (x < 0.58) {
      compact_some();
    } else if (x < 0.66) {
      const Index slot = any_slot();
      simple("admit", slot, admit(pool_, slot), model_.admit(slot));
    } else if (x < 0.69) {
      const Index slot = any_slot();
      simple("release", slot, release(pool_, slot), model_.release(slot));
    } else if (x < 0.70) {
      const Index slot = any_slot();
      simple("reset", slot, reset(pool_, slot), model_.reset(slot));
    } else if (x < 0.74) {
      const Index slot = any_slot();
      const Index tokens = random_.below(5) - 1;
      simple("roll_back", slot, roll_back(pool_, slot, tokens), model_.roll_back(slot, tokens));
    } else if (x < 0.77) {
      const Index slot = any_slot();
      simple("open_draft", slot, open_draft(pool_, slot), model_.open_draft(slot));
    } else if (x < 0.81) {
      const Index slot = any_slot();
      const Index tokens = random_.below(3);
      simple("close_draft", slot, close_draft(pool_, slot, tokens),
             model_.close_draft(slot, tokens));
    } else if (x < 0.86) {
      const Index from = any_slot();
      const Index to = any_slot();
      simple("fork", to, fork(pool_, from, to), model_.fork(from, to));
      expect_same(from);
    } else if (x < 0.90) {
      take_snapshot();
    } else if (x < 0.95) {
      restore_snapshot();
    } else if (x < 0.97) {
      cut_and_join();
    } else {
      dense();
    }
    return failure_;
  }

  // All slots, and where the component rows are.
  std::string compare_all() {
    failure_.clear();
    require(check_rows(pool_).empty(), check_rows(pool_));
    Index in_lists = 0;
    Index beyond = 0;
    for (Index s = 0; s < config_.slots; ++s) {
      expect_same(s);
      for (Index h = 0; h < config_.value_heads; ++h) {
        const auto head = pool_.head(s, h);
        if (!pool_.in_use(s)) continue;
        const auto view = pool_.state(s, h);
        require(*head.held == model_.rule().rows(view), "rows held, and not needed");
        beyond += model_.rule().beyond(*head.held);
        in_lists += *head.held;
      }
    }
    require(report(pool_).rows == in_lists, "rows in use");
    const Index free = *pool_.reserve.free;
    require(free == config_.reserve - beyond && free == model_.reserve(), "the reserve");
    return failure_;
  }

 private:
  MatrixView<const float> directions() const {
    return {directions_.data(), config_.value_heads, config_.state.d_v, config_.state.d_v};
  }
  void require(bool holds, const std::string& what) {
    if (!holds && failure_.empty()) failure_ = what;
  }
  void simple(const char* name, Index slot, Status given, Status wanted) {
    tally_[name][given] += 1;
    require(given == wanted, std::string(name) + " of slot " + std::to_string(slot) + ": wanted '" +
                                 to_string(wanted) + "', given '" + to_string(given) + "'");
    expect_same(slot);
  }
  void expect_same(Index slot) {
    if (!config_.is_slot(slot)) return;
    const bool in_use = model_.in_use(slot);
    require(pool_.in_use(slot) == in_use, "in use");
    if (!in_use) return;
    auto& request = *model_.at(slot);
    const SlotRecord& record = pool_.slot(slot);
    require(record.tokens == request.tokens && record.buffered == request.buffered &&
                record.draft == request.draft && record.blocked == request.blocked &&
                record.entry == -1 && record.readers == 0 && record.failed == 0,
            "record of slot " + std::to_string(slot));
    for (Index h = 0; h < config_.value_heads; ++h) {
      require(same_state(pool_.state(slot, h), request.heads[static_cast<std::size_t>(h)].view()),
              "state " + std::to_string(slot) + ", " + std::to_string(h));
    }
  }

  HostTeams& teams() { return starved_ ? starved_teams_ : teams_; }

  // Mostly one that exists.
  Index any_slot() {
    if (random_.chance(0.02)) return random_.chance(0.5) ? -1 - random_.below(3) : config_.slots;
    return random_.below(static_cast<int>(config_.slots));
  }

  void step_batch() {
    const Index d_k = config_.state.d_k;
    const Index d_v = config_.state.d_v;
    const Index decays = P::Rule::log_decays(d_k);
    const int entries = 1 + random_.below(8);
    const Index most = config_.state.buffer_capacity() + 1;
    std::vector<std::int32_t> slots, write_slots, counts, starts(1, 0);
    const bool forks = random_.chance(0.15);
    const bool packed = random_.chance(0.4);
    const bool beside = packed && random_.chance(0.4);  // counts and starts
    const bool counted = !packed && random_.chance(0.6);
    const Index tokens = random_.chance(0.6) ? 1 : 1 + random_.below(3);
    for (int b = 0; b < entries; ++b) {
      const bool padding = random_.chance(0.1);
      const Index slot = padding ? (config_.padding == Padding::slot_zero ? 0 : -1) : any_slot();
      slots.push_back(static_cast<std::int32_t>(slot));
      write_slots.push_back(
          static_cast<std::int32_t>(forks && random_.chance(0.5) ? any_slot() : slot));
      Index count = packed || counted ? random_.below(static_cast<int>(tokens) + 1) : tokens;
      if (counted && random_.chance(0.02)) count = random_.chance(0.5) ? -1 : most;
      counts.push_back(static_cast<std::int32_t>(count));
      const Index unused = packed && beside ? random_.below(3) : 0;
      starts.push_back(starts.back() + static_cast<std::int32_t>(count + unused));
    }
    const Index rows = packed ? Index{starts.back()} : entries * std::max(tokens, most);
    TokenBatch<float> batch;
    batch.entries = entries;
    batch.slots = slots.data();
    batch.write_slots = forks ? write_slots.data() : nullptr;
    batch.tokens = tokens;
    batch.counts = counted || beside ? counts.data() : nullptr;
    batch.starts = packed ? starts.data() : nullptr;
    // Heads and tokens are any number of entries apart.
    const Index gap = random_.below(3);
    std::vector<float> keys, queries, values, log_decays, strengths;
    const auto tensor = [&](std::vector<float>& numbers, Index heads, Index width,
                            const auto& number) {
      numbers.resize(static_cast<std::size_t>(rows * (heads * (width + gap) + gap) + 1));
      for (float& y : numbers) y = number();
      return HeadVectors<const float>{numbers.data(), heads * (width + gap) + gap, width + gap};
    };
    const auto normal = [&] { return static_cast<float>(random_.normal()); };
    batch.keys = tensor(keys, config_.key_heads, d_k, [&] { return 0.3f * normal(); });
    batch.queries = tensor(queries, config_.key_heads, d_k, normal);
    batch.values = tensor(values, config_.value_heads, d_v, normal);
    const bool weak = random_.chance(0.3);
    batch.log_decays = tensor(log_decays, config_.value_heads, std::max(decays, Index{1}), [&] {
      if (random_.chance(0.001)) return -std::numeric_limits<float>::infinity();
      return (weak ? -2.0f : -0.1f) * std::abs(normal());
    });
    batch.write_strengths = tensor(strengths, config_.value_heads, 1,
                                   [&] { return static_cast<float>(random_.uniform()); });
    if (random_.chance(0.1) && rows > 0) {
      const Index t = random_.below(static_cast<int>(rows));
      const Index h = random_.below(static_cast<int>(config_.value_heads));
      const Index k = random_.below(static_cast<int>(config_.key_heads));
      const auto spoil = [](const HeadVectors<const float>& vectors, Index token, Index head,
                            Index i,
                            float with) { const_cast<float*>(vectors.at(token, head))[i] = with; };
      const float nan = std::numeric_limits<float>::quiet_NaN();
      switch (random_.below(7)) {
        case 0:
          spoil(batch.keys, t, k, d_k - 1, nan);
          break;
        case 1:
          spoil(batch.queries, t, k, 0, nan);
          break;
        case 2:
          spoil(batch.values, t, h, d_v - 1, std::numeric_limits<float>::infinity());
          break;
        case 3:
          spoil(batch.write_strengths, t, h, 0, nan);
          break;
        case 4:
          spoil(batch.log_decays, t, h, 0, nan);
          break;
        case 5:
          spoil(batch.log_decays, t, h, 0, 0.25f);
          break;
        // Finite, but not what it becomes.
        default:
          spoil(batch.values, t, h, 0, 3e38f);
          spoil(batch.write_strengths, t, h, 0, 10.0f);
      }
    }
    const Index output_stride = config_.value_heads * d_v + gap;
    if (random_.chance(0.02) && rows > 0) {
      // Each number fits, as long as nobody multiplies them.
      const float loud = std::ldexp(1.0f, 62 + random_.below(6));
      const Index t = random_.below(static_cast<int>(rows));
      const Index h = random_.below(static_cast<int>(config_.value_heads));
      // Or each entry of what they write does, but not its norm: dense, it can be kept.
      const bool even = random_.chance(0.5);
      if (even)
        strengths[static_cast<std::size_t>(batch.write_strengths.at(t, h) - strengths.data())] =
            1.0f;
      const auto amplify = [&](const HeadVectors<const float>& vectors, Index head, Index width) {
        float* const x = const_cast<float*>(vectors.at(t, head));
        for (Index i = 0; i < width; ++i) x[i] = even ? std::copysign(1.2e19f, x[i]) : x[i] * loud;
      };
      amplify(batch.keys, config_.key_head(h), d_k);
      amplify(batch.values, h, d_v);
    }
    if (random_.chance(0.15)) batch.write_strengths.data = nullptr;
    const float poison = -7.25e30f;
    std::vector<float> outputs(static_cast<std::size_t>(rows * output_stride + 1), poison);
    std::vector<float> wanted = outputs;
    batch.outputs = {outputs.data(), output_stride, d_v};
    const bool reads = random_.chance(0.8);
    if (!reads) batch.outputs.data = nullptr;
    std::vector<Status> statuses(static_cast<std::size_t>(entries), Status::overflow);
    const Status first = step(teams(), pool_, batch, statuses.data());

    std::set<Index> written;
    std::map<Index, int> forked;  // how many entries fork a slot
    std::vector<Status> expected;
    std::vector<bool> works;
    for (int b = 0; b < entries; ++b) {
      const Index from = slots[static_cast<std::size_t>(b)];
      const Index to = batch.write_slot(b);
      Status status = Status::ok;
      bool work = false;
      if (!config_.is_padding(from)) {
        const Index capacity = config_.state.buffer_capacity();
        if (!model_.in_use(from) || !config_.is_slot(to)) {
          status = Status::invalid_slot;
        } else if (model_.at(from)->blocked != Status::ok) {
          status = model_.at(from)->blocked;
        } else if (batch.count(b) < 0 || batch.count(b) > capacity) {
          status = Status::invalid_argument;
        } else if (batch.count(b) > capacity - model_.at(from)->buffered) {
          status = Status::buffer_full;
        } else if (!written.insert(to).second) {
          status = Status::invalid_slot;
        } else {
          work = true;
          forked[from] += from != to ? 1 : 0;
        }
      }
      expected.push_back(status);
      works.push_back(work);
    }
    for (int b = 0; b < entries; ++b) {
      const auto i = static_cast<std::size_t>(b);
      const Index to = batch.write_slot(b);
      if (works[i] && slots[i] != to && forked.count(to) != 0 && forked[to] > 0) {
        works[i] = false;
        expected[i] = Status::invalid_slot;
      }
    }
    // Forks are made of what the slots were before any entry was stepped.
    std::vector<std::optional<ModelRequest<P>>> before;
    for (int b = 0; b < entries; ++b) {
      const auto i = static_cast<std::size_t>(b);
      before.emplace_back();
      if (works[i]) before.back() = *model_.at(slots[i]);
    }
    std::set<std::size_t> overflowed;
    for (int pass = 0; pass < 2; ++pass) {
      for (int b = 0; b < entries; ++b) {
        const auto i = static_cast<std::size_t>(b);
        const Index to = batch.write_slot(b);
        if (!works[i]) continue;
        float* const out = wanted.data() + batch.start(b) * output_stride;
        if (pass == 0 && slots[i] != to) {
          // All checks of numbers come before all forks.
          ModelRequest<P> trial = *before[i];
          std::vector<float> scratch(
              static_cast<std::size_t>((batch.count(b) + 1) * output_stride));
          const Status status = model_.step(trial, batch, b, scratch.data(), output_stride);
          if (status == Status::non_finite_input || status == Status::positive_log_decay) {
            expected[i] = status;
            works[i] = false;
          } else if (!model_.has_room(*before[i], to)) {
            expected[i] = Status::pool_exhausted;
            works[i] = false;
          } else {
            before[i]->draft = -1;
            model_.at(to) = *before[i];
          }
        } else if (pass == 1) {
          expected[i] = model_.step(*model_.at(to), batch, b, out, output_stride);
          if (expected[i] == Status::overflow) overflowed.insert(i);
        }
      }
    }
    Status expected_first = Status::ok;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      tally_[reads ? "step" : "advance"][statuses[i]] += 1;
      require(statuses[i] == expected[i], "step, entry " + std::to_string(i) + ": wanted '" +
                                              to_string(expected[i]) + "', given '" +
                                              to_string(statuses[i]) + "'");
      if (expected_first == Status::ok) expected_first = expected[i];
      if (slots[i] != batch.write_slot(static_cast<Index>(i)) && statuses[i] == Status::ok) {
        tally_["step into another slot"][Status::ok] += 1;
      }
      expect_same(slots[i]);
      expect_same(batch.write_slot(static_cast<Index>(i)));
      if (overflowed.count(i) != 0) {
        // Some of its outputs may have been written.
        const Index start = batch.start(static_cast<Index>(i)) * output_stride;
        const Index count = batch.count(static_cast<Index>(i)) * output_stride;
        std::copy_n(outputs.begin() + start, count, wanted.begin() + start);
      }
    }
    // Entries may be refused in another order than they are looked at.
    require((first == Status::ok) == (expected_first == Status::ok), "status of the batch");
    require(std::memcmp(outputs.data(), wanted.data(), outputs.size() * sizeof(float)) == 0,
            "outputs");
  }

  void compact_some() {
    std::vector<std::int32_t> slots;
    const int entries = 1 + random_.below(12);
    for (int b = 0; b < entries; ++b) slots.push_back(static_cast<std::int32_t>(any_slot()));
    const bool only_due = random_.chance(0.8);
    std::vector<Status> statuses(slots.size(), Status::overflow);
    const Index count = static_cast<Index>(slots.size());
    CompactionReport poison;
    poison.rank_before = -7;
    std::vector<CompactionReport> reports(
        slots.size() * static_cast<std::size_t>(config_.value_heads), poison);
    std::vector<CompactionReport> wanted_reports = reports;
    const Status first =
        only_due ? compact_due(teams(), pool_, slots.data(), count, statuses.data(), reports.data())
                 : compact(teams(), pool_, slots.data(), count, statuses.data(), reports.data());
    const std::vector<Status> wanted = model_.compact(slots, only_due, wanted_reports);
    tally_["second try"][Status::ok] += model_.take_second_tries();
    for (std::size_t i = 0; i < reports.size(); ++i) {
      const CompactionReport& a = reports[i];
      const CompactionReport& b = wanted_reports[i];
      require(a.rank_before == b.rank_before && a.rank_after == b.rank_after &&
                  a.decomposed == b.decomposed && a.tail == b.tail && a.projected == b.projected &&
                  same_numbers(&a.dropped, &b.dropped, 1) &&
                  same_numbers(&a.rounded, &b.rounded, 1) && a.sweeps == b.sweeps &&
                  a.capped == b.capped && a.dense == b.dense,
              "report " + std::to_string(i));
      tally_["turned dense"][Status::ok] += a.dense && a.rank_before > 0;
    }
    require(
        (first == Status::ok) == (std::count(wanted.begin(), wanted.end(), Status::ok) == count),
        "status of compact");
    for (std::size_t b = 0; b < slots.size(); ++b) {
      tally_[only_due ? "compact_due" : "compact"][statuses[b]] += 1;
      require(statuses[b] == wanted[b], std::string("compact: wanted '") + to_string(wanted[b]) +
                                            "', given '" + to_string(statuses[b]) + "'");
      expect_same(slots[b]);
    }
  }

  void take_snapshot() {
    const Index slot = any_slot();
    const std::size_t size = snapshot_bytes(pool_, slot);
    if (size == 0) {
      tally_["snapshot"][Status::invalid_slot] += 1;
      require(!model_.in_use(slot), "snapshot_bytes");
      return;
    }
    AlignedMemory bytes(size);
    const Status status = snapshot(pool_, slot, bytes.data(), size);
    tally_["snapshot"][status] += 1;
    require(status == model_.at(slot)->blocked, "snapshot");
    expect_same(slot);
    if (status != Status::ok) return;
    if (kept_.size() == 16) kept_.erase(kept_.begin());
    kept_.emplace_back(std::move(bytes), *model_.at(slot));
  }

  void restore_snapshot() {
    if (kept_.empty()) return;
    auto& [bytes, request] =
        kept_[static_cast<std::size_t>(random_.below(static_cast<int>(kept_.size())))];
    const Index slot = any_slot();
    const Index tokens = request.tokens + (random_.chance(0.1) ? 1 : 0);
    AlignedMemory damaged = bytes;
    const bool damage = random_.chance(0.1);
    if (damage) {
      const auto at =
          static_cast<std::size_t>(random_.uniform() * static_cast<double>(bytes.size()));
      static_cast<unsigned char*>(damaged.data())[at] ^= 1;
    }
    const Status status =
        restore(pool_, slot, SnapshotBytes{damaged.data(), damaged.size()}, tokens);
    tally_["restore"][status] += 1;
    if (!config_.is_slot(slot)) {
      require(status == Status::invalid_slot, "restore into no slot");
    } else if (damage) {
      require(status == Status::damaged_snapshot || status == Status::wrong_snapshot,
              "restore of damaged bytes");
    } else if (tokens != request.tokens) {
      require(status == Status::wrong_snapshot, "restore with another count");
    } else if (!model_.has_room(request, slot)) {
      require(status == Status::pool_exhausted, "restore without rows");
    } else {
      require(status == Status::ok, "restore");
      model_.at(slot) = request;
      model_.at(slot)->draft = -1;
    }
    expect_same(slot);
  }

  // Through two pools with half of the heads each, where it may go on, and back: to where it was or
  // elsewhere.
  void cut_and_join() {
    const Index slot = any_slot();
    if (!model_.in_use(slot) || model_.at(slot)->blocked != Status::ok) return;
    const Index half = config_.value_heads / 2;
    const Index d_k = config_.state.d_k;
    const Index d_v = config_.state.d_v;
    const Index decays = std::max(P::Rule::log_decays(d_k), Index{1});
    ModelRequest<P> request = *model_.at(slot);
    // One more token for all heads; where no two parts share a key, they may differ in it.
    const bool goes_on = random_.chance(0.5);
    const bool differ = random_.chance(0.2);
    const bool compacts = random_.chance(0.3);
    std::vector<float> keys, values, log_decays, queries, strengths;
    const auto fill = [&](std::vector<float>& numbers, Index count, const auto& number) {
      for (Index i = 0; i < count; ++i) numbers.push_back(static_cast<float>(number()));
    };
    fill(keys, 2 * config_.key_heads * d_k, [&] { return 0.3 * random_.normal(); });
    fill(queries, config_.key_heads * d_k, [&] { return random_.normal(); });
    fill(values, config_.value_heads * d_v, [&] { return random_.normal(); });
    fill(log_decays, config_.value_heads * decays, [&] { return -random_.uniform(); });
    fill(strengths, config_.value_heads, [&] { return random_.uniform(); });
    std::vector<float> outputs(static_cast<std::size_t>(config_.value_heads * d_v)), same = outputs;
    const std::int32_t place = 1;
    TokenBatch<float> batch;
    batch.entries = 1;
    batch.slots = &place;
    batch.keys = {keys.data(), 0, d_k};
    batch.queries = {queries.data(), 0, d_k};
    batch.values = {values.data(), 0, d_v};
    batch.log_decays = {log_decays.data(), 0, decays};
    batch.write_strengths = {strengths.data(), 0, 1};
    batch.outputs = {same.data(), 0, d_v};
    const Index other_keys = config_.key_heads * d_k;
    const bool may_differ = config_.head_map == HeadMap::interleaved;

    std::vector<AlignedMemory> parts;
    Status wanted = Status::ok;
    for (Index n = 0; n < 2; ++n) {
      PoolConfig config = config_;
      config.slots = 2;
      config.value_heads = half;
      config.key_heads =
          config_.head_map == HeadMap::tiled ? config_.key_heads : config_.key_heads / 2;
      config.first_head = config_.first_head + n * half;
      config.quota = 0;
      config.reserve = 0;
      MatrixView<const float> own;
      if (P::Sink::present) own = directions().middle_rows(n * half, half);
      StatePool<P> other(config, own);
      const HeadRange range{n * half, half};
      AlignedMemory bytes(snapshot_bytes(pool_, slot, range));
      require(snapshot(pool_, slot, range, bytes.data(), bytes.size()) == Status::ok, "cut");
      // From its half, or from the whole.
      AlignedMemory whole(snapshot_bytes(pool_, slot));
      require(snapshot(pool_, slot, whole.data(), whole.size()) == Status::ok, "snapshot");
      AlignedMemory& source = random_.chance(0.5) ? whole : bytes;
      require(restore(other.view(), 1, SnapshotBytes{source.data(), source.size()},
                      model_.at(slot)->tokens) == Status::ok,
              "restore into a part");
      if (!failure_.empty()) return;
      AlignedMemory again(snapshot_bytes(other.view(), 1));
      require(snapshot(other.view(), 1, again.data(), again.size()) == Status::ok, "cut again");
      require(again.size() == bytes.size() &&
                  std::memcmp(again.data(), bytes.data(), bytes.size()) == 0,
              "the same bytes from a part");
      if (goes_on) {
        TokenBatch<float> part = batch;
        const Index first_key = config_.head_map == HeadMap::tiled ? 0 : n * config.key_heads;
        part.keys.data += first_key * d_k + (differ && n == 1 ? other_keys : 0);
        part.queries.data += first_key * d_k;
        part.values.data += n * half * d_v;
        part.log_decays.data += n * half * decays;
        part.write_strengths.data += n * half;
        part.outputs.data = outputs.data() + n * half * d_v;
        const Status status = step(teams_, other.view(), part);
        require((status == Status::ok) == (request.buffered < config.state.buffer_capacity()) ||
                    status == Status::overflow,
                "step of a part");
        if (status != Status::ok) return;
      }
      if (compacts) {
        if (compact(teams_, other.view(), &place, 1) != Status::ok) return;
      }
      AlignedMemory result(snapshot_bytes(other.view(), 1));
      require(snapshot(other.view(), 1, result.data(), result.size()) == Status::ok, "cut again");
      parts.push_back(std::move(result));
    }
    if (!failure_.empty()) return;

    if (goes_on) {
      for (Index h = 0; h < config_.value_heads; ++h) {
        const Index k = config_.key_head(h);
        const bool second = h >= half;
        const Token<float> token{keys.data() + k * d_k + (differ && second ? other_keys : 0),
                                 values.data() + h * d_v, log_decays.data() + h * decays,
                                 strengths[static_cast<std::size_t>(h)]};
        auto& head = request.heads[static_cast<std::size_t>(h)];
        require(
            step(model_.team(), head.view(), token, queries.data() + k * d_k,
                 same.data() + h * d_v) == (starved_ ? Status::workspace_too_small : Status::ok),
            "step of a head");
      }
      if (starved_) return;
      require(same_numbers(outputs.data(), same.data(), static_cast<Index>(same.size())),
              "outputs of parts");
      request.tokens += 1;
      request.buffered += 1;
      // What was one key for two heads is one no longer, until it has been compacted away.
      if (differ && !may_differ && !compacts) wanted = Status::wrong_snapshot;
    }
    if (compacts) {
      if (starved_) return;
      for (auto& head : request.heads) {
        require(compact(model_.team(), head.view()) == Status::ok, "compact a head");
      }
      request.buffered = 0;
    }
    const SnapshotBytes pieces[3] = {{parts[1].data(), parts[1].size()},
                                     {parts[0].data(), parts[0].size()},
                                     {parts[1].data(), parts[1].size()}};
    const Index to = random_.chance(0.5) ? slot : any_slot();
    if (!config_.is_slot(to)) wanted = Status::invalid_slot;
    const auto refused = [&](const SnapshotBytes* some, Index count, Index tokens) {
      const Status status = restore(pool_, to, some, count, tokens);
      require(status == (config_.is_slot(to) ? Status::wrong_snapshot : Status::invalid_slot),
              "restore of pieces that do not make a whole");
    };
    refused(pieces, 1, request.tokens);
    refused(pieces, 3, request.tokens);
    refused(pieces, 2, request.tokens + 1);
    refused(pieces, 2, request.tokens - 1);
    expect_same(to);
    const Status status = restore(pool_, to, pieces, 2, request.tokens);
    if (wanted == Status::ok && !model_.has_room(request, to)) wanted = Status::pool_exhausted;
    tally_[differ && goes_on ? "cut, differ and join" : "cut and join"][status] += 1;
    require(status == wanted, std::string("join: wanted '") + to_string(wanted) + "', given '" +
                                  to_string(status) + "'");
    if (status == Status::ok) {
      model_.at(to) = std::move(request);
      model_.at(to)->draft = -1;
    }
    expect_same(to);
    expect_same(slot);
  }

  // A further prompt: out, something else happens to it, and in again. [K,V] or [V,K].
  void dense() {
    const Index slot = any_slot();
    const Index d_k = config_.state.d_k;
    const Index d_v = config_.state.d_v;
    const auto heads = static_cast<std::size_t>(config_.value_heads);
    // [K,V] or [V,K], and heads and rows any number of entries apart.
    const bool turned = random_.chance(0.5);
    const Index gap = random_.below(3);
    const Index row = (turned ? d_k : d_v) + gap;
    const Index head_stride = row * (turned ? d_v : d_k) + gap;
    const float poison = -7.25e30f;
    std::vector<float> matrices(heads * static_cast<std::size_t>(head_stride), poison);
    std::vector<float> again = matrices;
    std::vector<float> certificates(heads), same(heads);
    const auto layout = [&](auto* data) {
      using Number = std::remove_pointer_t<decltype(data)>;
      return DenseStates<Number>{data, head_stride, turned ? 1 : row, turned ? row : 1};
    };
    const Status out =
        materialize(teams(), pool_, slot, layout(matrices.data()), certificates.data());
    tally_["materialize"][out] += 1;
    if (!model_.in_use(slot)) {
      require(out == Status::invalid_slot, "materialize");
      return;
    }
    Status wanted = Status::ok;
    for (std::size_t h = 0; h < heads; ++h) {
      const Status status =
          materialize(model_.team(), model_.at(slot)->heads[h].view(),
                      layout(again.data()).head(static_cast<Index>(h), config_.state), &same[h]);
      if (status > wanted) wanted = status;
    }
    require(out == wanted, "materialize");
    if (out != Status::ok) return;
    require(std::memcmp(matrices.data(), again.data(), matrices.size() * sizeof(float)) == 0 &&
                certificates == same,
            "dense states");
    const float scale = static_cast<float>(random_.normal());
    for (float& x : matrices) {
      if (x != poison) x = 0.5f * x + 0.1f * scale;
    }
    if (random_.chance(0.05)) {
      // Of the last head, more than its norm or a narrow format holds.
      const auto last = layout(matrices.data()).head(config_.value_heads - 1, config_.state);
      for (Index i = 0; i < d_k; ++i) {
        for (Index j = 0; j < d_v; ++j) {
          last(i, j) = std::copysign(random_.chance(0.5) ? 1e38f : 3e38f, last(i, j));
        }
      }
    }
    if (random_.chance(0.05)) {
      layout(matrices.data()).head(config_.value_heads - 1, config_.state)(d_k - 1, d_v - 1) =
          std::numeric_limits<float>::quiet_NaN();
    }
    const DenseStates<const float> content = layout(static_cast<const float*>(matrices.data()));
    const Index tokens = random_.below(1000);
    const Status status =
        initialize(teams(), pool_, slot, content, tokens, RandomizedSvd{}, certificates.data());
    tally_["initialize"][status] += 1;
    require(status == model_.initialize(slot, content, tokens, certificates), "initialize");
    tally_["second try"][Status::ok] += model_.take_second_tries();
    expect_same(slot);
  }

  PoolConfig config_;
  Random random_;
  std::vector<float> directions_;
  PoolModel<P> model_;
  StatePool<P> pool_owner_;
  StatePoolView<P> pool_;
  HostTeams teams_;
  HostTeams starved_teams_;
  PoolTally& tally_;
  std::vector<std::pair<AlignedMemory, ModelRequest<P>>> kept_;
  std::string failure_;
  bool starved_ = false;
};

// 64 slots of four heads; shapes that are neither square nor multiples of anything.
inline PoolConfig small_pool(int variant) {
  const bool tall = variant % 2 == 0;
  PoolConfig config = pool_of(tall ? 12 : 9, tall ? 7 : 13, 64, 2, 4);
  config.state.draft = 2;
  config.state.dense_retry = 3;
  config.head_map = variant % 3 == 0 ? HeadMap::tiled : HeadMap::interleaved;
  config.padding = variant % 4 < 2 ? Padding::negative : Padding::slot_zero;
  config.first_head = variant;
  config.state.dense_fallback = variant % 8 != 3;
  return config;
}

// @returns the first disagreement, or nothing
template <class P>
std::string run_pool(PoolConfig config, Index threads, Index operations, std::uint64_t seed,
                     PoolTally& tally) {
  if (P::Compaction::adaptive) {
    config.quota = 2;
    config.reserve = 150;
  }
  PoolRun<P> run(config, threads, seed, tally);
  for (Index n = 0; n < operations; ++n) {
    std::string failure = run.operate();
    if (failure.empty() && (n % 200 == 199 || n + 1 == operations)) failure = run.compare_all();
    if (!failure.empty()) return "operation " + std::to_string(n) + ": " + failure;
  }
  return {};
}

}  // namespace sinkstate::testing
