// quantized_linear on CPUs, forward: codes become numbers next to where they are multiplied, and no
// weight is packed or kept.
//
// x is rounded once, to what is multiplied. A task is kColumns columns of y for kRows rows of x. A
// few rows take the codes straight from registers. Up to kMany take them from a cache, in rows as
// they lie: of up to kFew rows of x a row of codes goes from end to end, of more a piece of the
// depth goes through all columns. More rows take tiles that are turned, by oneDNN. Reads the codes
// once for each kRows rows. Sums are of pieces of the depth in one order, whatever the threads.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <vector>

#include "csrc/cpu/isa/linear/activation.h"
#include "csrc/cpu/isa/quantized_linear/dots.h"
#include "csrc/cpu/isa/quantized_linear/few.h"
#include "csrc/cpu/products.h"
#include "csrc/cpu/quantized_linear/weight.h"
#include "csrc/ops/linear/linear.h"

namespace fusedops::cpu {
namespace {

constexpr int64_t kRows = 256;       // of x, in a block
constexpr int64_t kColumns = 128;    // of y, whose sums wait for the end of the rows
constexpr int64_t kFew = 16;         // rows that stay in a cache with all their depth
constexpr int64_t kMany = 32;        // rows from which on tiles are turned for a product
constexpr int64_t kDepth = 2048;     // bytes of a row
constexpr int64_t kTileDepth = 256;  // numbers of a row of a tile
constexpr int64_t kGrain = 1 << 18;  // products of a task, about

int64_t blocks_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Where sums of products of 8 bits fit 32 bits, 255 * 127 each.
bool multiplies_integers(const Codes& w) {
  return isa() == Isa::avx512_bf16 && w.format == WeightFormat::int8 && w.a_scale_a_row() &&
         w.k <= 65536;
}

// x [rows, k] as a product takes it, its rows padded with zeros.
struct Input {
  Operand operand = Operand::float32;
  int64_t rows = 0, ld = 0;
  Tensor numbers;
  std::vector<float> steps;  // of codes; empty where x is multiplied as it is
  std::vector<int32_t> sums;

  Input() = default;
  Input(const Tensor& x, Operand operand, bool as_codes)
      : operand(operand),
        rows(x.size(0)),
        ld(blocks_of(x.size(1) * size_of(operand), kLanes) * kLanes / size_of(operand)),
        numbers(at::empty({padded(rows) * ld * size_of(operand)}, x.options().dtype(at::kByte))),
        steps(as_codes ? rows : 0),
        sums(steps.size()) {
    const int64_t k = x.size(1);
    at::parallel_for(0, rows, kGrain / (k + 1) + 1, [&](int64_t begin, int64_t end) {
      const auto* const data = static_cast<const char*>(x.const_data_ptr());
      for (int64_t i = begin; i < end; ++i) {
        read_input_for_isa()({data + i * k * x.element_size(), k, ld, dtype_of(x), at(i, 0),
                              operand, nullptr, as_codes ? &steps[i] : nullptr,
                              as_codes ? &sums[i] : nullptr});
      }
    });
  }

  void* at(int64_t row, int64_t column) const {
    return static_cast<char*>(numbers.mutable_data_ptr()) + (row * ld + column) * size_of(operand);
  }
};

bool of_bytes(const Codes& w) {
  return w.format == WeightFormat::int8 || w.format == WeightFormat::fp8;
}

// Whether codes are multiplied as they are read: those of a few rows need no place.
bool multiplies_few(const Codes& w, int64_t rows, Operand operand) {
  if (rows > kFewRows || operand == Operand::integer) return false;
  if (of_bytes(w)) return w.a_scale_a_row();
  return operand == Operand::bfloat16 && w.k % kHalves == 0;
}

// A few rows are bound by what reads the codes: float32 costs them nothing.
Operand operand_for(const Codes& w, int64_t rows, bool as_codes, Compute compute) {
  if (as_codes && multiplies_integers(w)) return Operand::integer;
  const auto operand = floating_operand(compute);
  return of_bytes(w) && multiplies_few(w, rows, operand) ? Operand::float32 : operand;
}

// A few rows in the order of codes of 4 bits.
struct Turned {
  std::vector<uint16_t> numbers;
  std::vector<float> lanes;

