// The floating-point dtypes that kernels read and write, defined without headers of c10.
#pragma once

#include <cstdint>

namespace fusedops {

enum class Dtype : uint8_t { float32, bfloat16, float16 };

constexpr int size_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

}  // namespace fusedops
