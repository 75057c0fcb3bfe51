// Pools on a device: beside a host pool under random operations, under the faults of docs/faults.md,
// in a captured graph, and against the dense recurrence in fp64. Without Catch2: a machine with a
// device may lack it.
//
//     test_device_pool [--quick] [--operations N] [--replays N] [--seed N] [--jobs N] [--verbose]
//
// Policies are tested on threads of their own, each with pools on streams of their own.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <sinkstate/sinkstate.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../oracles/dense_recurrence.hpp"
#include "device_pool.hpp"
#include "policies.hpp"

namespace {

using namespace sinkstate;
using sinkstate::testing::BatchBytes;
using sinkstate::testing::DenseNumbers;
using sinkstate::testing::DevicePool;
using sinkstate::testing::Slots;
using sinkstate::testing::Statuses;
using sinkstate::testing::StepPath;

struct Options {
  bool quick = false;
  int operations = 0;  // of each lockstep run; 0: 200, or 25 when quick
  int replays = 0;     // of the graph; 0: 4096, or 160 when quick
  unsigned seed = 20261203;
  bool verbose = false;  // say when each part begins
  int jobs = 1;          // policies at once
};

// ---- Failing ---------------------------------------------------------------------------------

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char* format, ...) {
  char text[8192];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Fault(text);
}

int number(Index i) { return static_cast<int>(i); }
std::size_t size(Index i) { return static_cast<std::size_t>(i); }

// The largest so far; NaN, once there, stays.
void include(double& worst, double x) {
  if (!(x <= worst)) worst = x;
}

template <class Statuses>
void want_statuses(const char* verb, const Statuses& found, const Statuses& wanted) {
  for (std::size_t b = 0; b < wanted.size(); ++b) {
    if (found[b] == wanted[b]) continue;
    fail("%s, entry %d of %d: status %d (%s), wanted %d (%s)", verb, static_cast<int>(b),
         static_cast<int>(wanted.size()), static_cast<int>(found[b]), to_string(found[b]),
         static_cast<int>(wanted[b]), to_string(wanted[b]));
  }
}
void want_ok(const char* verb, const Statuses& found) {
  want_statuses(verb, found, Statuses(found.size(), Status::ok));
}
void want_host(const char* verb, Status found) {
  if (found != Status::ok) fail("%s on the host: %s", verb, to_string(found));
}

// ---- Bytes and images ------------------------------------------------------------------------

struct alignas(64) Line {
  unsigned char bytes[64];
};
struct Bytes {
  std::vector<Line> lines;
  std::size_t used = 0;

  Bytes() = default;
  explicit Bytes(std::size_t count) : lines((count + 63) / 64), used(count) { fill(0xFF); }
  void fill(int byte) {
    if (!lines.empty()) std::memset(data(), byte, lines.size() * sizeof(Line));
  }
  unsigned char* data() { return reinterpret_cast<unsigned char*>(lines.data()); }
  const unsigned char* data() const { return reinterpret_cast<const unsigned char*>(lines.data()); }
};
// Where two stretches of equal length first differ, or -1.
std::ptrdiff_t difference(const void* a, const void* b, std::size_t count) {
  if (count == 0 || std::memcmp(a, b, count) == 0) return -1;
  const auto* x = static_cast<const unsigned char*>(a);
  const auto* y = static_cast<const unsigned char*>(b);
  std::ptrdiff_t i = 0;
  while (x[i] == y[i]) ++i;
  return i;
}

// All bytes of a pool on the host.
template <class P>
struct Image {
  Bytes bytes;
  StatePoolView<P> view;

  Image(const PoolConfig& config, const MatrixView<const float>& directions)
      : bytes(pool_bytes<P>(config).total),
        view(view_pool<P>(bytes.data(), bytes.used, config, directions)) {}
  Image(const Image&) = delete;
  void operator=(const Image&) = delete;
  void take(const Image& other) { std::memcpy(bytes.data(), other.bytes.data(), bytes.used); }
  void take(const DevicePool<P>& pool) {
    if (pool.size() != bytes.used) {
      fail("a pool on a device has %zu bytes, on the host %zu", pool.size(), bytes.used);
    }
    pool.download(bytes.data());
  }
};

template <class P>
Bytes snapshot_of(const StatePoolView<P>& pool, Index slot) {
  Bytes bytes(snapshot_bytes(pool, slot));
  const Status status = snapshot(pool, slot, bytes.data(), bytes.used);
  if (status != Status::ok) fail("snapshot of slot %d: %s", number(slot), to_string(status));
  return bytes;
}

void want_same(const char* what, const Bytes& found, const Bytes& wanted) {
  if (found.used != wanted.used) fail("%s: %zu bytes, wanted %zu", what, found.used, wanted.used);
  const std::ptrdiff_t place = difference(found.data(), wanted.data(), wanted.used);
  if (place >= 0) {
    fail("%s: byte %d of %zu is %02x, wanted %02x", what, static_cast<int>(place), wanted.used,
         found.data()[place], wanted.data()[place]);
  }
}

// What the heads of a slot share. Nothing of a call under way may be left.
template <class P>
void want_record(const char* what, const StatePoolView<P>& found, const StatePoolView<P>& wanted,
                 Index slot) {
  const SlotRecord& a = found.slot(slot);
  const SlotRecord& b = wanted.slot(slot);
  const auto want = [&](const char* field, std::int64_t x, std::int64_t y) {
    if (x != y) {
      fail("%s, slot %d: %s is %lld, wanted %lld", what, number(slot), field,
           static_cast<long long>(x), static_cast<long long>(y));
    }
  };
  want("in_use", a.in_use, b.in_use);
  want("entry", a.entry, -1);
  want("readers", a.readers, 0);
  want("arrived", a.arrived, 0);
  want("failed", a.failed.load(), 0);
  if (b.in_use == 0) return;
  want("tokens", a.tokens, b.tokens);
  want("buffered", a.buffered, b.buffered);
  want("draft", a.draft, b.draft);
  want("blocked", static_cast<int>(a.blocked), static_cast<int>(b.blocked));
  for (Index h = 0; h < found.config.value_heads; ++h) {
    want("buffered of a head", *found.head(slot, h).buffer.count, b.buffered);
  }
}

// Bit for bit.
template <class P>
void want_same_slot(const char* what, const StatePoolView<P>& found, const StatePoolView<P>& wanted,
                    Index slot) {
  want_record(what, found, wanted, slot);
  if (wanted.slot(slot).in_use == 0) return;
  const std::string name = std::string(what) + ", slot " + std::to_string(slot) + ", snapshot";
  want_same(name.c_str(), snapshot_of(found, slot), snapshot_of(wanted, slot));
  for (Index h = 0; h < found.config.value_heads; ++h) {
    const int a = *found.head(slot, h).held;
    const int b = *wanted.head(slot, h).held;
    if (a != b) {
      fail("%s, slot %d, head %d: %d rows held, wanted %d", what, number(slot), number(h), a, b);
    }
  }
}
template <class P>
void want_same_slots(const char* what, const StatePoolView<P>& found,
                     const StatePoolView<P>& wanted) {
  for (Index s = 0; s < found.config.slots; ++s) want_same_slot(what, found, wanted, s);
}

// Each row of the reserve is free once or in one list once; those of quotas are where they belong.
template <class P>
void want_sound_rows(const char* what, const StatePoolView<P>& pool) {
  const PoolConfig& config = pool.config;
  const Index quota = pool.quota(config);
  const Index first = pool.quota_rows(config);
  const Index free = *pool.reserve.free;
  if (free < 0 || free > config.reserve) {
    fail("%s: %d rows of the reserve of %d are free", what, number(free), number(config.reserve));
  }
  std::vector<int> seen(size(config.reserve), 0);
  const auto see = [&](Index row, const char* where, Index slot, Index h) {
    if (row < first || row >= first + config.reserve) {
      fail("%s: row %d %s (slot %d, head %d) is none of the reserve [%d, %d)", what, number(row),
           where, number(slot), number(h), number(first), number(first + config.reserve));
    }
    if (++seen[size(row - first)] > 1) {
      fail("%s: row %d %s (slot %d, head %d) is there twice", what, number(row), where,
           number(slot), number(h));
    }
  };
  for (Index i = 0; i < free; ++i) see(pool.reserve.rows[i], "of the free ones", -1, -1);
  Index in_lists = 0;
  for (Index s = 0; s < config.slots; ++s) {
    for (Index h = 0; h < config.value_heads; ++h) {
      const auto head = pool.head(s, h);
      const Index held = *head.held;
      const Index wanted = pool.in_use(s) ? detail::rows_in_use(pool, head) : 0;
      if (held != wanted) {
        fail("%s, slot %d (%s), head %d: %d rows held, %d in use", what, number(s),
             pool.in_use(s) ? "in use" : "free", number(h), number(held), number(wanted));
      }
      for (Index i = 0; i < held; ++i) {
        if (i >= quota) {
          see(head.list[i], "of a list", s, h);
          in_lists += 1;
        } else if (head.list[i] != head.first_row + i) {
          fail("%s, slot %d, head %d: row %d of the quota is %d, wanted %d", what, number(s),
               number(h), number(i), head.list[i], number(head.first_row + i));
        }
      }
    }
  }
  if (in_lists + free != config.reserve) {
    fail("%s: %d rows in lists and %d free of a reserve of %d", what, number(in_lists),
         number(free), number(config.reserve));
  }
}

// ---- Batches ---------------------------------------------------------------------------------

template <class Number>
float widened(typename detail::StoredAs<Number>::Code code) {
  if constexpr (detail::StoredAs<Number>::narrow) {
    return widen<Number>(code);
  } else {
    return code;
  }
}
template <class Number>
typename detail::StoredAs<Number>::Code rounded(float x) {
  if constexpr (detail::StoredAs<Number>::narrow) {
    return round_to_nearest<Number>(x);
  } else {
    return x;
  }
}

// A batch whose arrays lie in one stretch of bytes; all that nobody writes to is NaN, outputs too.
template <class P, class Number = float>
struct Batch {
  using Code = typename detail::StoredAs<Number>::Code;
  using Rule = typename P::Rule;

  // @param gap  numbers left out between neighbouring vectors, and before the first
  Batch(const PoolConfig& pool, Index entries, Index rows, Index gap = 0)
      : config(pool), row_count(rows) {
    const Index d_k = config.state.d_k;
    const Index d_v = config.state.d_v;
    const Index decay_count = Rule::log_decays(d_k);
    bytes = Bytes(bytes_for(entries, rows, gap));
    Workspace memory(bytes.data(), bytes.used);
    const auto list = [&](Index count) { return memory.take<std::int32_t>(count); };
    slots = list(entries);
    write_slots = list(entries);
    counts = list(entries);
    starts = list(entries + 1);
    const auto vectors = [&](auto& tensor, Index heads, Index width) {
      using Element = std::remove_reference_t<decltype(*tensor.data)>;
      tensor.head_stride = width + gap;
      tensor.token_stride = heads * tensor.head_stride + gap;
      tensor.data = memory.take<Element>(rows * tensor.token_stride + gap) + gap;
    };
    vectors(keys, config.key_heads, d_k);
    vectors(queries, config.key_heads, d_k);
    vectors(values, config.value_heads, d_v);
    vectors(outputs, config.value_heads, d_v);
    vectors(log_decays, config.value_heads, decay_count);
    vectors(write_strengths, config.value_heads, 1);
    if (memory.exhausted()) fail("the test's own batch has too little memory");
    received = bytes;
    for (Index b = 0; b < entries; ++b) slots[b] = counts[b] = starts[b] = write_slots[b] = 0;
    starts[entries] = 0;
    batch.entries = entries;
    batch.slots = slots;
    batch.keys = {keys.data, keys.token_stride, keys.head_stride};
    batch.queries = {queries.data, queries.token_stride, queries.head_stride};
    batch.values = {values.data, values.token_stride, values.head_stride};
    batch.outputs = outputs;
    if (decay_count > 0) {
      batch.log_decays = {log_decays.data, log_decays.token_stride, log_decays.head_stride};
    }
    batch.write_strengths = {write_strengths.data, write_strengths.token_stride,
                             write_strengths.head_stride};
  }
  Batch(const Batch&) = delete;
  void operator=(const Batch&) = delete;

  std::size_t bytes_for(Index entries, Index rows, Index gap) const {
    const Index d_k = config.state.d_k + gap;
    const Index d_v = config.state.d_v + gap;
    const Index row =
        2 * (config.key_heads + 1) * d_k + (config.value_heads + 1) * (2 * d_v + d_k + 2 + 2 * gap);
    return size(4 * (4 * (entries + 1) + rows * row + 6 * gap)) + 32 * 64;
  }
  BatchBytes transfer() { return {bytes.data(), bytes.used, received.data()}; }
  // What came back.
  const Code* output(Index row, Index h) const {
    const auto place = reinterpret_cast<const unsigned char*>(outputs.at(row, h)) - bytes.data();
    return reinterpret_cast<const Code*>(received.data() + place);
  }
  bool untouched(Index row, Index h) const {
    return difference(output(row, h), outputs.at(row, h), size(config.state.d_v) * sizeof(Code)) <
           0;
  }
  // Outputs are for the host from here on: elsewhere.
  TokenBatch<float> with_outputs(std::vector<float>& numbers) const {
    static_assert(std::is_same_v<Number, float>, "the host takes batches of floats");
    numbers.assign(size(row_count * outputs.token_stride + 1),
                   std::numeric_limits<float>::quiet_NaN());
    TokenBatch<float> host = batch;
    if (batch.outputs.data != nullptr) host.outputs.data = numbers.data();
    return host;
  }

