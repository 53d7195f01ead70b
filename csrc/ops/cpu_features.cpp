// Detects AMD CPUs with AVX-512 BF16, and CPUs with AMX, once; bfloat16_products overrides
// whether bfloat16 products count as fast.

#include "csrc/ops/cpu_features.h"

#include <ATen/cpu/Utils.h>

#include <atomic>

namespace fusedops {
namespace {

std::atomic<int> asked_for{-1};  // -1: not set

}  // namespace

bool amd_avx512_bf16() {
#if defined(__x86_64__)
  static const bool has_avx512_bf16 =
      __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16");
  return has_avx512_bf16;
#else
  return false;
#endif
}

bool has_amx() {
  static const bool enabled = at::cpu::init_amx();
  return enabled;
}

void bfloat16_products(std::optional<bool> asked) { asked_for = asked ? *asked : -1; }

bool fast_bfloat16_products() {
  static const bool has_instructions = has_amx() || amd_avx512_bf16();
  const int asked = asked_for;
  return asked < 0 ? has_instructions : asked == 1;
}

}  // namespace fusedops
