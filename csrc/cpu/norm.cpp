// RMSNorm and LayerNorm on CPUs: spreads the row loops of csrc/cpu/isa/norm over threads.
//
// Memory traffic is the minimum: forward reads x and residual and writes h and y; backward reads
// dy, dh and h and writes the gradient. A row that was just read or written is still in cache when
// it is read again. dweight and dbias are summed without atomics in two stages: within chunks of
// rows, then over the chunks. Chunks depend only on the shape, so the thread count changes no bit.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "csrc/cpu/isa/norm/norm.h"
#include "csrc/cpu/row_codes.h"
#include "csrc/ops/norm/operators.h"

namespace fusedops::cpu::norm {
namespace {

// The weight as float32, offset included; copied only if needed.
class Scale {
 public:
  Scale(const OptionalTensor& weight, double offset, int64_t n) {
    if (!is_defined(weight)) return;
    held_ = weight->contiguous();
    if (held_.scalar_type() == at::kFloat && offset == 0) {
      data_ = held_.const_data_ptr<float>();
      return;
    }
    converted_ = std::make_unique<float[]>(n);
    norm_scale_for_isa()(held_.const_data_ptr(), dtype_of(held_), n, static_cast<float>(offset),
                         converted_.get());
    data_ = converted_.get();
  }
  const float* data() const { return data_; }

 private:
  Tensor held_;
  std::unique_ptr<float[]> converted_;
  const float* data_ = nullptr;
};

bool has_kernel(Arguments arguments) { return isa() != Isa::none && !any_float64(arguments); }

// Rows per task: about 32k elements.
int64_t grain(int64_t n) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(n, 1)); }

NormForward norm_forward(const NormForwardArguments& a) {
  if (!has_kernel({a.x, a.residual, a.weight, a.bias})) return norm_forward_reference(a);
  auto outputs = norm_outputs(a);
  if (a.x.numel() == 0) return outputs;
  const NormForwardTensors tensors(a, outputs);
  const int64_t n = tensors.n;
  const Scale scale(a.weight, a.offset, n), shift(a.bias, 0, n);
  NormForwardArgs args;
  tensors.describe(args);
  args.weight = scale.data();
  args.bias = shift.data();
  args.n = n;
  auto* const run = norm_forward_rows_for_isa();
  at::parallel_for(0, args.rows, grain(n),
                   [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return outputs;
}

// A row of y exists only as float32 in a thread's cache, between the norm and its codes.
NormQuantized norm_quantized(const NormQuantizedArguments& q) {
  const auto& a = q.norm;
  if (!has_kernel({a.x, a.residual, a.weight})) return norm_quantized_reference(q);
  const auto outputs = norm_quantized_outputs(q);
  const auto& [codes, scale, h] = outputs;
  if (codes.numel() == 0) {
    scale.zero_();
    return outputs;
  }
  const NormForward all{codes, h, norm_stats(a)};
  const NormForwardTensors tensors(a, all);
  const int64_t n = tensors.n;
  const Scale weight(a.weight, a.offset, n);
  NormForwardArgs args;
  tensors.describe(args);
  args.weight = weight.data();
  args.bias = nullptr;
  args.n = n;
  args.y_dtype = Dtype::float32;
  auto* const run = norm_forward_rows_for_isa();
  const QuantizedRowsTo to(codes, scale, q.format);
  at::parallel_for(0, args.rows, grain(n), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> y(new float[n]);
    const auto address = reinterpret_cast<uintptr_t>(y.get());
    auto thread_args = args;
    for (int64_t row = begin; row < end; ++row) {
      // The kernel stores a row at y + row * n. A stride of its own would slow it by a tenth.
      thread_args.y = reinterpret_cast<void*>(address - row * n * sizeof(float));
      run(thread_args, row, row + 1);
      to.store(row, y.get());
    }
  });
  return outputs;
}

// Returns the number of row chunks for summing dweight and dbias: enough for a large machine's
// threads, few enough that the partial sums are small compared with the input.
int64_t chunk_count(int64_t rows, int64_t n) {
  return std::clamp<int64_t>(std::min(rows / 64, rows * n / 16384), 1, 128);
}

NormBackward norm_backward(const NormBackwardArguments& a) {
  const auto &dy = a.dy, &h = a.h;
  if (!has_kernel({dy, a.dh, h, a.weight, a.bias})) return norm_backward_reference(a);
  auto outputs = norm_backward_outputs(a);
  const auto& [dresidual, dx, dweight, dbias] = outputs;
  const bool wants_dweight = a.output_mask[2], wants_dbias = a.output_mask[3];
  if (h.numel() == 0) {
    if (wants_dweight) dweight.zero_();
    if (wants_dbias) dbias.zero_();
    return outputs;
  }
  const bool dy_fits = dy.scalar_type() == h.scalar_type() || dy.scalar_type() == at::kFloat ||
                       h.scalar_type() == at::kFloat;
  const NormBackwardTensors tensors(a, dy_fits ? dy : dy.to(at::kFloat), outputs);
  const int64_t rows = tensors.rows, n = tensors.n;
  const Scale scale(a.weight, a.offset, n);
  NormBackwardArgs args;
  tensors.describe(args);
  args.weight = scale.data();
  args.n = n;
  auto* const run = norm_backward_rows_for_isa();

  if (!wants_dweight && !wants_dbias) {
    at::parallel_for(0, rows, grain(n), [&](int64_t begin, int64_t end) {
      run(args, begin, end, nullptr, nullptr, nullptr);
    });
    return outputs;
  }
  // [chunks, dweight and dbias, n]
  const int64_t chunks = chunk_count(rows, n), width = (wants_dweight + wants_dbias) * n;
  std::vector<double> partials(chunks * width);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(2 * n);
    for (int64_t c = begin; c < end; ++c) {
      double* const chunk = partials.data() + c * width;
      run(args, c * rows / chunks, (c + 1) * rows / chunks, scratch.data(),
          wants_dweight ? chunk : nullptr, wants_dbias ? chunk + width - n : nullptr);
    }
  });
  auto* const sum = norm_sum_chunks_for_isa();
  at::parallel_for(0, n, 4096, [&](int64_t begin, int64_t end) {
    const auto total = [&](const double* first, const Tensor& out) {
      sum(first, chunks, width, begin, end, out.mutable_data_ptr(), dtype_of(out));
    };
    if (wants_dweight) total(partials.data(), dweight);
    if (wants_dbias) total(partials.data() + width - n, dbias);
  });
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("norm_forward", flat<norm_forward>);
  m.impl("norm_backward", flat<norm_backward>);
  m.impl("norm_quantized", flat<norm_quantized>);
}

}  // namespace fusedops::cpu::norm