  PoolConfig config;
  Index row_count;
  Bytes bytes, received;
  std::int32_t *slots = nullptr, *write_slots = nullptr, *counts = nullptr, *starts = nullptr;
  HeadVectors<Code> keys, queries, values, outputs;
  HeadVectors<float> log_decays, write_strengths;
  TokenBatch<float, Number> batch;
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  float gauss() { return normal_(engine_); }
  double uniform() { return std::uniform_real_distribution<double>(0, 1)(engine_); }
  bool chance(double p) { return uniform() < p; }
  // From first to last, both included.
  Index among(Index first, Index last) {
    return std::uniform_int_distribution<Index>(first, last)(engine_);
  }
  std::mt19937& engine() { return engine_; }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

// One row of a batch: keys of a few that come back, with noise in every other key head; heads forget at
// different rates. So some heads stay at a low rank, and others go dense.
template <class P, class Number>
void draw_token(Random& random, Batch<P, Number>& batch, Index row, double noise = 0.2) {
  const PoolConfig& config = batch.config;
  const Index d_k = config.state.d_k;
  const auto unit = [&](auto* place, float (*of)(Index, Index), Index which, double share) {
    std::vector<float> x(size(d_k));
    double squares = 0;
    for (Index i = 0; i < d_k; ++i) {
      x[size(i)] = of(i, which) + static_cast<float>(share) * random.gauss();
      squares += std::pow(static_cast<double>(x[size(i)]), 2);
    }
    const auto length = static_cast<float>(std::sqrt(squares));
    for (Index i = 0; i < d_k; ++i) place[i] = rounded<Number>(x[size(i)] / length);
  };
  const auto wave = [](Index i, Index which) {
    return std::sin(static_cast<float>(number((i + 1) * which)));
  };
  for (Index k = 0; k < config.key_heads; ++k) {
    unit(batch.keys.at(row, k), wave, random.among(1, 5) + k, k % 2 == 0 ? noise : noise / 60);
    unit(batch.queries.at(row, k), wave, random.among(1, 5) + k, 0.5);
  }
  for (Index h = 0; h < config.value_heads; ++h) {
    const float scale = h % 3 == 0 ? 0.3f : 1.0f;
    for (Index j = 0; j < config.state.d_v; ++j) {
      batch.values.at(row, h)[j] = rounded<Number>(scale * random.gauss());
    }
    const float rate = -0.05f - 0.1f * static_cast<float>(number(h % 4));
    for (Index i = 0; i < P::Rule::log_decays(d_k); ++i) {
      batch.log_decays.at(row, h)[i] = rate * std::abs(random.gauss());
    }
    *batch.write_strengths.at(row, h) = static_cast<float>(0.2 + 0.8 * random.uniform());
  }
}

std::vector<float> draw_directions(Random& random, const PoolConfig& config, bool present) {
  std::vector<float> numbers(present ? size(config.value_heads * config.state.d_v) : 0);
  for (float& x : numbers) x = random.gauss();
  return numbers;
}
MatrixView<const float> as_rows(const std::vector<float>& numbers, const PoolConfig& config) {
  if (numbers.empty()) return {};
  return {numbers.data(), config.value_heads, config.state.d_v, config.state.d_v};
}

double distance(const float* a, const float* b, Index n) {
  double squares = 0;
  for (Index i = 0; i < n; ++i) {
    squares += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
  }
  return std::sqrt(squares);
}
double norm(const float* a, Index n) {
  double squares = 0;
  for (Index i = 0; i < n; ++i) squares += std::pow(static_cast<double>(a[i]), 2);
  return std::sqrt(squares);
}

// Of each policy under test.
Index threads_each = 1;

// ---- What is told at the end -----------------------------------------------------------------

struct Result {
  std::string part;
  double seconds = 0;
  double operations = 0;
  double output = 0, state = 0, certificate = 0;
  Index states = 0;     // that were compacted or initialised
  Index ranks = 0;      // of them, with another rank than on the host
  Index cuts = 0;       // with an equal rank, but further away than rounding alone
  Index truncated = 0;  // entries whose states lacked rows
  Index largest_rank = 0;
  Index dense = 0;  // states in dense form
  Index rank_changes = 0;
  std::string fault;
};

template <class P>
struct Limits {
  static constexpr bool narrow_body = detail::StoredAs<typename P::Stored>::narrow;
  static constexpr bool narrow_buffer = detail::StoredAs<typename P::Buffered>::narrow;
  static constexpr bool scaled = detail::StoredAs<typename P::Stored>::scaled;
  // A narrow number may be rounded to either side, here and there.
  static constexpr double step = narrow_buffer ? 2e-3 : 1e-5;
  static constexpr double step_certificate = narrow_buffer ? 1e-3 : 1e-5;
  static constexpr double state = narrow_body || narrow_buffer ? 2e-3 : 1e-5;
  static constexpr double certificate = 1e-3;
  // Sums whose terms cancel are as far off as their terms are.
  static constexpr double floor = 0.05;
  // Of all states: those where a singular value was cut from a near neighbour, or numbers of 8 bits
  // were rounded to the other side. All of them are within their certificates.
  static constexpr double cuts = scaled ? 0.15 : 0.05;
  static constexpr double ranks = 0.01;
};

// ---- 1. In step with a host pool -------------------------------------------------------------

template <class P>
class Lockstep {
 public:
  Lockstep(const PoolConfig& config, unsigned seed)
      : config_(config),
        random_(seed),
        directions_(draw_directions(random_, config, P::Sink::present)),
        host_(config, rows()),
        before_(config, rows()),
        after_(config, rows()),
        // Once with a warp for each state, and once with fewer.
        device_(config, directions_.empty() ? nullptr : directions_.data(),
                config.padding == Padding::slot_zero ? 7 * config.key_heads : 256),
        teams_(threads_each, workspace_bytes<P>(config.state)) {
    // Images hold NaN wherever nobody has written.
    host_.view = make_pool<P>(host_.bytes.data(), host_.bytes.used, config, rows());
    after_.take(device_);
    want_same_slots("a new pool", after_.view, host_.view);
    want_sound_rows("a new pool", after_.view);
    device_.upload(host_.bytes.data());
  }

  Result result;

  void run(int operations) {
    for (int i = 0; i < operations; ++i) {
      before_.take(host_);
      name_ = "nothing";
      try {
        one();
        after_.take(device_);
        want_sound_rows("host", host_.view);
        want_sound_rows("device", after_.view);
        compare_();
      } catch (const std::exception& fault) {
        fail("operation %d, %s: %s", i, name_.c_str(), fault.what());
      }
      // Where nothing was computed both are equal, so the device may go on with what it has.
      if (computed_ || random_.chance(0.5)) device_.upload(host_.bytes.data());
      result.operations += 1;
    }
    const auto states = static_cast<double>(result.states);
    using L = Limits<P>;
    if (static_cast<double>(result.ranks) > 3 + L::ranks * states) {
      fail("%d of %d states have another rank than on the host", number(result.ranks),
           number(result.states));
    }
    if (static_cast<double>(result.cuts) > 3 + L::cuts * states) {
      fail("%d of %d states are further from those of the host than rounding", number(result.cuts),
           number(result.states));
    }
  }

 private:
  MatrixView<const float> rows() const { return as_rows(directions_, config_); }
  Index any_slot() { return random_.among(0, config_.slots - 1); }
  std::int32_t padding() {
    return config_.padding == Padding::slot_zero ? 0
                                                 : static_cast<std::int32_t>(-random_.among(1, 9));
  }
  std::int32_t invalid() {
    if (config_.padding == Padding::slot_zero && random_.chance(0.5)) return -1;
    return static_cast<std::int32_t>(config_.slots + random_.among(0, 3));
  }
  Slots in_use(bool wanted) {
    Slots slots;
    for (Index s = 0; s < config_.slots; ++s) {
      if (config_.is_slot(s) && host_.view.in_use(s) == wanted) {
        slots.push_back(static_cast<std::int32_t>(s));
      }
    }
    std::shuffle(slots.begin(), slots.end(), random_.engine());
    return slots;
  }
  // Some requests in any order, with padding, slots that are none, and free ones in between.
  Slots some(double twice = 0) {
    Slots slots = in_use(true);
    slots.resize(size(random_.among(std::min<Index>(1, static_cast<Index>(slots.size())),
                                    static_cast<Index>(slots.size()))));
    const auto insert = [&](std::int32_t slot) {
      slots.insert(slots.begin() + random_.among(0, static_cast<Index>(slots.size())), slot);
    };
    if (random_.chance(0.4)) insert(padding());
    if (random_.chance(0.2)) insert(padding());
    if (random_.chance(0.2)) insert(invalid());
    const Slots free = in_use(false);
    if (!free.empty() && random_.chance(0.2)) insert(free.front());
    if (!slots.empty() && random_.chance(twice)) insert(slots.front());
    if (slots.empty()) insert(padding());
    return slots;
  }
  static std::string listed(const Slots& slots) {
    std::string text;
    for (const std::int32_t slot : slots) text += (text.empty() ? "" : " ") + std::to_string(slot);
    return "[" + text + "]";
  }

  void one() {
    computed_ = false;
    compare_ = [this] { want_same_slots("device", after_.view, host_.view); };
    const double kind = random_.uniform();
    const auto used = static_cast<Index>(in_use(true).size());
    if (used < 2 || kind < 0.06) return admit();
    if (kind < 0.09) return release();
    if (kind < 0.11) return reset();
    if (kind < 0.16) return fork();
    if (kind < 0.22) return roll_back();
    if (kind < 0.28) return open_draft();
    if (kind < 0.36) return close_draft();
    if (kind < 0.42) return initialize();
    if (kind < 0.46) return materialize();
    if (kind < 0.66) return compact();
    return step();
  }

  // -- Without arithmetic

  void admit() {
    Slots slots{static_cast<std::int32_t>(any_slot())};
    const Slots free = in_use(false);
    if (!free.empty()) slots.push_back(free.front());
    if (free.size() > 1 && random_.chance(0.5)) slots.push_back(free.back());
    if (random_.chance(0.3)) slots.push_back(invalid());
    name_ = "admit " + listed(slots);
    // Which of two that ask for the same slot gets it is not promised.
    std::set<std::int32_t> seen;
    Slots once;
    for (const std::int32_t slot : slots) {
      if (seen.insert(slot).second) once.push_back(slot);
    }
    each("admit", once, device_.admit(once),
         [&](Index b) { return sinkstate::admit(host_.view, once[size(b)]); });
  }
  void release() {
    const Slots slots = some(0.3);
    Slots few(slots.begin(),
              slots.begin() + std::min<std::ptrdiff_t>(2, std::ptrdiff_t(slots.size())));
    name_ = "release " + listed(few);
    each("release", few, device_.release(few),
         [&](Index b) { return sinkstate::release(host_.view, few[size(b)]); });
  }
  void reset() {
    const Slots slots = some();
    Slots few(slots.begin(),
              slots.begin() + std::min<std::ptrdiff_t>(2, std::ptrdiff_t(slots.size())));
    name_ = "reset " + listed(few);
    each("reset", few, device_.reset(few),
         [&](Index b) { return sinkstate::reset(host_.view, few[size(b)]); });
  }
  void fork() {
    Slots from;
    Slots to;
    for (Index i = random_.among(1, 3); i > 0; --i) {
      from.push_back(static_cast<std::int32_t>(any_slot()));
      to.push_back(static_cast<std::int32_t>(any_slot()));
    }
    if (random_.chance(0.2)) from.front() = invalid();
    if (random_.chance(0.2)) to.back() = invalid();
    name_ = "fork " + listed(from) + " to " + listed(to);
    std::set<std::int32_t> made;
    each("fork", from, device_.fork(from, to), [&](Index b) {
      const std::int32_t source = from[size(b)];
      const std::int32_t target = to[size(b)];
      // A copy that the same call makes cannot be copied.
      const bool free = config_.is_slot(target) && !host_.view.in_use(target);
      if (made.count(source) != 0 && free) return Status::invalid_slot;
      const Status status = sinkstate::fork(host_.view, source, target);
      if (status == Status::ok) made.insert(target);
      return status;
    });
  }
  Slots numbers_for(const Slots& slots, Index first, Index last) {
    Slots numbers;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      numbers.push_back(static_cast<std::int32_t>(random_.among(first, last)));
    }
    return numbers;
  }
  void roll_back() {
    const Slots slots = some();
    const Slots tokens = numbers_for(slots, random_.chance(0.2) ? -1 : 0, 3);
    name_ = "roll_back " + listed(slots) + " by " + listed(tokens);
    each("roll_back", slots, device_.roll_back(slots, tokens), [&](Index b) {
      return sinkstate::roll_back(host_.view, slots[size(b)], tokens[size(b)]);
    });
  }
  void open_draft() {
    const Slots slots = some();
    name_ = "open_draft " + listed(slots);
    each("open_draft", slots, device_.open_draft(slots),
         [&](Index b) { return sinkstate::open_draft(host_.view, slots[size(b)]); });
  }
  void close_draft() {
    const Slots slots = some();
    const Slots rejected = numbers_for(slots, random_.chance(0.1) ? -1 : 0, 2);
    name_ = "close_draft " + listed(slots) + " by " + listed(rejected);
    each("close_draft", slots, device_.close_draft(slots, rejected), [&](Index b) {
      return sinkstate::close_draft(host_.view, slots[size(b)], rejected[size(b)]);
    });
  }
  template <class OnHost>
  void each(const char* verb, const Slots& slots, const Statuses& found, const OnHost& on_host) {
    Statuses wanted;
    for (Index b = 0; b < static_cast<Index>(slots.size()); ++b) wanted.push_back(on_host(b));
    want_statuses(verb, found, wanted);
  }

