// Emulates __syncthreads and its variants, and describes threads that would wait forever.
#pragma once

#include <cstdio>
#include <source_location>
#include <string>

#include "csrc/simt/block.h"

namespace fusedops::simt {

inline std::string hex(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

// Describes where a waiting thread is.
inline std::string whereabouts(const Thread& thread) {
  switch (thread.state) {
    case State::exited: return "it exited";
    case State::at_barrier: return "it waits at " + text(thread.call);
    case State::in_warp:
      return "it waits in " + text(thread.call) + " with mask " + hex(thread.call.mask);
    default: return "it repeats an atomic at " + where(thread.call.pc);
  }
}

// Whether `other` has reached the call in which `thread` waits.
inline bool came(const Thread& thread, const Thread& other) {
  return other.state == thread.state && other.call.mask == thread.call.mask &&
         same_call(thread.call, other.call);
}

// Returns the first thread that this one waits for forever, or -1.
inline int missing(const Block& block, int number) {
  const Thread& thread = block.threads[number];
  const bool in_warp = thread.state == State::in_warp;
  const int first = in_warp ? number / kLanes * kLanes : 0;
  const int last = in_warp ? first + kLanes : block.size;
  for (int t = first; t < last; ++t) {
    if (in_warp && !(thread.call.mask >> (t - first) & 1)) continue;
    if (!came(thread, block.threads[t])) return t;
  }
  return -1;
}

inline std::string Block::stuck() const {
  // a stuck warp keeps its block from a barrier, so the error names the warp
  for (const State state : {State::in_warp, State::at_barrier}) {
    for (int t = 0; t < size; ++t) {
      if (threads[t].state != state) continue;
      const int other = missing(*this, t);
      if (other < 0) continue;
      return name(t) + whereabouts(threads[t]).substr(2) + "; " + name(other) +
             " never comes: " + whereabouts(threads[other]);
    }
  }
  int t = 0;
  while (threads[t].state == State::exited) ++t;
  return name(t) + whereabouts(threads[t]).substr(2) + ", and nothing changes";
}

FUSEDOPS_SIMT_CALLED inline int sync_block(const char* name, bool predicate,
                                           std::source_location at) {
  return running->barrier(predicate, {name, __builtin_return_address(0), at, 0});
}

// Calls sync_block, which reads its return address: the asm statement prevents a tail call.
__forceinline__ int call_sync_block(const char* name, bool predicate, std::source_location at) {
  int count = sync_block(name, predicate, at);
  asm volatile("" : "+r"(count));
  return count;
}

}  // namespace fusedops::simt

__forceinline__ void __syncthreads(std::source_location at = std::source_location::current()) {
  fusedops::simt::call_sync_block("__syncthreads", false, at);
}

__forceinline__ int __syncthreads_count(int predicate,
                                        std::source_location at = std::source_location::current()) {
  return fusedops::simt::call_sync_block("__syncthreads_count", predicate != 0, at);
}

__forceinline__ int __syncthreads_or(int predicate,
                                     std::source_location at = std::source_location::current()) {
  return fusedops::simt::call_sync_block("__syncthreads_or", predicate != 0, at) != 0;
}

__forceinline__ int __syncthreads_and(int predicate,
                                      std::source_location at = std::source_location::current()) {
  return fusedops::simt::call_sync_block("__syncthreads_and", predicate == 0, at) == 0;
}
