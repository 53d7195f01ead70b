// quantized_linear's forward on CPUs: codes are decoded piece by piece where they are multiplied,
// so there is never a whole decoded weight.
//
// x is rounded once, to the operand's format; for a few rows of int8 the rounded numbers are then
// stored as float32. A task is kColumns columns of y for kMostRows rows of
// x. For a few rows codes are decoded in registers. Up to kMany rows of x read decoded rows from
// the cache: with up to kFew rows of x a row of codes is read from end to end, with more a piece of
// the depth is read for all columns. More rows use transposed tiles, by oneDNN, or with AVX2 alone
// linear's product. If the CPU has a matrix unit (AMX), it multiplies 3 rows or more, of fp8 4,
// of int8 with a scale for each row 6. Codes are read once for each kMostRows rows, or by linear's
// product once for all. The order of sums does not depend on the number of threads.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/cpu/activation.h"
#include "csrc/cpu/isa/quantized_linear/dots.h"
#include "csrc/cpu/isa/quantized_linear/few.h"
#include "csrc/cpu/isa/quantized_linear/tiles.h"
#include "csrc/cpu/gemm.h"
#include "csrc/cpu/linear/product.h"
#include "csrc/cpu/quantized_linear/input.h"
#include "csrc/cpu/quantized_linear/kernel_choice.h"
#include "csrc/cpu/quantized_linear/plan.h"
#include "csrc/cpu/quantized_linear/products.h"
#include "csrc/cpu/quantized_linear/weight.h"

namespace fusedops::cpu::quantized_linear {
namespace {

constexpr int64_t kMostRows = 256;   // rows of x per block
constexpr int64_t kColumns = 128;    // columns of y per task; their sums stay in scratch memory
constexpr int64_t kFew = 16;         // up to this many rows of x fit the cache in full depth
constexpr int64_t kDepth = 2048;     // bytes of a row per piece of the depth
constexpr int64_t kTileDepth = 256;  // elements of a tile's row

struct Outputs {
  Tensor y, z;  // [rows, n]
  Activation activation;
  Tensor bias;

  const Tensor& first() const { return z.defined() ? z : y; }
};

// Turns sums into y: scales, bias, rounding, activation.
struct Finish {
  const Codes& w;
  const Input& x;
  const Outputs& out;

  // Rows [row, row + rows) of columns [begin, begin + columns). sums: the first one.
  void operator()(const float* sums, int64_t ld, int64_t row, int64_t rows, int64_t begin,
                  int64_t columns) const {
    const bool codes = !x.steps.empty();
    const auto* const bias =
        out.bias.defined()
            ? static_cast<const char*>(out.bias.const_data_ptr()) + begin * out.bias.element_size()
            : nullptr;
    for (int64_t i = 0; i < rows; ++i) {
      finish_sums_for_isa()({sums + i * ld, columns, codes ? x.steps[row + i] : 1,
                             w.a_scale_a_row() ? w.scales + begin : nullptr,
                             codes ? x.sums[row + i] : 0, bias, place(out.first(), row + i, begin),
                             dtype_of(out.y), x.operand});
    }
    if (out.activation == Activation::none) return;
    const auto dtype = dtype_of(out.y);
    linear::activate_rows_for_isa()({place(out.first(), row, begin), nullptr, nullptr,
                                     place(out.y, row, begin), columns, w.n, w.n, dtype, dtype,
                                     out.activation},
                                    0, rows);
  }

 private:
  void* place(const Tensor& t, int64_t row, int64_t column) const {
    return static_cast<char*>(t.mutable_data_ptr()) + (row * w.n + column) * t.element_size();
  }
};

// Computes blocks of y. The scratch belongs to one thread.
class OutputBlock {
 public:
  OutputBlock(const Codes& w, const Input& x, DecodeAt decode_at, const FewRows& few,
              const Packed* packed, const Outputs& out)
      : w_(w),
        x_(x),
        decode_at_(decode_at),
        few_(few),
        packed_(packed),
        finish_{w, x, out},
        scaled_(!w.a_scale_a_row()),
        codes_(decode_at == DecodeAt::tiles ? kColumns * kTileDepth * sizeof(BFloat16)
                                            : 8 * kDepth),
        transposed_(decode_at == DecodeAt::tiles ? new BFloat16[kColumns * kTileDepth] : nullptr),
        sums_(padded(std::min(x.rows, kMostRows)) * kColumns) {}