  explicit Turned(const Input& x) : numbers(x.rows * x.ld), lanes(numbers.size() / 8) {
    for (int64_t i = 0; i < x.rows; ++i) {
      turn_halves_for_isa()(static_cast<const uint16_t*>(x.at(i, 0)), x.ld,
                            numbers.data() + i * x.ld, lanes.data() + i * x.ld / 8);
    }
  }
};

struct Outputs {
  Tensor y, z;  // [rows, n]
  Activation activation;
  Tensor bias;

  const Tensor& first() const { return z.defined() ? z : y; }
};

// Blocks of y. The scratch is a thread's.
class Block {
 public:
  Block(const Codes& w, const Input& x, const FewRows* few, const Outputs& out)
      : w_(w),
        x_(x),
        few_(few),
        out_(out),
        scaled_(!w.a_scale_a_row()),
        turns_(x.rows > kMany && x.operand == Operand::bfloat16 &&
               multiplies_bfloat16(at::kBFloat16)),
        codes_(turns_ ? kColumns * kTileDepth * sizeof(BFloat16) : 8 * kDepth),
        turned_(turns_ ? kColumns * kTileDepth : 0),
        sums_(padded(std::min(x.rows, kRows)) * kColumns) {}

  // Rows [row, row + rows) of columns [begin, begin + columns).
  void run(int64_t row, int64_t rows, int64_t begin, int64_t columns) {
    if (few_ != nullptr) {
      FewRows args = *few_;
      args.sums = sums_.data();
      add_few_rows_for_isa()(w_, args, begin, begin + columns);
    } else if (turns_) {
      add_tiles(row, rows, begin, columns);
    } else {
      add_pieces(row, rows, begin, columns);
    }
    for (int64_t i = 0; i < rows; ++i) finish(row + i, sums_.data() + i * kColumns, begin, columns);
    if (out_.activation != Activation::none) activate(row, rows, begin, columns);
  }

 private:
  void add_tiles(int64_t row, int64_t rows, int64_t begin, int64_t columns) {
    auto* const tile = reinterpret_cast<BFloat16*>(codes_.data());
    for (int64_t k = 0; k < w_.k; k += kTileDepth) {
      const int64_t end = std::min(k + kTileDepth, w_.k), depth = padded(end - k, 2 * kEdge);
      prefetch(begin, columns, end, std::min(end + kTileDepth, w_.k));
      read_codes_for_isa()(w_, {begin, columns, k, end, tile, depth, scaled_, x_.operand});
      transpose_second(tile, depth, padded(columns), depth, turned_.data(), kColumns);
      product(padded(rows), padded(columns), depth, static_cast<const BFloat16*>(x_.at(row, k)),
              x_.ld, turned_.data(), kColumns, sums_.data(), kColumns, k > 0);
    }
  }

  void add_pieces(int64_t row, int64_t rows, int64_t begin, int64_t columns) {
    const int64_t at_once = columns_for(rows), depth = kDepth / size_of(x_.operand),
                  pieces = std::max<int64_t>(blocks_of(w_.k, depth), 1);
    // Few rows stay in a cache, and the codes of a row are read from end to end.
    const int64_t some = rows <= kFew ? at_once : columns;
    for (int64_t first = 0; first < columns; first += some) {
      for (int64_t piece = 0; piece < pieces; ++piece) {
        for (int64_t c = first; c < std::min(first + some, columns); c += at_once) {
          add(row, rows, begin + c, std::min(at_once, columns - c), piece * depth,
              sums_.data() + c);
        }
      }
    }
  }

  // A piece of the depth, from k on, of `columns` columns.
  void add(int64_t row, int64_t rows, int64_t begin, int64_t columns, int64_t k, float* sums) {
    const int64_t piece = kDepth / size_of(x_.operand), end = std::min(k + piece, w_.k),
                  padded = std::min(piece, x_.ld - k);
    prefetch(begin + columns, columns, k, end);
    Dots dots{x_.at(row, k), codes_.data(), x_.ld,    padded, rows,
              padded,        sums,          kColumns, k > 0,  x_.operand};
    if (multiplied_as_they_lie(begin, rows)) {
      dots.w = w_.at(begin, k);
      dots.ld_w = w_.k;
    } else {
      read_codes_for_isa()(w_,
                           {begin, columns, k, end, codes_.data(), padded, scaled_, x_.operand});
    }
    dot_rows_for_isa()(dots);
  }

  bool multiplied_as_they_lie(int64_t begin, int64_t rows) const {
    return x_.operand == Operand::integer && w_.k % kLanes == 0 &&
           begin + columns_for(rows) <= w_.n;
  }

