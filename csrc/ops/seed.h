// What the kernels are told of a dropout of a share p.
#pragma once

#include <algorithm>

#include "csrc/common.h"
#include "csrc/kernels/philox.h"

namespace fusedops {

// An element whose random word is at least the threshold stays, scaled.
inline double dropout_scale(double p) { return p == 1 ? 0 : 1 / (1 - p); }

inline uint32_t dropout_threshold(double p) {
  return static_cast<uint32_t>(std::min(p * 4294967296.0, 4294967295.0));
}

inline Dropout dropout_of(double p, const OptionalTensor& seed) {
  if (p == 0) return {};
  return {seed->const_data_ptr<int64_t>(), dropout_threshold(p),
          static_cast<float>(dropout_scale(p))};
}

}  // namespace fusedops
