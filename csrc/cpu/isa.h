// Chooses the instruction set of csrc/cpu/isa's kernels. Sources there are compiled once for each
// set that they use; all other C++ sources are compiled for the baseline.
#pragma once

#include "csrc/kernels/dtype.h"

namespace fusedops::cpu {

enum class Isa { none, avx2, avx512, avx512_bf16 };

// Returns the best instruction set of this CPU, or a lower one if FUSEDOPS_CPU_ISA names it. Fixed
// at first use.
Isa isa();

const char* isa_name(Isa isa);

template <class Function>
Function* for_isa(Function* avx2, Function* avx512, Function* avx512_bf16) {
  switch (isa()) {
    case Isa::avx2: return avx2;
    case Isa::avx512: return avx512;
    case Isa::avx512_bf16: return avx512_bf16;
    default: return nullptr;
  }
}

}  // namespace fusedops::cpu

// Declares a function that a file of csrc/cpu/isa defines once per instruction set, in namespace
// CPU_CAPABILITY, and name_for_isa(), which returns the one to call.
#define FUSEDOPS_ISA_FUNCTION(name, ...) \
  namespace AVX2 {                       \
  void name(__VA_ARGS__);                \
  }                                      \
  namespace AVX512 {                     \
  void name(__VA_ARGS__);                \
  }                                      \
  namespace AVX512_BF16 {                \
  void name(__VA_ARGS__);                \
  }                                      \
  inline auto* name##_for_isa() { return for_isa(AVX2::name, AVX512::name, AVX512_BF16::name); }

// The same for a file that does not use instructions for bfloat16. It is compiled without them, and
// WITHOUT_BF16 in fusedops/building.py names it.
#define FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(name, ...) \
  namespace AVX2 {                                    \
  void name(__VA_ARGS__);                             \
  }                                                   \
  namespace AVX512 {                                  \
  void name(__VA_ARGS__);                             \
  }                                                   \
  inline auto* name##_for_isa() { return for_isa(AVX2::name, AVX512::name, AVX512::name); }
