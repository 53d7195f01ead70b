// Detects data races on the emulator's shared memory: records each byte's last accesses.
//
// A barrier of the block orders everything before it against everything after it: it begins a new
// epoch. Within an epoch, threads of different warps are unordered, and lanes of one warp are
// ordered by __syncwarp: each lane has a vector clock of its warp's 32 lanes. Shuffles, votes and
// atomics do not order memory. Two accesses race if neither came before the other, unless both read
// or both are atomic. Each byte keeps its last write, and the reads (or atomics) since.
#pragma once

#include <cstdint>
#include <cstring>

#include "csrc/simt/names.h"

namespace fusedops::simt {

inline constexpr int kMaxThreads = 1024, kLanes = 32;

enum class Access : uint8_t { read, write, atomic };

// Identifies an access: the thread, the code address and the time. `time` is the lane's own entry
// in its clock.
struct Stamp {
  const void* pc = nullptr;
  uint32_t epoch = 0, time = 0;
  int thread = 0;
  Access access = Access::read;
};

struct Clocks {
  uint32_t epoch = 0;
  uint32_t of[kMaxThreads][kLanes];

  FUSEDOPS_SIMT_UNSEEN void begin(int threads) {
    ++epoch;
    std::memset(of, 0, threads * sizeof(of[0]));
    for (int t = 0; t < threads; ++t) of[t][t % kLanes] = 1;
  }

  FUSEDOPS_SIMT_UNSEEN uint32_t time(int thread) const { return of[thread][thread % kLanes]; }

  // __syncwarp: the lanes' clocks are merged, and each lane's time advances.
  FUSEDOPS_SIMT_UNSEEN void join(int warp, uint32_t lanes) {
    uint32_t merged[kLanes] = {};
    for (uint32_t left = lanes; left; left &= left - 1) {
      const uint32_t* clock = of[warp * kLanes + __builtin_ctz(left)];
      for (int i = 0; i < kLanes; ++i) merged[i] = merged[i] < clock[i] ? clock[i] : merged[i];
    }
    for (uint32_t left = lanes; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      uint32_t* clock = of[warp * kLanes + lane];
      for (int i = 0; i < kLanes; ++i) clock[i] = merged[i];
      ++clock[lane];
    }
  }

  // Whether an access precedes the current access of `thread`.
  FUSEDOPS_SIMT_UNSEEN bool before(const Stamp& s, int thread) const {
    if (s.epoch != epoch || s.thread == thread) return true;
    return s.thread / kLanes == thread / kLanes && of[thread][s.thread % kLanes] >= s.time;
  }
};

// Accesses of one kind, reads or atomics, to one byte in one epoch. No order exists between them.
struct Together {
  Stamp last;          // an access by the warp whose lanes are kept
  Stamp other;         // an access by any other warp
  uint32_t lanes = 0;  // of last's warp, whose accesses no later one has followed

  // Returns an access that does not precede the current one of `thread`, or null.
  FUSEDOPS_SIMT_UNSEEN const Stamp* unordered(const Clocks& clocks, int thread) {
    if (!clocks.before(last, thread)) return &last;
    if (!clocks.before(other, thread)) return &other;
    if (last.epoch != clocks.epoch || last.thread / kLanes != thread / kLanes) return nullptr;
    drop_ordered(clocks, thread);
    const uint32_t others = lanes & ~(1u << thread % kLanes);
    if (!others) return nullptr;
    last.thread = thread / kLanes * kLanes + __builtin_ctz(others);
    return &last;
  }

  FUSEDOPS_SIMT_UNSEEN void add(const Clocks& clocks, const Stamp& now) {
    const uint32_t lane = 1u << now.thread % kLanes;
    if (last.epoch != now.epoch) {
      *this = {now, {}, lane};
    } else if (last.thread / kLanes != now.thread / kLanes) {
      other = now;
    } else {
      if (last.time != now.time) drop_ordered(clocks, now.thread);
      // Lanes that synchronized under partial masks may have different times. Keeping the smallest
      // may hide a race but never reports a false one.
      const bool older = (lanes & ~lane) && last.time < now.time;
      const uint32_t time = older ? last.time : now.time;
      last = now;
      last.time = time;
      lanes |= lane;
    }
  }

 private:
  FUSEDOPS_SIMT_UNSEEN void drop_ordered(const Clocks& clocks, int thread) {
    for (uint32_t left = lanes; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (clocks.of[thread][lane] >= last.time) lanes &= ~(1u << lane);
    }
  }
};

// The record of one byte of shared memory, or of a word that is only accessed whole.
struct Cell {
  Stamp write;
  Together together;
  uint32_t written = 0;  // the last block that wrote it
  uint32_t split = 0;    // the last block that accessed part of its word

  // Records an access; returns the earlier access that it races with, or null.
  FUSEDOPS_SIMT_UNSEEN const Stamp* note(const Clocks& clocks, const Stamp& now) {
    if (!clocks.before(write, now.thread)) return &write;
    const bool current = together.last.epoch == now.epoch;
    if (now.access == Access::write || (current && together.last.access != now.access)) {
      if (const Stamp* racing = together.unordered(clocks, now.thread)) return racing;
      if (current && together.last.access == Access::atomic) write = together.last;
      together = {};
    }
    if (now.access == Access::write) {
      write = now;
    } else {
      together.add(clocks, now);
    }
    return nullptr;
  }
};

}  // namespace fusedops::simt