  // Computes rows [row, row + rows) of columns [begin, begin + columns).
  void run(int64_t row, int64_t rows, int64_t begin, int64_t columns) {
    switch (decode_at_) {
      case DecodeAt::registers:
        few_.sums = sums_.data();
        add_few_rows_for_isa()(w_, few_, begin, begin + columns);
        // A group's unscaled sum may overflow float32 although the scaled one does not.
        if (!w_.in_bytes() && !finite(rows, columns)) add_pieces(row, rows, begin, columns);
        break;
      case DecodeAt::tiles: add_tiles(row, rows, begin, columns); break;
      case DecodeAt::matrix_unit:
        multiply_tiles_for_isa()(w_,
                                 {packed_->at(row), rows, packed_->depth, x_.by_lane, scaled_,
                                  sums_.data(), kColumns},
                                 begin, begin + columns);
        break;
      default: add_pieces(row, rows, begin, columns);
    }
    finish_(sums_.data(), kColumns, row, rows, begin, columns);
  }

 private:
  bool finite(int64_t rows, int64_t columns) const {
    for (int64_t i = 0; i < rows; ++i) {
      const float* const sums = sums_.data() + i * kColumns;
      if (!std::all_of(sums, sums + columns, [](float v) { return std::isfinite(v); }))
        return false;
    }
    return true;
  }

  void add_tiles(int64_t row, int64_t rows, int64_t begin, int64_t columns) {
    auto* const tile = reinterpret_cast<BFloat16*>(codes_.data());
    for (int64_t k = 0; k < w_.k; k += kTileDepth) {
      const int64_t end = std::min(k + kTileDepth, w_.k), depth = padded(end - k, 2 * kEdge);
      prefetch(begin, columns, end, std::min(end + kTileDepth, w_.k));
      read_codes_for_isa()(w_,
                           {begin, columns, k, end, tile, depth, scaled_, x_.operand, x_.by_lane});
      transpose_second(tile, depth, padded(columns), depth, transposed_.get(), kColumns);
      product(padded(rows), padded(columns), depth, static_cast<const BFloat16*>(x_.at(row, k)),
              x_.ld, transposed_.get(), kColumns, sums_.data(), kColumns, k > 0);
    }
  }

