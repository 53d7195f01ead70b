// Declares the loops over the experts' rows: gate, its gradient, weighted sums and small products.
// Formulas: fusedops/functional/experts.py; split: csrc/cpu/experts/operators.cpp.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/experts.h"

namespace fusedops::cpu::experts {

using fusedops::experts::Activation;

// How z [rows, N] becomes h [rows, n]. N is 2 n if gated, else n.
struct Gating {
  int64_t n;
  bool gated, interleaved;  // interleaved: gate0 up0 gate1 up1, else all of gate, then all of up
  bool limited;
  float limit, alpha, up_offset;
  Activation activation;
  Dtype dtype;  // of z, h and dz
};

struct GateRows {
  Gating gating;
  const void* z;
  void* h;
};

// With dh the gradient before the routing weight: dz = weight dh h'(z), h = weight h(z), and
// dot = the sum of dh h(z).
struct GateBackwardRows {
  Gating gating;
  const void* z;
  const float *dh, *weights;  // weights: one for each row
  void *h, *dz;               // each may be null
  float* dots;                // may be null
};

FUSEDOPS_ISA_FUNCTION(gate_rows, const GateRows& args, int64_t begin, int64_t end)

FUSEDOPS_ISA_FUNCTION(gate_backward_rows, const GateBackwardRows& args, int64_t begin, int64_t end)

// out [n] for each token: the sum over its `k` slots, in order, of weight (row + bias).
struct SumSlots {
  const float* rows;       // [any, n]
  const int64_t* places;   // [tokens, k]: which row, or -1 for none
  const int64_t* experts;  // [tokens, k]: which row of bias
  const float* weights;    // [tokens, k], or null: 1
  const void* bias;        // [E, n], or null
  void* out;
  int64_t k, n;
  Dtype dtype;  // of bias and out
};

FUSEDOPS_ISA_FUNCTION(sum_slots, const SumSlots& args, int64_t begin, int64_t end)

// sums [rows, ld_sums] = x w for columns [begin, end) of w [depth, n], whose rows are contiguous: w
// is read once, row by row. At most kFewAcross rows of x [rows, ld_x]. A sum is one chain of
// float32, whose error is small beside a 16-bit rounding.
constexpr int64_t kFewAcross = 4;
struct FewAcross {
  const void *x, *w;
  int64_t rows, depth, ld_x, ld_w;
  Dtype dtype;  // of x and w
  float* sums;
  int64_t ld_sums;
};
FUSEDOPS_ISA_FUNCTION(multiply_few_across, const FewAcross& args, int64_t begin, int64_t end)

// The sum of a's products with b, both [n].
FUSEDOPS_ISA_FUNCTION(add_dot, const void* a, const void* b, int64_t n, Dtype dtype, float* sum)

}  // namespace fusedops::cpu::experts
