#include <ucontext.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

namespace emulation {

thread_local Index thread, block, block_size, grid_size;

namespace {

/// Threads that wait until as many have arrived as are left.
class Meeting {
 public:
  explicit Meeting(int count) : left_(count) {}

  /// @returns the number of the meeting
  long arrive() {
    const long now = held_;
    if (++arrived_ == left_) end();
    return now;
  }
  bool over(long number) const { return held_ != number; }
  bool empty() const { return arrived_ == 0; }
  long number() const { return held_; }
  void leave() {
    --left_;
    if (left_ > 0 && arrived_ == left_) end();
  }

 private:
  void end() {
    arrived_ = 0;
    ++held_;
  }
  int left_;
  int arrived_ = 0;
  long held_ = 0;
};

struct Warp {
  explicit Warp(int lanes) : meeting(lanes) {}
  Meeting meeting;
  // Of this meeting and of the last, which some may still be reading.
  Exchange exchanges[2];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  bool done = false;
};
constexpr std::size_t stack_size = std::size_t{512} << 10;

/// The block at work on this thread of the host.
struct Work {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::unique_ptr<Meeting> all;
  const std::function<void()>* kernel = nullptr;
};
thread_local Work work;

void give_turn() { swapcontext(&work.fibers[thread.x].context, &work.scheduler); }

void run_fiber() {
  (*work.kernel)();
  work.warps[thread.x / 32].meeting.leave();
  work.all->leave();
  work.fibers[thread.x].done = true;
  give_turn();
}

void run_block(unsigned threads) {
  work.warps.clear();
  for (unsigned first = 0; first < threads; first += 32) {
    work.warps.emplace_back(static_cast<int>(threads - first < 32 ? threads - first : 32));
  }
  work.all = std::make_unique<Meeting>(static_cast<int>(threads));
  if (work.fibers.size() < threads) work.fibers.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = work.fibers[i];
    if (fiber.stack == nullptr) fiber.stack.reset(new unsigned char[stack_size]);
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = stack_size;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (unsigned left = threads; left > 0;) {
    for (unsigned i = 0; i < threads; ++i) {
      if (work.fibers[i].done) continue;
      thread.x = i;
      swapcontext(&work.scheduler, &work.fibers[i].context);
      if (work.fibers[i].done) --left;
    }
  }
}

struct Stream {
  bool captures = false;
  std::vector<std::function<void()>> captured;
};
using Graph = std::vector<std::function<void()>>;

void put(cudaStream_t stream, const std::function<void()>& task) {
  auto* const to = static_cast<Stream*>(stream);
  if (to != nullptr && to->captures) {
    to->captured.push_back(task);
  } else {
    task();
  }
}

}  // namespace

const Exchange& exchange(const void* value, std::size_t size) {
  Warp& warp = work.warps[thread.x / 32];
  Exchange& now = warp.exchanges[warp.meeting.number() % 2];
  if (warp.meeting.empty()) now = Exchange{};
  Exchange::Lane& mine = now.lanes[thread.x % 32];
  mine.present = true;
  std::memcpy(mine.bytes, value, size);
  const long number = warp.meeting.arrive();
  while (!warp.meeting.over(number)) give_turn();
  return now;
}

void wait_for_block() {
  const long number = work.all->arrive();
  while (!work.all->over(number)) give_turn();
}

void launch(unsigned blocks, unsigned threads, int, cudaStream_t stream,
            const std::function<void()>& kernel) {
  put(stream, [=] {
    work.kernel = &kernel;
    block_size.x = threads;
    grid_size.x = blocks;
    for (block.x = 0; block.x < blocks; ++block.x) run_block(threads);
  });
}

}  // namespace emulation

using emulation::put;
using emulation::Stream;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new Stream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete static_cast<Stream*>(stream);
  return cudaSuccess;
}
cudaError_t cudaMallocBytes(void** memory, std::size_t size) {
  *memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind,
                            cudaStream_t stream) {
  put(stream, [=] { std::memcpy(to, from, size); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t size, cudaStream_t stream) {
  put(stream, [=] { std::memset(memory, value, size); });
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  *static_cast<Stream*>(stream) = Stream{true, {}};
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  auto* const from = static_cast<Stream*>(stream);
  from->captures = false;
  *graph = new emulation::Graph(from->captured);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* program, cudaGraph_t graph, unsigned long long) {
  *program = new emulation::Graph(*static_cast<emulation::Graph*>(graph));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete static_cast<emulation::Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t program) {
  delete static_cast<emulation::Graph*>(program);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t program, cudaStream_t) {
  for (const auto& task : *static_cast<emulation::Graph*>(program)) task();
  return cudaSuccess;
}
