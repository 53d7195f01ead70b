// Rows of numbers that lie side by side, as the loops of attention get them.
#pragma once

#include <cstdint>

#include "csrc/dtype.h"

namespace fusedops::cpu {

constexpr int64_t kKeys = 512;  // of a tile of scores, at most
constexpr int64_t kEdge = 16;   // tiles are padded to a multiple of it

// Rows of numbers of a dtype; those of a row lie side by side.
struct RowsOf {
  const void* data;
  int64_t stride;
  Dtype dtype;
};

}  // namespace fusedops::cpu
