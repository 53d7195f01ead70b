// The rotary embedding's formulas and arguments, shared by CPU and CUDA kernels. Formulas and
// shapes: fusedops/functional/rotary.py. Plain C++ for any device.
//
// A head's first `rotary` elements are pairs (a, b): of its two halves, or interleaved, neighbours.
// Each pair has cosines and sines of its own, (c_a, s_a) and (c_b, s_b), where a and b stand:
//   forward     a' = a c_a - b s_a      b' = b c_b + a s_b
//   transposed  a' = a c_a + b s_b      b' = b c_b - a s_a
// What is past them is copied.
#pragma once

#include <cstdint>

#include "csrc/kernels/dtype.h"

namespace fusedops::rotary {

// In elements.
struct RotaryStrides {
  int64_t batch, head, seq;
};

// x and y [batch, heads, seq, width], each head contiguous.
struct RotaryHeads {
  const void* x;
  void* y;
  RotaryStrides x_at, y_at;
  int64_t heads, width;
};

struct RotaryArguments {
  RotaryHeads tensors[2];  // q and k, or the one that there is
  int count;
  int64_t batch, seq;
  const void *cos, *sin;         // [batch, seq, rotary], each row contiguous
  RotaryStrides cos_at, sin_at;  // 0 where they are one for all; head is
  int64_t rotary;
  Dtype from, table, to;  // of x, of cos and sin, of y. table is from, to or float32
  bool interleaved, transposed;
};

}  // namespace fusedops::rotary
