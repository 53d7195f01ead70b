// Operations of a warp's lanes: shuffles, votes, maxima and __syncwarp.
//
// Each lane waits for the lanes of its mask. The last one to arrive serves them all, from values
// that no lane can have overwritten yet. Reading from a lane outside the mask and a missing lane of
// the mask are undefined in CUDA; here both are errors.
#pragma once

#include <cstdint>
#include <cstring>
#include <source_location>
#include <string>
#include <type_traits>

#include "csrc/simt/barrier.h"

namespace fusedops::simt {

// Gives each lane of the mask its result. Called by the last lane to arrive.
using Serve = void (*)(Block& block, Thread* lanes, uint32_t mask);

[[noreturn]] FUSEDOPS_SIMT_UNSEEN inline void stop_in_warp(Block& block, const Thread& thread,
                                                           const char* what, int lane) {
  const int number = static_cast<int>(&thread - block.threads);
  block.stop([&block, number, what, lane] {
    const Call& call = block.threads[number].call;
    return block.name(number) + " calls " + text(call) + " with mask " + hex(call.mask) +
           ": lane " + std::to_string(lane) + " " + what;
  });
}

FUSEDOPS_SIMT_UNSEEN inline void check_mask(Block& block, const Thread& thread) {
  const int lane = block.number % kLanes;
  const uint32_t mask = thread.call.mask;
  const uint32_t absent = mask & ~block.warp().lanes, exited = mask & block.warp().exited;
  if (!(mask >> lane & 1)) stop_in_warp(block, thread, "calls it and is not in the mask", lane);
  if (absent) {
    stop_in_warp(block, thread, "does not exist in this warp", __builtin_ctz(absent));
  }
  if (exited) stop_in_warp(block, thread, "has exited", __builtin_ctz(exited));
}

// Whether all lanes of the mask wait in this call.
FUSEDOPS_SIMT_UNSEEN inline bool all_came(Block& block, const Thread* lanes, uint32_t mask) {
  if ((block.warp().waiting & mask) != mask) return false;
  const Thread& first = lanes[__builtin_ctz(mask)];
  for (uint32_t left = mask; left; left &= left - 1) {
    if (lanes[__builtin_ctz(left)].call.mask != mask) return false;
  }
  for (uint32_t left = mask; left; left &= left - 1) {
    if (!same_call(first.call, lanes[__builtin_ctz(left)].call)) block.stop_stuck();
  }
  return true;
}

FUSEDOPS_SIMT_CALLED inline uint64_t meet(const char* name, uint32_t mask, uint64_t value,
                                          int source, Serve serve, std::source_location at) {
  Block& block = *running;
  Thread& thread = block.thread();
  Thread* lanes = &thread - block.number % kLanes;
  thread.call.name = name;  // field by field: copying a new struct would stall on its stores
  thread.call.pc = __builtin_return_address(0);
  thread.call.at = at;
  thread.call.mask = mask;
  thread.value = value;
  thread.source = source;
  check_mask(block, thread);
  thread.state = State::in_warp;
  block.warp().waiting |= 1u << block.number % kLanes;
  if (all_came(block, lanes, mask)) {
    serve(block, lanes, mask);
    for (uint32_t left = mask; left; left &= left - 1) {
      lanes[__builtin_ctz(left)].state = State::ready;
    }
    block.warp().waiting &= ~mask;
    block.warp().ready |= mask;
  }
  block.suspend();
  return thread.result;
}

// Calls meet, which reads its return address: the asm statement prevents a tail call.
__forceinline__ uint64_t call_meet(const char* name, uint32_t mask, uint64_t value, int source,
                                   Serve serve, std::source_location at) {
  uint64_t result = meet(name, mask, value, source, serve, at);
  asm volatile("" : "+r"(result));
  return result;
}

FUSEDOPS_SIMT_UNSEEN inline void serve_sync(Block& block, Thread*, uint32_t mask) {
  if (hooked) block.clocks.join(block.number / kLanes, mask);
}

FUSEDOPS_SIMT_UNSEEN inline void serve_vote(Block&, Thread* lanes, uint32_t mask) {
  uint64_t votes = 0;
  for (uint32_t left = mask; left; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    votes |= lanes[lane].value << lane;
  }
  for (uint32_t left = mask; left; left &= left - 1) lanes[__builtin_ctz(left)].result = votes;
}

FUSEDOPS_SIMT_UNSEEN inline void serve_largest(Block&, Thread* lanes, uint32_t mask) {
  uint64_t largest = 0;
  for (uint32_t left = mask; left; left &= left - 1) {
    const uint64_t value = lanes[__builtin_ctz(left)].value;
    if (value > largest) largest = value;
  }
  for (uint32_t left = mask; left; left &= left - 1) lanes[__builtin_ctz(left)].result = largest;
}

FUSEDOPS_SIMT_UNSEEN inline void serve_shuffle(Block& block, Thread* lanes, uint32_t mask) {
  for (uint32_t left = mask; left; left &= left - 1) {
    Thread& thread = lanes[__builtin_ctz(left)];
    if (!(mask >> thread.source & 1)) {
      stop_in_warp(block, thread, "is read and is not in the mask", thread.source);
    }
    thread.result = lanes[thread.source].value;
  }
}

FUSEDOPS_SIMT_UNSEEN inline int this_lane() { return running->number % kLanes; }

// Computes `source` like PTX's shfl: a lane whose source is outside its group of `width` reads
// itself.
template <class T>
__forceinline__ T shuffle(const char* name, unsigned mask, T value, int source, bool inside,
                          std::source_location at) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = call_meet(name, mask, bits, inside ? source : this_lane(), serve_shuffle, at);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

__forceinline__ uint32_t vote(const char* name, unsigned mask, bool predicate,
                              std::source_location at) {
  return static_cast<uint32_t>(call_meet(name, mask, predicate, 0, serve_vote, at));
}

}  // namespace fusedops::simt

