// Declares the rotary embedding's CPU loops. Formulas: csrc/kernels/rotary.h; split and memory
// traffic: csrc/cpu/rotary.cpp.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/rotary.h"

namespace fusedops::cpu::rotary {

using namespace fusedops::rotary;

// Rotates all heads at positions [begin, end) of batch * seq.
FUSEDOPS_ISA_FUNCTION(rotary_positions, const RotaryArguments& args, int64_t begin, int64_t end)

}  // namespace fusedops::cpu::rotary
