// Chooses and runs the kernels of the experts' matrix products: their rows times their weights, and
// the weights' gradients.
//
// An expert with few rows is limited by the reading of its weight: the loops of csrc/cpu/isa/linear
// read it once, in place, and all such experts' columns are one parallel loop. An expert with many
// rows is a product in blocks, or torch's where linear's rule says that it is faster. bfloat16 runs
// on Intel's matrix unit, if the CPU has one and the sizes fit its tiles.

#include "csrc/cpu/experts/products.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "csrc/cpu/gemm.h"
#include "csrc/cpu/isa/experts/rows.h"
#include "csrc/cpu/isa/experts/tiles.h"
#include "csrc/cpu/isa/linear/few.h"
#include "csrc/cpu/linear/product.h"
#include "csrc/cpu/quantized_linear/weight.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::cpu::experts {
namespace {

using linear::Output;

constexpr int64_t kTaskProducts = 1 << 18;  // approximate number of multiplications per task

// t, or a copy if neither of its last two strides is 1.
Tensor strided(const Tensor& t) {
  return t.stride(-1) == 1 || t.stride(-2) == 1 ? t : t.contiguous();
}

// An expert's rows of out [rows, n], with its row of bias [E, n].
Output output_of(const Tensor& out, const Tensor& bias, const Share& share) {
  const int64_t n = out.size(1), size = out.element_size();
  const void* const expert_bias =
      bias.defined() ? static_cast<const char*>(bias.const_data_ptr()) + share.expert * n * size
                     : nullptr;
  return {static_cast<char*>(out.mutable_data_ptr()) + share.first * n * size, nullptr, expert_bias,
          n, dtype_of(out)};
}

// c = a b + bias by torch. c's numbers are bfloat16's if a's are.
void multiply_torch(const Tensor& a, const Tensor& b, const Tensor& bias, Tensor c) {
  if (c.scalar_type() != a.scalar_type()) {
    c.copy_(at::mm(a, b));
  } else if (bias.defined()) {
    at::addmm_out(c, bias, a, b);
  } else {
    at::mm_out(c, a, b);
  }
}

// float16 may overflow where the float32 number, times the routing weight, would not.
bool overflows(const Tensor& a, const Tensor& c) {
  return a.scalar_type() == at::kHalf && c.scalar_type() == at::kFloat;
}

// Few rows of all experts that have few: packed together, then one task for each expert's columns.
class FewRows {
 public:
  FewRows(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& out)
      : x_(x), w_(w), bias_(bias), out_(out), k_(x.size(1)), n_(w.size(1)) {}

  void add(const Share& share) {
    const int64_t wide = columns(share.count);
    for (int64_t begin = 0; begin < n_; begin += wide) {
      tasks_.push_back({static_cast<int64_t>(shares_.size()), begin, std::min(begin + wide, n_)});
    }
    products_ += share.count * n_ * k_;
    shares_.push_back(share);
    offsets_.push_back(bytes_);
    bytes_ += (linear::packed_bytes(share.count, k_) + 63) / 64 * 64;
  }

  void run() {
    if (shares_.empty()) return;
    const std::unique_ptr<char[]> packed(new char[bytes_]);
    pack(packed.get());
    const int64_t tasks = static_cast<int64_t>(tasks_.size());
    at::parallel_for(0, tasks, kTaskProducts / (products_ / tasks + 1) + 1,
                     [&](int64_t i, int64_t last) {
                       std::vector<float> sums;
                       for (; i < last; ++i) run(tasks_[i], packed.get(), sums);
                     });
  }

 private:
  struct Task {
    int64_t share, begin, end;
  };

  // Columns per task: whole blocks of 3 or 4 rows of w; more where the sums leave room.
  static int64_t columns(int64_t rows) {
    const int64_t least = isa() == Isa::avx2 ? 96 : 64;
    return rows > linear::kAtOnce ? least : 4 * least;
  }

  void pack(char* packed) const {
    const auto* const from = static_cast<const char*>(x_.const_data_ptr());
    const auto dtype = dtype_of(x_);
    at::parallel_for(0, shares_.size(), 16, [&](int64_t i, int64_t last) {
      for (; i < last; ++i) {
        const auto& share = shares_[i];
        linear::pack_few_rows_for_isa()(from + share.first * k_ * size_of(dtype), share.count, k_,
                                        dtype, packed + offsets_[i]);
      }
    });
  }

