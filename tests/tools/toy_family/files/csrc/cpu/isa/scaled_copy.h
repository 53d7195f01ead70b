// Declares scaled_copy's CPU loop, which csrc/cpu/scaled_copy.cpp runs on several threads.
#pragma once

#include <cstdint>

#include "csrc/cpu/isa.h"

namespace fusedops::cpu::scaled_copy {

// y = scale * x of n elements.
FUSEDOPS_ISA_FUNCTION(scale_elements, Dtype dtype, const void* x, void* y, float scale, int64_t n)

}  // namespace fusedops::cpu::scaled_copy
