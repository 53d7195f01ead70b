// Shared by AdamW's CPU and CUDA kernels: the description of a tensor, the step's factors, the
// 8-bit codes and the random numbers. Formulas: fusedops/functional/adamw.py. Plain C++ for any
// device.
#pragma once

#include <cmath>
#include <cstdint>

#include "csrc/kernels/dtype.h"
#include "csrc/kernels/host_device.h"

namespace fusedops::adamw {

// A block of elements shares one scale and one key for random numbers. Kernels process one block at
// a time, whatever the format of the moments.
constexpr int kAdamWBlock = 256;

// A sum of squares is made of this many parts on every device; a part sums neighbouring blocks.
constexpr int kSquareParts = 256;

enum class Moments : uint8_t { float32, bfloat16, int8 };

// How a 16-bit parameter is rounded.
enum class Rounding : uint8_t { nearest, stochastic, remainder };

// A parameter group's options, as in torch.
struct AdamWGroup {
  double lr, beta1, beta2, eps, weight_decay;
  const float* lr_at;  // the learning rate on the device; null: use `lr`
  bool maximize, amsgrad;
  bool bounded;  // 8-bit first moments are at most max_ratio_of beside the second ones
};

// One parameter. Every tensor is contiguous or has the parameter's memory layout.
struct AdamWTensor {
  void* param;
  const void* grad;
  void *exp_avg, *exp_avg_sq;
  float* max_exp_avg_sq;                    // null without amsgrad
  float *exp_avg_scale, *exp_avg_sq_scale;  // for int8: one per block
  int16_t* remainder;                       // for Rounding::remainder
  float* step;                              // steps taken before this one
  int64_t numel;
  int64_t row;          // a new block starts after this many elements: numel unless it is sharded
  int64_t first_block;  // number of blocks in all tensors before it
  int64_t first_key;    // number of blocks in this tensor's shards before it
  int64_t index;        // among the optimizer's parameters; its random numbers depend on it
  int32_t group;
  Dtype dtype;
  Moments moments;
  Rounding rounding;
};

FUSEDOPS_HOST_DEVICE int64_t blocks_of_row(int64_t row) {
  return (row + kAdamWBlock - 1) / kAdamWBlock;
}

FUSEDOPS_HOST_DEVICE int64_t blocks_of(const AdamWTensor& t) {
  return t.row == t.numel ? blocks_of_row(t.row) : t.numel / t.row * blocks_of_row(t.row);
}

// The position of a block in its tensor.
struct BlockPlace {
  int64_t first, count;
};

FUSEDOPS_HOST_DEVICE BlockPlace place_of(const AdamWTensor& t, int64_t block) {
  int64_t start = 0;
  if (t.row != t.numel) {
    const int64_t per_row = blocks_of_row(t.row), number = block / per_row;
    start = number * t.row;
    block -= number * per_row;
  }
  const int64_t first = block * kAdamWBlock, rest = t.row - first;
  return {start + first, rest < kAdamWBlock ? rest : kAdamWBlock};
}

// The step's factors in float32, computed in float64.
//
//   p = p decay - step_size m / (sqrt(v) denom + eps)
struct AdamWFactors {
  float decay, beta1, rate1, beta2, rate2, step_size, denom, eps;  // rate = 1 - beta
  float max_ratio;                                                 // of |m| to sqrt(v), for codes
  uint64_t step;                                                   // this step's number, from 1
};

constexpr float kNoRatio = 1e15f;  // infinity times v = 0 would be NaN

// The largest |m| / sqrt(v) that t steps with these betas can give, plus a percent: by the
// Cauchy-Schwarz inequality
//
//   m^2 <= v sum over k < t of ((1 - beta1) beta1^k)^2 / ((1 - beta2) beta2^k)
//
// Where a gradient stops, rounding to codes can exceed it, because v decays more slowly than m.
FUSEDOPS_HOST_DEVICE float max_ratio_of(double beta1, double beta2, double t) {
  const double growth = beta1 * beta1 / beta2;
  const double sum = growth == 1 ? t : expm1(t * log(growth)) / (growth - 1);
  const double ratio = 1.01 * (1 - beta1) * sqrt(sum / (1 - beta2));
  return ratio < kNoRatio ? static_cast<float>(ratio) : kNoRatio;
}

// t: this step's number, from 1. 1 - beta^t loses no digits where beta^t is near 1.
FUSEDOPS_HOST_DEVICE AdamWFactors factors_of(const AdamWGroup& group, double lr, double t) {
  const double correction1 = -expm1(t * log(group.beta1));
  const double correction2 = -expm1(t * log(group.beta2));
  return {static_cast<float>(1 - lr * group.weight_decay),
          static_cast<float>(group.beta1),
          static_cast<float>(1 - group.beta1),
          static_cast<float>(group.beta2),
          static_cast<float>(1 - group.beta2),
          static_cast<float>(lr / correction1),
          static_cast<float>(1 / sqrt(correction2)),
          static_cast<float>(group.eps),
          group.bounded ? max_ratio_of(group.beta1, group.beta2, t) : kNoRatio,
          static_cast<uint64_t>(t)};
}

// The 8-bit codes. Their roots are evenly spaced, so that small values stay accurate beside large
// ones.
//
//   m = sign(c) (c / 127)^2 scale,       c in -127 .. 127,   scale = max |m|
//   v = ((c + 1) / 256 scale)^4,         c in 0 .. 255,      scale = max v^(1/4)
//
// A code of v is never zero, except in an empty block. Codes are not rounded to nearest: a step
// without a gradient changes a moment by less than half the distance of its codes (with the usual
// betas: v always, m below c = 10), so nearest codes would not decay. Instead, a code with
// fractional part f is rounded up in a part f of the steps. A sequence of thresholds spreads these
// steps evenly: it advances by 0.382 in each step, the square of the golden ratio's fractional
// part. A random sequence would be as right on average, but would let elements wander whose
// gradient stops.
constexpr float kMomentCodes = 127, kSquareCodes = 256;
constexpr float kLeastMomentScale = 1e-30f;  // a block with a smaller max |m| has codes of 0

// c^2 is larger on average than the square of c's mean: by f (1 - f), 1 / 6 for random f. So the
// code of m is min(m, sqrt(m - 1 / 6)) before rounding, for m in units of scale / 127^2. Small m,
// which become 0 or 1, give m itself; kLeastMoment is where the root takes over.
constexpr float kMomentVariance = 1 / 6.f, kLeastMoment = 0.2113248654f;

// The first threshold of a block, in units of 1 / 65536. Element i has the 16 lowest bits of the
// sum of this and kThresholdElement i. A code becomes floor(code + threshold / 65536); for m, byte
// 1 of the threshold is enough. Byte 0 is the same for a whole block.
constexpr uint32_t kThresholdElement = 159 << 8;
FUSEDOPS_HOST_DEVICE uint32_t first_threshold(uint64_t step, uint64_t block) {
  return static_cast<uint32_t>(25033 * step + (77 << 8) * block);
}

// SplitMix64's finaliser (Steele et al., OOPSLA 2014).
FUSEDOPS_HOST_DEVICE uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The key of a parameter in a step: the same on every device and every replica.
FUSEDOPS_HOST_DEVICE uint64_t adamw_key(uint64_t seed, uint64_t step, uint64_t parameter) {
  return mixed(mixed(mixed(seed) ^ step) ^ parameter);
}

// Indices of a block's random words. Each little-endian half belongs to one element: element i uses
// half i of the words from these.
constexpr uint32_t kRandomParam = 64, kRandomSquare16 = 192;

struct BlockKey {
  uint32_t low, high;
};

FUSEDOPS_HOST_DEVICE BlockKey block_key(uint64_t key, int64_t block) {
  const uint64_t mix = mixed(key + static_cast<uint64_t>(block));
  return {static_cast<uint32_t>(mix), static_cast<uint32_t>(mix >> 32)};
}

// A 32-bit mix by two products (lowbias32: Wellons, "Prospecting for hash functions", 2018).
FUSEDOPS_HOST_DEVICE uint32_t random_word(BlockKey key, uint32_t word) {
  uint32_t x = word ^ key.low;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x ^= key.high;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

}  // namespace fusedops::adamw
