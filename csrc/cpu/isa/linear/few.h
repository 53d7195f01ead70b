// Products of a few rows with a weight that is read once, in place. csrc/cpu/linear/few.cpp shares
// them among threads.
#pragma once

#include "csrc/cpu/isa.h"

namespace fusedops::cpu::linear {

constexpr int64_t kAtOnce = 4;  // rows of x that are packed and multiplied together

// Operands of y = x w^T. x: packed by pack_few_rows. w: row-major, ld elements from row to row.
struct FewRows {
  const void *x, *w;
  int64_t rows, k, ld;
  Dtype dtype;  // of w, and of x before it was packed
  float* sums;  // [rows, ld_sums]: y as float32
  int64_t ld_sums;
};

// Returns at least as many bytes as pack_few_rows writes.
constexpr int64_t packed_bytes(int64_t rows, int64_t k) { return rows * (k + 32) * 4; }

// Packs x [rows, k], contiguous: a register of each of kAtOnce rows, then the next register of
// each. Rows that are multiplied together so lie in one stream; rows that are a multiple of 4 KiB
// apart would evict each other from the first cache.
FUSEDOPS_ISA_FUNCTION(pack_few_rows, const void* x, int64_t rows, int64_t k, Dtype dtype,
                      void* packed)

// Computes the sums for rows [begin, end) of w; sums points to the one for `begin`.
FUSEDOPS_ISA_FUNCTION(multiply_few_rows, const FewRows& args, int64_t begin, int64_t end)

}  // namespace fusedops::cpu::linear