  // -- Bodies

  // As many entries from the first on as the reserve suffices for, whoever is served first.
  template <class Need>
  Slots affordable(const Slots& slots, const Need& need) {
    const auto& pool = host_.view;
    Index left = *pool.reserve.free;
    Slots some_of_them;
    std::set<std::int32_t> seen;
    for (const std::int32_t slot : slots) {
      Index wanted = 0;
      for (Index h = 0; pool.in_use(slot) && h < config_.value_heads; ++h) {
        const Index more = detail::beyond_quota(pool, need(pool.state(slot, h))) -
                           detail::beyond_quota(pool, *pool.head(slot, h).held);
        wanted += std::max<Index>(more, 0);
      }
      if (seen.count(slot) == 0 && wanted > left) continue;
      left -= seen.insert(slot).second ? wanted : 0;
      some_of_them.push_back(slot);
    }
    return some_of_them;
  }

  void compact() {
    const bool only_due = random_.chance(0.6);
    const Slots slots =
        affordable(some(0.15), [](const auto& state) { return detail::rows_to_compact(state); });
    name_ = (only_due ? "compact_due " : "compact ") + listed(slots);
    const auto entries = static_cast<Index>(slots.size());
    if (entries == 0) return;
    Statuses wanted(slots.size(), Status::ok);
    if (only_due) {
      (void)sinkstate::compact_due(teams_, host_.view, slots.data(), entries, wanted.data());
      want_statuses("compact_due", device_.compact_due(slots), wanted);
    } else {
      (void)sinkstate::compact(teams_, host_.view, slots.data(), entries, wanted.data());
      want_statuses("compact", device_.compact(slots), wanted);
    }
    computed_ = true;
    compare_ = [this, slots] {
      std::set<std::int32_t> listed(slots.begin(), slots.end());
      for (Index s = 0; s < config_.slots; ++s) {
        const bool worked = config_.is_slot(s) && host_.view.in_use(s) &&
                            before_.view.slot(s).buffered > 0 && host_.view.slot(s).buffered == 0;
        if (!worked) {
          want_same_slot("a slot that is not compacted", after_.view, before_.view, s);
          continue;
        }
        if (listed.count(static_cast<std::int32_t>(s)) == 0)
          fail("slot %d is compacted", number(s));
        if (after_.view.slot(s).bodies.now() <= before_.view.slot(s).bodies.now()) {
          fail("slot %d is compacted, but its version is the same", number(s));
        }
        compare_bodies(s, true);
      }
    };
  }

  void initialize() {
    Slots slots;
    for (const std::int32_t slot : some()) {
      if (std::count(slots.begin(), slots.end(), slot) == 0) slots.push_back(slot);
    }
    const Index most = StatePoolView<P>::most_rows(config_.state);
    slots = affordable(slots, [&](const auto&) { return most; });
    if (slots.size() > 3) slots.resize(3);
    name_ = "initialize " + listed(slots);
    const auto entries = static_cast<Index>(slots.size());
    if (entries == 0) return;
    const StateConfig& state = config_.state;
    const Index numbers = state.d_k * state.d_v;
    const Index heads = config_.value_heads;
    DenseNumbers dense;
    dense.states.resize(size(entries * heads * numbers));
    for (Index i = 0; i < entries * heads; ++i) draw_dense(dense.states.data() + i * numbers);
    const bool plain = random_.chance(0.3);
    for (Index b = 0; !plain && b < entries; ++b) {
      dense.tokens.push_back(random_.among(0, 1000));
      for (Index h = 0; h < heads; ++h) {
        dense.certificates.push_back(static_cast<float>(1e-4 * random_.uniform()));
      }
    }
    const Index bad = random_.among(0, 3 * entries);
    if (bad < entries) {
      const double kind = plain ? 0 : random_.uniform();
      const Index h = random_.among(0, heads - 1);
      name_ += ", bad entry " + std::to_string(bad);
      if (kind < 0.4) {
        dense.states[size((bad * heads + h) * numbers + random_.among(0, numbers - 1))] =
            random_.chance(0.5) ? std::numeric_limits<float>::quiet_NaN()
                                : -std::numeric_limits<float>::infinity();
      } else if (kind < 0.7) {
        dense.tokens[size(bad)] = -1;
      } else {
        dense.certificates[size(bad * heads + h)] =
            random_.chance(0.5) ? -1.0f : std::numeric_limits<float>::quiet_NaN();
      }
    }
    Statuses wanted;
    for (Index b = 0; b < entries; ++b) {
      const Index slot = slots[size(b)];
      if (config_.is_padding(slot)) {
        wanted.push_back(Status::ok);
        continue;
      }
      const auto states = DenseStates<const float>::keys_by_values(
          dense.states.data() + b * heads * numbers, state.d_k, state.d_v);
      wanted.push_back(sinkstate::initialize(
          teams_, host_.view, slot, states, plain ? 0 : dense.tokens[size(b)], RandomizedSvd{},
          plain ? nullptr : dense.certificates.data() + b * heads));
    }
    want_statuses("initialize", device_.initialize(slots, dense), wanted);
    computed_ = true;
    compare_ = [this, slots, wanted] {
      std::set<Index> worked;
      for (std::size_t b = 0; b < slots.size(); ++b) {
        if (!config_.is_padding(slots[b]) && wanted[b] == Status::ok) worked.insert(slots[b]);
      }
      for (Index s = 0; s < config_.slots; ++s) {
        if (worked.count(s) == 0) {
          want_same_slot("a slot that is not initialised", after_.view, before_.view, s);
        } else {
          compare_bodies(s, false);
        }
      }
    };
  }
  // Terms that fall from one to the next, so that it is clear which are kept; or of all ranks.
  void draw_dense(float* matrix) {
    const Index d_k = config_.state.d_k;
    const Index d_v = config_.state.d_v;
    constexpr bool fixed = P::Compaction::low_rank && !P::Compaction::adaptive;
    if (!fixed && random_.chance(0.25)) {
      for (Index i = 0; i < d_k * d_v; ++i) matrix[i] = 0.1f * random_.gauss();
      return;
    }
    std::vector<double> sums(size(d_k * d_v), 0.0);
    double strength = 1;
    for (Index r = 0; r < std::min<Index>(config_.state.full_rank(), 40); ++r, strength *= 0.7) {
      std::vector<double> u(size(d_k)), w(size(d_v));
      for (double& x : u) x = static_cast<double>(random_.gauss()) / std::sqrt(d_k);
      for (double& x : w) x = static_cast<double>(random_.gauss()) / std::sqrt(d_v);
      for (Index i = 0; i < d_k; ++i) {
        for (Index j = 0; j < d_v; ++j) {
          sums[size(i * d_v + j)] += strength * u[size(i)] * w[size(j)];
        }
      }
    }
    for (Index i = 0; i < d_k * d_v; ++i) matrix[i] = static_cast<float>(sums[size(i)]);
  }

  void materialize_on_host(const StatePoolView<P>& pool, Index slot, std::vector<float>& states,
                           std::vector<float>& certificates) {
    const StateConfig& state = config_.state;
    states.resize(size(config_.value_heads * state.d_k * state.d_v));
    certificates.resize(size(config_.value_heads));
    want_host("materialize", sinkstate::materialize(teams_, pool, slot,
                                                    DenseStates<float>::keys_by_values(
                                                        states.data(), state.d_k, state.d_v),
                                                    certificates.data()));
  }

  void materialize() {
    const Slots slots = some(0.2);
    name_ = "materialize " + listed(slots);
    const Index numbers = config_.state.d_k * config_.state.d_v;
    const Index heads = config_.value_heads;
    DenseNumbers found;
    const float untouched = -12345.0f;
    found.states.assign(slots.size() * size(heads * numbers), untouched);
    found.certificates.assign(slots.size() * size(heads), untouched);
    const Statuses statuses = device_.materialize(slots, found);
    Statuses wanted;
    for (Index b = 0; b < static_cast<Index>(slots.size()); ++b) {
      const Index slot = slots[size(b)];
      const bool works = !config_.is_padding(slot) && host_.view.in_use(slot);
      wanted.push_back(works || config_.is_padding(slot) ? Status::ok : Status::invalid_slot);
      std::vector<float> states, certificates;
      if (works) materialize_on_host(host_.view, slot, states, certificates);
      for (Index h = 0; h < heads; ++h) {
        const float* const here = found.states.data() + (b * heads + h) * numbers;
        const float certificate = found.certificates[size(b * heads + h)];
        if (!works) {
          if (std::count(here, here + numbers, untouched) != numbers || certificate != untouched) {
            fail("entry %d has no request, but something was written", number(b));
          }
          continue;
        }
        const float* const there = states.data() + h * numbers;
        const double scale = std::max(norm(there, numbers), Limits<P>::floor * mass(slot, h));
        within("materialised state", result.state, distance(here, there, numbers), scale, 1e-5,
               slot, h);
        const auto exact = static_cast<double>(certificates[size(h)]);
        within("certificate of a materialised state", result.certificate,
               std::abs(static_cast<double>(certificate) - exact), exact, 1e-4, slot, h);
      }
    }
    want_statuses("materialize", statuses, wanted);
  }

  double mass(Index slot, Index h) const {
    const auto state = host_.view.state(slot, h);
    return static_cast<double>(state.buffer.masses[state.buffered()]);
  }
  void within(const char* what, double& worst, double error, double scale, double limit, Index slot,
              Index h) {
    if (error == 0) return;
    include(worst, error / scale);
    if (!(error <= limit * scale)) {
      fail("%s of slot %d, head %d: off by %.3e of %.3e, which is %.2e, more than %.0e", what,
           number(slot), number(h), error, scale, error / scale, limit);
    }
  }

  // After bodies were rewritten.
  void compare_bodies(Index slot, bool compacted) {
    using L = Limits<P>;
    want_record("device", after_.view, host_.view, slot);
    if (after_.view.slot(slot).buffered != 0) fail("slot %d: tokens are buffered", number(slot));
    std::vector<float> found, wanted, own, bounds;
    materialize_on_host(after_.view, slot, found, own);
    materialize_on_host(host_.view, slot, wanted, bounds);
    const Index numbers = config_.state.d_k * config_.state.d_v;
    for (Index h = 0; h < config_.value_heads; ++h) {
      const auto here = after_.view.state(slot, h);
      const auto there = host_.view.state(slot, h);
      result.states += 1;
      result.dense += there.dense() ? 1 : 0;
      result.largest_rank = std::max(result.largest_rank, there.rank());
      if (here.record->tokens != there.record->tokens ||
          here.record->compactions != there.record->compactions) {
        fail("slot %d, head %d: %lld tokens and %lld compactions, wanted %lld and %lld",
             number(slot), number(h), static_cast<long long>(here.record->tokens),
             static_cast<long long>(here.record->compactions),
             static_cast<long long>(there.record->tokens),
             static_cast<long long>(there.record->compactions));
      }
      const float* const a = found.data() + h * numbers;
      const float* const b = wanted.data() + h * numbers;
      const double apart = distance(a, b, numbers);
      const double scale = std::max(norm(b, numbers), L::floor * mass(slot, h));
      // Each is within its certificate of what is exact.
      const double allowed =
          static_cast<double>(own[size(h)]) + static_cast<double>(bounds[size(h)]);
      if (!(apart <= allowed + 1e-30)) {
        fail("slot %d, head %d: the states are %.3e apart, their certificates add up to %.3e",
             number(slot), number(h), apart, allowed);
      }
      if (here.rank() != there.rank() || here.dense() != there.dense()) {
        result.ranks += 1;
        if (compacted) want_close_cut(slot, h);
        continue;
      }
      if (apart > L::state * scale) {
        result.cuts += 1;
      } else if (apart != 0) {
        include(result.state, apart / scale);
      }
      const auto exact = static_cast<double>(there.certificate());
      const double off = std::abs(static_cast<double>(here.certificate()) - exact);
      if (off > 1e-6 * mass(slot, h)) {
        within("certificate", result.certificate, off, exact, L::certificate, slot, h);
      }
    }
  }
  // Ranks may differ for terms as strong as the threshold.
  void want_close_cut(Index slot, Index h) {
    const auto here = after_.view.state(slot, h);
    const auto there = host_.view.state(slot, h);
    if (before_.view.state(slot, h).dense() || here.dense() || there.dense()) return;
    if (!P::Compaction::adaptive) {
      fail("slot %d, head %d: a fixed rank of %d, wanted %d", number(slot), number(h),
           number(here.rank()), number(there.rank()));
    }
    const auto more = here.rank() > there.rank() ? here : there;
    const Index fewer = std::min(here.rank(), there.rank());
    double strongest = more.rank() > 0 ? static_cast<double>(more.factors.strength(0)) : 0;
    if constexpr (P::Sink::present) {
      // What the sink is as strong as is not stored; its coefficients and direction are.
      const auto sink = more.sink;
      double squares = 0;
      for (Index i = 0; i < config_.state.d_k; ++i) squares += std::pow(sink_number(sink, i), 2);
      strongest =
          std::max(strongest, std::sqrt(squares) * norm(more.sink_direction, config_.state.d_v));
    }
    for (Index i = fewer; i < more.rank(); ++i) {
      const auto strength = static_cast<double>(more.factors.strength(i));
      bool close = strength <= 1e-6 * strongest;
      for (const double share : {1.0, config_.state.tail_share}) {
        const double threshold = share * config_.state.epsilon * strongest;
        close = close || std::abs(strength - threshold) <= 1e-5 * threshold + 1e-6 * strongest;
      }
      if (!close) {
        fail(
            "slot %d, head %d: rank %d, wanted %d, but term %d has strength %.6e, and the "
            "strongest is %.6e",
            number(slot), number(h), number(here.rank()), number(there.rank()), number(i), strength,
            strongest);
      }
    }
  }
  template <class Rows>
  static double sink_number(const Rows& sink, Index i) {
    using Body = detail::StoredAs<typename P::Stored>;
    if constexpr (Body::scaled) {
      return static_cast<double>(widened<typename P::Stored>(sink.codes(0, i))) *
             static_cast<double>(sink.scales(0, 0));
    } else if constexpr (Body::narrow) {
      return static_cast<double>(widened<typename P::Stored>(sink.codes(0, i)));
    } else {
      return static_cast<double>(sink(0, i));
    }
  }

