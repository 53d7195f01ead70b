// Declares cross entropy's CPU loops over contiguous logits. Formulas:
// csrc/kernels/cross_entropy.h.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/cross_entropy.h"

namespace fusedops::cpu::cross_entropy {

using namespace fusedops::cross_entropy;

// Adds these logits to the row's sums of this kind.
FUSEDOPS_ISA_FUNCTION(add_logits, const Logits& logits, SumKind kind, LogitSums& sums)

// Writes dx in the logits' dtype; it may overwrite the logits.
FUSEDOPS_ISA_FUNCTION(logit_gradients, const Logits& logits, const LogitGradient& of, void* dx)

}  // namespace fusedops::cpu::cross_entropy
