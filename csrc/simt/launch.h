// The emulator's counterpart of csrc/cuda/launch.cuh: launches, shared memory, loads and stores,
// fast arithmetic and device limits.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#include "csrc/simt/block.h"

struct CUstream_st;

namespace fusedops::simt {

// Why a GPU would refuse a launch, or an empty string.
inline std::string refused(const Launch& launch) {
  const dim3 grid = launch.grid, block = launch.block;
  const bool deep = block.x > 1024 || block.y > 1024 || block.z > 64;
  const unsigned threads = deep ? 0 : block.x * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads) {
    return "a block has 1 to 1024 threads, at most 64 along z, got " + to_string(block);
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return "a grid has at least one block, got " + to_string(grid);
  }
  if (grid.x >> 31 || grid.y > 65535 || grid.z > 65535) {
    return "a grid has at most 2147483647, 65535 and 65535 blocks, got " + to_string(grid);
  }
  if (launch.smem > kMaxShared) {
    return "a block has at most 232448 bytes of shared memory, got " + std::to_string(launch.smem);
  }
  return "";
}

inline std::string run_block(const Launch& launch, int64_t block) {
  try {
    return Block::mine().run(launch, block);
  } catch (const std::exception& error) {  // must not leave a parallel region
    return error.what();
  }
}

// If several blocks fail, the first block's error is thrown: later blocks are skipped, earlier ones
// still run.
inline void run_grid(const Launch& launch) {
  if (const std::string why = refused(launch); !why.empty()) {
    throw std::runtime_error(kernel_name(launch.kernel) + ": " + why);
  }
  const int64_t blocks = int64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  std::atomic<int64_t> failed = blocks;
  std::string message;
  std::mutex mutex;
#pragma omp parallel for schedule(dynamic) if (blocks > 1)
  for (int64_t i = 0; i < blocks; ++i) {
    if (i > failed) continue;
    const std::string error = run_block(launch, i);
    const std::lock_guard lock(mutex);
    if (error.empty() || i > failed) continue;
    failed = i;
    message = error;
  }
  if (!message.empty()) throw std::runtime_error(message);
}

// The running block's array for a declaration; ends the block if a GPU has no room for it.
FUSEDOPS_SIMT_CALLED inline char* shared_array(const void* tag, const char* name, size_t bytes) {
  Block& block = *running;
  const Array* array = block.arena.declare(tag, name, bytes);
  if (!array) {
    const void* pc = __builtin_return_address(0);
    block.stop([name, bytes, pc] {
      return std::string(name) + " of " + std::to_string(bytes) + " bytes at " + where(pc) +
             " has no room: a block has 48 KiB of static and 227 KiB of all shared memory";
    });
  }
  return block.arena.memory() + array->offset;
}

template <class Tag>
inline constexpr char tag = 0;

template <class Tag, class T>
__forceinline__ T& shared_array(const char* name) {
  static_assert(alignof(T) <= 16);
  char* memory = shared_array(&tag<Tag>, name, sizeof(T));
  asm volatile("" : "+r"(memory));
  return *reinterpret_cast<T*>(memory);
}

FUSEDOPS_SIMT_CALLED inline void stop_misaligned(const char* what, size_t bytes, const void* p) {
  Block& block = *running;
  const void* pc = __builtin_return_address(0);
  block.stop([&block, number = block.number, what, bytes, p, pc] {
    std::ostringstream text;
    text << block.name(number) << " " << what << ' ' << bytes << " bytes at the misaligned address "
         << p << " at " << where(pc);
    return text.str();
  });
}

}  // namespace fusedops::simt

// __shared__ T name[count]: one array for each declaration, shared by the threads of a block.
#define FUSEDOPS_SHARED(T, name, count) \
  T(&name)[count] = ::fusedops::simt::shared_array<decltype([] {}), T[count]>(#name)

namespace fusedops::cuda {

using Stream = CUstream_st*;  // as CUDA declares cudaStream_t; always null

// Runs the whole grid. Throws if a GPU would refuse the launch or a block has an error.
template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, Stream, A... args) {
  struct Bound {
    void (*kernel)(P...);
    std::tuple<P...> args;
  };
  const Bound bound{kernel, {static_cast<P>(args)...}};
  const auto call = [](const void* p) {
    const auto& bound = *static_cast<const Bound*>(p);
    std::apply(bound.kernel, bound.args);
  };
  simt::run_grid({grid, block, smem, reinterpret_cast<const void*>(kernel), call, &bound});
}

// The launch's `smem` bytes.
template <class T>
__forceinline__ T* dynamic_shared() {
  return reinterpret_cast<T*>(simt::arena_low);
}

__forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p) - simt::arena_low);
}
__forceinline__ uint32_t load_shared(uint32_t address) {
  return *reinterpret_cast<const uint32_t*>(simt::arena_low + address);
}

template <class T>
__forceinline__ T* global_memory(T* p) {
  return p;
}

template <class Word>
__forceinline__ Word load_word(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Word))
    simt::stop_misaligned("loads", sizeof(Word), p);
  return *static_cast<const Word*>(p);
}

template <class Word>
__forceinline__ void store_word(void* p, Word word) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Word))
    simt::stop_misaligned("stores", sizeof(Word), p);
  *static_cast<Word*>(p) = word;
}

// Arrives only at wait_for_copies, so a kernel that does not wait reads what was there before.
__forceinline__ void copy_to_shared(uint4* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(uint4)) {
    simt::stop_misaligned("copies", sizeof(uint4), from);
  }
  auto& copies = simt::running->thread().copies;
  copies.waiting.push_back({to, static_cast<const uint4*>(from), copies.groups});
}

__forceinline__ void end_copies() { ++simt::running->thread().copies.groups; }

template <int kLater>
__forceinline__ void wait_for_copies() {
  auto& copies = simt::running->thread().copies;
  std::erase_if(copies.waiting, [&](const simt::Copy& copy) {
    const bool arrives = copy.group < copies.groups - kLater;
    if (arrives) *copy.to = *copy.from;
    return arrives;
  });
}

template <class Word>
__forceinline__ void store_global(void* p, Word word) {
  store_word(p, word);
}

// As wrong as the special function unit's may be, so that a test notices if that is too much.
__forceinline__ float without_denormals(float x) { return fabsf(x) < 0x1p-126f ? 0 * x : x; }
__forceinline__ float quick_sqrt(float x) { return sqrtf(x) * (1 + 0x1p-22f); }
__forceinline__ float quick_normal_sqrt(float x) { return quick_sqrt(without_denormals(x)); }
__forceinline__ float quick_quotient(float a, float b) {
  if (fabsf(b) > 0x1p126f) return 0 * a;
  return without_denormals(without_denormals(a) / without_denormals(b)) * (1 + 0x1p-22f);
}

__forceinline__ uint32_t bits_plus(float x, uint32_t more) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return x == x ? bits + more : bits;
}

__forceinline__ uint32_t bfloat16_pair(float low, float high) {
  const auto nearest = [](float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
  };
  return nearest(high) << 16 | nearest(low);
}

// A small device, so that grids that fill it stay small.
inline int multiprocessors() { return 3; }

// Returns how much dynamic shared memory a block can have, in bytes. The size of the kernel's
// static arrays is not known before it runs; 2 KiB are kept for them.
template <class... P>
size_t max_shared_memory(void (*)(P...)) {
  return simt::kMaxShared - 2048;
}

}  // namespace fusedops::cuda