  // -- Steps

  void step() {
    const Index capacity = config_.state.buffer_capacity();
    Slots slots = some(0.15);
    const auto entries = static_cast<Index>(slots.size());
    const Index most = random_.among(1, 4);
    const double mode = random_.uniform();  // of counts: all equal, some fewer, packed
    const Index gap = random_.chance(0.6) ? 0 : random_.among(1, 4);
    const Index rows_per_entry = std::max(most, Index{4});
    auto batch = std::make_shared<Batch<P>>(config_, entries, entries * rows_per_entry, gap);
    auto& tokens = batch->batch;
    tokens.tokens = most;
    name_ = "step " + listed(slots);
    Slots counts(slots.size(), static_cast<std::int32_t>(most));
    if (mode > 0.3) {
      for (auto& count : counts) count = static_cast<std::int32_t>(random_.among(0, most));
      if (mode < 0.7 && random_.chance(0.15)) {
        counts[size(random_.among(0, entries - 1))] =
            random_.chance(0.5) ? -1 : static_cast<std::int32_t>(capacity + 1);
      }
      if (mode < 0.7) {
        tokens.counts = batch->counts;
      } else {
        tokens.starts = batch->starts;
      }
    }
    name_ += " counts " + listed(counts);
    const bool forks = random_.chance(0.3);
    Slots targets = slots;
    if (forks) {
      for (Index b = 0; b < entries; ++b) {
        if (random_.chance(0.4)) targets[size(b)] = static_cast<std::int32_t>(any_slot());
        if (random_.chance(0.05)) targets[size(b)] = invalid();
      }
      tokens.write_slots = batch->write_slots;
      name_ += " into " + listed(targets);
    }
    for (Index b = 0; b < entries; ++b) {
      batch->slots[b] = slots[size(b)];
      batch->write_slots[b] = targets[size(b)];
      batch->counts[b] = counts[size(b)];
      batch->starts[b + 1] = batch->starts[b] + std::max(counts[size(b)], 0);
    }
    // Inputs of padding stay NaN.
    for (Index b = 0; b < entries; ++b) {
      if (config_.is_padding(slots[size(b)])) continue;
      for (Index t = 0; t < std::min<Index>(counts[size(b)], rows_per_entry); ++t) {
        draw_token(random_, *batch, tokens.start(b) + t);
      }
    }
    if (random_.chance(0.08)) tokens.outputs = {};
    if (random_.chance(0.1)) tokens.write_strengths = {};
    if (random_.chance(0.3)) spoil(*batch, slots, targets, counts);

    std::vector<float> outputs;
    const TokenBatch<float> on_host = batch->with_outputs(outputs);
    Statuses wanted(slots.size(), Status::ok);
    (void)sinkstate::step(teams_, host_.view, on_host, wanted.data());

    StepPath path = StepPath::usual;
    std::set<std::int32_t> seen(slots.begin(), slots.end());
    if (!forks && seen.size() == slots.size() && random_.chance(0.4)) path = StepPath::distinct;
    if (path == StepPath::usual && random_.chance(0.4)) {
      path = random_.chance(0.5) ? StepPath::one_warp : StepPath::four_warps;
    }
    name_ += " path " + std::to_string(static_cast<int>(path));
    want_statuses("step", device_.step(tokens, batch->transfer(), path), wanted);
    computed_ = true;
    compare_ = [this, batch, slots, targets, counts, wanted, outputs] {
      compare_step(*batch, slots, targets, counts, wanted, outputs);
    };
  }

  // Makes a number of one entry, which does not fork, one that is refused.
  void spoil(Batch<P>& batch, const Slots& slots, const Slots& targets, const Slots& counts) {
    const Index b = random_.among(0, static_cast<Index>(slots.size()) - 1);
    const Index count = std::min<Index>(counts[size(b)], 4);
    if (slots[size(b)] != targets[size(b)] || count < 1 || config_.is_padding(slots[size(b)])) {
      return;
    }
    const auto& tokens = batch.batch;
    const Index row = tokens.start(b) + random_.among(0, count - 1);
    const Index h = random_.among(0, config_.value_heads - 1);
    const Index k = config_.key_head(h);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const Index decays = P::Rule::log_decays(config_.state.d_k);
    const double kind = random_.uniform();
    name_ += ", bad row " + std::to_string(row) + " head " + std::to_string(h) + " kind " +
             std::to_string(kind);
    if (kind < 0.2) {
      batch.keys.at(row, k)[random_.among(0, config_.state.d_k - 1)] = nan;
    } else if (kind < 0.4) {
      batch.values.at(row, h)[random_.among(0, config_.state.d_v - 1)] =
          std::numeric_limits<float>::infinity();
    } else if (kind < 0.5) {
      batch.queries.at(row, k)[random_.among(0, config_.state.d_k - 1)] = nan;
    } else if (kind < 0.6) {
      *batch.write_strengths.at(row, h) = nan;
    } else if (kind < 0.75) {
      if (decays > 0) batch.log_decays.at(row, h)[random_.among(0, decays - 1)] = nan;
    } else if (kind < 0.9) {
      if (decays > 0) batch.log_decays.at(row, h)[random_.among(0, decays - 1)] = 0.5f;
    } else if (tokens.write_strengths.data != nullptr) {
      batch.values.at(row, h)[config_.state.d_v - 1] = 3e38f;
      *batch.write_strengths.at(row, h) = 8.0f;
    }
  }

  void compare_step(const Batch<P>& batch, const Slots& slots, const Slots& targets,
                    const Slots& counts, const Statuses& statuses,
                    const std::vector<float>& outputs) {
    const auto& tokens = batch.batch;
    const bool reads = tokens.outputs.data != nullptr;
    const Index d_v = config_.state.d_v;
    std::set<Index> stepped;
    std::set<Index> written_rows;
    for (Index b = 0; b < tokens.entries; ++b) {
      if (config_.is_padding(slots[size(b)])) continue;
      const Status status = statuses[size(b)];
      const Index count = counts[size(b)];
      // Numbers that are refused are found in mid-step: some outputs may be there.
      const bool looked_at = status == Status::ok || status == Status::non_finite_input ||
                             status == Status::positive_log_decay || status == Status::overflow;
      for (Index t = 0; looked_at && t < count; ++t) written_rows.insert(tokens.start(b) + t);
      if (status != Status::ok) continue;
      stepped.insert(targets[size(b)]);
      for (Index t = 0; reads && t < count; ++t) {
        const Index row = tokens.start(b) + t;
        for (Index h = 0; h < config_.value_heads; ++h) {
          const float* const here = batch.output(row, h);
          const float* const there =
              outputs.data() + row * tokens.outputs.token_stride + h * tokens.outputs.head_stride;
          const double query = norm(tokens.queries.at(row, config_.key_head(h)), config_.state.d_k);
          const double scale =
              std::max(norm(there, d_v), Limits<P>::floor * mass(targets[size(b)], h) * query);
          within("output", result.output, distance(here, there, d_v), scale, Limits<P>::step,
                 targets[size(b)], h);
        }
      }
    }
    for (Index row = 0; row < batch.row_count; ++row) {
      for (Index h = 0; h < config_.value_heads; ++h) {
        if (written_rows.count(row) == 0 && !batch.untouched(row, h)) {
          fail(
              "B38: outputs of row %d, head %d, were written, which belong to no token that is "
              "applied",
              number(row), number(h));
        }
      }
    }
    for (Index s = 0; s < config_.slots; ++s) {
      if (stepped.count(s) != 0) {
        compare_stepped(s);
      } else {
        want_same_slot("a slot that is not stepped", after_.view, host_.view, s);
        // Refused entries, too; only a fork whose result overflows replaces what was there.
        const bool written = std::count(targets.begin(), targets.end(), s) != 0;
        if (!written) want_same_slot("an untouched slot", after_.view, before_.view, s);
      }
    }
  }

  void compare_stepped(Index slot) {
    using L = Limits<P>;
    const auto& found = after_.view;
    const auto& wanted = host_.view;
    want_record("a stepped slot", found, wanted, slot);
    const Index buffered = wanted.slot(slot).buffered;
    const Index d_k = config_.state.d_k;
    const Index d_v = config_.state.d_v;
    const auto same = [&](const char* what, Index h, const void* a, const void* b, Index bytes) {
      const std::ptrdiff_t place = difference(a, b, size(bytes));
      if (place >= 0) {
        fail("%s of slot %d, head %d, differ at byte %d", what, number(slot), number(h),
             static_cast<int>(place));
      }
    };
    for (Index h = 0; h < config_.value_heads; ++h) {
      const auto here = found.state(slot, h);
      const auto there = wanted.state(slot, h);
      const auto a = found.head(slot, h);
      const auto b = wanted.head(slot, h);
      // A step changes no body.
      same("counters", h, here.record, there.record, sizeof(StateRecord));
      if (*a.held != *b.held || here.rank() != there.rank()) {
        fail("slot %d, head %d: rank %d in %d rows, wanted %d in %d", number(slot), number(h),
             number(here.rank()), *a.held, number(there.rank()), *b.held);
      }
      const Index width = d_k + d_v;
      const Index scales = StatePoolView<P>::Factors::row_scales(d_k, d_v);
      const Index code = sizeof(typename StatePoolView<P>::Code);
      for (Index i = 0; i < detail::rows_in_use(wanted, b); ++i) {
        const Index x = a.list[i];
        const Index y = b.list[i];
        // Of a dense body the last row may be full in part.
        const Index per_row = StatePoolView<P>::Factors::matrix_rows_per_row(d_k, d_v);
        const Index full = there.dense() ? std::min(per_row, d_k - i * per_row) * d_v : width;
        same("rows", h, found.components + x * width, wanted.components + y * width, full * code);
        if (!there.dense()) same("strengths", h, found.strengths + x, wanted.strengths + y, 4);
        const Index used =
            there.dense() ? std::min(scales, full / d_v) : std::min<Index>(scales, 2);
        same("scales", h, found.scales + x * scales, wanted.scales + y * scales, used * 4);
      }
      if constexpr (P::Sink::present) {
        same("sinks", h, detail::codes_of(a.sink).data, detail::codes_of(b.sink).data, d_k * code);
      }
      const Index buffered_code = sizeof(typename StatePoolView<P>::BufferedCode);
      same("keys", h, detail::codes_of(here.buffer.keys).data,
           detail::codes_of(there.buffer.keys).data, buffered * d_k * buffered_code);
      same("log decays", h, here.buffer.log_decays.data, there.buffer.log_decays.data,
           buffered * here.buffer.log_decays.cols * 4);
      for (Index j = 0; j < buffered; ++j) {
        std::vector<float> x(size(d_v)), y(size(d_v));
        for (Index i = 0; i < d_v; ++i) {
          x[size(i)] =
              widened<typename P::Buffered>(detail::codes_of(here.buffer.corrections).row(j)[i]);
          y[size(i)] =
              widened<typename P::Buffered>(detail::codes_of(there.buffer.corrections).row(j)[i]);
        }
        const double scale = std::max(norm(y.data(), d_v),
                                      L::floor * static_cast<double>(there.buffer.masses[j + 1]));
        within("correction", result.output, distance(x.data(), y.data(), d_v), scale, L::step, slot,
               h);
      }
      for (Index j = 0; j <= buffered; ++j) {
        const auto bound = static_cast<double>(there.buffer.certificates[j]);
        within("certificate", result.certificate,
               std::abs(static_cast<double>(here.buffer.certificates[j]) - bound), bound,
               L::step_certificate, slot, h);
        const auto mass_there = static_cast<double>(there.buffer.masses[j]);
        double ignored = 0;
        within("mass", ignored, std::abs(static_cast<double>(here.buffer.masses[j]) - mass_there),
               mass_there, L::step_certificate, slot, h);
      }
    }
  }

