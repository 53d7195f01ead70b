#include "csrc/ops/bfloat16.h"

#include <ATen/cpu/Utils.h>

#include <atomic>

namespace fusedops {
namespace {

std::atomic<int> asked_for{-1};  // -1: nothing

bool amd() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

void bfloat16_products(std::optional<bool> asked) { asked_for = asked ? *asked : -1; }

bool fast_bfloat16_products() {
  static const bool found = at::cpu::init_amx() || amd();
  const int asked = asked_for;
  return asked < 0 ? found : asked == 1;
}

}  // namespace fusedops
