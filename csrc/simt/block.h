// Emulates one CUDA block: its threads as fibers, the order in which they run, and their barrier.
//
// Threads run warp by warp and lane by lane, each until it waits, so every run has the same order.
// A warp runs until all its lanes wait; then the next one runs.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "csrc/simt/fiber.h"
#include "csrc/simt/names.h"
#include "csrc/simt/race.h"
#include "csrc/simt/shared.h"
#include "csrc/simt/where.h"

namespace fusedops::simt {

// The arguments of launch(). `call` runs the kernel with the kernel's arguments.
struct Launch {
  dim3 grid, block;
  size_t smem;
  const void* kernel;
  void (*call)(const void* arguments);
  const void* arguments;
};

// A call that waits for other threads. `at` gives the line even without addr2line, and keeps the
// compiler from merging the calls of two branches.
struct Call {
  const char* name = nullptr;
  const void* pc = nullptr;
  std::source_location at;
  uint32_t mask = 0;
};

enum class State : uint8_t { ready, at_barrier, in_warp, exited };

struct Copy {
  uint4* to;
  const uint4* from;
  int group;
};

// A thread's copies to shared memory: the ones under way, and the number of groups.
struct Copies {
  std::vector<Copy> waiting;
  int groups = 0;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  State state = State::exited;
  Call call;
  int source = 0;                  // the lane that a shuffle reads
  uint64_t value = 0, result = 0;  // what a shuffle or vote contributes and returns
  Copies copies;
};

struct Warp {
  uint32_t lanes = 0;    // mask of the lanes that exist
  uint32_t ready = 0;    // lanes that can run now
  uint32_t next = 0;     // lanes that can run in the warp's next turn
  uint32_t waiting = 0;  // lanes that wait for other lanes
  uint32_t exited = 0;
};

template <class Index>  // dim3 or uint3
std::string to_string(Index i) {
  std::string text = "(";
  text += std::to_string(i.x) + ", " + std::to_string(i.y) + ", " + std::to_string(i.z);
  return text += ")";
}

inline uint3 unravel(int64_t i, dim3 size) {
  return {static_cast<unsigned>(i % size.x), static_cast<unsigned>(i / size.x % size.y),
          static_cast<unsigned>(i / size.x / size.y)};
}

class Block {
 public:
  // Returns this CPU thread's block. It keeps the stacks and the arena between launches.
  static Block& mine();

  Block() = default;
  Block(const Block&) = delete;
  ~Block() { std::free(cells); }

  // Runs one block; returns its error, or an empty string.
  std::string run(const Launch& launch, int64_t block);

  // Ends the block from one of its threads. The message is built on the CPU thread's stack.
  [[noreturn]] FUSEDOPS_SIMT_UNSEEN void stop(std::function<std::string()> message) {
    message_ = std::move(message);
    stopped_ = true;
    suspend();
    __builtin_unreachable();
  }

  // Lets the other threads run; returns when this one is resumed.
  FUSEDOPS_SIMT_INLINE void suspend() {
    spins_ = 0;
    thread().fiber.switch_to(host_);
  }

  // Like that, after an atomic, for a thread that does not wait.
  FUSEDOPS_SIMT_INLINE void yield(bool changed) {
    spins_ = changed ? 0 : spins_ + 1;
    if (spins_ == kSpins) stop_stuck();
    warp().next |= 1u << number % kLanes;
    thread().fiber.switch_to(host_);
  }

  FUSEDOPS_SIMT_INLINE int barrier(bool predicate, const Call& call);

  [[noreturn]] void stop_stuck() {
    stop([this] { return stuck(); });
  }

  FUSEDOPS_SIMT_INLINE Thread& thread() { return threads[number]; }
  FUSEDOPS_SIMT_INLINE Warp& warp() { return warps[number / kLanes]; }
  std::string name(int thread) const { return "thread " + to_string(threads[thread].index); }

  Thread threads[kMaxThreads];
  Warp warps[kMaxThreads / kLanes];
  int size = 0;    // threads
  int number = 0;  // of the running thread
  Arena arena;
  Clocks clocks;
  Cell* cells = nullptr;     // the arena's cells, if the hooks are compiled in
  uint32_t first_epoch = 0;  // of this block

 private:
  // This many atomics in a row that change nothing are a wait that never ends.
  static constexpr int kSpins = 1 << 24;

  static void enter();
  FUSEDOPS_SIMT_UNSEEN void begin(const Launch& launch, int64_t block);
  FUSEDOPS_SIMT_UNSEEN bool run_warp(int w);
  FUSEDOPS_SIMT_INLINE void resume(int thread);
  FUSEDOPS_SIMT_UNSEEN void release();
  void abandon();
  std::string stuck() const;