  PoolConfig config_;
  Random random_;
  std::vector<float> directions_;
  Image<P> host_, before_, after_;
  DevicePool<P> device_;
  HostTeams teams_;
  std::string name_;
  bool computed_ = false;
  std::function<void()> compare_;
};

// ---- A pool on a device with an image --------------------------------------------------------

template <class P>
class Bench {
 public:
  Bench(const PoolConfig& pool, unsigned seed)
      : config(pool),
        random(seed),
        directions(draw_directions(random, config, P::Sink::present)),
        device(config, directions.empty() ? nullptr : directions.data()),
        image(config, as_rows(directions, config)),
        other(config, as_rows(directions, config)) {}

  Slots all() const {
    Slots slots;
    for (Index s = 0; s < config.slots; ++s) {
      if (config.is_slot(s)) slots.push_back(static_cast<std::int32_t>(s));
    }
    return slots;
  }
  std::shared_ptr<Batch<P>> batch(const Slots& slots, Index tokens, Index gap = 0) {
    auto made = std::make_shared<Batch<P>>(config, static_cast<Index>(slots.size()),
                                           static_cast<Index>(slots.size()) * tokens, gap);
    std::copy(slots.begin(), slots.end(), made->slots);
    made->batch.tokens = tokens;
    for (Index row = 0; row < made->row_count; ++row) draw_token(random, *made, row);
    return made;
  }
  // Entry `to` of one batch gets the tokens of entry `from` of another.
  static void copy_tokens(const Batch<P>& source, Index from, Batch<P>& target, Index to,
                          Index count) {
    const PoolConfig& config = source.config;
    const Index d_k = config.state.d_k;
    for (Index t = 0; t < count; ++t) {
      const Index a = from + t;
      const Index b = to + t;
      for (Index k = 0; k < config.key_heads; ++k) {
        std::copy_n(source.keys.at(a, k), d_k, target.keys.at(b, k));
        std::copy_n(source.queries.at(a, k), d_k, target.queries.at(b, k));
      }
      for (Index h = 0; h < config.value_heads; ++h) {
        std::copy_n(source.values.at(a, h), config.state.d_v, target.values.at(b, h));
        std::copy_n(source.log_decays.at(a, h), P::Rule::log_decays(d_k),
                    target.log_decays.at(b, h));
        *target.write_strengths.at(b, h) = *source.write_strengths.at(a, h);
      }
    }
  }
  void step(Batch<P>& tokens, StepPath path = StepPath::usual) {
    want_ok("step", device.step(tokens.batch, tokens.transfer(), path));
  }
  // Some tokens into each of these, with the compactions that come.
  // Every slot, admitted and stepped so often; `image` is what they have become.
  Slots fed(int rounds) {
    const Slots slots = all();
    want_ok("admit", device.admit(slots));
    feed(slots, rounds);
    now();
    return slots;
  }
  void feed(const Slots& slots, int rounds) {
    for (int i = 0; i < rounds; ++i) {
      step(*batch(slots, 1));
      for (const Status status : device.compact_due(slots)) {
        if (status != Status::ok && status != Status::truncated) {
          fail("compact_due: %s", to_string(status));
        }
      }
    }
  }
  const StatePoolView<P>& now() {
    image.take(device);
    want_sound_rows("device", image.view);
    return image.view;
  }

  PoolConfig config;
  Random random;
  std::vector<float> directions;
  DevicePool<P> device;
  Image<P> image, other;
};

// Outputs of entries of two batches, bit for bit.
template <class P>
void want_same_outputs(const char* what, const Batch<P>& found, Index found_row,
                       const Batch<P>& wanted, Index wanted_row, Index rows) {
  const PoolConfig& config = found.config;
  for (Index t = 0; t < rows; ++t) {
    for (Index h = 0; h < config.value_heads; ++h) {
      const auto* const a = found.output(found_row + t, h);
      const auto* const b = wanted.output(wanted_row + t, h);
      const std::ptrdiff_t place = difference(a, b, size(config.state.d_v) * sizeof(*a));
      if (place < 0) continue;
      const auto i = place / std::ptrdiff_t(sizeof(*a));
      fail("%s: output of row %d, head %d, channel %d is %.9g, wanted %.9g", what,
           number(found_row + t), number(h), static_cast<int>(i), static_cast<double>(a[i]),
           static_cast<double>(b[i]));
    }
  }
}

// ---- 2. Faults -------------------------------------------------------------------------------

template <class P>
class Faults {
 public:
  Faults(const PoolConfig& config, unsigned seed) : config_(config), seed_(seed) {}

  Result result;

  // Each on pools of its own; what fails is put together.
  void run() {
    std::string faults;
    const auto part = [&](const char* name, void (Faults::*check)()) {
      try {
        (this->*check)();
        result.operations += 1;
      } catch (const std::exception& fault) {
        faults += (faults.empty() ? "" : "; ") + std::string(name) + ": " + fault.what();
      }
    };
    part("B33", &Faults::stale_memory);
    part("B34", &Faults::reset_clears);
    part("B35", &Faults::padding_as_index);
    part("B37, B38", &Faults::padded_rows);
    part("B52", &Faults::same_launches);
    part("B54, batch composition", &Faults::same_in_any_batch);
    part("B54, claims", &Faults::claims);
    part("refused fork", &Faults::refused_fork);
    part("B59", &Faults::capture_changes_nothing);
    part("B60", &Faults::drafts);
    part("B61", &Faults::draft_to_the_boundary);
    part("B64, copies", &Faults::copies);
    if (!faults.empty()) fail("%s", faults.c_str());
  }

 private:
  // A new request behaves the same whatever the slot's memory held.
  void stale_memory() {
    Bench<P> bench(config_, seed_);
    auto& pool = bench.now();
    const Index last = config_.slots - 1;
    const Slots slot{static_cast<std::int32_t>(last)};
    const Slots fresh{static_cast<std::int32_t>(last - 1)};
    const Index rows = pool.row_count(config_);
    const StateConfig& state = config_.state;
    std::vector<Index> held;
    std::memset(pool.components, 0xFF,
                size(rows * (state.d_k + state.d_v)) * sizeof(*pool.components));
    std::memset(pool.strengths, 0xFF, size(rows) * sizeof(float));
    const Index scales = rows * StatePoolView<P>::Factors::row_scales(state.d_k, state.d_v);
    if (scales > 0) std::memset(pool.scales, 0xFF, size(scales) * sizeof(float));
    std::memset(pool.slot_memory + size(last) * pool.slot_bytes, 0xFF, pool.slot_bytes);
    // A free slot holds no rows: that alone is true of it.
    for (Index h = 0; h < config_.value_heads; ++h) *pool.head(last, h).held = 0;
    bench.device.upload(bench.image.bytes.data());
    want_ok("admit", bench.device.admit({slot[0], fresh[0]}));
    for (int i = 0; i < 11; ++i) {
      auto tokens = bench.batch({slot[0], fresh[0]}, 1);
      Bench<P>::copy_tokens(*tokens, 0, *tokens, 1, 1);
      bench.step(*tokens);
      want_same_outputs("outputs beside those of a clean slot", *tokens, 0, *tokens, 1, 1);
      want_ok("compact_due", bench.device.compact_due({slot[0], fresh[0]}));
    }
    bench.now();
    want_same("snapshot beside that of a clean slot", snapshot_of(bench.image.view, slot[0]),
              snapshot_of(bench.image.view, fresh[0]));
  }

  // A slot that was reset, and one that was released and admitted, are as new.
  void reset_clears() {
    Bench<P> bench(config_, seed_ + 1);
    const auto first = static_cast<std::int32_t>(config_.slots - 3);
    const Slots used{first, first + 1};
    const Slots all{first, first + 1, first + 2};
    want_ok("admit", bench.device.admit(used));
    bench.feed(used, 14);
    want_ok("reset", bench.device.reset({used[0]}));
    want_ok("release", bench.device.release({used[1]}));
    want_ok("admit", bench.device.admit({used[1], all[2]}));
    for (int i = 0; i < 9; ++i) {
      auto tokens = bench.batch(all, 1);
      Bench<P>::copy_tokens(*tokens, 0, *tokens, 1, 1);
      Bench<P>::copy_tokens(*tokens, 0, *tokens, 2, 1);
      bench.step(*tokens);
      want_same_outputs("outputs after a reset", *tokens, 0, *tokens, 2, 1);
      want_same_outputs("outputs after a release", *tokens, 1, *tokens, 2, 1);
      want_ok("compact_due", bench.device.compact_due(all));
    }
    const auto& pool = bench.now();
    want_same("snapshot after a reset", snapshot_of(pool, all[0]), snapshot_of(pool, all[2]));
    want_same("snapshot after a release", snapshot_of(pool, all[1]), snapshot_of(pool, all[2]));
  }

  // All bytes of a slot: its record, its memory, and the rows of its quotas.
  void want_raw_slot(const StatePoolView<P>& a, const StatePoolView<P>& b, Index slot) {
    const auto same = [&](const char* what, const void* x, const void* y, std::size_t bytes) {
      const std::ptrdiff_t place = difference(x, y, bytes);
      if (place >= 0) fail("%s of slot %d: byte %d", what, number(slot), static_cast<int>(place));
    };
    same("record", &a.slot(slot), &b.slot(slot), sizeof(SlotRecord));
    same("memory", a.slot_memory + size(slot) * a.slot_bytes,
         b.slot_memory + size(slot) * b.slot_bytes, a.slot_bytes);
    const Index width = config_.state.d_k + config_.state.d_v;
    const Index rows = config_.value_heads * a.quota(config_);
    same("rows", a.components + slot * rows * width, b.components + slot * rows * width,
         size(rows * width) * sizeof(*a.components));
    same("strengths", a.strengths + slot * rows, b.strengths + slot * rows, size(rows) * 4);
  }

  void padding_as_index() {
    PoolConfig config = config_;
    config.slots = 5;
    config.padding = Padding::negative;
    Bench<P> bench(config, seed_ + 2);
    bench.fed(6);
    bench.other.take(bench.image);
    auto tokens = bench.batch({-1, 3}, 2);
    bench.step(*tokens);
    want_ok("compact", bench.device.compact({-1, 3}));
    bench.now();
    for (Index s : {0, 1, 2, 4}) want_raw_slot(bench.image.view, bench.other.view, s);
    if (bench.image.view.slot(3).tokens != bench.other.view.slot(3).tokens + 2) {
      fail("slot 3 was not stepped");
    }
  }

  // Rows of padding first, in the middle and last: their inputs are NaN, their outputs stay.
  void padded_rows() {
    Bench<P> bench(config_, seed_ + 3);
    const Slots slots = bench.fed(5);
    const std::int32_t none = config_.padding == Padding::slot_zero ? 0 : -1;
    const Slots spread{none, slots[0], none, none, slots[1], none};
    auto alone = bench.batch({slots[0], slots[1]}, 1);
    auto padded = std::make_shared<Batch<P>>(config_, 6, 6);
    std::copy(spread.begin(), spread.end(), padded->slots);
    Bench<P>::copy_tokens(*alone, 0, *padded, 1, 1);
    Bench<P>::copy_tokens(*alone, 1, *padded, 4, 1);
    bench.step(*alone);
    bench.other.take(bench.device);
    for (const StepPath path : {StepPath::usual, StepPath::distinct}) {
      bench.device.upload(bench.image.bytes.data());
      bench.step(*padded, path);
      want_same_outputs("beside padding", *padded, 1, *alone, 0, 1);
      want_same_outputs("beside padding", *padded, 4, *alone, 1, 1);
      for (const Index row : {0, 2, 3, 5}) {
        for (Index h = 0; h < config_.value_heads; ++h) {
          if (!padded->untouched(row, h)) fail("outputs of padded row %d", number(row));
        }
      }
      Image<P> after(config_, as_rows(bench.directions, config_));
      after.take(bench.device);
      want_same_slots("beside padding", after.view, bench.other.view);
    }
  }

  void same_launches() {
    Bench<P> bench(config_, seed_ + 4);
    const Slots slots = bench.fed(7);
    auto tokens = bench.batch(slots, 2);
    Bytes image;
    Bytes outputs;
    for (int launch = 0; launch < 5; ++launch) {
      bench.device.upload(bench.image.bytes.data());
      bench.step(*tokens);
      for (const Status status : bench.device.compact(slots)) {
        if (status != Status::ok && status != Status::truncated) fail("%s", to_string(status));
      }
      bench.other.take(bench.device);
      if (launch == 0) {
        image = bench.other.bytes;
        outputs = tokens->received;
      }
      want_same("the pool after another launch", bench.other.bytes, image);
      want_same("outputs of another launch", tokens->received, outputs);
    }
  }

