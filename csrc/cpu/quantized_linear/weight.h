// A quantized weight's tensors as the CPU loops read them, and the type of its products' operands.
#pragma once

#include <cstdlib>

#include "csrc/cpu/isa/quantized_linear/codes.h"
#include "csrc/ops/cpu_features.h"
#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::cpu::quantized_linear {

inline Codes codes_of(const QuantizedTensors& w) {
  return {static_cast<const uint8_t*>(w.qweight.const_data_ptr()),
          w.scales.const_data_ptr<float>(),
          is_defined(w.zeros) ? w.zeros->const_data_ptr<uint8_t>() : nullptr,
          w.format,
          w.n.expect_int(),
          w.k.expect_int(),
          w.group_size};
}

inline bool has_kernel(c10::ScalarType dtype) { return isa() != Isa::none && dtype != at::kDouble; }

// The operand for products that may round to bfloat16. Without bfloat16 instructions they do not.
inline Operand floating_operand(Compute compute) {
  const bool rounds = compute == Compute::any || compute == Compute::bf16;
  return rounds && isa() == Isa::avx512_bf16 ? Operand::bfloat16 : Operand::float32;
}

// Whether Intel's matrix unit multiplies. A named FUSEDOPS_CPU_ISA leaves it out.
inline bool has_matrix_unit() {
  static const bool available = [] {
    const char* const requested = std::getenv("FUSEDOPS_CPU_ISA");
    return (requested == nullptr || *requested == '\0') && isa() == Isa::avx512_bf16 && has_amx();
  }();
  return available;
}

}  // namespace fusedops::cpu::quantized_linear