  Fiber host_;
  Stacks stacks_;
  const Launch* launch_ = nullptr;
  std::function<std::string()> message_;
  int exited_ = 0, arrived_ = 0, count_ = 0, result_ = 0;
  int spins_ = 0;
  bool stopped_ = false;
};

// Null while no kernel runs on this CPU thread.
FUSEDOPS_SIMT_PER_CPU Block* running = nullptr;

// Whether shared accesses are checked. Instrumented files call __tsan_init when they are loaded,
// which sets it.
inline constinit bool hooked = false;

inline Block& Block::mine() {
  thread_local std::unique_ptr<Block> block;
  if (!block) block = std::make_unique<Block>();
  return *block;
}

// Whether two threads wait in the same call of the source. The compiler may have copied that call.
FUSEDOPS_SIMT_UNSEEN inline bool same_call(const Call& a, const Call& b) {
  if (a.pc == b.pc) return true;
  if (a.at.line() != b.at.line() || a.at.column() != b.at.column()) return false;
  return where(a.pc) == where(b.pc);
}

inline std::string text(const Call& call) {
  std::string line = where(call.pc);
  if (line.find(':') == std::string::npos) {
    line = short_place(call.at.file_name()) + ":" + std::to_string(call.at.line());
  }
  return std::string(call.name) + " at " + line;
}

inline void Block::enter() {
  Block& block = *running;
  block.thread().fiber.begin(block.host_);
  block.launch_->call(block.launch_->arguments);
  block.thread().state = State::exited;
  block.warp().exited |= 1u << block.number % kLanes;
  ++block.exited_;
  block.thread().fiber.end(block.host_);
}

inline void Block::begin(const Launch& launch, int64_t block) {
  launch_ = &launch;
  size = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  exited_ = arrived_ = count_ = spins_ = 0;
  stopped_ = false;
  blockDim = launch.block, gridDim = launch.grid, blockIdx = unravel(block, launch.grid);
  arena.begin(launch.smem);
  // pages that no kernel touches are never allocated
  if (hooked && !cells) cells = static_cast<Cell*>(std::calloc(kArena, sizeof(Cell)));
  clocks.begin(hooked ? size : 0);
  first_epoch = clocks.epoch;
  for (int t = 0; t < size; ++t) {
    threads[t].index = unravel(t, launch.block);
    threads[t].state = State::ready;
    threads[t].copies.waiting.clear();
    threads[t].fiber.prepare(stacks_.at(t), enter);
  }
  for (int w = 0; w * kLanes < size; ++w) {
    const int lanes = std::min(kLanes, size - w * kLanes);
    const uint32_t all = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    warps[w] = {all, all, 0, 0, 0};
  }
}

inline std::string Block::run(const Launch& launch, int64_t block) {
  begin(launch, block);
  running = this;
  arena_low = reinterpret_cast<uintptr_t>(arena.memory());
  bool ran = true;
  while (ran && !stopped_) {
    ran = false;
    for (int w = 0; w * kLanes < size; ++w) ran |= run_warp(w);
  }
  running = nullptr;
  arena_low = 0;
  if (exited_ == size) return "";
  const std::string message = stopped_ ? message_() : stuck();
  message_ = nullptr;
  abandon();
  return kernel_name(launch.kernel) + ": block " + to_string(blockIdx) + ", " + message;
}

// Runs the lanes until each waits or has done an atomic; false if no lane could run.
inline bool Block::run_warp(int w) {
  Warp& warp = warps[w];
  warp.ready |= warp.next;
  warp.next = 0;
  const bool any = warp.ready != 0;
  while (warp.ready && !stopped_) {
    const int lane = __builtin_ctz(warp.ready);
    warp.ready &= warp.ready - 1;
    resume(w * kLanes + lane);
  }
  return any;
}

inline void Block::resume(int thread) {
  number = thread;
  threadIdx = threads[thread].index;
  host_.switch_to(threads[thread].fiber);
}

inline void Block::abandon() {
  for (int t = 0; t < size; ++t) threads[t].fiber.abandon();
}

// Returns the number of threads whose predicate is true.
inline int Block::barrier(bool predicate, const Call& call) {
  thread().call = call;
  thread().state = State::at_barrier;
  count_ += predicate;
  if (++arrived_ == size) release();
  suspend();
  return result_;
}

// Called when all threads wait at barriers. They continue if all wait at the same one.
inline void Block::release() {
  for (int t = 1; t < size; ++t) {
    if (!same_call(threads[0].call, threads[t].call)) stop_stuck();
  }
  for (int t = 0; t < size; ++t) threads[t].state = State::ready;
  for (int w = 0; w * kLanes < size; ++w) warps[w].next = warps[w].lanes;
  result_ = count_;
  arrived_ = count_ = 0;
  ++clocks.epoch;
}

}  // namespace fusedops::simt