  // An entry's bits are the same alone and among others, by one warp and by four.
  void same_in_any_batch() {
    Bench<P> bench(config_, seed_ + 5);
    const Slots slots = bench.fed(9);
    const Index count = 3;
    auto together = bench.batch(slots, count);
    bench.step(*together);
    bench.other.take(bench.device);
    Image<P> after(config_, as_rows(bench.directions, config_));
    for (const StepPath path : {StepPath::distinct, StepPath::one_warp, StepPath::four_warps}) {
      bench.device.upload(bench.image.bytes.data());
      auto again = bench.batch(slots, count);
      Bench<P>::copy_tokens(*together, 0, *again, 0, together->row_count);
      bench.step(*again, path);
      const std::string name = "by path " + std::to_string(static_cast<int>(path));
      want_same_outputs(name.c_str(), *again, 0, *together, 0, together->row_count);
      after.take(bench.device);
      want_same_slots(name.c_str(), after.view, bench.other.view);
    }
    bench.device.upload(bench.image.bytes.data());
    for (Index b = static_cast<Index>(slots.size()) - 1; b >= 0; --b) {
      // One after the other too: the tokens of a call or of three are the same.
      const bool split = b % 2 == 0;
      for (Index t = 0; t < (split ? count : 1); ++t) {
        auto alone = bench.batch({slots[size(b)]}, split ? 1 : count);
        Bench<P>::copy_tokens(*together, b * count + t, *alone, 0, alone->row_count);
        bench.step(*alone);
        want_same_outputs("alone", *alone, 0, *together, b * count + t, alone->row_count);
      }
    }
    after.take(bench.device);
    want_same_slots("alone", after.view, bench.other.view);
    // And a compaction.
    Slots backwards(slots.rbegin(), slots.rend());
    if (config_.reserve == 0) {
      want_ok("compact", bench.device.compact(slots));
      bench.image.take(bench.device);
      bench.device.upload(bench.other.bytes.data());
      for (const std::int32_t slot : backwards) want_ok("compact", bench.device.compact({slot}));
      after.take(bench.device);
      want_same_slots("compacted alone", after.view, bench.image.view);
    }
  }

  // Two entries would replace a slot that a third forks: all that write there are refused, whichever
  // thread looks first.
  void claims() {
    Bench<P> bench(config_, seed_ + 11);
    const Slots slots = bench.fed(2);
    constexpr Index groups = 40;  // of three entries, more than a warp has threads
    Batch<P> tokens(config_, 3 * groups, 3 * groups);
    tokens.batch.write_slots = tokens.write_slots;
    Statuses wanted;
    for (Index row = 0; row < tokens.row_count; ++row) draw_token(bench.random, tokens, row);
    for (Index g = 0; g < groups; ++g) {
      const std::int32_t from[3] = {slots[0], slots[1], slots[2]};
      const std::int32_t to[3] = {slots[2], slots[2], slots[3]};
      std::copy(from, from + 3, tokens.slots + 3 * g);
      std::copy(to, to + 3, tokens.write_slots + 3 * g);
      wanted.insert(wanted.end(), {Status::invalid_slot, Status::invalid_slot,
                                   g == 0 ? Status::ok : Status::invalid_slot});
    }
    want_statuses("step", bench.device.step(tokens.batch, tokens.transfer()), wanted);
    bench.other.take(bench.device);
    for (const std::int32_t slot : slots) {
      if (slot == slots[3]) continue;
      want_same_slot("a slot that was not to be replaced", bench.other.view, bench.image.view,
                     slot);
    }
    if (bench.other.view.slot(slots[3]).tokens != bench.image.view.slot(slots[2]).tokens + 1) {
      fail("the fork has not the tokens of its original and one more");
    }
  }

  // A fork whose token is refused leaves the slot that it was to replace as it was.
  void refused_fork() {
    Bench<P> bench(config_, seed_ + 12);
    const Slots slots = bench.fed(6);
    Batch<P> tokens(config_, 2, 2);
    tokens.batch.write_slots = tokens.write_slots;
    for (Index row = 0; row < 2; ++row) draw_token(bench.random, tokens, row);
    tokens.slots[0] = slots[0];
    tokens.write_slots[0] = slots[1];
    tokens.slots[1] = tokens.write_slots[1] = slots[2];
    tokens.values.at(0, config_.value_heads - 1)[0] = std::numeric_limits<float>::quiet_NaN();
    want_statuses("step", bench.device.step(tokens.batch, tokens.transfer()),
                  {Status::non_finite_input, Status::ok});
    bench.other.take(bench.device);
    want_sound_rows("device", bench.other.view);
    want_same_slot("the original", bench.other.view, bench.image.view, slots[0]);
    want_same_slot("what was not replaced", bench.other.view, bench.image.view, slots[1]);
  }

  void capture_changes_nothing() {
    Bench<P> bench(config_, seed_ + 6);
    const Slots slots = bench.fed(7);
    auto tokens = bench.batch(slots, 1);
    bench.device.capture(tokens->batch, tokens->transfer());
    bench.other.take(bench.device);
    want_same("the pool after a capture", bench.other.bytes, bench.image.bytes);
    const Statuses replayed = bench.device.replay(tokens->transfer());
    for (std::size_t i = 0; i < replayed.size(); ++i) {
      if (replayed[i] != Status::ok && replayed[i] != Status::truncated) {
        fail("status %d of a replay: %s", static_cast<int>(i), to_string(replayed[i]));
      }
    }
    Bytes outputs = tokens->received;
    bench.other.take(bench.device);
    Bytes by_graph = bench.other.bytes;
    bench.device.upload(bench.image.bytes.data());
    bench.step(*tokens);
    (void)bench.device.compact_due(slots);
    bench.other.take(bench.device);
    want_same("outputs with and without a graph", tokens->received, outputs);
    want_same("the pool with and without a graph", bench.other.bytes, by_graph);
  }

  // Accept 2 of 4, then a step without a draft, then accept none: as if nothing else had been.
  void drafts() {
    Bench<P> bench(config_, seed_ + 7);
    const auto first = static_cast<std::int32_t>(config_.slots - 2);
    const Slots drafted{first};
    const Slots plain{first + 1};
    want_ok("admit", bench.device.admit({first, first + 1}));
    const auto both = [&](Index keep, Index draft, bool open) {
      auto tokens = bench.batch(drafted, keep + draft);
      if (open) want_ok("open_draft", bench.device.open_draft(drafted));
      bench.step(*tokens);
      if (open) {
        // A draft is not compacted.
        want_ok("compact_due", bench.device.compact_due(drafted));
        want_statuses("compact of a draft", bench.device.compact(drafted),
                      Statuses{Status::draft_open});
        want_ok("close_draft",
                bench.device.close_draft(drafted, {static_cast<std::int32_t>(draft)}));
      }
      for (Index t = 0; t < keep; ++t) {
        auto one = bench.batch(plain, 1);
        Bench<P>::copy_tokens(*tokens, t, *one, 0, 1);
        bench.step(*one);
        want_same_outputs("without a draft", *one, 0, *tokens, t, 1);
      }
      const auto& pool = bench.now();
      want_same("snapshot after a draft", snapshot_of(pool, drafted[0]),
                snapshot_of(pool, plain[0]));
      want_ok("compact_due", bench.device.compact_due({first, first + 1}));
    };
    both(2, 2, true);
    both(1, 0, false);
    both(0, 3, true);
    both(3, 0, true);
    both(1, 2, true);
    const auto& pool = bench.now();
    want_same("snapshot in the end", snapshot_of(pool, drafted[0]), snapshot_of(pool, plain[0]));
  }

  // What is accepted ends exactly where a compaction is due.
  void draft_to_the_boundary() {
    Bench<P> bench(config_, seed_ + 8);
    const auto first = static_cast<std::int32_t>(config_.slots - 2);
    const Slots slots{first, first + 1};
    want_ok("admit", bench.device.admit(slots));
    const Index buffer = config_.state.buffer;
    for (int round = 0; round < 4; ++round) {
      const Index before = round % 2;
      const Index drafted = std::min(buffer - before + 1, config_.state.buffer_capacity() - before);
      auto tokens = bench.batch({first}, before + drafted);
      auto part = [&](Index from, Index count, std::int32_t slot) {
        auto some = bench.batch({slot}, count);
        Bench<P>::copy_tokens(*tokens, from, *some, 0, count);
        bench.step(*some);
      };
      if (before > 0) part(0, before, first);
      want_ok("open_draft", bench.device.open_draft({first}));
      part(before, drafted, first);
      want_ok("close_draft", bench.device.close_draft(
                                 {first}, {static_cast<std::int32_t>(before + drafted - buffer)}));
      part(0, buffer, first + 1);
      const auto& pool = bench.now();
      if (!pool.due(first)) fail("%d tokens are buffered, and it is not due", number(buffer));
      want_ok("compact_due", bench.device.compact_due(slots));
      bench.now();
      if (bench.image.view.slot(first).buffered != 0) fail("it was not compacted");
      want_same("snapshot at the boundary", snapshot_of(bench.image.view, first),
                snapshot_of(bench.image.view, first + 1));
    }
  }

  // A request leaves the device as a pool of one slot, three tokens pending, and comes back.
  void copies() {
    Bench<P> bench(config_, seed_ + 9);
    const Slots slots = bench.all();
    Slots used(slots.begin(), slots.end() - 1);
    const Slots free{slots.back()};
    want_ok("admit", bench.device.admit(used));
    bench.feed(used, 3 * number(config_.state.buffer) + 3);
    const Slots one{used.back()};
    bench.now();
    if (bench.image.view.slot(one[0]).buffered != 3) fail("three tokens were to be pending");
    want_ok("open_draft", bench.device.open_draft(one));
    PoolConfig single = config_;
    single.slots = config_.padding == Padding::slot_zero ? 2 : 1;
    single.quota = single.reserve = 0;
    const Slots only{static_cast<std::int32_t>(single.slots - 1)};
    DevicePool<P> small(single, bench.directions.empty() ? nullptr : bench.directions.data());
    want_ok("copy", bench.device.copy_to(small, one, only));
    want_statuses("a second copy", bench.device.copy_to(small, one, only),
                  Statuses{Status::slot_in_use});
    Image<P> image(single, as_rows(bench.directions, single));
    image.take(small);
    want_sound_rows("a pool of one slot", image.view);
    bench.now();
    const Bytes original = snapshot_of(bench.image.view, one[0]);
    want_same("snapshot of a copy", snapshot_of(image.view, only[0]), original);
    if (image.view.slot(only[0]).draft != -1) fail("a draft is open in a copy");
    // The host goes on with it, and gives it back.
    HostTeams teams(1, workspace_bytes<P>(config_.state));
    DevicePool<P> other(single, bench.directions.empty() ? nullptr : bench.directions.data());
    other.upload(image.bytes.data());
    want_ok("copy back", other.copy_to(bench.device, only, free));
    bench.now();
    want_same("snapshot of what came back", snapshot_of(bench.image.view, free[0]), original);
    want_same("snapshot of the original", snapshot_of(bench.image.view, one[0]), original);
    want_ok("close_draft", bench.device.close_draft(one, {0}));
    // Both go on alike, a compaction included.
    for (int i = 0; i < 6; ++i) {
      const Slots both{one[0], free[0]};
      auto tokens = bench.batch(both, 1);
      Bench<P>::copy_tokens(*tokens, 0, *tokens, 1, 1);
      if (i == 0) want_ok("compact", bench.device.compact(both));
      bench.step(*tokens);
      want_same_outputs("of what came back", *tokens, 1, *tokens, 0, 1);
      want_ok("compact_due", bench.device.compact_due(both));
    }
    bench.now();
    want_same("snapshot in the end", snapshot_of(bench.image.view, free[0]),
              snapshot_of(bench.image.view, one[0]));
  }

  PoolConfig config_;
  unsigned seed_;
};

// ---- The dense recurrence beside a pool ------------------------------------------------------

template <class P>
class Exact {
 public:
  explicit Exact(const PoolConfig& config)
      : config_(config), requests_(size(config.slots)), ranks_(size(config.slots)) {}

  void admit(Index slot) {
    requests_[size(slot)].clear();
    ranks_[size(slot)].assign(size(config_.value_heads), 0);
    for (Index h = 0; h < config_.value_heads; ++h) {
      requests_[size(slot)].emplace_back(rule(), number(config_.state.d_k),
                                         number(config_.state.d_v));
    }
  }
  void release(Index slot) { requests_[size(slot)].clear(); }
  bool live(Index slot) const { return !requests_[size(slot)].empty(); }
  void copy(Index from, Index to) {
    requests_[size(to)] = requests_[size(from)];
    ranks_[size(to)] = ranks_[size(from)];
  }

