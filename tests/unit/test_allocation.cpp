// No verb allocates. Every form of operator new is counted here, and Eigen's own allocator too.
#define EIGEN_RUNTIME_NO_MALLOC
namespace {
int eigen_failures = 0;
}
// Counted in release builds as well, where Eigen's assertions are off.
#define eigen_assert(condition)         \
  do {                                  \
    if (!(condition)) ++eigen_failures; \
  } while (false)

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

#include "sinkstate/sinkstate.hpp"
#include "support/catch.hpp"
#include "support/count_allocations.hpp"
#include "support/state_runner.hpp"

using namespace sinkstate;
using namespace sinkstate::testing;

namespace {

// What was allocated while it lived, by operator new or through Eigen.
class AllocationWatch {
 public:
  AllocationWatch() : at_start_(allocations), eigen_at_start_(eigen_failures) {
    Eigen::internal::set_is_malloc_allowed(false);
  }
  ~AllocationWatch() { Eigen::internal::set_is_malloc_allowed(true); }
  AllocationWatch(const AllocationWatch&) = delete;
  AllocationWatch& operator=(const AllocationWatch&) = delete;

  long count() const { return allocations - at_start_ + eigen_failures - eigen_at_start_; }

 private:
  long at_start_;
  int eigen_at_start_;
};

constexpr Index d_k = 12, d_v = 10, buffer = 8;
constexpr int stream_tokens = 64;

template <class P>
StateConfig make_config() {
  StateConfig config;
  config.d_k = d_k;
  config.d_v = d_v;
  config.buffer = buffer;
  config.epsilon = 1e-3;
  config.dense_retry = 1;
  config.active = 3;
  config.tail_period = 1;
  if (!P::Compaction::adaptive) config.rank_cap = 3;  // a fixed rank is found by projection
  return config;
}

// Every verb on one state, which goes dense and comes back where its policy can. Everything that
// allocates is in the constructor; statuses are kept, since a test framework allocates.
template <class P>
class EveryVerb {
 public:
  using T = typename P::Compute;

  explicit EveryVerb(const Stream& stream)
      : inputs_(stream),
        heavy_value_(stream.value_at(0), stream.value_at(0) + d_v),
        state_(make_config<P>(), P::Sink::present ? inputs_.sink() : nullptr),
        team_(all_workspace_bytes<P>(make_config<P>())),
        output_(d_v),
        outputs_(4 * d_v),
        dense_(d_k * d_v) {
    for (T& element : heavy_value_) element *= T(1e8);
  }

  void run() {
    token_verbs();
    matrix_verbs();
    go_dense();
    come_back();
    reset(state_.view());
  }

  bool all_ok() const { return all_ok_; }
  bool was_low_rank() const { return was_low_rank_; }
  bool went_dense() const { return went_dense_; }
  bool came_back() const { return came_back_; }
  bool projected() const { return projected_; }

 private:
  void token_verbs() {
    const auto view = state_.view();
    note(step(team_, view, inputs_.token(0), inputs_.query(0), output_.data()));
    note(advance(team_, view, inputs_.token(1)));
    note(read_out(team_, view, inputs_.query(1), output_.data()));
    note(step(team_, view, inputs_.tokens(2, 4), inputs_.queries(2, 4),
              MatrixView<T>{outputs_.data(), 4, d_v, d_v}));
    note(roll_back(view, 4));
    note(advance(team_, view, inputs_.tokens(2, 2)));
    note(compact(team_, view));
    was_low_rank_ = !view.dense();
  }
  void matrix_verbs() {
    const MatrixView<T> dense{dense_.data(), d_k, d_v, d_v};
    T certificate = 0;
    note(materialize(team_, state_.view(), dense, &certificate));
    note(initialize(team_, state_.view(), dense, ExactSvd{}, certificate));
    note(initialize(team_, state_.view(), dense, RandomizedSvd{4, 2, 1}, certificate));
  }
  void go_dense() {
    for (int first = 8; first < stream_tokens; first += buffer) {
      note(advance(team_, state_.view(), inputs_.tokens(first, buffer)));
      CompactionReport report;
      note(compact(team_, state_.view(), &report));
      projected_ = projected_ || report.projected > 0;
      went_dense_ = went_dense_ || state_.view().dense();
    }
    const MatrixView<T> dense{dense_.data(), d_k, d_v, d_v};
    note(materialize(team_, state_.view(), dense));
    note(initialize(team_, state_.view(), dense, ExactSvd{}));
  }
  // One token beside which all others are below epsilon.
  void come_back() {
    Token<T> heavy = inputs_.token(0);
    heavy.value = heavy_value_.data();
    note(step(team_, state_.view(), heavy, inputs_.query(0), output_.data()));
    note(compact(team_, state_.view()));
    came_back_ = !state_.view().dense();
  }
  void note(Status status) { all_ok_ = all_ok_ && status == Status::ok; }

  Inputs<T> inputs_;
  std::vector<T> heavy_value_;
  SinkState<P> state_;
  HostTeam team_;
  std::vector<T> output_, outputs_, dense_;
  bool all_ok_ = true;
  bool was_low_rank_ = false;
  bool went_dense_ = false;
  bool came_back_ = false;
  bool projected_ = false;
};

template <class P>
void check_policy(const Stream& stream) {
  INFO(policy_name<P>());
  EveryVerb<P> verbs(stream);
  const AllocationWatch watch;
  verbs.run();
  const long count = watch.count();

  CHECK(count == 0);
  CHECK(verbs.all_ok());
  CHECK(verbs.was_low_rank() == P::Compaction::low_rank);
  CHECK(verbs.went_dense() == (P::Compaction::adaptive || !P::Compaction::low_rank));
  CHECK(verbs.came_back() == P::Compaction::low_rank);
  CHECK(verbs.projected() == (P::Compaction::low_rank && !P::Compaction::adaptive));
}

template <class Rule, class Precision>
void check_policies() {
  const std::uint64_t seed = test_seed();
  INFO(seed_note(seed));
  Stream stream = random_full_rank(traits_of<Rule>, d_k, d_v, stream_tokens, seed);
  std::copy_n(stream.value_at(5), d_v, stream.sink.begin());
  for_each_policy<Rule, Precision>(
      [&](auto tag) { check_policy<typename decltype(tag)::type>(stream); });
}

}  // namespace

TEST_CASE("allocation: the watch sees every form", "[allocation]") {
  const AllocationWatch watch;
  ::operator delete(::operator new(1));
  ::operator delete[](::operator new[](1));
  ::operator delete (::operator new (1, Alignment{64}), Alignment{64});
  ::operator delete[](::operator new[](1, Alignment{64}), Alignment{64});
  ::operator delete(::operator new(1, std::nothrow), std::nothrow);
  ::operator delete[](::operator new[](1, std::nothrow), std::nothrow);
  ::operator delete (::operator new (1, Alignment{64}, std::nothrow), Alignment{64});
  ::operator delete[](::operator new[](1, Alignment{64}, std::nothrow), Alignment{64});
  const long by_operator_new = watch.count();
  Eigen::internal::aligned_free(Eigen::internal::aligned_malloc(64));
  const long with_eigen = watch.count();

  CHECK(by_operator_new == 8);
  CHECK(with_eigen == 9);
}

TEMPLATE_LIST_TEST_CASE("allocation: no verb allocates", "[allocation]", AllRules) {
  check_policies<TestType, Fp32>();
}

TEMPLATE_TEST_CASE("allocation: no verb allocates, fp64", "[allocation]", Mamba2, GatedDelta,
                   KimiDelta) {
  check_policies<TestType, Fp64>();
}
