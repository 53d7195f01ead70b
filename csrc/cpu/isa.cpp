// Detects the CPU's instruction set, or reads it from FUSEDOPS_CPU_ISA, once.

#include "csrc/cpu/isa.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace fusedops::cpu {
namespace {

Isa best() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  if (!avx2) return Isa::none;
  if (!avx512) return Isa::avx2;
  return bf16 ? Isa::avx512_bf16 : Isa::avx512;
}

Isa choose() {
  const char* const requested = std::getenv("FUSEDOPS_CPU_ISA");
  if (requested == nullptr || *requested == '\0') return best();
  for (const auto isa : {Isa::none, Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    if (std::string(requested) != isa_name(isa)) continue;
    TORCH_CHECK(isa <= best(), "FUSEDOPS_CPU_ISA: this CPU has ", isa_name(best()), ", got ",
                requested);
    return isa;
  }
  TORCH_CHECK(false, "FUSEDOPS_CPU_ISA must be none, avx2, avx512 or avx512_bf16, got ", requested);
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::avx512_bf16: return "avx512_bf16";
    default: return "none";
  }
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace fusedops::cpu