  // One token of each head, read or not.
  void step(const Batch<P>& batch, Index row, Index slot) {
    for (Index h = 0; h < config_.value_heads; ++h) {
      at(slot, h).step(static_cast<const float*>(batch.keys.at(row, config_.key_head(h))),
                       static_cast<const float*>(batch.values.at(row, h)),
                       static_cast<const float*>(batch.log_decays.at(row, h)),
                       *batch.write_strengths.at(row, h));
    }
  }
  void want_output(const Batch<P>& batch, Index row, Index slot, const StatePoolView<P>& pool,
                   Result& result) {
    std::vector<double> wanted(size(config_.state.d_v));
    for (Index h = 0; h < config_.value_heads; ++h) {
      const float* const query = batch.queries.at(row, config_.key_head(h));
      at(slot, h).read(query, wanted.data());
      double squares = 0;
      double length = 0;
      for (Index j = 0; j < config_.state.d_v; ++j) {
        const double there = wanted[size(j)];
        squares += std::pow(static_cast<double>(batch.output(row, h)[j]) - there, 2);
        length += there * there;
      }
      const auto state = pool.state(slot, h);
      const auto certificate = static_cast<double>(state.certificate());
      const auto mass = static_cast<double>(state.buffer.masses[state.buffered()]);
      // What the certificate says, and the roundings of reading (docs/numerics.md, N3).
      const double allowed = norm(query, config_.state.d_k) * (certificate + 400 * 6e-8 * mass) +
                             1e-6 * std::sqrt(length) + 1e-30;
      include(result.output, std::sqrt(squares) / allowed);
      if (!(std::sqrt(squares) <= allowed)) {
        fail("output of slot %d, head %d, is off by %.3e, allowed %.3e", number(slot), number(h),
             std::sqrt(squares), allowed);
      }
    }
  }
  // Certificates of all live states bound their distance.
  void want_bounded(HostTeam& team, const StatePoolView<P>& pool, Result& result) {
    const Index d_k = config_.state.d_k;
    const Index d_v = config_.state.d_v;
    std::vector<float> found(size(d_k * d_v));
    for (Index s = 0; s < config_.slots; ++s) {
      if (!live(s)) continue;
      if (!pool.in_use(s)) fail("slot %d is not in use", number(s));
      for (Index h = 0; h < config_.value_heads; ++h) {
        const auto state = pool.state(s, h);
        float certificate = 0;
        want_host(
            "materialize",
            materialize(team, state, MatrixView<float>{found.data(), d_k, d_v, d_v}, &certificate));
        double squares = 0;
        for (Index i = 0; i < d_k * d_v; ++i) {
          squares += std::pow(static_cast<double>(found[size(i)]) - at(s, h).state()[size(i)], 2);
        }
        const double apart = std::sqrt(squares);
        if (certificate > 0) include(result.certificate, apart / static_cast<double>(certificate));
        if (!(apart <= static_cast<double>(certificate) + 1e-30)) {
          fail("slot %d, head %d (rank %d, %d tokens): %.4e from exact, its certificate says %.4e",
               number(s), number(h), number(state.rank()), number(state.record->tokens), apart,
               static_cast<double>(certificate));
        }
        include(result.state, apart / std::max(1e-30, norm(found.data(), d_k * d_v)));
        const Index rank = state.dense() ? -1 : state.rank();
        result.rank_changes += rank != ranks_[size(s)][size(h)] ? 1 : 0;
        result.states += 1;
        result.dense += state.dense() ? 1 : 0;
        result.largest_rank = std::max(result.largest_rank, state.rank());
        ranks_[size(s)][size(h)] = rank;
      }
    }
  }

 private:
  static constexpr oracle::RuleTraits rule() {
    using Kind = oracle::RuleTraits::Decay;
    return {P::Rule::corrects, P::Rule::decay == Decay::none     ? Kind::none
                               : P::Rule::decay == Decay::scalar ? Kind::scalar
                                                                 : Kind::per_channel};
  }
  oracle::DenseRecurrence<double>& at(Index slot, Index h) {
    return requests_[size(slot)][size(h)];
  }

  PoolConfig config_;
  std::vector<std::vector<oracle::DenseRecurrence<double>>> requests_;
  std::vector<std::vector<Index>> ranks_;
};

// ---- 3. One graph, many replays --------------------------------------------------------------

template <class P>
Result replay_graph(const PoolConfig& config, unsigned seed, int replays, Result& result) {
  Bench<P> bench(config, seed);
  Exact<P> exact(config);
  HostTeam team(workspace_bytes<P>(config.state));
  const std::int32_t none = config.padding == Padding::slot_zero ? 0 : -1;
  const Index entries = config.slots - 1;
  auto batch = std::make_shared<Batch<P>>(config, entries, entries);
  std::fill_n(batch->slots, entries, none);
  for (Index b = 0; b < entries; ++b) draw_token(bench.random, *batch, b);
  bench.device.capture(batch->batch, batch->transfer());
  bench.other.take(bench.device);

  Slots lane(size(entries), none);
  double noise = 0.2;
  for (int r = 0; r < replays; ++r) {
    try {
      // Requests come and go on the stream and in the array of slots, which the graph reads anew.
      for (Index b = 0; b < entries; ++b) {
        std::int32_t& slot = lane[size(b)];
        if (slot != none && bench.random.chance(0.01)) {
          want_ok("release", bench.device.release({slot}));
          exact.release(slot);
          slot = none;
        } else if (slot == none && bench.random.chance(0.15)) {
          Slots free;
          for (const std::int32_t s : bench.all()) {
            if (!exact.live(s)) free.push_back(s);
          }
          slot = free[size(bench.random.among(0, static_cast<Index>(free.size()) - 1))];
          want_ok("admit", bench.device.admit({slot}));
          exact.admit(slot);
        } else if (slot != none && bench.random.chance(0.01)) {
          // Another lane.
          std::swap(slot, lane[size(bench.random.among(0, entries - 1))]);
        }
      }
      // For a while keys repeat, and for a while they do not, so that ranks fall and rise.
      if (r % 97 == 0) noise = r % 2 == 0 ? 0.01 : 1.0;
      for (Index b = 0; b < entries; ++b) {
        batch->slots[b] = lane[size(b)];
        draw_token(bench.random, *batch, b, noise);
      }
      const Statuses statuses = bench.device.replay(batch->transfer());
      for (Index i = 0; i < 2 * entries; ++i) {
        const Status status = statuses[size(i)];
        result.truncated += status == Status::truncated ? 1 : 0;
        if (status != Status::ok && !(i >= entries && status == Status::truncated)) {
          fail("%s, entry %d: %s", i < entries ? "step" : "compact_due", number(i % entries),
               to_string(status));
        }
      }
      for (Index b = 0; b < entries; ++b) {
        if (lane[size(b)] != none) {
          exact.step(*batch, b, lane[size(b)]);
          for (Index h = 0; h < config.value_heads; ++h) {
            if (!std::isfinite(norm(batch->output(b, h), config.state.d_v))) {
              fail("entry %d, head %d: an output is not finite", number(b), number(h));
            }
          }
          continue;
        }
        for (Index h = 0; h < config.value_heads; ++h) {
          if (!batch->untouched(b, h)) fail("B38: outputs of padded entry %d", number(b));
        }
      }
      if (r % 64 == 63 || r + 1 == replays) {
        const auto& pool = bench.now();
        exact.want_bounded(team, pool, result);
        for (Index b = 0; b < entries; ++b) {
          if (lane[size(b)] != none) {
            exact.want_output(*batch, b, lane[size(b)], pool, result);
          }
        }
      }
    } catch (const std::exception& fault) {
      fail("replay %d: %s", r, fault.what());
    }
    result.operations += 1;
  }
  if (P::Compaction::adaptive && replays >= 256 && result.rank_changes < 10) {
    fail("ranks changed %d times only: this shows little", number(result.rank_changes));
  }
  return result;
}

// ---- 1b. A reserve that does not suffice -----------------------------------------------------

template <class P>
void exhaust(const PoolConfig& config, unsigned seed, int rounds, Result& result) {
  Bench<P> bench(config, seed);
  Exact<P> exact(config);
  HostTeam team(workspace_bytes<P>(config.state));
  const Slots slots = bench.all();
  const Slots used(slots.begin(), slots.end() - 2);  // one is a neighbour, one is free
  const std::int32_t neighbour = slots[slots.size() - 2];
  const std::int32_t free = slots.back();
  Slots admitted = used;
  admitted.push_back(neighbour);
  want_ok("admit", bench.device.admit(admitted));
  for (const std::int32_t slot : admitted) exact.admit(slot);
  const auto feed = [&](const Slots& list) {
    auto tokens = bench.batch(list, 1);
    for (Index row = 0; row < tokens->row_count; ++row) draw_token(bench.random, *tokens, row, 2.0);
    bench.step(*tokens);
    for (Index b = 0; b < static_cast<Index>(list.size()); ++b) {
      exact.step(*tokens, b, list[size(b)]);
    }
    return bench.device.compact_due(list);
  };
  for (int i = 0; i < 6; ++i) (void)feed({neighbour});
  Image<P> before(config, as_rows(bench.directions, config));
  before.take(bench.device);
  Index refused = 0;
  for (int round = 0; round < rounds; ++round) {
    try {
      Slots order = used;
      std::shuffle(order.begin(), order.end(), bench.random.engine());
      for (const Status status : feed(order)) {
        result.truncated += status == Status::truncated ? 1 : 0;
        if (status != Status::ok && status != Status::truncated) {
          fail("compact_due: %s", to_string(status));
        }
      }
      const auto& pool = bench.now();
      exact.want_bounded(team, pool, result);
      want_same_slot("the neighbour", pool, before.view, neighbour);
      bench.other.take(bench.image);
      const std::int32_t source = order.front();
      const Status status = bench.device.fork({source}, {free}).front();
      bench.now();
      if (status == Status::pool_exhausted) {
        refused += 1;
        want_same_slots("after a fork that was refused", bench.image.view, bench.other.view);
        if (*bench.image.view.reserve.free != *bench.other.view.reserve.free) {
          fail("a fork that was refused has cost rows");
        }
      } else if (status == Status::ok) {
        want_same("a fork", snapshot_of(bench.image.view, free),
                  snapshot_of(bench.image.view, source));
        want_ok("release", bench.device.release({free}));
      } else {
        fail("fork: %s", to_string(status));
      }
      // What a request leaves behind, others get.
      if (round % 10 == 9) {
        want_ok("release", bench.device.release({source}));
        want_ok("admit", bench.device.admit({source}));
        exact.admit(source);
      }
    } catch (const std::exception& fault) {
      fail("round %d: %s", round, fault.what());
    }
    result.operations += 1;
  }
  if (result.truncated == 0 || refused == 0) {
    fail("%d entries truncated, %d forks refused: the reserve was never short",
         number(result.truncated), number(refused));
  }
  want_ok("release", bench.device.release(admitted));
  bench.now();
  if (*bench.image.view.reserve.free != config.reserve) {
    fail("all are released, and %d of %d rows are free", number(*bench.image.view.reserve.free),
         number(config.reserve));
  }
}

// ---- 4. Inputs of 16 bits --------------------------------------------------------------------

