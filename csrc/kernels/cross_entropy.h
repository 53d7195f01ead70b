// Shared by cross entropy's operators and CPU kernels: formulas, options, sums of a row. Shapes:
// fusedops/functional/cross_entropy.py. Plain C++.
//
// A row has C logits x_c and the class t:
//   z_c  = softcap tanh(scale x_c / softcap), or scale x_c
//   loss = w_t ((1 - a) (lse - z_t) + z_loss lse^2) + a / C sum_c w_c (lse - z_c)
//   dz_c = g (P p_c - T [c = t] - S w_c)      p_c = exp(z_c - lse)
//          P = w_t ((1 - a) + 2 z_loss lse) + a / C sum_c w_c,  T = (1 - a) w_t,  S = a / C
//   dx_c = dz_c scale (1 - (z_c / softcap)^2)
// with a the label smoothing and g the gradient of the row's loss.
#pragma once

#include <cstdint>
#include <limits>

#include "csrc/kernels/dtype.h"

namespace fusedops::cross_entropy {

enum class Reduction : int64_t { none, mean, sum };  // torch's numbers

// How a logit becomes z.
struct LogitMap {
  double scale;
  double softcap;  // 0: none
};

// Adjacent logits of one row: all of them or a part.
struct Logits {
  const void* x;
  int64_t n;
  Dtype dtype;
  const float* weight;  // the weights of these classes; null: 1
  int64_t target;       // t's index among these logits; outside 0 to n - 1 if t is not among them
  LogitMap map;
};

// The sums behind a row's loss, over the logits read so far.
struct LogitSums {
  float base = -std::numeric_limits<float>::infinity();  // near the largest z_c
  double exponentials = 0;                               // sum of exp(z_c - base)
  double weighted = 0;                                   // sum of w_c (z_c - origin), if requested
  double target = 0;                                     // z_t
  float origin = std::numeric_limits<float>::quiet_NaN();  // near the z_c: they may be far from 0
};

// The terms of dz_c: g T, g S, the sum of the w_c, and g w_t 2 z_loss lse. g P follows from them.
struct LogitGradient {
  double lse;
  double target, smooth, all, square;
};

}  // namespace fusedops::cross_entropy
