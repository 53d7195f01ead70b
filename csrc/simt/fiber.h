// Fibers: contexts with their own stacks, between which a CPU thread switches.
//
// On x86-64 a switch is a few instructions. Other machines (and FUSEDOPS_SIMT_UCONTEXT) use
// ucontext, which is many times slower because it makes a system call.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <stdexcept>
#include <vector>

#include "csrc/simt/names.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace fusedops::simt {

struct Stack {
  char* low = nullptr;
  size_t size = 0;
};

#if defined(__x86_64__) && !defined(FUSEDOPS_SIMT_UCONTEXT)

// Registers that only AVX-512 has.
#if defined(__AVX512F__)
#define FUSEDOPS_SIMT_WIDE_REGISTERS                                                            \
  "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",     \
      "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", \
      "k7",
#else
#define FUSEDOPS_SIMT_WIDE_REGISTERS
#endif

class Registers {
 public:
  void prepare(Stack stack, void (*entry)()) {
    // entry starts as if called: its unused return address puts the top of the stack at 16 n + 8
    auto* top = reinterpret_cast<void**>(stack.low + stack.size);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    top_ = top;
  }

  // Saves rbp and the address to resume at on this stack; the compiler saves all other live
  // registers. Inline and without a return instruction, because the CPU would mispredict each.
  FUSEDOPS_SIMT_INLINE void switch_to(Registers& next) {
    void** save = &top_;
    void* load = next.top_;
    asm volatile(R"(
      leaq -128(%%rsp), %%rsp  # what a leaf function keeps below its stack
      pushq %%rbp
      leaq 1f(%%rip), %%rax
      pushq %%rax
      movq %%rsp, (%[save])
      movq %[load], %%rsp
      popq %%rax
      jmpq *%%rax
    1:
      popq %%rbp
      leaq 128(%%rsp), %%rsp
    )"
                 : [save] "+D"(save), [load] "+S"(load)
                 :
                 : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                   "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                   "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
                   FUSEDOPS_SIMT_WIDE_REGISTERS "memory", "cc");
  }

 private:
  void* top_ = nullptr;
};

#else

class Registers {
 public:
  void prepare(Stack stack, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack.low;
    context_.uc_stack.ss_size = stack.size;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  void switch_to(Registers& next) { swapcontext(&context_, &next.context_); }

 private:
  ucontext_t context_;
};

#endif

// A fiber, or the CPU thread that resumes fibers. Every switch is reported to AddressSanitizer.
class Fiber {
 public:
  void prepare(Stack stack, void (*entry)()) {
    stack_ = stack;
    registers_.prepare(stack, entry);
  }

  FUSEDOPS_SIMT_INLINE void switch_to(Fiber& next) {
    leave(next, &shadow_);
    registers_.switch_to(next.registers_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(shadow_, nullptr, nullptr);
#endif
  }

  // An entry function calls this first; `from` is the context that switched to it.
  FUSEDOPS_SIMT_UNSEEN void begin([[maybe_unused]] Fiber& from) {
#if defined(__SANITIZE_ADDRESS__)
    const void* low;
    __sanitizer_finish_switch_fiber(nullptr, &low, &from.stack_.size);
    from.stack_.low = static_cast<char*>(const_cast<void*>(low));
#endif
  }

  // The last switch of a fiber, which is not resumed again.
  FUSEDOPS_SIMT_UNSEEN void end(Fiber& next) {
    leave(next, nullptr);
    registers_.switch_to(next.registers_);
    __builtin_unreachable();
  }

  // Clears an abandoned fiber's poison from its stack, so that the next fiber can use it.
  void abandon() {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_.low, stack_.size);
#endif
  }

 private:
  FUSEDOPS_SIMT_INLINE static void leave([[maybe_unused]] Fiber& next,
                                         [[maybe_unused]] void** shadow) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(shadow, next.stack_.low, next.stack_.size);
#endif
  }

  Registers registers_;
  Stack stack_;
  [[maybe_unused]] void* shadow_ = nullptr;
};

// One CPU thread's stacks, kept between launches.
class Stacks {
 public:
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  ~Stacks() {
    for (char* low : lows_) munmap(low, kGuard + kSize);
  }

  Stack at(size_t i) {
    while (lows_.size() <= i) lows_.push_back(map());
    // equally spaced stack tops would all map to the same L1 cache set
    return {lows_[i] + kGuard, kSize - i % 32 * 128};
  }

 private:
  static constexpr size_t kGuard = 4096, kSize = 128 * 1024;

  // A stack that overflows hits its guard page instead of the next stack.
  static char* map() {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* low = mmap(nullptr, kGuard + kSize, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (low == MAP_FAILED) throw std::runtime_error("simt: no memory for a thread's stack");
    mprotect(low, kGuard, PROT_NONE);
    return static_cast<char*>(low);
  }

  std::vector<char*> lows_;
};

}  // namespace fusedops::simt
