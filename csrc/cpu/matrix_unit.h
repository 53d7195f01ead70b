// Intel's matrix unit (AMX).
#pragma once

namespace fusedops::cpu {

// Whether kernels use it: the CPU has it beside avx512_bf16, and FUSEDOPS_CPU_ISA names no
// instruction set.
bool has_matrix_unit();

}  // namespace fusedops::cpu
