// Products of float32 tiles. Some rows of c, two vectors wide, stay in registers over a chain of
// terms: each term takes a broadcast for a row and two loads for all of them.

#include "csrc/cpu/isa/tile_product.h"

#include <algorithm>
#include <utility>

#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu::CPU_CAPABILITY {
namespace {

constexpr int kRows = kRowsInRegisters;

// Rows [row, row + kLive) and columns from `column` on, as many as `part` has.
template <int kLive, class Part>
FUSEDOPS_INLINE void strip(const TileProduct& of, int64_t row, int64_t column, Part part) {
  const float *a = of.a + row * of.ld_a, *b = of.b + column;
  float* const c = of.c + row * of.ld_c + column;
  bool add = of.add;
  for (int64_t from = 0; from < of.k; from += of.chain, add = true) {
    const int64_t end = std::min(from + of.chain, of.k);
    Lanes sum[kLive][2] = {};
    for (int64_t p = from; p < end; ++p) {
      const auto loaded = load(b + p * of.ld_b, part);
      const auto low = static_cast<Lanes>(static_cast<Register>(loaded.lo)),
                 high = static_cast<Lanes>(static_cast<Register>(loaded.hi));
#pragma GCC unroll 16
      for (int r = 0; r < kLive; ++r) {
        sum[r][0] += a[r * of.ld_a + p] * low;
        sum[r][1] += a[r * of.ld_a + p] * high;
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kLive; ++r) {
      Floats total{static_cast<Register>(sum[r][0]), static_cast<Register>(sum[r][1])};
      if (add) total = load(c + r * of.ld_c, part) + total;
      store(c + r * of.ld_c, total, part);
    }
  }
}

template <int kLive>
void rows(const TileProduct& of, int64_t row) {
  each_step(of.n, [&](int64_t column, auto part) { strip<kLive>(of, row, column, part); });
}

using Rows = decltype(&rows<1>);

template <int... kFewer>
Rows rows_of(int live, std::integer_sequence<int, kFewer...>) {
  constexpr Rows all[] = {rows<kFewer + 1>...};
  return all[live - 1];
}

}  // namespace

void multiply_tile(const TileProduct& product) {
  const int64_t strips = (product.m + kRows - 1) / kRows;
  for (int64_t i = 0; i < strips; ++i) {
    const int64_t row = i * product.m / strips, end = (i + 1) * product.m / strips;
    rows_of(static_cast<int>(end - row), std::make_integer_sequence<int, kRows>())(product, row);
  }
}

}  // namespace fusedops::cpu::CPU_CAPABILITY
