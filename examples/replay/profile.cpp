#include "profile.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

#include "exact_svd.hpp"
#include "oracles/dense_recurrence.hpp"
#include "parallel_for.hpp"

namespace sinkstate::tools {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr double none = std::numeric_limits<double>::quiet_NaN();

std::size_t size(std::ptrdiff_t count) { return static_cast<std::size_t>(count); }

double share(double part, double whole) { return whole > 0 ? part / whole : none; }

VectorXd vector(const float* entries, std::ptrdiff_t count) {
  return Eigen::Map<const Eigen::VectorXf>(entries, count).cast<double>();
}

/// How many of the first energies hold so much of all.
std::ptrdiff_t rank_holding(double share, const VectorXd& energies) {
  const double wanted = share * energies.sum();
  double held = 0;
  std::ptrdiff_t rank = 0;
  while (rank < energies.size() && held < wanted) held += energies(rank++);
  return rank;
}

/// Of values whose squares may leave the range of a double.
VectorXd energies(const VectorXd& values) {
  return values.size() == 0 ? values : VectorXd((values / values(0)).array().square());
}

double top_share(std::ptrdiff_t terms, const VectorXd& energies) {
  return share(energies.head(std::min<Eigen::Index>(terms, energies.size())).sum(), energies.sum());
}

// --- vectors -------------------------------------------------------------------------------------

/// X^T X of the rows t in [first, last).
template <class RowOf>
MatrixXd gram(const RowOf& row, std::ptrdiff_t width, std::ptrdiff_t first, std::ptrdiff_t last) {
  constexpr std::ptrdiff_t block = 256;
  MatrixXd sum = MatrixXd::Zero(width, width);
  MatrixXd rows;
  for (; first < last; first += block) {
    rows.resize(width, std::min(block, last - first));
    for (Eigen::Index i = 0; i < rows.cols(); ++i) rows.col(i) = vector(row(first + i), width);
    sum.noalias() += rows * rows.transpose();
  }
  return sum;
}

/// Shares of the energy behind `gram` in the first columns of an orthonormal basis.
TopShares shares_in(const MatrixXd& basis, const MatrixXd& gram) {
  const VectorXd along = (gram * basis).cwiseProduct(basis).colwise().sum();
  TopShares shares;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const auto count = std::min<Eigen::Index>(profiled_directions[i], along.size());
    shares[i] = share(along.head(count).sum(), gram.trace());
  }
  return shares;
}

template <class RowOf>
VectorProfile profile_vectors(const RowOf& row, std::ptrdiff_t width, std::ptrdiff_t tokens,
                              std::ptrdiff_t part) {
  const MatrixXd all = gram(row, width, 0, tokens);
  const MatrixXd early = gram(row, width, 0, part);
  const MatrixXd late = gram(row, width, tokens - part, tokens);
  // X^T X has the right singular vectors of X.
  return {shares_in(exact_svd(all).right, all), shares_in(exact_svd(early).right, late),
          shares_in(exact_svd(late).right, late)};
}

// --- states --------------------------------------------------------------------------------------

oracle::RuleTraits traits_of(Rule rule) {
  switch (rule) {
    case Rule::mamba2:
      return oracle::mamba2;
    case Rule::gated_delta:
      return oracle::gated_delta;
    case Rule::kimi_delta:
      return oracle::kimi_delta;
  }
  return oracle::mamba2;
}

/// Terms of at least epsilon times the strongest, or times the sink kept apart.
std::ptrdiff_t rank_at(double epsilon, const VectorXd& values, double sink) {
  const double least = values.size() == 0 ? 0 : epsilon * std::max(values(0), sink);
  return std::count_if(values.data(), values.data() + values.size(),
                       [&](double value) { return value >= least; });
}

class HeadProfiler {
 public:
  HeadProfiler(const std::string& name, const Trace& trace, std::ptrdiff_t head,
               const ReplayOptions& options, const TraceReport& report,
               const std::function<void(std::ptrdiff_t)>& progress)
      : name_(name),
        trace_(trace),
        head_(head),
        options_(options),
        report_(report),
        progress_(progress),
        exact_(traits_of(trace.rule), static_cast<int>(trace.d_k), static_cast<int>(trace.d_v)) {}