  void run(const Task& task, const char* packed, std::vector<float>& sums) const {
    const auto& share = shares_[task.share];
    const auto weight = w_.select(0, share.expert);
    const int64_t width = task.end - task.begin;
    const Output out = output_of(out_, bias_, share);
    const bool direct = out.dtype == Dtype::float32 && out.bias == nullptr;
    if (!direct) sums.resize(std::max<size_t>(sums.size(), share.count * width));
    float* const to = direct ? static_cast<float*>(out.y) + task.begin : sums.data();
    const linear::FewRows args{packed + offsets_[task.share],
                               weight.const_data_ptr(),
                               share.count,
                               k_,
                               weight.stride(0),
                               dtype_of(x_),
                               to,
                               direct ? n_ : width};
    linear::multiply_few_rows_for_isa()(args, task.begin, task.end);
    if (!direct) out.write(to, width, 0, share.count, task.begin, width);
  }

  const Tensor &x_, &w_, &bias_, &out_;
  int64_t k_, n_, bytes_ = 0, products_ = 0;
  std::vector<Share> shares_;
  std::vector<int64_t> offsets_;
  std::vector<Task> tasks_;
};

// Few rows in 16 bits, of weights whose rows are along the columns of the product.
class FewAcrossRows {
 public:
  FewAcrossRows(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& out)
      : x_(x), w_(w), bias_(bias), out_(out), n_(w.size(1)) {}

  static bool fits(const Share& share, const Tensor& x, const Tensor& w) {
    return x.scalar_type() != at::kFloat && w.stride(2) != 1 && share.count <= kFewAcross;
  }

  void add(const Share& share) { shares_.push_back(share); }

  void run() const {
    // As wide as the threads allow: then memory is read from end to end.
    const int64_t threads = at::get_num_threads(), shares = static_cast<int64_t>(shares_.size());
    const int64_t wide = std::max<int64_t>(512, padded(at::divup(n_, threads), 64));
    const int64_t across = at::divup(n_, wide);
    at::parallel_for(0, shares * across, 1, [&](int64_t i, int64_t last) {
      std::vector<float> sums(kFewAcross * wide);
      for (; i < last; ++i) {
        const auto& share = shares_[i / across];
        const int64_t begin = i % across * wide, end = std::min(begin + wide, n_);
        const auto weight = w_.select(0, share.expert);
        const auto* const x = static_cast<const char*>(x_.const_data_ptr()) +
                              share.first * x_.size(1) * x_.element_size();
        multiply_few_across_for_isa()({x, weight.const_data_ptr(), share.count, x_.size(1),
                                       x_.size(1), weight.stride(1), dtype_of(x_), sums.data(),
                                       wide},
                                      begin, end);
        output_of(out_, bias_, share).write(sums.data(), wide, 0, share.count, begin, end - begin);
      }
    });
  }

 private:
  const Tensor &x_, &w_, &bias_, &out_;
  int64_t n_;
  std::vector<Share> shares_;
};

// bfloat16 rows of all experts on the matrix unit: packed together, then one task for each expert's
// blocks of rows and columns.
class Tiles {
 public:
  static constexpr int64_t kRows = 256, kColumns = kAcross;

  Tiles(const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& out)
      : x_(x),
        w_(w),
        bias_(bias),
        out_(out),
        k_(x.size(1)),
        n_(w.size(1)),
        along_(w.stride(2) == 1) {}

  // w: its last two strides are 1 and any, in any order.
  static bool fits(const Tensor& x, const Tensor& w) {
    return x.scalar_type() == at::kBFloat16 && quantized_linear::has_matrix_unit() &&
           x.size(1) % kTileDepth == 0 && w.size(1) % kTile == 0;
  }

  void add(const Share& share) {
    for (int64_t row = 0; row < share.count; row += kRows) {
      const int64_t rows = std::min(kRows, share.count - row);
      for (int64_t begin = 0; begin < n_; begin += kColumns) {
        tasks_.push_back({{share.expert, share.first + row, rows}, packed_rows_, begin});
      }
      blocks_.push_back({{share.expert, share.first + row, rows}, packed_rows_, 0});
      packed_rows_ += padded(rows, kTile);
    }
  }

  void run() {
    if (tasks_.empty()) return;
    const std::unique_ptr<uint16_t[]> packed(new uint16_t[packed_rows_ * k_]);
    pack(packed.get());
    const int64_t tasks = static_cast<int64_t>(tasks_.size());
    at::parallel_for(0, tasks, kTaskProducts / (packed_rows_ * n_ * k_ / tasks + 1) + 1,
                     [&](int64_t i, int64_t last) {
                       std::vector<float> sums;
                       for (; i < last; ++i) run(tasks_[i], packed.get(), sums);
                     });
  }

