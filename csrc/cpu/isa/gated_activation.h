// Declares the gated activations' CPU loops. Formulas: csrc/kernels/gated_activation.h; split and
// memory traffic: csrc/cpu/gated_activation.cpp.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/gated_activation.h"

namespace fusedops::cpu::gated_activation {

using namespace fusedops::gated_activation;

FUSEDOPS_ISA_FUNCTION(gated_forward_rows, const GatedForward& args, int64_t begin, int64_t end)

FUSEDOPS_ISA_FUNCTION(gated_backward_rows, const GatedBackward& args, int64_t begin, int64_t end)

}  // namespace fusedops::cpu::gated_activation
