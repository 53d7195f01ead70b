// Products of float32 tiles that are not packed.
#pragma once

#include "csrc/cpu/isa.h"

namespace fusedops::cpu {

#if defined(CPU_CAPABILITY)
namespace CPU_CAPABILITY {
// Rows of c, two vectors wide, whose sums stay in registers.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRowsInRegisters = 14;  // 28 sums, two vectors of b and one of a in 32 registers
#else
constexpr int kRowsInRegisters = 6;  // 12 sums in 16 registers
#endif
}  // namespace CPU_CAPABILITY
#endif

// c [m, n] = a [m, k] b [k, n], or c += a b if `add`. ld_a, ld_b and ld_c are row strides.
struct TileProduct {
  int64_t m, n, k;
  const float* a;
  int64_t ld_a;
  const float* b;
  int64_t ld_b;
  float* c;
  int64_t ld_c;
  bool add;
  int64_t chain;  // terms that are summed before c is added
};
FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(multiply_tile, const TileProduct& product)

}  // namespace fusedops::cpu
