// Quantizes float32 groups to 4-bit codes, on CPUs. Formats and order of operations:
// fusedops/functional/quantized_linear.py;
// split: csrc/cpu/isa/quantized_linear/quantize.cpp.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/quantized_linear.h"

namespace fusedops::cpu::quantized_linear {

using namespace fusedops::quantized_linear;

struct QuantizeGroups {
  const float* w;        // [groups, size]
  uint8_t* codes;        // [groups, size / 2]
  float* scales;         // [groups]
  uint8_t* zeros;        // [groups], for int4 only
  int64_t size;          // a power of two from 32 to 128
  const double* shares;  // factors of the full-range scale to try; on a tie the first wins
  int64_t count;         // number of shares
  bool nf4;
};

// Quantizes groups [begin, end).
FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(quantize_groups, const QuantizeGroups& args, int64_t begin,
                                   int64_t end)

}  // namespace fusedops::cpu::quantized_linear
