// Names the instruction sets that the kernels in csrc/cpu/isa run in. Every file in that folder is
// compiled once for each; this file and its includers are compiled for the baseline.
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

// Like that, for a file that gains nothing from bfloat16 instructions. It is not compiled for them;
// WITHOUT_BF16 in fusedops/building.py lists it.
#define FUSEDOPS_ISA_FUNCTION_WITHOUT_BF16(name, ...) \
  namespace AVX2 {                                    \
  void name(__VA_ARGS__);                             \
  }                                                   \
  namespace AVX512 {                                  \
  void name(__VA_ARGS__);                             \
  }                                                   \
  inline auto* name##_for_isa() { return for_isa(AVX2::name, AVX512::name, AVX512::name); }
