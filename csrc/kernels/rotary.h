// Arguments of the rotary embedding's CPU and CUDA kernels, and the formulas. Shapes:
// fusedops/functional/rotary.py. Plain C++ for any device.
//
// A head's first `rotary` elements are pairs (a, b): one from each half, or neighbours if
// interleaved. Each pair has its own cosines and sines, (c_a, s_a) and (c_b, s_b):
//   forward     a' = a c_a - b s_a      b' = b c_b + a s_b
//   transposed  a' = a c_a + b s_b      b' = b c_b - a s_a
// The elements after them are copied.
#pragma once

#include <cstdint>

#include "csrc/kernels/dtype.h"

namespace fusedops::rotary {

// Strides in elements.
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
  RotaryHeads tensors[2];  // q and k, or only one of them
  int count;
  int64_t batch, seq;
  const void *cos, *sin;         // [batch, seq, rotary], each row contiguous
  RotaryStrides cos_at, sin_at;  // 0 in broadcast dimensions; head is always 0
  int64_t rotary;
  Dtype from, table, to;  // from: x; table: cos and sin, one of from, to and float32; to: y
  bool interleaved, transposed;
};

}  // namespace fusedops::rotary
