// Bias and activation after a linear layer's product, and the activation's gradient, on CPUs.
// Formulas: fusedops/functional/linear.py.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/linear.h"

namespace fusedops::cpu::linear {

using namespace fusedops::linear;

struct ActivateRows {
  const void *product, *bias;         // product: the matmul, [rows, n]; bias: [n] or null
  void *z, *y;                        // z: product + bias, or null; y: activation(product + bias)
  int64_t n, product_stride, stride;  // stride: of z and y, which may overwrite the product
  Dtype dtype;                        // of bias, z and y
  Dtype product_dtype;                // the same, or float32
  Activation activation;
};

struct ActivateBackwardRows {
  const void *dy, *z;
  void* dz;              // dy activation'(z), [rows, n]
  int64_t n, dy_stride;  // z and dz are contiguous
  Dtype dtype;
  Activation activation;
};

FUSEDOPS_ISA_FUNCTION(activate_rows, const ActivateRows& args, int64_t begin, int64_t end)

FUSEDOPS_ISA_FUNCTION(activate_backward_rows, const ActivateBackwardRows& args, int64_t begin,
                      int64_t end)

}  // namespace fusedops::cpu::linear
