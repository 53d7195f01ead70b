// Chooses quantized_linear's kernel by the formats, the number of rows and the CPU.
#pragma once

#include <cstdint>
#include <limits>

#include "csrc/cpu/gemm.h"
#include "csrc/cpu/isa/quantized_linear/dots.h"
#include "csrc/cpu/isa/quantized_linear/few.h"
#include "csrc/cpu/quantized_linear/weight.h"

namespace fusedops::cpu::quantized_linear {

// Where codes are decoded: in registers, in place, row-wise in cache, in cached tiles for oneDNN,
// in cached tiles for the matrix unit, or in the blocks of linear's product.
enum class DecodeAt { registers, in_place, rows, tiles, matrix_unit, blocks };

struct Plan {
  static constexpr int64_t kMany = 32;  // above this many rows, tiles are transposed for a matmul
  static constexpr int64_t kNoRows = std::numeric_limits<int64_t>::max();

  Operand operand;
  DecodeAt decode_at;
  bool widened;  // x is rounded to bfloat16, and then float32: as in the kernels for more rows
  bool by_lane;  // x and the decoded weight are in order_by_lane's order

  // Returns the fewest rows for the matrix unit. Fewer are faster in registers: 2 rows of nf4 take
  // 1.1 against 1.6 ms, 3 of fp8 2.1 against 2.2, 4096 x 4096, on one thread of an Intel Xeon.
  // Of int8, float32_rows come first.
  int64_t unit_rows(const Codes& w) const {
    if (operand != Operand::bfloat16 || !has_matrix_unit()) return kNoRows;
    return format_of(w.format).matrix_unit_rows;
  }
  // Returns the most rows of which int8 codes become float32: it takes fewer instructions, and is
  // as precise. 4 rows of bfloat16 take 1.4 ms, as bfloat16 2.3 ms on the matrix unit and 2.9 ms
  // without it, 4096 x 4096, on one thread of an Intel Xeon; 6 are faster on the unit.
  static int64_t float32_rows(const Codes& w) {
    if (!has_int8_codes(w) || !w.a_scale_a_row()) return 0;
    return has_matrix_unit() ? 5 : kFewRows;
  }

  Plan(const Codes& w, int64_t rows, InputFormat rounds, Compute compute)
      : operand(rounds == InputFormat::int8 && multiplies_integers(w) ? Operand::integer
                : rows <= float32_rows(w)                             ? Operand::float32
                                                                      : floating_operand(compute)),
        decode_at(operand == Operand::integer ? for_integers(w)
                  : rows >= unit_rows(w)      ? DecodeAt::matrix_unit
                  : rows <= kFewRows          ? for_few_rows(w)
                  : rows <= kMany             ? DecodeAt::rows
                                              : for_many_rows(w)),
        widened(operand == Operand::float32 && floating_operand(compute) == Operand::bfloat16),
        by_lane(operand == Operand::bfloat16 && w.in_blocks()) {}

 private:
  static bool has_int8_codes(const Codes& w) {
    return format_of(w.format).row_format == RowFormat::int8;
  }
  // Whether integer products run: their sums, of at most 255 * 127 each, must fit 32 bits.
  static bool multiplies_integers(const Codes& w) {
    return isa() == Isa::avx512_bf16 && has_int8_codes(w) && w.a_scale_a_row() &&
           w.k <= kMostIntegers;
  }
  static DecodeAt for_integers(const Codes& w) {
    return w.k % kLanes == 0 ? DecodeAt::in_place : DecodeAt::rows;
  }
  DecodeAt for_few_rows(const Codes& w) const {
    const bool decodes = operand == Operand::bfloat16 || isa() == Isa::avx2;
    const bool fits = w.in_bytes() ? w.a_scale_a_row() : decodes && w.in_blocks();
    return fits ? DecodeAt::registers : DecodeAt::rows;
  }
  DecodeAt for_many_rows(const Codes& w) const {
    const bool multiplies = operand == Operand::bfloat16 && multiplies_bfloat16(at::kBFloat16);
    if (multiplies) return DecodeAt::tiles;
    return isa() == Isa::avx2 && w.k > 0 ? DecodeAt::blocks : DecodeAt::rows;
  }
};

}  // namespace fusedops::cpu::quantized_linear
