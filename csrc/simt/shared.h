// Emulates CUDA's shared memory: one arena per CPU thread, and the arrays that the running block
// has declared in it.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "csrc/simt/names.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace fusedops::simt {

inline constexpr size_t kMaxShared = 227 * 1024;  // a block's, on sm_90
inline constexpr size_t kMaxStatic = 48 * 1024;   // of these by default
inline constexpr size_t kArena = 256 * 1024;      // with the gaps between arrays

// The start of the running block's arena; no address is within kArena bytes of 0.
FUSEDOPS_SIMT_PER_CPU uintptr_t arena_low = 0;

// An array of shared memory: its declaration's tag, its name, and its place in the arena.
struct Array {
  const void* tag = nullptr;
  const char* name = "";
  size_t offset = 0, bytes = 0;
};

class Arena {
 public:
  Arena() : memory_(new (std::align_val_t{128}) char[kArena]) {}
  Arena(const Arena&) = delete;
  ~Arena() {
    mark(0, kArena, true);
    ::operator delete[](memory_, std::align_val_t{128});
  }

  char* memory() const { return memory_; }

  // Forgets the last block's arrays; the first array is the launch's dynamic memory.
  void begin(size_t dynamic_bytes) {
    mark(0, kArena, false);
    arrays_ = 0;
    end_ = 0;
    add({nullptr, "dynamic shared memory", 0, dynamic_bytes});
  }

  // A declaration's array, made by the block's first thread to reach it; null if a GPU has no room
  // for it.
  FUSEDOPS_SIMT_UNSEEN const Array* declare(const void* tag, const char* name, size_t bytes) {
    for (int i = 1; i < arrays_; ++i) {
      if (array_[i].tag == tag) return &array_[i];
    }
    if (arrays_ == kArrays || used() + bytes > kMaxShared) return nullptr;
    if (used() - array_[0].bytes + bytes > kMaxStatic) return nullptr;
    return add({tag, name, end_, bytes});
  }

  // Returns the last array that begins at or before offset.
  FUSEDOPS_SIMT_UNSEEN const Array& nearest(size_t offset) const {
    int i = arrays_ - 1;
    while (array_[i].offset > offset) --i;
    return array_[i];
  }

  // Whether one array holds all these bytes.
  FUSEDOPS_SIMT_UNSEEN bool holds(size_t offset, size_t bytes) const {
    const Array& array = nearest(offset);
    return offset + bytes <= array.offset + array.bytes;
  }

 private:
  static constexpr int kArrays = 64;
  static constexpr size_t kGap = 64;  // unused bytes between two arrays

  // Uninitialized bytes are 0xFF: NaN as a float, -1 as an int.
  const Array* add(Array array) {
    mark(array.offset, array.bytes, true);
    std::memset(memory_ + array.offset, 0xFF, array.bytes);
    end_ = (array.offset + array.bytes + kGap + 15) / 16 * 16;
    array_[arrays_] = array;
    return &array_[arrays_++];
  }

  size_t used() const {
    size_t sum = 0;
    for (int i = 0; i < arrays_; ++i) sum += array_[i].bytes;
    return sum;
  }

  // Tells AddressSanitizer which bytes may be accessed.
  void mark([[maybe_unused]] size_t offset, [[maybe_unused]] size_t bytes,
            [[maybe_unused]] bool usable) {
#if defined(__SANITIZE_ADDRESS__)
    const auto set = usable ? __asan_unpoison_memory_region : __asan_poison_memory_region;
    set(memory_ + offset, bytes);
#endif
  }

  char* memory_;
  Array array_[kArrays];
  int arrays_ = 0;
  size_t end_ = 0;
};

}  // namespace fusedops::simt