 private:
  struct Task {
    Share rows;
    int64_t packed, column;  // packed: the number of its first row among the packed ones
  };

  void pack(uint16_t* packed) const {
    const auto* const from = static_cast<const uint16_t*>(x_.const_data_ptr());
    at::parallel_for(0, blocks_.size(), 1, [&](int64_t i, int64_t last) {
      std::vector<uint16_t> tile(along_ ? kTile * k_ : 0);
      for (; i < last; ++i) {
        const auto& [rows, first, column] = blocks_[i];
        for (int64_t row = 0; row < rows.count; row += kTile) {
          auto* const to = packed + (first + row) * k_;
          auto* const straight = along_ ? tile.data() : to;
          const int64_t some = std::min(kTile, rows.count - row);
          std::copy_n(from + (rows.first + row) * k_, some * k_, straight);
          std::fill(straight + some * k_, straight + kTile * k_, 0);
          if (along_) {
            transpose_for_isa()(reinterpret_cast<const float*>(straight), k_ / 2, kTile, k_ / 2,
                                reinterpret_cast<float*>(to), kTile);
          }
        }
      }
    });
  }

  void run(const Task& task, const uint16_t* packed, std::vector<float>& sums) const {
    const auto& [rows, first, begin] = task;
    const auto weight = w_.select(0, rows.expert);
    const int64_t end = std::min(begin + kColumns, n_);
    sums.resize(std::max<size_t>(sums.size(), padded(rows.count, 2 * kTile) * kColumns));
    const auto* const x = packed + first * k_;
    const auto* const w = static_cast<const uint16_t*>(weight.const_data_ptr());
    if (along_) {
      multiply_tile_rows_for_isa()({x, w, rows.count, k_, weight.stride(0), sums.data(), kColumns},
                                   begin, end);
    } else {
      multiply_tile_columns_for_isa()({x, w, rows.count, k_, k_, weight.stride(1), sums.data(),
                                       kColumns},
                                      begin, end);
    }
    output_of(out_, bias_, rows).write(sums.data(), kColumns, 0, rows.count, begin, end - begin);
  }

  const Tensor &x_, &w_, &bias_, &out_;
  int64_t k_, n_, packed_rows_ = 0;
  bool along_;
  std::vector<Task> tasks_, blocks_;
};

}  // namespace

void grouped_product(const Routing& routing, const Tensor& x, const Tensor& w, const Tensor& bias,
                     const Tensor& out) {
  const auto weights = strided(w);
  const int64_t n = w.size(1), depth = w.size(2);
  const bool across = weights.stride(2) != 1;
  FewRows few(x, weights, bias, out);
  FewAcrossRows few_across(x, weights, bias, out);
  Tiles tiles(x, weights, bias, out);
  const bool fits = Tiles::fits(x, weights);
  for (const auto& share : routing.shares) {
    if (FewAcrossRows::fits(share, x, weights)) {
      few_across.add(share);
      continue;
    }
    if (fits) {
      tiles.add(share);
      continue;
    }
    if (linear::few_rows_pay(x.scalar_type(), share.count, n, depth, across)) {
      few.add(share);
      continue;
    }
    const auto a = x.narrow(0, share.first, share.count), b = weights.select(0, share.expert).t();
    const auto c = out.narrow(0, share.first, share.count);
    if (linear::own_product_pays(a, b) || overflows(a, c)) {
      linear::multiply(a, b, output_of(out, bias, share));
    } else {
      multiply_torch(a, b, bias.defined() ? bias.select(0, share.expert) : Tensor(), c);
    }
  }
  few.run();
  few_across.run();
  tiles.run();
}

void grouped_outer(const Routing& routing, const Tensor& a, const Tensor& b, const Tensor& out) {
  std::vector<bool> hit(routing.experts, false);
  for (const auto& share : routing.shares) {
    hit[share.expert] = true;
    auto c = out.select(0, share.expert);
    auto left = a.narrow(0, share.first, share.count).t();
    auto right = b.narrow(0, share.first, share.count);
    if (!c.is_contiguous()) {  // the transposed weight: (b^T a)^T
      c = c.t();
      std::swap(left, right);
      left = left.t();
      right = right.t();
    }
    linear::product(left, right, c);
  }
  for (int64_t expert = 0; expert < routing.experts; ++expert) {
    if (!hit[expert]) out.select(0, expert).zero_();
  }
}

}  // namespace fusedops::cpu::experts