template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
                              std::source_location at = std::source_location::current()) {
  const int first = fusedops::simt::this_lane() & -width;
  return fusedops::simt::shuffle("__shfl_sync", mask, value, first + (source & (width - 1)), true,
                                 at);
}

template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                                 std::source_location at = std::source_location::current()) {
  const int lane = fusedops::simt::this_lane(), source = lane - static_cast<int>(delta & 31);
  return fusedops::simt::shuffle("__shfl_up_sync", mask, value, source, source >= (lane & -width),
                                 at);
}

template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                                   std::source_location at = std::source_location::current()) {
  const int lane = fusedops::simt::this_lane(), source = lane + static_cast<int>(delta & 31);
  return fusedops::simt::shuffle("__shfl_down_sync", mask, value, source,
                                 source < (lane & -width) + width, at);
}

template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize,
                                  std::source_location at = std::source_location::current()) {
  const int lane = fusedops::simt::this_lane(), source = lane ^ (lanes & 31);
  return fusedops::simt::shuffle("__shfl_xor_sync", mask, value, source,
                                 source < (lane & -width) + width, at);
}

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate,
                                       std::source_location at = std::source_location::current()) {
  return fusedops::simt::vote("__ballot_sync", mask, predicate != 0, at);
}

__forceinline__ int __any_sync(unsigned mask, int predicate,
                               std::source_location at = std::source_location::current()) {
  return fusedops::simt::vote("__any_sync", mask, predicate != 0, at) != 0;
}

__forceinline__ int __all_sync(unsigned mask, int predicate,
                               std::source_location at = std::source_location::current()) {
  return fusedops::simt::vote("__all_sync", mask, predicate != 0, at) == mask;
}

__forceinline__ unsigned __reduce_max_sync(
    unsigned mask, unsigned value, std::source_location at = std::source_location::current()) {
  return static_cast<unsigned>(fusedops::simt::call_meet("__reduce_max_sync", mask, value, 0,
                                                         fusedops::simt::serve_largest, at));
}

__forceinline__ void __syncwarp(unsigned mask = ~0u,
                                std::source_location at = std::source_location::current()) {
  fusedops::simt::call_meet("__syncwarp", mask, 0, 0, fusedops::simt::serve_sync, at);
}

// The lanes that have not exited.
inline unsigned __activemask() {
  const fusedops::simt::Warp& warp = fusedops::simt::running->warp();
  return warp.lanes & ~warp.exited;
}
