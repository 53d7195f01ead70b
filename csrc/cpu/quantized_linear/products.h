// Matrix products with several quantized weights in one call, for a mixture of experts.
#pragma once

#include <vector>

#include "csrc/cpu/quantized_linear/weight.h"

namespace fusedops::cpu::quantized_linear {

// One product: x and y have at least one row and are contiguous.
struct Product {
  Codes w;
  Tensor x;     // float32, float16 or bfloat16
  Tensor bias;  // of y's dtype, contiguous, or undefined
  Tensor y;     // x's dtype or float32
};

// y [rows, n] = x w^T + bias. Bits do not depend on the number of threads or on other products.
void multiply_each(const std::vector<Product>& products, Compute compute);

// y [rows, k] = x w, without bias.
void multiply_across_each(const std::vector<Product>& products, Compute compute);

}  // namespace fusedops::cpu::quantized_linear
