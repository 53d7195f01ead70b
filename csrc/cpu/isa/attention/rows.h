// Rows of numbers that lie side by side, as the loops of attention get them.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

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

// f with a value of the C++ type of dtype.
template <class Function>
inline void with_type(Dtype dtype, const Function& f) {
  switch (dtype) {
    case Dtype::float32: return f(float());
    case Dtype::bfloat16: return f(c10::BFloat16());
    case Dtype::float16: return f(c10::Half());
  }
}

}  // namespace fusedops::cpu
