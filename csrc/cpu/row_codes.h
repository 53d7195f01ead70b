// Quantizes rows of float32 to 8-bit codes on CPUs, for the outputs of norms and gated activations.
#pragma once

#include "csrc/cpu/isa/quantized_linear/codes.h"
#include "csrc/common.h"

namespace fusedops::cpu {

// Where codes [rows, n] and their scales go.
struct QuantizedRowsTo {
  int8_t* codes;  // or bytes of float8_e4m3fn
  float* scale;
  int64_t n;
  RowFormat format;

  QuantizedRowsTo(const Tensor& codes, const Tensor& scale, RowFormat format)
      : codes(static_cast<int8_t*>(codes.mutable_data_ptr())),
        scale(scale.mutable_data_ptr<float>()),
        n(codes.size(-1)),
        format(format) {}

  void store(int64_t row, const float* y) const {
    int32_t sum;
    quantized_linear::read_input_for_isa()({y, n, n, Dtype::float32, codes + row * n,
                                            quantized_linear::Operand::integer, nullptr, format,
                                            scale + row, &sum});
  }
};

}  // namespace fusedops::cpu
