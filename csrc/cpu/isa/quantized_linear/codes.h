// Decodes rows of quantized weights, and converts or quantizes rows of inputs. Formats:
// fusedops/functional/quantized_linear.py.
#pragma once

#include "csrc/cpu/isa.h"
#include "csrc/kernels/weight_formats.h"

namespace fusedops::cpu::quantized_linear {

using namespace fusedops::quantized_linear;

constexpr int64_t kHalves = 128;  // 4-bit codes per register

// A quantized weight [n, k].
struct Codes {
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;
  WeightFormat format;
  int64_t n, k, group_size;

  // Returns the byte that holds a code.
  const uint8_t* at(int64_t row, int64_t column) const {
    switch (format) {
      case WeightFormat::int4: return codes + row * ((k + 1) / 2) + column / 2;
      case WeightFormat::nf4: return codes + (row * k + column) / 2;
      default: return codes + row * k + column;
    }
  }
  bool in_bytes() const { return format_of(format).bits == 8; }
  // Whether kHalves codes are decoded at once, in order_by_lane's order.
  bool in_blocks() const {
    return !in_bytes() && k % kHalves == 0 &&
           (group_size == 32 || group_size == 64 || group_size == 128);
  }
  bool a_scale_a_row() const { return in_bytes() && group_size >= k && k > 0; }  // no k, no scale
};

// The type of a product's operands. Integers are bytes: the codes themselves.
enum class Operand : uint8_t { float32, bfloat16, integer };

constexpr int64_t size_of(Operand operand) {
  return operand == Operand::float32 ? 4 : operand == Operand::bfloat16 ? 2 : 1;
}

// Decodes rows [row, row + rows) and columns [begin, end) of a weight to out [rows, ld]. If not
// scaled, the caller applies each row's scale. begin is a multiple of 2. by_lane: in
// order_by_lane's order; the codes are in blocks, begin and end are multiples of kHalves, and the
// operand is bfloat16.
struct ReadCodes {
  int64_t row, rows, begin, end;
  void* out;
  int64_t ld;
  bool scaled;
  Operand operand;
  bool by_lane = false;
};
FUSEDOPS_ISA_FUNCTION(read_codes, const Codes& weight, const ReadCodes& args)

// Converts a row x [k], times `factors` if not null, padded with zeros to `padded`. Unless `rounds`
// is none, x becomes codes, with x = codes * *step; a row that is not finite gets a step of NaN and
// codes of 0. sum: the sum of the int8 codes.
struct ReadInput {
  const void* x;
  int64_t k, padded;
  Dtype dtype;
  void* out;
  Operand operand;
  const float* factors = nullptr;
  InputFormat rounds = InputFormat::none;
  float* step = nullptr;
  int32_t* sum = nullptr;
};
FUSEDOPS_ISA_FUNCTION(read_input, const ReadInput& args)

}  // namespace fusedops::cpu::quantized_linear
