// A warp against a host thread, compaction by compaction from equal states: outputs, ranks, strengths,
// the state, its basis and its certificate. Without Catch2: a machine with a device may lack it.
//
//     test_warp_team [TOKENS]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <sinkstate/sinkstate.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "device_state.hpp"
#include "policies.hpp"

namespace {

using namespace sinkstate;

using Numbers = std::vector<float>;

Numbers sized(Index n, float value = 0) { return Numbers(static_cast<std::size_t>(n), value); }

// The largest so far; NaN, once there, stays.
void include(double& worst, double x) {
  if (!(x <= worst)) worst = x;
}

double distance(const Numbers& a, const Numbers& b) {
  double squares = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    squares += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return squares == 0 ? 0 : std::sqrt(squares / norm);
}

template <class Rows>
double away_from_orthonormal(const Rows& rows) {
  double worst = 0;
  for (Index i = 0; i < rows.rows; ++i) {
    for (Index j = 0; j <= i; ++j) {
      double dot = i == j ? -1 : 0;
      for (Index l = 0; l < rows.cols; ++l) {
        dot += static_cast<double>(rows(i, l)) * static_cast<double>(rows(j, l));
      }
      include(worst, std::abs(dot));
    }
  }
  return worst;
}

// Bytes of a state, which a view is over.
template <class P>
struct HostCopy {
  HostCopy(const StateConfig& config, const float* sink)
      : memory(state_bytes<P>(config)),
        bytes(memory.workspace().take<unsigned char>(static_cast<Index>(memory.size()))),
        view(make_view<P>(bytes, memory.size(), config, sink)) {}
  bool operator==(const HostCopy& other) const {
    return std::memcmp(bytes, other.bytes, memory.size()) == 0;
  }
  AlignedBytes memory;
  unsigned char* bytes;
  SinkStateView<P> view;
};

struct Worst {
  double output = 0, state = 0, strength = 0, certificate = 0, basis = 0;
  int ranks = 0;
  Index largest_rank = 0;
};

template <class P>
class Comparison {
 public:
  Comparison(Index d_k, Index d_v, unsigned seed)
      : config_(config_of(d_k, d_v)),
        random_(seed),
        direction_(gaussian(d_v)),
        host_(config_, sink()),
        device_(config_, sink()),
        team_(workspace_bytes<P>(config_)),
        before_(config_, sink()),
        after_(config_, sink()) {
    device_.upload(host_.bytes);
  }

  // What went wrong, or nothing.
  std::string run(int tokens) {
    for (int t = 0; t < tokens; ++t) {
      draw(t % 5 + 1);
      if (!step_both(Status::ok)) return "a step was refused";
      include(worst.output, distance(read_, output_));
      if (!host_.view.due()) continue;
      device_.upload(host_.bytes);
      if (compact(team_, host_.view) != Status::ok || device_.compact() != Status::ok) {
        return "a compaction was refused";
      }
      device_.download(after_.bytes);
      if (const std::string fault = compare_states(); !fault.empty()) return fault;
      device_.upload(host_.bytes);
    }
    if (const std::string fault = refuse_nan(); !fault.empty()) return fault;
    return launch_again();
  }

  Worst worst;

 private:
  static StateConfig config_of(Index d_k, Index d_v) {
    StateConfig config;
    config.d_k = d_k;
    config.d_v = d_v;
    config.epsilon = 0.03;
    return config;
  }
  const float* sink() const { return P::Sink::present ? direction_.data() : nullptr; }
  Numbers gaussian(Index n) {
    Numbers x = sized(n);
    for (float& number : x) number = normal_(random_);
    return x;
  }

  // One of a few keys that come back, with noise.
  void draw(int number) {
    key_ = gaussian(config_.d_k);
    value_ = gaussian(config_.d_v);
    query_ = gaussian(config_.d_k);
    decays_ = gaussian(P::Rule::log_decays(config_.d_k));
    double squares = 0;
    for (std::size_t i = 0; i < key_.size(); ++i) {
      key_[i] = 0.2f * key_[i] + std::sin(static_cast<float>(static_cast<int>(i) * number));
      squares += std::pow(static_cast<double>(key_[i]), 2);
    }
    for (float& x : key_) x /= static_cast<float>(std::sqrt(squares));
    for (float& x : decays_) x = -0.1f * std::abs(x);
  }

  bool step_both(Status wanted) {
    const Token<float> token{key_.data(), value_.data(), decays_.data(), 0.7f};
    output_ = sized(config_.d_v);
    read_ = sized(config_.d_v, std::numeric_limits<float>::quiet_NaN());
    return step(team_, host_.view, token, query_.data(), output_.data()) == wanted &&
           device_.step(token, query_.data(), read_.data()) == wanted;
  }

