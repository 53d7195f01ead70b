// Draws dropout's seed, and computes the kernels' dropout arguments from it and the probability.
#pragma once

#include <ATen/ops/randint.h>

#include <algorithm>
#include <limits>

#include "csrc/common.h"
#include "csrc/kernels/philox.h"

namespace fusedops {

// An element is kept and scaled if its random word is at least the threshold.
inline double dropout_scale(double p) { return p == 1 ? 0 : 1 / (1 - p); }

inline uint32_t dropout_threshold(double p) {
  return static_cast<uint32_t>(std::min(p * 4294967296.0, 4294967295.0));
}

// ATen draws the seed, so `torch.manual_seed` reproduces it and nothing waits for the device.
inline OptionalTensor draw_seed(const Tensor& x, double p) {
  if (p == 0) return std::nullopt;
  return at::randint(std::numeric_limits<int64_t>::max(), {}, x.options().dtype(at::kLong));
}

inline Dropout dropout_of(double p, const OptionalTensor& seed) {
  if (p == 0) return {};
  return {seed->const_data_ptr<int64_t>(), dropout_threshold(p),
          static_cast<float>(dropout_scale(p))};
}

}  // namespace fusedops
