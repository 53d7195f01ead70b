// Philox4x32-7 (Salmon et al., SC 2011), the random number generator of every dropout mask, and the
// kernels' dropout arguments. `dropout_reference` in fusedops/references/norm.py defines the masks.
// Plain C++ for any device.
#pragma once

#include <cstdint>

#include "csrc/kernels/host_device.h"

namespace fusedops {

struct Words {
  uint32_t at[4];
};

// The random words of the elements 4 * group to 4 * group + 3 of a row.
FUSEDOPS_HOST_DEVICE Words philox(uint64_t seed, uint64_t row, uint32_t group) {
  uint32_t c0 = group, c1 = static_cast<uint32_t>(row), c2 = static_cast<uint32_t>(row >> 32);
  uint32_t c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0, p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Dropout's arguments. An element is kept and scaled if its random word is at least the threshold.
struct Dropout {
  const int64_t* seed = nullptr;  // on the kernel's device; null: nothing is dropped
  uint32_t threshold = 0;
  float scale = 1;
};

}  // namespace fusedops