  // Asks for codes that come next: the processor does not see it from so few of a row.
  void prefetch(int64_t begin, int64_t columns, int64_t k, int64_t end) const {
    for (int64_t row = begin; row < std::min(begin + columns, w_.n); ++row) {
      const auto *const from = w_.at(row, k), *const to = w_.at(row, end);
      for (const auto* line = from; line < to; line += 64) __builtin_prefetch(line, 0, 2);
    }
  }

  void finish(int64_t row, const float* sums, int64_t begin, int64_t columns) {
    const bool codes = !x_.steps.empty();
    finish_sums_for_isa()({sums, columns, codes ? x_.steps[row] : 1,
                           scaled_ ? nullptr : w_.scales + begin, codes ? x_.sums[row] : 0,
                           out_.bias.defined() ? place(out_.bias, 0, begin) : nullptr,
                           place(out_.first(), row, begin), dtype_of(out_.y), x_.operand});
  }

  void activate(int64_t row, int64_t rows, int64_t begin, int64_t columns) {
    const int64_t n = w_.n;
    activate_rows_for_isa()({place(out_.first(), row, begin), nullptr, nullptr,
                             place(out_.y, row, begin), columns, n, n, dtype_of(out_.y),
                             out_.activation},
                            0, rows);
  }

  void* place(const Tensor& t, int64_t row, int64_t column) const {
    return static_cast<char*>(t.mutable_data_ptr()) + (row * w_.n + column) * t.element_size();
  }

  const Codes& w_;
  const Input& x_;
  const FewRows* few_;  // or null
  const Outputs& out_;
  bool scaled_, turns_;
  std::vector<char> codes_;
  std::vector<BFloat16> turned_;
  std::vector<float> sums_;  // int32 where the operands are integers
};

void multiply(const Codes& w, const Input& x, const Outputs& out) {
  const int64_t across = blocks_of(w.n, kColumns), tasks = blocks_of(x.rows, kRows) * across;
  const bool few = multiplies_few(w, x.rows, x.operand),
             halves = few && x.operand == Operand::bfloat16;
  const Turned turned(halves ? x : Input());
  FewRows args{halves ? turned.numbers.data() : x.at(0, 0),
               x.ld,
               x.rows,
               turned.lanes.data(),
               nullptr,
               kColumns};
  const int64_t grain = kGrain / (std::min(x.rows, kRows) * kColumns * (w.k + 1)) + 1;
  at::parallel_for(0, tasks, grain, [&](int64_t first, int64_t last) {
    const Products products;
    Block block(w, x, few ? &args : nullptr, out);
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / across * kRows, begin = i % across * kColumns;
      block.run(row, std::min(kRows, x.rows - row), begin, std::min(kColumns, w.n - begin));
    }
  });
}

QuantizedForward quantized_linear_forward(const Tensor& x, const Tensor& qweight,
                                          const Tensor& scales, const OptionalTensor& zeros,
                                          const OptionalTensor& bias, std::string_view format,
                                          c10::SymInt out_features, c10::SymInt in_features,
                                          int64_t group_size, std::string_view activation,
                                          std::string_view input_format, std::string_view compute,
                                          bool keep_z) {
  if (!has_kernel(x.scalar_type())) {
    return quantized_linear_forward_composite(x, qweight, scales, zeros, bias, format, out_features,
                                              in_features, group_size, activation, input_format,
                                              compute, keep_z);
  }
  const auto outputs =
      quantized_linear_outputs(x, qweight, scales, zeros, bias, format, out_features, in_features,
                               group_size, activation, input_format, compute, keep_z);
  const auto& [y, z] = outputs;
  if (y.numel() == 0) return outputs;
  const QuantizedTensors weight(qweight, scales, zeros, format, out_features, in_features,
                                group_size);
  const auto w = codes_of(weight);
  const bool as_codes = input_format == "int8";
  const auto rows = as_rows(x).contiguous();
  const Input input(rows, operand_for(w, rows.size(0), as_codes, compute_of(compute)), as_codes);
  multiply(w, input,
           {as_rows(y), z.defined() ? as_rows(z) : z, activation_of(activation),
            given(bias) ? bias->contiguous() : Tensor()});
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("quantized_linear_forward", quantized_linear_forward);
}

}  // namespace fusedops::cpu