template <class P, class Number>
void narrow_inputs(const PoolConfig& config, unsigned seed, Result& result) {
  Bench<P> bench(config, seed);
  HostTeams teams(threads_each, workspace_bytes<P>(config.state));
  const Slots slots = bench.all();
  want_ok("admit", bench.device.admit(slots));
  bench.feed(slots, 5);
  const Index d_v = config.state.d_v;
  const auto entries = static_cast<Index>(slots.size());
  Image<P> straight(config, as_rows(bench.directions, config));
  for (int round = 0; round < 4; ++round) {
    const Index count = round % 2 + 1;
    bench.now();
    Batch<P, Number> tokens(config, entries, entries * count);
    std::copy(slots.begin(), slots.end(), tokens.slots);
    tokens.batch.tokens = count;
    Batch<P> wide(config, entries, entries * count);
    std::copy(slots.begin(), slots.end(), wide.slots);
    wide.batch.tokens = count;
    const auto copy = [&](const auto& from, const auto& to, Index heads, Index width, Index row,
                          const auto& as) {
      for (Index h = 0; h < heads; ++h) {
        for (Index i = 0; i < width; ++i) to.at(row, h)[i] = as(from.at(row, h)[i]);
      }
    };
    const auto copy_all = [&](const auto& from, const auto& to, const auto& as) {
      const auto plain = [](float x) { return x; };
      for (Index row = 0; row < entries * count; ++row) {
        copy(from.keys, to.keys, config.key_heads, config.state.d_k, row, as);
        copy(from.queries, to.queries, config.key_heads, config.state.d_k, row, as);
        copy(from.values, to.values, config.value_heads, d_v, row, as);
        copy(from.log_decays, to.log_decays, config.value_heads,
             P::Rule::log_decays(config.state.d_k), row, plain);
        copy(from.write_strengths, to.write_strengths, config.value_heads, 1, row, plain);
      }
    };
    for (Index row = 0; row < entries * count; ++row) draw_token(bench.random, tokens, row);
    copy_all(tokens, wide, [](auto code) { return widened<Number>(code); });

    want_ok("step", bench.device.step(tokens.batch, tokens.transfer()));
    straight.take(bench.device);
    // Vectors that are aligned to nothing.
    for (const Index gap : {1, 3}) {
      Batch<P, Number> odd(config, entries, entries * count, gap);
      std::copy(slots.begin(), slots.end(), odd.slots);
      odd.batch.tokens = count;
      copy_all(tokens, odd, [](auto code) { return code; });
      bench.device.upload(bench.image.bytes.data());
      want_ok("step", bench.device.step(odd.batch, odd.transfer()));
      bench.other.take(bench.device);
      want_same_slots("strided inputs", bench.other.view, straight.view);
      for (Index row = 0; row < entries * count; ++row) {
        for (Index h = 0; h < config.value_heads; ++h) {
          if (difference(odd.output(row, h), tokens.output(row, h),
                         size(d_v) * sizeof(*odd.output(row, h))) >= 0) {
            fail("outputs of row %d, head %d differ with a gap of %d", number(row), number(h),
                 number(gap));
          }
        }
      }
    }
    std::vector<float> outputs;
    const TokenBatch<float> on_host = wide.with_outputs(outputs);
    want_host("step", sinkstate::step(teams, bench.image.view, on_host));
    constexpr int digits = detail::StoredAs<Number>::narrow ? Number::fraction_bits + 1 : 24;
    const float unit = std::ldexp(1.0f, -digits);
    // Halves have a smallest number.
    const float smallest = Number::exponent_bits == 5 ? std::ldexp(1.0f, -25) : 0.0f;
    for (Index row = 0; row < entries * count; ++row) {
      for (Index h = 0; h < config.value_heads; ++h) {
        const float* const there =
            outputs.data() + row * on_host.outputs.token_stride + h * on_host.outputs.head_stride;
        const auto state = bench.image.view.state(slots[size(row / count)], h);
        const auto mass = static_cast<double>(state.buffer.masses[state.buffered()]);
        const double query = norm(wide.queries.at(row, config.key_head(h)), config.state.d_k);
        const double scale = std::max(norm(there, d_v), Limits<P>::floor * mass * query);
        for (Index j = 0; j < d_v; ++j) {
          const auto here = static_cast<double>(widened<Number>(tokens.output(row, h)[j]));
          const auto exact = static_cast<double>(there[j]);
          const double limit = Limits<P>::step * scale +
                               1.01 * static_cast<double>(unit) * std::abs(exact) +
                               static_cast<double>(smallest);
          const double off = std::abs(here - exact);
          include(result.output, off / limit);
          if (!(off <= limit)) {
            fail("output of row %d, head %d, channel %d: %.9g, wanted %.9g to %.1e", number(row),
                 number(h), number(j), here, exact, limit);
          }
        }
      }
    }
    // The states are equal up to rounding: of their certificates this is enough to see.
    for (const std::int32_t slot : slots) {
      want_record("narrow inputs", straight.view, bench.image.view, slot);
      for (Index h = 0; h < config.value_heads; ++h) {
        const auto here = straight.view.state(slot, h);
        const auto there = bench.image.view.state(slot, h);
        const auto wanted = static_cast<double>(there.certificate());
        const double off = std::abs(static_cast<double>(here.certificate()) - wanted);
        include(result.certificate, wanted == 0 ? off : off / wanted);
        if (!(off <= Limits<P>::step_certificate * wanted)) {
          fail("certificate of slot %d, head %d: %.9e, wanted %.9e", slot, number(h),
               static_cast<double>(here.certificate()), wanted);
        }
        const Index bytes = there.buffered() * config.state.d_k *
                            static_cast<Index>(sizeof(typename StatePoolView<P>::BufferedCode));
        if (difference(detail::codes_of(here.buffer.keys).data,
                       detail::codes_of(there.buffer.keys).data, size(bytes)) >= 0) {
          fail("keys of slot %d, head %d", slot, number(h));
        }
      }
    }
    bench.device.upload(bench.image.bytes.data());
    (void)bench.device.compact_due(slots);
    result.operations += 1;
  }
}

// ---- All of it -------------------------------------------------------------------------------

PoolConfig pool_of(Index d_k, Index d_v, Index value_heads, Index key_heads, HeadMap map) {
  PoolConfig config;
  config.state.d_k = d_k;
  config.state.d_v = d_v;
  config.state.buffer = 4;
  config.state.draft = 3;
  config.state.epsilon = 0.03;
  config.state.dense_retry = 3;
  config.state.seed = 11;
  config.slots = 6;
  config.value_heads = value_heads;
  config.key_heads = key_heads;
  config.head_map = map;
  return config;
}

struct Row {
  std::string policy;
  std::string shape;
  Result result;
};

std::string shape_of(const PoolConfig& config) {
  char text[96];
  std::snprintf(text, sizeof text, "%dx%d %d/%d%s q%d+%d%s", number(config.state.d_k),
                number(config.state.d_v), number(config.value_heads), number(config.key_heads),
                config.head_map == HeadMap::tiled ? "t" : "i", number(config.quota),
                number(config.reserve), config.padding == Padding::slot_zero ? " z" : "");
  return text;
}

template <class P>
class PolicyTest {
 public:
  PolicyTest(const char* name, const Options& options, bool large, std::vector<Row>& table)
      : name_(name), options_(options), large_(large), table_(table) {}

  void run() {
    const int operations = options_.operations > 0 ? options_.operations
                           : options_.quick        ? 25
                                                   : 200;
    std::vector<PoolConfig> shapes{pool_of(128, 80, 12, 2, HeadMap::interleaved),
                                   pool_of(33, 65, 6, 3, HeadMap::tiled)};
    if (large_) shapes.push_back(pool_of(200, 136, 2, 1, HeadMap::interleaved));
    unsigned seed = options_.seed;
    for (const PoolConfig& shape : shapes) {
      for (const PoolConfig& config : {shape, short_of_rows(shape, 2, 3)}) {
        part("lockstep", config, ++seed, [&](Result& result, unsigned own) {
          Lockstep<P> lockstep(config, own);
          try {
            lockstep.run(operations);
          } catch (...) {
            result = lockstep.result;
            throw;
          }
          result = lockstep.result;
        });
      }
    }
    for (const PoolConfig& config : {shapes[1], short_of_rows(shapes[1], 9, 10), shapes[0]}) {
      if (options_.quick && config.state.d_k == 128) continue;
      part("faults", config, ++seed, [&](Result& result, unsigned own) {
        Faults<P> faults(config, own);
        faults.run();
        result = faults.result;
      });
    }
    const PoolConfig small = pool_of(33, 17, 4, 2, HeadMap::interleaved);
    const int replays = options_.replays > 0 ? options_.replays : options_.quick ? 160 : 4096;
    part("graph", short_of_rows(small, 1, 2), ++seed, [&](Result& result, unsigned own) {
      replay_graph<P>(short_of_rows(small, 1, 2), own, replays, result);
    });
    if constexpr (P::Compaction::adaptive) {
      PoolConfig scarce = small;
      scarce.quota = 3;
      scarce.reserve = 24;
      part("exhaustion", scarce, ++seed, [&](Result& result, unsigned own) {
        exhaust<P>(scarce, own, options_.quick ? 24 : 120, result);
      });
      scarce.state.dense_fallback = false;
      part("exhaustion", scarce, ++seed, [&](Result& result, unsigned own) {
        exhaust<P>(scarce, own, options_.quick ? 24 : 120, result);
      });
    }
    if constexpr (sinkstate::testing::takes_narrow_inputs<P>) {
      for (const PoolConfig& config : {shapes[0], shapes[1]}) {
        part("fp16 in", config, ++seed,
             [&](Result& result, unsigned own) { narrow_inputs<P, Float16>(config, own, result); });
        part("bf16 in", config, ++seed, [&](Result& result, unsigned own) {
          narrow_inputs<P, BFloat16>(config, own, result);
        });
      }
    }
  }

 private:
  // Padding that is slot 0; and, if ranks adapt, a small quota, with `share` / `of` of what all states
  // together may need beyond it.
  static PoolConfig short_of_rows(PoolConfig config, Index share, Index of) {
    config.padding = Padding::slot_zero;
    if constexpr (P::Compaction::adaptive) {
      const Index most = StatePoolView<P>::most_rows(config.state);
      config.quota = std::min<Index>(6, most);
      config.reserve = config.slots * config.value_heads * (most - config.quota) * share / of;
    }
    return config;
  }

  template <class Run>
  void part(const char* what, const PoolConfig& config, unsigned seed, const Run& run) {
    Row row{name_, shape_of(config), {}};
    if (options_.verbose) {
      std::printf("%s, %s, %s, seed %u\n", name_, what, row.shape.c_str(), seed);
      std::fflush(stdout);
    }
    const auto begin = std::chrono::steady_clock::now();
    try {
      run(row.result, seed);
    } catch (const std::exception& fault) {
      row.result.fault = fault.what();
    }
    row.result.part = what;
    row.result.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (!row.result.fault.empty()) {
      std::printf("FAILED: %s, %s, %s, seed %u\n    %s\n", name_, what, row.shape.c_str(), seed,
                  row.result.fault.c_str());
      std::fflush(stdout);
    }
    table_.push_back(row);
  }

  const char* name_;
  const Options& options_;
  bool large_;
  std::vector<Row>& table_;
};

bool print(const std::vector<Row>& table) {
  std::printf(
      "\nOutputs, states and certificates: lockstep, the largest relative distance from the host; "
      "narrow inputs, outputs\nas a share of what is allowed; graph and exhaustion, outputs as a "
      "share of what is allowed, states relative,\ncertificates as true error / certificate (at "
      "most 1). rank and dense: the largest\nrank and states in dense "
      "form; ranks: other than on the host; cuts: equal ranks, but further apart than "
      "rounding.\n\n");
  std::printf("%-10s %-26s %6s %8s %8s %8s %7s %5s %5s %5s %5s %7s %6s %6s\n", "part", "shape",
              "ops", "output", "state", "certif.", "states", "rank", "dense", "ranks", "cuts",
              "changes", "trunc.", "s");
  bool passed = true;
  std::string policy;
  for (const Row& row : table) {
    if (row.policy != policy) std::printf("%s\n", row.policy.c_str());
    policy = row.policy;
    const Result& r = row.result;
    std::printf("%-10s %-26s %6.0f %8.1e %8.1e %8.1e %7d %5d %5d %5d %5d %7d %6d %6.2f%s\n",
                r.part.c_str(), row.shape.c_str(), r.operations, r.output, r.state, r.certificate,
                number(r.states), number(r.largest_rank), number(r.dense), number(r.ranks),
                number(r.cuts), number(r.rank_changes), number(r.truncated), r.seconds,
                r.fault.empty() ? "" : "  FAILED");
    passed = passed && r.fault.empty();
  }
  return passed;
}

}  // namespace

int main(int count, char** arguments) {
  Options options;
  bool understood = true;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    const auto next = [&]() -> unsigned {
      if (++i < count) {
        const long value = std::atol(arguments[i]);
        if (value > 0) return static_cast<unsigned>(value);
      }
      understood = false;
      return 1;
    };
    if (word == "--quick") {
      options.quick = true;
    } else if (word == "--verbose") {
      options.verbose = true;
    } else if (word == "--operations") {
      options.operations = static_cast<int>(next());
    } else if (word == "--replays") {
      options.replays = static_cast<int>(next());
    } else if (word == "--seed") {
      options.seed = next();
    } else if (word == "--jobs") {
      options.jobs = static_cast<int>(next());
    } else {
      understood = false;
    }
  }
  if (!understood) {
    std::fprintf(
        stderr,
        "usage: test_device_pool [--quick] [--operations N] [--replays N] [--seed N] [--jobs N]\n"
        "                        [--verbose]\n");
    return 2;
  }
  std::printf("seed %u\n", options.seed);
  std::fflush(stdout);
  using Test = std::function<void(std::vector<Row>&)>;
  std::vector<Test> tests;
#define SINKSTATE_TEST_POOL(...)                                               \
  tests.push_back([&options, large = tests.empty()](std::vector<Row>& table) { \
    PolicyTest<__VA_ARGS__>(#__VA_ARGS__, options, large, table).run();        \
  });
  SINKSTATE_FOR_DEVICE_POOLS(SINKSTATE_TEST_POOL)

  const auto wanted = static_cast<std::size_t>(options.jobs);
  const std::size_t jobs = std::min(wanted, tests.size());
  const auto threads = static_cast<Index>(std::thread::hardware_concurrency() / jobs);
  threads_each = std::clamp<Index>(threads, 1, 16);
  std::vector<std::vector<Row>> tables(tests.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < tests.size(); i = next++) tests[i](tables[i]);
  };
  std::vector<std::thread> workers;
  for (std::size_t i = 1; i < jobs; ++i) workers.emplace_back(work);
  work();
  for (std::thread& helper : workers) helper.join();

  std::vector<Row> all;
  for (const std::vector<Row>& table : tables) all.insert(all.end(), table.begin(), table.end());
  const bool passed = print(all);
  std::printf("\n%s\n", passed ? "passed" : "FAILED");
  return passed ? 0 : 1;
}
