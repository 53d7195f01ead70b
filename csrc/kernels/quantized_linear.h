// Formats and constants of quantized_linear, for the kernels of any device. Formulas and shapes:
// fusedops/functional/quantized_linear.py. Plain C++.
#pragma once

#include <cstdint>

#include "csrc/kernels/dtype.h"
#include "csrc/kernels/quantized_rows.h"

namespace fusedops::quantized_linear {

enum class WeightFormat : uint8_t { int8, int4, nf4, fp8 };

// The precision to which a product's operands may be rounded. Sums are float32, or int32 for int8.
enum class Compute : uint8_t { any, exact, bf16, int8 };

// Whether it allows operands of 16 bits.
constexpr bool may_round(Compute compute) {
  return compute == Compute::any || compute == Compute::bf16;
}

using InputFormat = RowFormat;  // of x

constexpr int64_t kNf4Block = 64;  // elements of the flattened weight that share an absmax

// Quantiles of a normal distribution, of which 0 and both ends are exact. Dettmers et al.,
// arXiv:2305.14314, appendix E.
constexpr float kNf4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// On GPUs: the most rows of x that csrc/cuda multiplies in float32, and on tensor cores, where x is
// float16 or bfloat16; and the largest depth whose products of codes (127 * 127 at most) are summed
// in 32 bits.
constexpr int kGemvRows = 4;
constexpr int kTensorRows = 16;
constexpr int64_t kMostIntegers = 65536;

// Returns how many groups cover a row. group_size is 0 only if the row is empty.
constexpr int64_t groups_of(int64_t k, int64_t group_size) {
  return k == 0 ? 0 : (k + group_size - 1) / group_size;
}

// Returns the most rows of float16 or bfloat16 that csrc/cuda multiplies with such a weight on a
// GPU's tensor cores, which take 64 bytes of each of its rows at a time; 0 if none.
constexpr int tensor_rows(WeightFormat format, int64_t n, int64_t k, int64_t group_size) {
  if (k > INT32_MAX || n * k / 8 > INT32_MAX) return 0;  // the kernel's indices have 31 bits
  switch (format) {
    case WeightFormat::int8: return k % 64 == 0 && group_size >= k ? kTensorRows : 0;
    case WeightFormat::int4:
      if (k % 128 != 0) return 0;
      return group_size == 64 || group_size == 128 ? kTensorRows : group_size == 32 ? 8 : 0;
    case WeightFormat::nf4: return k % 128 == 0 ? kTensorRows : 0;
    default: return 0;
  }
}

}  // namespace fusedops::quantized_linear
