// quantized_linear on CPUs for few rows: codes are decoded in registers.
#pragma once

#include "csrc/cpu/isa/quantized_linear/codes.h"

namespace fusedops::cpu::quantized_linear {

constexpr int64_t kFewRows = 4;
constexpr int64_t kHalves = 128;     // codes of 4 bits in a register
constexpr int64_t kCodesOfLane = 8;  // of which the products meet in a lane of 32 bits

// sums [rows, ld_sums] = x w^T for rows [begin, end) of w, at most kFewRows of x. x: [rows, ld], of
// codes of 8 bits float32 or, of fp8, bfloat16, with zeros behind its rows, and the scale is left
// out; of 4 bits as turn_halves leaves it.
struct FewRows {
  const void* x;
  bool narrow;  // bfloat16
  int64_t ld, rows;
  const float* lanes;
  float* sums;
  int64_t ld_sums;
};
FUSEDOPS_ISA_FUNCTION(add_few_rows, const Codes& weight, const FewRows& args, int64_t begin,
                      int64_t end)

// A row x [k] of bfloat16 in the order in which codes of 4 bits are read, and the sums of those
// that meet in a lane: out [k], lanes [k / kCodesOfLane]. k is a multiple of kHalves.
FUSEDOPS_ISA_FUNCTION(turn_halves, const uint16_t* x, int64_t k, uint16_t* out, float* lanes)

}  // namespace fusedops::cpu::quantized_linear
