// The shared algorithms compile for a device, over a team that is one thread of plain loops. It proves what "written once
// over a team" says; it is not a backend.

#include <cmath>
#include <sinkstate/algorithm/advance.hpp>
#include <sinkstate/algorithm/compact.hpp>
#include <sinkstate/algorithm/initialize.hpp>
#include <sinkstate/algorithm/materialize.hpp>
#include <sinkstate/algorithm/pool_compact.hpp>
#include <sinkstate/algorithm/read_out.hpp>

namespace {

using namespace sinkstate;

class PlainTeam {
 public:
  __device__ PlainTeam(void* bytes, std::size_t size) : bytes_(bytes), size_(size) {}

  __device__ Workspace workspace() const { return Workspace(bytes_, size_); }

  template <class T>
  __device__ T dot(Index n, const T* x, const T* y) const {
    T sum = 0;
    for (Index i = 0; i < n; ++i) sum += x[i] * y[i];
    return sum;
  }
  template <class T>
  __device__ T norm(Index n, const T* x) const {
    const T largest = max_abs(n, x);
    if (!(largest > T(0))) return largest;
    T sum = 0;
    for (Index i = 0; i < n; ++i) sum += x[i] / largest * (x[i] / largest);
    return largest * std::sqrt(sum);
  }
  template <class T>
  __device__ T max(Index n, const T* x) const {
    T largest = x[0];
    for (Index i = 1; i < n; ++i) {
      if (!(x[i] <= largest)) largest = x[i];
      if (largest != largest) break;
    }
    return largest;
  }
  template <class T>
  __device__ T max_abs(Index n, const T* x) const {
    T largest = 0;
    for (Index i = 0; i < n; ++i) {
      const T magnitude = std::abs(x[i]) + x[i] * T(0);
      if (!(magnitude <= largest)) largest = magnitude;
      if (largest != largest) break;
    }
    return largest;
  }
  template <class T>
  __device__ bool finite(Index n, const T* x) const {
    T sum = 0;
    for (Index i = 0; i < n; ++i) sum += x[i] * T(0);
    return sum == T(0);
  }
  template <class Rows, class T>
  __device__ void project(const Rows& rows, const T* x, T* z) const {
    for (Index i = 0; i < rows.rows; ++i) z[i] = dot<T>(rows.cols, rows.row(i), x);
  }
  template <class Rows, class T>
  __device__ void add_combination(const Rows& rows, const T* z, T* y) const {
    for (Index i = 0; i < rows.rows; ++i) {
      for (Index j = 0; j < rows.cols; ++j) y[j] += z[i] * rows(i, j);
    }
  }
  template <class T>
  __device__ void fill(Index n, T value, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] = value;
  }
  template <class T>
  __device__ void copy(Index n, const T* x, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] = x[i];
  }
  template <class T>
  __device__ void scale(Index n, T a, const T* x, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] = a * x[i];
  }
  template <class T>
  __device__ void multiply(Index n, const T* x, const T* w, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] = x[i] * w[i];
  }
  template <class T>
  __device__ void add(Index n, const T* x, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] += x[i];
  }
  template <class T>
  __device__ void rotate(Index n, T s, T tau, T* x, T* y) const {
    for (Index i = 0; i < n; ++i) {
      const T a = x[i];
      const T b = y[i];
      x[i] = a - s * (b + tau * a);
      y[i] = b + s * (a - tau * b);
    }
  }
  template <class Format>
  __device__ void widen(Format, Index n, float scale, const typename Format::Code* x,
                        float* y) const {
    for (Index i = 0; i < n; ++i) y[i] = scale * sinkstate::widen<Format>(x[i]);
  }
  template <class Format>
  __device__ void narrow(Format format, Index n, float factor, const float* x,
                         const detail::RowRounding& rounding, typename Format::Code* y) const {
    rounding(format, 0, n, factor, x, y);
  }
  template <class T>
  __device__ T exp_decay(T log_decay) const {
    return log_decay < T(-71.4) ? T(0) : std::exp(log_decay);
  }
  template <class T>
  __device__ void exp_decay(Index n, const T* x, T* y) const {
    for (Index i = 0; i < n; ++i) y[i] = exp_decay(x[i]);
  }

 private:
  void* bytes_;
  std::size_t size_;
};

struct PlainDevice {
  using Team = PlainTeam;
  using Core = float;
};

template <class P, class T = typename P::Compute>
__global__ void every_verb(SinkStateView<P> state, void* bytes, std::size_t size, Token<T> token,
                           const T* query, T* output, MatrixView<T> dense, Status* status) {
  PlainTeam team(bytes, size);
  reset(state);
  status[0] = step(team, state, token, query, output);
  status[1] = advance(team, state, token);
  status[2] = read_out(team, state, query, output);
  status[3] = compact(team, state);
  status[4] = materialize(team, state, dense);
  status[5] = initialize(team, state, MatrixView<const T>(dense));
  status[6] = initialize(team, state, MatrixView<const T>(dense), ExactSvd{});
  status[7] = roll_back(state, 0);
}

template <class P, class T = typename P::Compute>
constexpr auto instance = &every_verb<P, T>;

// One of each word, in few combinations.
[[maybe_unused]] constexpr auto kimi =
    instance<Policy<KimiDelta, PlainDevice, Fp32, LocalSvd, MeanValueSink>>;
[[maybe_unused]] constexpr auto mamba =
    instance<Policy<Mamba2, PlainDevice, Fp32, FullSvd, NoSink>>;
[[maybe_unused]] constexpr auto fixed =
    instance<Policy<GatedDelta, PlainDevice, Fp32, FixedRank, NoSink>>;
[[maybe_unused]] constexpr auto dense =
    instance<Policy<GatedDelta, PlainDevice, Bf16, DenseBuffered, MeanValueSink>>;
[[maybe_unused]] constexpr auto narrow =
    instance<Policy<KimiDelta, PlainDevice, Precision<float, Float8E4M3, BFloat16>, LocalSvd,
                    MeanValueSink>>;

// And who has which component row of a pool, by one thread.
template <class P>
__global__ void rows_of_pools(StatePoolView<P> pool, StatePoolView<P> other,
                              CompactionReport report, Status* status) {
  pool.reserve.reset(pool.quota_rows(pool.config));
  detail::empty_slot(pool, 0);
  const auto head = pool.head(0, 0);
  const auto state = pool.state(0, 0);
  const Index rows = detail::rows_to_compact(state);
  if (rows <= detail::may_hold(pool, *head.held)) detail::hold_rows(pool, head, rows);
  if (!detail::lacked_rows(state, report)) detail::trim_rows(pool, head);
  *status = detail::settle_slot(pool, 0);
  if (detail::may_copy_slot(pool, 0, other, 1)) detail::copy_slot(pool, 0, other, 1);
}

template <class P>
constexpr auto rows_instance = &rows_of_pools<P>;

[[maybe_unused]] constexpr auto rows =
    rows_instance<Policy<GatedDelta, PlainDevice, Fp32, LocalSvd, NoSink>>;
[[maybe_unused]] constexpr auto narrow_rows =
    rows_instance<Policy<KimiDelta, PlainDevice, Fp8, LocalSvd, MeanValueSink>>;
[[maybe_unused]] constexpr auto dense_rows =
    rows_instance<Policy<Mamba2, PlainDevice, Fp32, DenseBuffered, NoSink>>;

}  // namespace