  HeadProfile run(std::ptrdiff_t part) {
    const auto row_of = [this](auto part_of) {
      return [this, part_of](std::ptrdiff_t t) { return (trace_.*part_of)(t, head_); };
    };
    result_.q = profile_vectors(row_of(&Trace::query), trace_.d_k, trace_.tokens, part);
    result_.k = profile_vectors(row_of(&Trace::key), trace_.d_k, trace_.tokens, part);
    result_.v = profile_vectors(row_of(&Trace::value), trace_.d_v, trace_.tokens, part);

    if (!trace_.initial_state.empty()) {
      const auto begin = trace_.initial_state.begin() + head_ * trace_.d_k * trace_.d_v;
      std::copy(begin, begin + trace_.d_k * trace_.d_v, exact_.state().begin());
    }
    const std::ptrdiff_t rank = std::min(trace_.d_k, trace_.d_v);
    output_ = VectorXd::Zero(rank);
    std::ptrdiff_t done = 0;
    for (const std::ptrdiff_t moment : profile_moments(trace_.tokens, options_)) {
      for (std::ptrdiff_t t = done; t < moment; ++t) {
        exact_.step(trace_.key(t, head_), trace_.value(t, head_), trace_.log_decays(t, head_),
                    trace_.write_strength(t, head_));
      }
      look(moment);
      progress_(moment - done);
      done = moment;
    }
    result_.r99_output = rank_holding(0.99, output_);
    result_.captured_k = key_.mean(rank);
    result_.captured_v = value_.mean(rank);
    return std::move(result_);
  }

 private:
  /// Shares that incoming vectors have in each singular vector.
  struct Captured {
    VectorXd sum;
    std::ptrdiff_t count = 0;

    void add(const MatrixXd& directions, const VectorXd& incoming, std::ptrdiff_t rank) {
      const double length = incoming.norm();
      if (!(length > 0)) return;
      if (count++ == 0) sum = VectorXd::Zero(rank);
      const VectorXd along = directions.transpose() * (incoming / length);
      sum.head(along.size()) += along.cwiseAbs2();
    }
    std::vector<double> mean(std::ptrdiff_t rank) const {
      std::vector<double> shares(size(rank), none);
      for (std::size_t i = 0; i < shares.size() && count > 0; ++i) {
        shares[i] = sum(static_cast<Eigen::Index>(i)) / static_cast<double>(count);
      }
      return shares;
    }
  };

  void look(std::ptrdiff_t tokens) {
    const MatrixXd state =
        Eigen::Map<const RowMajor>(exact_.state().data(), trace_.d_k, trace_.d_v);
    if (!state.allFinite()) {
      throw ToolError(name_ + ": head " + std::to_string(head_) + ", token " +
                      std::to_string(tokens - 1) + ": the exact state overflows");
    }
    const ExactSvd svd = exact_svd(state);
    const VectorXd energy = energies(svd.values);
    StateMoment now;
    now.tokens = tokens;
    now.top_1 = top_share(1, energy);
    now.top_8 = top_share(8, energy);
    now.r99 = rank_holding(0.99, energy);
    now.r99_9 = rank_holding(0.999, energy);
    now.rank_exact = rank_at(options_.epsilon, svd.values, 0);
    now.rank_stored = stored_rank(tokens);

    // S^T q = sum of value (left . q) right, in orthogonal directions: energies add here too.
    const VectorXd read =
        svd.left.transpose() * vector(trace_.query(tokens - 1, head_), trace_.d_k);
    const VectorXd output = svd.values.cwiseProduct(read).cwiseAbs2();
    now.r99_output = rank_holding(0.99, output);
    output_.head(output.size()) += output;

    look_at_sink(state, svd, now);
    if (tokens < trace_.tokens && svd.values.size() > 0) {
      key_.add(svd.left, vector(trace_.key(tokens, head_), trace_.d_k), output_.size());
      value_.add(svd.right, vector(trace_.value(tokens, head_), trace_.d_v), output_.size());
    }
    if (tokens == trace_.tokens) {
      result_.singular_values.assign(svd.values.data(), svd.values.data() + svd.values.size());
    }
    result_.moments.push_back(now);
  }

