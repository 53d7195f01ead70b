// The CPU operators quantized_linear_backward (dx = dz w from codes) and dequantize_weight.
//
// A task is kWidth columns of dx for kRows rows. It decodes kTile rows of the weight at a time into
// the cache and multiplies them there: sums are over tiles, in an order that does not depend on the
// number of rows or threads. If a row of codes has one scale, dz is multiplied by it.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "csrc/cpu/activation.h"
#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/quantized_linear/dots.h"
#include "csrc/cpu/gemm.h"
#include "csrc/cpu/quantized_linear/products.h"

namespace fusedops::cpu::quantized_linear {
namespace {

constexpr int64_t kRows = 128, kWidth = 512, kTile = 64;

template <class T>
constexpr Operand kOperand = std::is_same_v<T, float> ? Operand::float32 : Operand::bfloat16;

// dz [rows, n] as a first operand, in rows of ld, padded with zeros on the right and below.
template <class T>
struct Gradient {
  int64_t ld;
  std::vector<T> numbers;

  Gradient(const Tensor& dz, const Codes& w)
      : ld(padded(w.n, kTile)), numbers(padded(dz.size(0)) * ld) {
    const auto* const data = static_cast<const char*>(dz.const_data_ptr());
    at::parallel_for(0, dz.size(0), kGrain / ld + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        read_input_for_isa()({data + i * w.n * dz.element_size(), w.n, ld, dtype_of(dz),
                              numbers.data() + i * ld, kOperand<T>,
                              w.a_scale_a_row() ? w.scales : nullptr});
      }
    });
  }
};

// Computes blocks of dx. The scratch belongs to one thread.
template <class T>
class Block {
 public:
  Block(const Codes& w, const Gradient<T>& dz, const Tensor& dx)
      : w_(w),
        dz_(dz),
        dx_(dx),
        width_(std::min(kWidth, padded(w.k))),
        tile_(kTile * width_),
        pairs_(std::is_same_v<T, float> ? 0 : tile_.size()),
        sums_(padded(std::min(dx.size(0), kRows)) * width_) {}

  void run(int64_t row, int64_t rows, int64_t begin, int64_t end) {
    const int64_t width = padded(end - begin);
    for (int64_t n = 0; n < w_.n; n += kTile) {
      const int64_t some = std::min(kTile, w_.n - n);
      read_codes_for_isa()(w_, {n, some, begin, end, tile_.data(), width, !w_.a_scale_a_row(),
                                kOperand<T>});
      product(padded(rows), width, padded(some), dz_.numbers.data() + row * dz_.ld + n, dz_.ld,
              second(some, width), width, sums_.data(), width_, n > 0);
    }
    for (int64_t i = 0; i < rows; ++i) {
      auto* const to = static_cast<char*>(dx_.mutable_data_ptr()) +
                       ((row + i) * w_.k + begin) * dx_.element_size();
      finish_sums_for_isa()({sums_.data() + i * width_, end - begin, 1, nullptr, 0, nullptr, to,
                             dtype_of(dx_), Operand::float32});
    }
  }

 private:
  // Returns the tile's first rows, zero-padded to a multiple of kEdge, as a second operand.
  const T* second(int64_t rows, int64_t width) {
    if constexpr (std::is_same_v<T, float>) {
      std::fill(tile_.begin() + rows * width, tile_.begin() + padded(rows) * width, 0.f);
      return tile_.data();
    } else {
      read_second({tile_.data(), width, kDtype<T>}, rows, width, padded(rows), pairs_.data());
      return pairs_.data();
    }
  }

  const Codes& w_;
  const Gradient<T>& dz_;
  const Tensor& dx_;
  int64_t width_;
  std::vector<T> tile_, pairs_;
  std::vector<float> sums_;
};

template <class T>
void multiply(const std::vector<Product>& products) {
  std::vector<Gradient<T>> gradients;
  std::vector<int64_t> ends;  // of each product's tasks in the loop
  int64_t tasks = 0;
  for (const auto& product : products) {
    gradients.emplace_back(product.x, product.w);
    ends.push_back(tasks += at::divup(product.x.size(0), kRows) * at::divup(product.w.k, kWidth));
  }
  at::parallel_for(0, tasks, 1, [&](int64_t i, int64_t last) {
    const BrgemmScope scope;
    while (i < last) {
      const auto which = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
      const auto& [w, dz, bias, dx] = products[which];
      const int64_t first = which == 0 ? 0 : ends[which - 1], end = std::min(ends[which], last),
                    rows = dz.size(0), across = at::divup(w.k, kWidth);
      Block<T> block(w, gradients[which], dx);
      for (; i < end; ++i) {
        const int64_t row = (i - first) / across * kRows, begin = (i - first) % across * kWidth;
        block.run(row, std::min(kRows, rows - row), begin, std::min(begin + kWidth, w.k));
      }
    }
  });
}

QuantizedBackward quantized_linear_backward(const QuantizedBackwardArguments& a) {
  const auto outputs = quantized_linear_backward_outputs(a);
  if (!has_kernel(a.dy.scalar_type()) || a.dy.numel() == 0) {
    return quantized_linear_backward_reference(a);
  }
  const auto& [dx, dbias] = outputs;
  const auto dz = linear::rows_of_dz(a.dy, a.z, a.activation).contiguous();
  if (dbias.defined()) dbias.copy_(dz.sum(0));
  if (!dx.defined() || dx.numel() == 0) return outputs;
  const auto weight = a.weight();
  multiply_across_each({{codes_of(weight), dz, Tensor(), as_rows(dx)}}, a.compute);
  return outputs;
}

// Dequantizes a row of the weight at a time.
Tensor dequantize_weight(const DequantizeArguments& a) {
  if (!has_kernel(a.dtype) || a.dtype == at::kHalf) return dequantize_weight_reference(a);
  const auto out = dequantize_weight_outputs(a);
  if (out.numel() == 0) return out;
  const auto weight = a.weight();
  const auto w = codes_of(weight);
  const auto operand = a.dtype == at::kFloat ? Operand::float32 : Operand::bfloat16;
  at::parallel_for(0, w.n, kGrain / w.k + 1, [&](int64_t begin, int64_t end) {
    auto* const to = static_cast<char*>(out.mutable_data_ptr()) + begin * w.k * out.element_size();
    read_codes_for_isa()(w, {begin, end - begin, 0, w.k, to, w.k, true, operand});
  });
  return out;
}

}  // namespace

void multiply_across_each(const std::vector<Product>& products, Compute compute) {
  const auto asked = compute == Compute::int8 ? Compute::any : compute;
  if (floating_operand(asked) == Operand::bfloat16 && multiplies_bfloat16(at::kBFloat16)) {
    multiply<BFloat16>(products);
  } else {
    multiply<float>(products);
  }
}

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("quantized_linear_backward", flat<quantized_linear_backward>);
  m.impl("dequantize_weight", flat<dequantize_weight>);
}

}  // namespace fusedops::cpu::quantized_linear
