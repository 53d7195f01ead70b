// Matrix products of float32 or bfloat16 tiles, and the packing of operands. Sums are float32.
//
// A bfloat16 second operand [k, n] has the processor's layout, in pairs of rows: [k / 2, n, 2]
// ("VNNI"). All other operands are row-major.
#pragma once

#include <ATen/Functions.h>

#include <vector>

#include "csrc/cpu/isa/operands.h"

namespace fusedops::cpu {

using c10::BFloat16;

inline int64_t padded(int64_t n, int64_t to = kEdge) { return (n + to - 1) / to * to; }

template <class T>
constexpr Dtype kDtype = std::is_same_v<T, float> ? Dtype::float32 : Dtype::bfloat16;

// c [m, n] = a b, or c += a b if `add`. ld_a, ld_b and ld_c are row strides. float32 is summed in
// pieces, because one chain over all terms loses accuracy. For bfloat16, k is even.
void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t ld_a, const float* b,
             int64_t ld_b, float* c, int64_t ld_c, bool add);
void product(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t ld_a, const BFloat16* b,
             int64_t ld_b, float* c, int64_t ld_c, bool add);

// Whether tensors of this dtype are multiplied unconverted; others are converted to float32.
bool multiplies_bfloat16(c10::ScalarType dtype);

// Releases the AMX tiles that brgemm holds in this thread.
struct BrgemmScope {
  ~BrgemmScope();
};

// out [padded, ld] = rows, padded with zero rows and columns.
inline void read_rows(const RowsOf& rows, int64_t n, int64_t width, int64_t padded, float* out,
                      int64_t ld) {
  read_rows_for_isa()(rows, n, width, padded, out, ld);
}
inline void read_rows(const RowsOf& rows, int64_t n, int64_t width, int64_t padded, BFloat16* out,
                      int64_t ld) {
  const auto* x = static_cast<const BFloat16*>(rows.data);
  for (int64_t i = 0; i < n; ++i, x += rows.stride) {
    std::fill(std::copy_n(x, width, out + i * ld), out + (i + 1) * ld, BFloat16(0));
  }
  std::fill(out + n * ld, out + padded * ld, BFloat16(0));
}

// The same rows as a second operand [padded, width].
inline void read_second(const RowsOf& rows, int64_t n, int64_t width, int64_t padded, float* out) {
  read_rows(rows, n, width, padded, out, width);
}
inline void read_second(const RowsOf& rows, int64_t n, int64_t width, int64_t padded,
                        BFloat16* out) {
  pair_rows_for_isa()(static_cast<const uint16_t*>(rows.data), rows.stride, n, padded, width,
                      reinterpret_cast<uint16_t*>(out));
}

// out [columns, ld_out] = x [rows, ld] transposed, as a second operand. A pair of bfloat16 moves as
// one 32-bit number.
inline void transpose_second(const float* x, int64_t ld, int64_t rows, int64_t columns, float* out,
                             int64_t ld_out) {
  transpose_for_isa()(x, ld, rows, columns, out, ld_out);
}
inline void transpose_second(const BFloat16* x, int64_t ld, int64_t rows, int64_t columns,
                             BFloat16* out, int64_t ld_out) {
  transpose_for_isa()(reinterpret_cast<const float*>(x), ld / 2, rows, columns / 2,
                      reinterpret_cast<float*>(out), ld_out);
}

}  // namespace fusedops::cpu
