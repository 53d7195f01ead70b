// The functions that the compiler calls at each memory access under -fsanitize=thread. The program
// is not linked with that sanitizer's library: these functions check only shared memory. A memcpy
// that is not inlined is not reported, so kernels fill shared memory by assignment.
#pragma once

#include "csrc/simt/touch.h"

#if defined(__SANITIZE_THREAD__)

#define FUSEDOPS_SIMT_HOOK \
  extern "C" __attribute__((weak, used, visibility("hidden"), noinline)) FUSEDOPS_SIMT_UNSEEN

namespace fusedops::simt {

FUSEDOPS_SIMT_INLINE inline void seen(const void* p, size_t bytes, Access access, const void* pc) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (address - arena_low < kArena) touch(address, bytes, access, pc);
}

}  // namespace fusedops::simt

#define FUSEDOPS_SIMT_ACCESS(name, bytes, access)                                                \
  FUSEDOPS_SIMT_HOOK void name(void* p) {                                                        \
    fusedops::simt::seen(p, bytes, fusedops::simt::Access::access, __builtin_return_address(0)); \
  }
#define FUSEDOPS_SIMT_ACCESSES(bytes)                               \
  FUSEDOPS_SIMT_ACCESS(__tsan_read##bytes, bytes, read)             \
  FUSEDOPS_SIMT_ACCESS(__tsan_write##bytes, bytes, write)           \
  FUSEDOPS_SIMT_ACCESS(__tsan_unaligned_read##bytes, bytes, read)   \
  FUSEDOPS_SIMT_ACCESS(__tsan_unaligned_write##bytes, bytes, write) \
  FUSEDOPS_SIMT_ACCESS(__tsan_volatile_read##bytes, bytes, read)    \
  FUSEDOPS_SIMT_ACCESS(__tsan_volatile_write##bytes, bytes, write)
FUSEDOPS_SIMT_ACCESSES(1)
FUSEDOPS_SIMT_ACCESSES(2)
FUSEDOPS_SIMT_ACCESSES(4)
FUSEDOPS_SIMT_ACCESSES(8)
FUSEDOPS_SIMT_ACCESSES(16)

FUSEDOPS_SIMT_HOOK void __tsan_read_range(void* p, size_t bytes) {
  fusedops::simt::seen(p, bytes, fusedops::simt::Access::read, __builtin_return_address(0));
}
FUSEDOPS_SIMT_HOOK void __tsan_write_range(void* p, size_t bytes) {
  fusedops::simt::seen(p, bytes, fusedops::simt::Access::write, __builtin_return_address(0));
}

FUSEDOPS_SIMT_HOOK void __tsan_init() { fusedops::simt::hooked = true; }
FUSEDOPS_SIMT_HOOK void __tsan_func_entry(void*) {}
FUSEDOPS_SIMT_HOOK void __tsan_func_exit(void*) {}
FUSEDOPS_SIMT_HOOK void __tsan_vptr_read(void*) {}
FUSEDOPS_SIMT_HOOK void __tsan_vptr_update(void*, void*) {}

// The C++ library's atomics also call these hooks. Kernels use the atomics of atomic.h.
#define FUSEDOPS_SIMT_ATOMIC_UPDATE(bits, type, what)                                         \
  FUSEDOPS_SIMT_HOOK type __tsan_atomic##bits##_fetch_##what(volatile void* p, type v, int) { \
    return __atomic_fetch_##what(static_cast<volatile type*>(p), v, __ATOMIC_SEQ_CST);        \
  }
#define FUSEDOPS_SIMT_ATOMIC_EXCHANGE(bits, type, how)                                           \
  FUSEDOPS_SIMT_HOOK bool __tsan_atomic##bits##_compare_exchange_##how(volatile void* p,         \
                                                                       void* expected, type v,   \
                                                                       int, int) {               \
    return __atomic_compare_exchange_n(static_cast<volatile type*>(p),                           \
                                       static_cast<type*>(expected), v, false, __ATOMIC_SEQ_CST, \
                                       __ATOMIC_SEQ_CST);                                        \
  }
#define FUSEDOPS_SIMT_ATOMICS(bits, type)                                                 \
  FUSEDOPS_SIMT_HOOK type __tsan_atomic##bits##_load(const volatile void* p, int) {       \
    return __atomic_load_n(static_cast<const volatile type*>(p), __ATOMIC_SEQ_CST);       \
  }                                                                                       \
  FUSEDOPS_SIMT_HOOK void __tsan_atomic##bits##_store(volatile void* p, type v, int) {    \
    __atomic_store_n(static_cast<volatile type*>(p), v, __ATOMIC_SEQ_CST);                \
  }                                                                                       \
  FUSEDOPS_SIMT_HOOK type __tsan_atomic##bits##_exchange(volatile void* p, type v, int) { \
    return __atomic_exchange_n(static_cast<volatile type*>(p), v, __ATOMIC_SEQ_CST);      \
  }                                                                                       \
  FUSEDOPS_SIMT_ATOMIC_UPDATE(bits, type, add)                                            \
  FUSEDOPS_SIMT_ATOMIC_UPDATE(bits, type, sub)                                            \
  FUSEDOPS_SIMT_ATOMIC_EXCHANGE(bits, type, strong)                                       \
  FUSEDOPS_SIMT_ATOMIC_EXCHANGE(bits, type, weak)
FUSEDOPS_SIMT_ATOMICS(8, unsigned char)
FUSEDOPS_SIMT_ATOMICS(32, unsigned)
FUSEDOPS_SIMT_ATOMICS(64, unsigned long)

#endif
