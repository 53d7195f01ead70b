// Shared by cross entropy's operators and CPU kernels: formulas, options, sums of a row. Shapes:
// fusedops/functional/cross_entropy.py. Plain C++.
//
// A row has C logits x_c and the class t:
//   z_c  = softcap tanh(scale x_c / softcap), or scale x_c
//   loss = w_t ((1 - a) (lse - z_t) + z_loss lse^2) + a / C sum_c w_c (lse - z_c)
//   dz_c = g (P p_c - T [c = t] - S w_c)      p_c = exp(z_c - lse)
//          P = w_t ((1 - a) + 2 z_loss lse) + a / C sum_c w_c,  T = (1 - a) w_t,  S = a / C
//   dx_c = dz_c scale (1 - (z_c / softcap)^2)
// with a the label smoothing and g the gradient of the row's loss. Log-probabilities have
//   log p_t = z_t - lse,  entropy = lse - m      m = sum_c p_c z_c
//   dz_c = G ([c = t] - p_c) - E p_c (z_c - m)
// with G and E the gradients of log p_t and of the entropy.
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

// Which sums a row needs beside those of lse: the weighted one, or the moment and the top class.
enum class SumKind { plain, weighted, moment };

// The sums of a row over the logits read so far.
struct LogitSums {
  float base = -std::numeric_limits<float>::infinity();    // near the largest z_c; a moment's is it
  double exponentials = 0;                                 // sum of exp(z_c - base)
  double weighted = 0;                                     // sum of w_c (z_c - origin)
  double moment = 0;                                       // sum of exp(z_c - base) (z_c - base)
  double target = 0;                                       // z_t
  float origin = std::numeric_limits<float>::quiet_NaN();  // near the z_c: they may be far from 0
  bool top = false;  // with a moment: whether t is the first of the classes with the largest z_c
};

// The terms of dz_c: g T, g S, the sum of the w_c, and g w_t 2 z_loss lse. g P follows from them.
// For log-probabilities g T is -G, and the others are 0.
struct LogitGradient {
  double lse;
  double target, smooth, all, square;
  double entropy = 0, mean = 0;  // E and m
};

}  // namespace fusedops::cross_entropy
