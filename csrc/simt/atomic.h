// Emulates CUDA's atomics and memory fences with real atomics, because blocks run on several CPU
// threads. After each atomic the block's other threads run, so that a loop can wait for another
// thread's store.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "csrc/simt/touch.h"

namespace fusedops::simt {

// Atomically replaces the old value by next(old); returns the old value.
template <class T, class Next>
FUSEDOPS_SIMT_CALLED T update(T* p, Next next) {
  const void* pc = __builtin_return_address(0);
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (hooked && address - arena_low < kArena) touch(address, sizeof(T), Access::atomic, pc);
  running->thread().call.pc = pc;
  T old, desired;
  __atomic_load(p, &old, __ATOMIC_SEQ_CST);
  do {
    desired = next(old);
  } while (
      !__atomic_compare_exchange(p, &old, &desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  running->yield(std::memcmp(&old, &desired, sizeof(T)) != 0);
  return old;
}

// Calls update, which reads its return address: the asm statement prevents a tail call.
template <class T, class Next>
__forceinline__ T call_update(T* p, Next next) {
  T old = update(p, next);
  asm volatile("" : "+m"(old));
  return old;
}

template <class T>
concept Word =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;
template <class T>
concept Number = Word<T> || std::is_same_v<T, float> || std::is_same_v<T, double>;
template <class T>
concept Integer = Word<T> || std::is_same_v<T, long long>;

}  // namespace fusedops::simt

template <fusedops::simt::Number T>
__forceinline__ T atomicAdd(T* p, std::type_identity_t<T> value) {
  return fusedops::simt::call_update(p, [value](T old) { return old + value; });
}

template <fusedops::simt::Integer T>
__forceinline__ T atomicMax(T* p, std::type_identity_t<T> value) {
  return fusedops::simt::call_update(p, [value](T old) { return old < value ? value : old; });
}

template <fusedops::simt::Integer T>
__forceinline__ T atomicMin(T* p, std::type_identity_t<T> value) {
  return fusedops::simt::call_update(p, [value](T old) { return value < old ? value : old; });
}

template <fusedops::simt::Number T>
__forceinline__ T atomicExch(T* p, std::type_identity_t<T> value) {
  return fusedops::simt::call_update(p, [value](T) { return value; });
}

template <fusedops::simt::Integer T>
__forceinline__ T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return fusedops::simt::call_update(p, [expected, value](T old) {
    return old == expected ? value : old;
  });
}

FUSEDOPS_SIMT_CALLED inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
FUSEDOPS_SIMT_CALLED inline void __threadfence_block() { __threadfence(); }