  void add_pieces(int64_t row, int64_t rows, int64_t begin, int64_t columns) {
    const int64_t at_once = columns_for(rows), depth = kDepth / size_of(x_.operand),
                  pieces = std::max<int64_t>(at::divup(w_.k, depth), 1);
    // A few rows of x stay in the cache, so a row of codes is read from end to end.
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

  // Adds a piece of the depth, from k on, for `columns` columns.
  void add(int64_t row, int64_t rows, int64_t begin, int64_t columns, int64_t k, float* sums) {
    const int64_t piece = kDepth / size_of(x_.operand), end = std::min(k + piece, w_.k),
                  padded = std::min(piece, x_.ld - k);
    prefetch(begin + columns, columns, k, end);
    Dots dots{x_.at(row, k), codes_.data(), x_.ld,    padded, rows,
              padded,        sums,          kColumns, k > 0,  x_.operand};
    // In place, the last rows would be read past their end.
    if (decode_at_ == DecodeAt::in_place && begin + columns_for(rows) <= w_.n) {
      dots.w = w_.at(begin, k);
      dots.ld_w = w_.k;
    } else {
      read_codes_for_isa()(w_, {begin, columns, k, end, codes_.data(), padded, scaled_, x_.operand,
                                x_.by_lane});
    }
    dot_rows_for_isa()(dots);
  }

  // Prefetches the next codes: a row's piece is too short for the processor's own prefetching.
  void prefetch(int64_t begin, int64_t columns, int64_t k, int64_t end) const {
    for (int64_t row = begin; row < std::min(begin + columns, w_.n); ++row) {
      const auto *const from = w_.at(row, k), *const to = w_.at(row, end);
      for (const auto* line = from; line < to; line += 64) __builtin_prefetch(line, 0, 2);
    }
  }

  const Codes& w_;
  const Input& x_;
  DecodeAt decode_at_;
  FewRows few_;
  const Packed* packed_;  // for the matrix unit, else null
  Finish finish_;
  bool scaled_;
  std::vector<char> codes_;
  std::unique_ptr<BFloat16[]>
      transposed_;           // not filled: zeroing it would take as long as 64 rows do
  std::vector<float> sums_;  // int32 if the operands are integers
};

// Many rows in float32: codes are decoded into the panels of linear's product. Blocks are half as
// deep as linear's: a chain of 192 sums erred more than twice as much as MKL's product.
void multiply_in_blocks(const Codes& w, const Input& x, const Outputs& out) {
  using linear::kPanel;
  constexpr int64_t kDeep = 96, kDecoding = 4 * linear::kPacking;
  const auto pack = [&](int64_t first, int64_t deep, int64_t begin, int64_t end, float* packed) {
    const std::unique_ptr<float[]> rows(new float[kPanel * deep]);
    for (int64_t n = begin; n < end; n += kPanel) {
      const int64_t some = std::min(kPanel, end - n);
      read_codes_for_isa()(w, {n, some, first, first + deep, rows.get(), deep, !w.a_scale_a_row(),
                               Operand::float32});
      linear::pack_columns_for_isa()({rows.get(), 1, deep, Dtype::float32}, deep, 0, some,
                                     packed + n * deep);
    }
  };
  const Finish finish{w, x, out};
  const auto done = [&](const float* c, int64_t stride, int64_t row, int64_t last, int64_t column,
                        int64_t width) { finish(c, stride, row, last - row, column, width); };
  const linear::Matrix left{x.at(0, 0), x.ld, 1, Dtype::float32};
  linear::multiply_in_blocks({left, x.rows, w.n, w.k, kDeep, kPanel, kDecoding, pack, done},
                             nullptr);
}

// A product's operands, and its tasks: blocks of kMostRows rows and kColumns columns.
class Multiplication {
 public:
  // scale: of each row, if the rows are codes; else undefined.
  Multiplication(const Codes& w, const Tensor& rows, const Tensor& scale, InputFormat rounds,
                 Compute compute, Outputs out)
      : w_(w),
        plan_(w, rows.size(0), rounds, compute),
        x_(rows, scale, plan_, rounds),
        out_(std::move(out)) {
    if (plan_.decode_at == DecodeAt::registers && x_.by_lane && w.zeros != nullptr) {
      lanes_.resize(x_.rows * x_.ld / kCodesOfLane);
      sum_lanes_for_isa()(static_cast<const uint16_t*>(x_.at(0, 0)), x_.rows * x_.ld,
                          lanes_.data());
    }
    if (plan_.decode_at == DecodeAt::matrix_unit) packed_.emplace(x_);
  }
  Multiplication(const Multiplication&) = delete;

  // Whether linear's product runs it, with tasks of its own.
  bool in_blocks() const { return plan_.decode_at == DecodeAt::blocks; }
  void run_in_blocks() const { multiply_in_blocks(w_, x_, out_); }

  int64_t tasks() const { return at::divup(x_.rows, kMostRows) * across(); }
  // Approximate number of multiplications of a task.
  int64_t products() const { return std::min(x_.rows, kMostRows) * kColumns * (w_.k + 1); }

  void run(int64_t first, int64_t last) const {
    const FewRows few{x_.at(0, 0),   x_.operand == Operand::bfloat16,
                      x_.ld,         x_.rows,
                      lanes_.data(), nullptr,
                      kColumns};
    OutputBlock block(w_, x_, plan_.decode_at, few, packed_ ? &*packed_ : nullptr, out_);
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / across() * kMostRows, begin = i % across() * kColumns;
      block.run(row, std::min(kMostRows, x_.rows - row), begin, std::min(kColumns, w_.n - begin));
    }
  }

 private:
  int64_t across() const { return at::divup(w_.n, kColumns); }

