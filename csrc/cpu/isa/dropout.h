// Computes the factors by which dropout multiplies a row, on CPUs.
#pragma once

#include <algorithm>

#include "csrc/cpu/isa/vec.h"
#include "csrc/kernels/philox.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

// scales[k] = the factor of the row's element begin + k: 0 or the dropout's scale. Fills whole
// groups of four.
inline void dropout_scales(const Dropout& dropout, int64_t row, int64_t begin, int64_t count,
                           float* scales) {
  const auto [at, threshold, scale] = dropout;  // GCC vectorises only with local copies
  const auto seed = static_cast<uint64_t>(*at);
  const auto first = static_cast<uint32_t>(begin / 4),
             groups = static_cast<uint32_t>(count + 3) / 4;
  for (uint32_t g = 0; g < groups; ++g) {
    const auto words = philox(seed, static_cast<uint64_t>(row), first + g);
    for (int k = 0; k < 4; ++k) scales[4 * g + k] = words.at[k] >= threshold ? scale : 0.f;
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