  /// S = a v^T + content, a = S v, v the sink direction at length 1.
  void look_at_sink(const MatrixXd& state, const ExactSvd& svd, StateMoment& now) {
    now.sink = now.sink_cosine = none;
    if (trace_.sink_direction.empty()) return;
    VectorXd direction = vector(trace_.sink_direction.data() + head_ * trace_.d_v, trace_.d_v);
    const bool present = direction.norm() > 0;
    if (present) direction.normalize();
    const VectorXd coefficients = state * direction;
    const VectorXd content = singular_values(state - coefficients * direction.transpose(),
                                             svd.values.size() > 0 ? svd.values(0) : 0);
    now.content_r99 = rank_holding(0.99, energies(content));
    if (present && svd.values.size() > 0) {
      const double strongest = svd.values(0);
      now.sink = (coefficients / strongest).squaredNorm() / (svd.values / strongest).squaredNorm();
      now.sink_cosine = std::abs(svd.right.col(0).dot(direction));
    }
    if (options_.sink) now.rank_exact = rank_at(options_.epsilon, content, coefficients.norm());
    if (now.tokens == trace_.tokens) {
      result_.content_singular_values.assign(content.data(), content.data() + content.size());
    }
  }

  /// The next token's output is read at the rank that the state has now.
  double stored_rank(std::ptrdiff_t tokens) const {
    if (tokens == trace_.tokens) return report_.per_head[size(head_)].rank_final;
    return report_.series[size(head_)].rank[size(tokens - options_.prefill)];
  }

  const std::string& name_;
  const Trace& trace_;
  std::ptrdiff_t head_;
  const ReplayOptions& options_;
  const TraceReport& report_;
  const std::function<void(std::ptrdiff_t)>& progress_;

  oracle::DenseRecurrence<double> exact_;
  VectorXd output_;  // energies by term
  Captured key_;
  Captured value_;
  HeadProfile result_;
};

}  // namespace

std::vector<std::ptrdiff_t> profile_moments(std::ptrdiff_t tokens, const ReplayOptions& options) {
  constexpr std::ptrdiff_t most = 64;
  const std::ptrdiff_t compactions = (tokens - options.prefill) / options.buffer;
  const std::ptrdiff_t count = std::min(most, compactions);
  std::vector<std::ptrdiff_t> moments;
  for (std::ptrdiff_t i = 1; i <= count; ++i) {
    moments.push_back(options.prefill + i * compactions / count * options.buffer);
  }
  if (moments.empty() || moments.back() < tokens) moments.push_back(tokens);
  return moments;
}

void check_profile(const std::string& name, const Trace& trace) {
  constexpr std::ptrdiff_t most = 1024;
  if (trace.d_k <= most && trace.d_v <= most) return;
  throw ToolError(name + ": --profile: wanted d_k and d_v of at most " + std::to_string(most) +
                  ", given " + std::to_string(trace.d_k) + " and " + std::to_string(trace.d_v));
}

TraceProfile profile(const std::string& name, const Trace& trace, const ReplayOptions& options,
                     const TraceReport& report,
                     const std::function<void(std::ptrdiff_t)>& progress) {
  TraceProfile result;
  result.sink = !trace.sink_direction.empty();
  result.epsilon = options.epsilon;
  result.part = (trace.tokens + 3) / 4;
  result.heads.resize(size(trace.value_heads));
  parallel_for(trace.value_heads, options.threads, [&](std::ptrdiff_t head) {
    result.heads[size(head)] =
        HeadProfiler(name, trace, head, options, report, progress).run(result.part);
  });
  return result;
}

}  // namespace sinkstate::tools
