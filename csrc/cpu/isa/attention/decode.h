// Attention's q k^T and p v for a few queries, on keys and values in their own layout and dtype.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/cpu/isa/operands.h"

namespace fusedops::cpu::attention {

// A paged cache's rows are not adjacent: `each` has their addresses, and those of the kAhead rows
// after them, which are prefetched. Otherwise it is null, and `rows` says where they are.
constexpr int64_t kAhead = 64;
struct KeyRows {
  RowsOf rows;
  const void* const* each = nullptr;
};

// scratch: the size of q, or of p. n is at most kKeys.

// s [rows, ld] = q k^T for n keys. q: [rows, width], row stride ld_q, a multiple of 2 kEdge.
FUSEDOPS_ISA_FUNCTION(query_products, const float* q, int64_t ld_q, int64_t rows, const KeyRows& k,
                      int64_t n, int64_t width, float* s, int64_t ld, float* scratch)

// out [rows, width] += p [rows, ld] v for n keys.
FUSEDOPS_ISA_FUNCTION(add_values, const float* p, int64_t ld, int64_t rows, const KeyRows& v,
                      int64_t n, int64_t width, float* out, float* scratch)

}  // namespace fusedops::cpu::attention