  std::string compare_states() {
    const auto& host = host_.view;
    const auto& device = after_.view;
    const Index d_k = config_.d_k;
    const Index d_v = config_.d_v;
    if (device.buffered() != 0 || device.record->tokens != host.record->tokens ||
        device.record->compactions != host.record->compactions) {
      return "counters differ";
    }
    Numbers exact = sized(d_k * d_v);
    Numbers found = exact;
    const auto matrix = [&](Numbers& x) { return MatrixView<float>{x.data(), d_k, d_v, d_v}; };
    if (materialize(team_, host, matrix(exact)) != Status::ok ||
        materialize(team_, device, matrix(found)) != Status::ok) {
      return "a state does not materialise";
    }
    include(worst.state, distance(found, exact));
    include(worst.certificate, std::abs(static_cast<double>(device.certificate()) /
                                            static_cast<double>(host.certificate()) -
                                        1));
    const Index rank = host.rank();
    if (device.rank() != rank || device.dense() != host.dense()) {
      ++worst.ranks;
      return "";
    }
    if (rank > worst.largest_rank) worst.largest_rank = rank;
    for (Index i = 0; i < rank; ++i) {
      const double gap = static_cast<double>(device.factors.strength(i)) -
                         static_cast<double>(host.factors.strength(i));
      include(worst.strength, std::abs(gap) / static_cast<double>(host.factors.strength(0)));
    }
    // Of the policies that decompose every term.
    if constexpr (std::is_same_v<typename P::Compaction, FullSvd> ||
                  std::is_same_v<typename P::Compaction, FixedRank>) {
      include(worst.basis, away_from_orthonormal(device.factors.keys()));
      include(worst.basis, away_from_orthonormal(device.factors.values()));
    }
    return "";
  }

  // Bad input is refused, and each byte is as it was.
  std::string refuse_nan() {
    device_.download(before_.bytes);
    draw(1);
    value_.back() = std::numeric_limits<float>::quiet_NaN();
    if (!step_both(Status::non_finite_input)) return "NaN was not refused";
    device_.download(after_.bytes);
    return after_ == before_ ? "" : "a refused step changed the state";
  }

  // Five launches, the same bits.
  std::string launch_again() {
    while (!host_.view.due()) {
      draw(2);
      if (!step_both(Status::ok)) return "a step was refused";
    }
    device_.download(before_.bytes);
    HostCopy<P> first(config_, sink());
    for (int launch = 0; launch < 5; ++launch) {
      device_.upload(before_.bytes);
      if (device_.compact() != Status::ok) return "a compaction was refused";
      device_.download(after_.bytes);
      if (launch == 0) std::memcpy(first.bytes, after_.bytes, first.memory.size());
      if (!(after_ == first)) return "two launches differ";
    }
    return "";
  }

  StateConfig config_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  Numbers direction_;
  HostCopy<P> host_;
  testing::DeviceState<P> device_;
  HostTeam team_;
  HostCopy<P> before_;
  HostCopy<P> after_;  // of the device, as before_
  Numbers key_, value_, query_, decays_, output_, read_;
};

template <class P>
bool passes(const char* name, Index d_k, Index d_v, unsigned seed, int tokens) {
  Comparison<P> comparison(d_k, d_v, seed);
  std::string fault = comparison.run(tokens);
  const Worst& worst = comparison.worst;
  // Of a narrow body the two may round a number to either side.
  const bool narrow = detail::StoredAs<typename P::Stored>::narrow;
  const double limit = narrow ? 2e-3 : 1e-5;
  if (fault.empty() &&
      !(worst.ranks == 0 && worst.output < 1e-5 && worst.state < limit && worst.strength < limit &&
        worst.certificate < (narrow ? 1e-3 : 1e-5) && worst.basis < 5e-6)) {
    fault = "out of bounds";
  }
  std::printf(
      "%-60s %3dx%-3d rank %2d  output %.1e  state %.1e  strengths %.1e  certificate %.1e  "
      "basis %.1e  ranks that differ %d%s%s\n",
      name, static_cast<int>(d_k), static_cast<int>(d_v), static_cast<int>(worst.largest_rank),
      worst.output, worst.state, worst.strength, worst.certificate, worst.basis, worst.ranks,
      fault.empty() ? "" : "  FAILED: ", fault.c_str());
  return fault.empty();
}

}  // namespace

int main(int count, char** arguments) {
  constexpr unsigned seed = 20261203;
  const int tokens = count > 1 ? std::atoi(arguments[1]) : 400;
  if (tokens < 8 || count > 2) {
    std::fprintf(stderr, "usage: test_warp_team [TOKENS], at least 8\n");
    return 2;
  }
  std::printf("seed %u, %d tokens\n", seed, tokens);
  bool passed = true;
#define SINKSTATE_COMPARE(...)                                                 \
  passed = passes<__VA_ARGS__>(#__VA_ARGS__, 128, 80, seed, tokens) && passed; \
  passed = passes<__VA_ARGS__>(#__VA_ARGS__, 33, 65, seed + 1, tokens) && passed;
  SINKSTATE_FOR_DEVICE_POLICIES(SINKSTATE_COMPARE)
  return passed ? 0 : 1;
}
