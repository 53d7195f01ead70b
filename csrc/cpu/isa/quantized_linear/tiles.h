// Products with a quantized weight that is decoded to bfloat16, on Intel's matrix unit (AMX).
#pragma once

#include "csrc/cpu/isa/quantized_linear/codes.h"

namespace fusedops::cpu::quantized_linear {

// sums [rows, ld_sums] = x w^T for rows [begin, end) of w, as bfloat16. x [rows, depth]: bfloat16,
// zero-padded from w.k to depth, a multiple of 32; each 16 rows are transposed in pairs of columns,
// [depth / 2, 16, 2]. sums has space for multiples of 16 rows and columns. by_lane, scaled: as in
// ReadCodes.
struct TileProducts {
  const uint16_t* x;
  int64_t rows, depth;
  bool by_lane, scaled;
  float* sums;
  int64_t ld_sums;
};
FUSEDOPS_ISA_FUNCTION(multiply_tiles, const Codes& weight, const TileProducts& args, int64_t begin,
                      int64_t end)

}  // namespace fusedops::cpu::quantized_linear