  Codes w_;
  Plan plan_;
  Input x_;
  Outputs out_;
  std::vector<float> lanes_;
  std::optional<Packed> packed_;
};

// Runs the tasks of several products as one parallel loop, except products in blocks.
void run(const std::vector<std::unique_ptr<Multiplication>>& each) {
  std::vector<const Multiplication*> products;
  std::vector<int64_t> ends;  // of each product's tasks in the loop
  int64_t tasks = 0, work = 0;
  for (const auto& multiplication : each) {
    if (multiplication->in_blocks()) {
      multiplication->run_in_blocks();
      continue;
    }
    work += multiplication->tasks() * multiplication->products();
    products.push_back(multiplication.get());
    ends.push_back(tasks += multiplication->tasks());
  }
  if (tasks == 0) return;
  at::parallel_for(0, tasks, kProducts / (work / tasks + 1) + 1, [&](int64_t i, int64_t last) {
    const BrgemmScope scope;
    while (i < last) {
      const auto which = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
      const int64_t begin = which == 0 ? 0 : ends[which - 1], end = std::min(ends[which], last);
      products[which]->run(i - begin, end - begin);
      i = end;
    }
  });
}

QuantizedForward quantized_linear_forward(const QuantizedArguments& a) {
  if (!has_kernel(a.dtype())) return quantized_linear_forward_reference(a);
  const auto outputs = quantized_linear_outputs(a);
  const auto& [y, z] = outputs;
  if (y.numel() == 0) return outputs;
  const auto weight = a.weight();
  const auto w = codes_of(weight);
  std::vector<std::unique_ptr<Multiplication>> multiplications;
  multiplications.push_back(std::make_unique<Multiplication>(
      w, as_rows(a.x).contiguous(), a.x_is_codes() ? a.x_scale->contiguous() : Tensor(),
      a.input_format, a.compute,
      Outputs{as_rows(y), z.defined() ? as_rows(z) : z, a.activation,
              is_defined(a.bias) ? a.bias->contiguous() : Tensor()}));
  run(multiplications);
  return outputs;
}

}  // namespace

void multiply_each(const std::vector<Product>& products, Compute compute) {
  std::vector<std::unique_ptr<Multiplication>> each;
  for (const auto& product : products) {
    each.push_back(std::make_unique<Multiplication>(product.w, product.x, Tensor(),
                                                    InputFormat::none, compute,
                                                    Outputs{product.y, Tensor(), Activation::none,
                                                            product.bias}));
  }
  run(each);
}

std::string quantized_linear_plan(std::string_view format, int64_t n, int64_t k, int64_t group_size,
                                  int64_t rows, std::string_view input_format,
                                  std::string_view compute) {
  if (isa() == Isa::none) return "";
  constexpr const char* op = kQuantizedLinear;
  const Codes w{nullptr, nullptr, nullptr, from_name<WeightFormat>(op, format), n, k, group_size};
  const auto asked = from_name<Compute>(op, compute);
  const Plan plan(w, rows, from_name<InputFormat>(op, input_format), asked);
  const int64_t most =
      plan.widened ? Plan::float32_rows(w) : std::min(kFewRows, plan.unit_rows(w) - 1);
  const std::string operand = plan.operand == Operand::integer    ? "int8"
                              : plan.operand == Operand::bfloat16 ? "bfloat16"
                                                                  : "float32";
  switch (plan.decode_at) {
    case DecodeAt::registers:
      return "codes become " + operand + " in registers, of at most " + std::to_string(most) +
             " rows of input";
    case DecodeAt::in_place: return "int8 codes are multiplied in place";
    case DecodeAt::rows: return "codes become " + operand + " in a cache, a few rows at a time";
    case DecodeAt::matrix_unit: return "codes become " + operand + " in tiles of the matrix unit";
    case DecodeAt::blocks:
      return "codes become float32 in blocks, from " + std::to_string(Plan::kMany + 1) +
             " rows of input on";
    default:
      return "codes become " + operand + " in tiles that oneDNN multiplies, from " +
             std::to_string(Plan::kMany + 1) + " rows of input on";
  }
}

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("quantized_linear_forward", flat<quantized_linear_forward>);
}

}  // namespace fusedops::cpu::quantized_linear
