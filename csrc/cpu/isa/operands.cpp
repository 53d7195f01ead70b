// Reads, pairs and transposes the operands of matrix products, and scales and writes results.

#include "csrc/cpu/isa/operands.h"

#include <algorithm>

#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::CPU_CAPABILITY {

void read_rows(const RowsOf& rows, int64_t n, int64_t width, int64_t padded, float* out,
               int64_t ld) {
  with_type(rows.dtype, [&]<class T>(T) {
    const auto* x = static_cast<const T*>(rows.data);
    for (int64_t i = 0; i < n; ++i, x += rows.stride) {
      each_step(width,
                [&](int64_t d, auto part) { store(out + i * ld + d, load(x + d, part), part); });
      std::fill(out + i * ld + width, out + (i + 1) * ld, 0.f);
    }
  });
  std::fill(out + n * ld, out + padded * ld, 0.f);
}

void write_row(const float* x, int64_t width, float factor, void* out, Dtype dtype) {
  with_type(dtype, [&]<class T>(T) {
    auto* const to = static_cast<T*>(out);
    each_step(width,
              [&](int64_t d, auto part) { store(to + d, load(x + d, part) * all(factor), part); });
  });
}

void scale_row(float* x, int64_t width, float factor) {
  each_step(width,
            [&](int64_t d, auto part) { store(x + d, load(x + d, part) * all(factor), part); });
}

void transpose(const float* x, int64_t ld, int64_t rows, int64_t columns, float* out,
               int64_t ld_out) {
  for (int64_t i = 0; i < rows; i += kEdge) {
    for (int64_t j = 0; j < columns; j += kEdge) {
      at::vec::transpose_mxn<float, kEdge, kEdge>(x + i * ld + j, ld, out + j * ld_out + i, ld_out);
    }
  }
}

void pair_rows(const uint16_t* x, int64_t ld, int64_t n, int64_t padded, int64_t columns,
               uint16_t* out) {
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int64_t i = 0; i < padded; i += 2, x += 2 * ld, to += columns) {
    if (i + 1 < n) {
      for (int64_t j = 0; j < columns; ++j) to[j] = x[j] | static_cast<uint32_t>(x[ld + j]) << 16;
    } else if (i < n) {
      std::copy_n(x, columns, to);
    } else {
      std::fill_n(to, columns, 0);
    }
  }
}

}  // namespace fusedops::cpu::CPU_CAPABILITY
