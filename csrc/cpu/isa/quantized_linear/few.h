// Products of a few rows with a quantized weight, whose codes are decoded in registers.
#pragma once

#include "csrc/cpu/isa/quantized_linear/codes.h"

namespace fusedops::cpu::quantized_linear {

constexpr int64_t kFewRows = 8;
constexpr int64_t kCodesOfLane = 8;  // codes whose products are summed in one 32-bit lane

// sums [rows, ld_sums] = x w^T for rows [begin, end) of w and at most kFewRows rows of x [rows,
// ld], padded with zeros. For 8-bit codes, the caller applies the scale. For 4-bit codes, x is
// narrow and in order_by_lane's order; with AVX2 it is float32, in the original order.
struct FewRows {
  const void* x;
  bool narrow;  // bfloat16, else float32
  int64_t ld, rows;
  const float* lanes;  // of x, by sum_lanes; read if x is narrow and the weight has zeros
  float* sums;
  int64_t ld_sums;
};
FUSEDOPS_ISA_FUNCTION(add_few_rows, const Codes& weight, const FewRows& args, int64_t begin,
                      int64_t end)

// Reorders a bfloat16 row x [k] like the 4-bit codes are read, to out [k]. k is a multiple of
// kHalves.
FUSEDOPS_ISA_FUNCTION(order_by_lane, const uint16_t* x, int64_t k, uint16_t* out)

// Sums each lane's elements of x [k], in order_by_lane's order, to lanes [k / kCodesOfLane].
FUSEDOPS_ISA_FUNCTION(sum_lanes, const uint16_t* x, int64_t k, float* lanes)

}  // namespace fusedops::cpu::quantized_linear
