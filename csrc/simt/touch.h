// Checks an access to shared memory: it must be within one array, read only what was written, and
// race with no other access.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/simt/block.h"

namespace fusedops::simt {

// `bytes 4 to 7 of partial`
inline std::string bytes_of(const Array& array, size_t offset, size_t bytes) {
  const size_t first = offset - array.offset;
  return "bytes " + std::to_string(first) + " to " + std::to_string(first + bytes - 1) + " of " +
         array.name;
}

inline const char* verb(Access access) {
  return access == Access::read    ? "reads"
         : access == Access::write ? "writes"
                                   : "atomically updates";
}

// `thread (1, 0, 0) reads bytes 4 to 7 of partial at norm/forward.cu:30`
inline std::string sentence(const Block& block, const Stamp& stamp, const std::string& what) {
  return block.name(stamp.thread) + " " + verb(stamp.access) + " " + what + " at " +
         where(stamp.pc);
}

[[noreturn]] FUSEDOPS_SIMT_UNSEEN inline void stop_outside(Block& block, const Stamp& now,
                                                           size_t offset, size_t bytes) {
  block.stop([&block, now, offset, bytes] {
    const Array& array = block.arena.nearest(offset);
    return sentence(block, now, bytes_of(array, offset, bytes)) + ", past its " +
           std::to_string(array.bytes) + " bytes";
  });
}

[[noreturn]] FUSEDOPS_SIMT_UNSEEN inline void stop_unwritten(Block& block, const Stamp& now,
                                                             size_t offset, size_t bytes) {
  block.stop([&block, now, offset, bytes] {
    const Array& array = block.arena.nearest(offset);
    return sentence(block, now, bytes_of(array, offset, bytes)) +
           ", which nobody wrote in this block";
  });
}

[[noreturn]] FUSEDOPS_SIMT_UNSEEN inline void stop_race(Block& block, const Stamp& now,
                                                        const Stamp& earlier, size_t offset,
                                                        size_t bytes) {
  block.stop([&block, now, earlier, offset, bytes] {
    const Array& array = block.arena.nearest(offset);
    return sentence(block, now, bytes_of(array, offset, bytes)) + ", " +
           sentence(block, earlier, "them") + ", and nothing orders the two: a race";
  });
}

// Returns the cells of the word at offset, and gives each byte its own cell from now on.
FUSEDOPS_SIMT_UNSEEN inline void split(Block& block, size_t offset) {
  Cell* word = &block.cells[offset / 4 * 4];
  if (word->split == block.first_epoch) return;
  word->split = block.first_epoch;
  for (int i = 1; i < 4; ++i) word[i] = *word;
}

// Checks an access to the running block's arena.
FUSEDOPS_SIMT_UNSEEN inline void touch(uintptr_t address, size_t bytes, Access access,
                                       const void* pc) {
  Block& block = *running;
  const size_t offset = address - arena_low;
  const Clocks& clocks = block.clocks;
  const Stamp now{pc, clocks.epoch, clocks.time(block.number), block.number, access};
  if (!block.arena.holds(offset, bytes)) stop_outside(block, now, offset, bytes);
  const bool whole = offset % 4 == 0 && bytes % 4 == 0;
  for (size_t i = offset; i < offset + bytes;) {
    if (!whole) split(block, i);
    Cell& cell = block.cells[i];
    if (access != Access::write && cell.written != block.first_epoch) {
      stop_unwritten(block, now, offset, bytes);
    }
    if (const Stamp* earlier = cell.note(clocks, now)) {
      stop_race(block, now, *earlier, offset, bytes);
    }
    if (access != Access::read) cell.written = block.first_epoch;
    i += whole && block.cells[i / 4 * 4].split != block.first_epoch ? 4 : 1;
  }
}

}  // namespace fusedops::simt
