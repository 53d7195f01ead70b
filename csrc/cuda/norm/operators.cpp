// The norm family on GPUs: from tensors to the kernels of forward.cu and backward.cu. Nothing here
// waits for the device: the dropout's seed is read by the kernels.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/cuda/norm/norm.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/norm/norm.h"

namespace fusedops::cuda {
namespace {

// Blocks and columns are counted in 32 bits.
bool has_kernel(int64_t rows, int64_t n, std::initializer_list<OptionalTensor> tensors) {
  constexpr int64_t most = int64_t{1} << 30;
  return rows <= most && n <= most && !any_float64(tensors);
}

Dropout dropout_of(double p, const OptionalTensor& seed) {
  if (p == 0) return {};
  const auto threshold = std::min(p * 4294967296.0, 4294967295.0);
  return {seed->const_data_ptr<int64_t>(), static_cast<uint32_t>(threshold),
          p == 1 ? 0.f : static_cast<float>(1 / (1 - p))};
}

Tensor contiguous(const OptionalTensor& t) { return given(t) ? t->contiguous() : Tensor(); }

const void* data_or_null(const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

void* mutable_data_or_null(const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; }

Dtype dtype_or(const Tensor& t, Dtype otherwise) { return t.defined() ? dtype_of(t) : otherwise; }

NormForward norm_forward(const Tensor& x, const OptionalTensor& residual,
                         const OptionalTensor& weight, const OptionalTensor& bias, int64_t dims,
                         double eps, std::string_view kind, double offset, double dropout_p,
                         const OptionalTensor& seed) {
  auto outputs = norm_outputs(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
  const auto& [y, h, stats] = outputs;
  if (x.numel() == 0) return outputs;
  const int64_t rows = stats.size(1), n = x.numel() / rows;
  if (!has_kernel(rows, n, {x, residual, weight, bias})) {
    return norm_forward_composite(x, residual, weight, bias, dims, eps, kind, offset, dropout_p,
                                  seed);
  }
  const OnDeviceOf device(x);
  const bool add = given(residual);
  const Rows x_rows(x, n), residual_rows(add ? residual->to(h.scalar_type()) : x, n);
  const Tensor scale = contiguous(weight), shift = contiguous(bias);

  NormForwardArgs args;
  args.x = x_rows.data();
  args.x_stride = x_rows.stride;
  args.residual = add ? residual_rows.data() : nullptr;
  args.residual_stride = residual_rows.stride;
  args.weight = data_or_null(scale);
  args.bias = data_or_null(shift);
  args.y = y.mutable_data_ptr();
  args.h = mutable_data_or_null(h);
  args.mean = stats.size(0) == 2 ? stats.mutable_data_ptr<double>() : nullptr;
  args.rstd = stats.mutable_data_ptr<double>() + (stats.size(0) - 1) * rows;
  args.rows = rows;
  args.n = static_cast<int>(n);
  args.per_n = 1.0 / static_cast<double>(n);
  args.eps = eps;
  args.offset = static_cast<float>(offset);
  args.x_dtype = dtype_of(x);
  args.h_dtype = dtype_of(add ? h : x);
  args.weight_dtype = dtype_or(scale, args.x_dtype);
  args.bias_dtype = dtype_or(shift, args.x_dtype);
  args.y_dtype = dtype_of(y);
  args.base_dtype =
      norm_base_dtype(x, h.scalar_type(), weight) == x.scalar_type() ? args.x_dtype : args.h_dtype;
  args.round_first = kind == "rms_llama";
  args.dropout = dropout_of(dropout_p, seed);
  launch_norm_forward(args, device.stream());
  return outputs;
}

// Sums what the blocks left of dweight and dbias.
void sum_partials(const NormBackwardArgs& args, int64_t chunks, const Tensor& dweight,
                  const Tensor& dbias, const OnDeviceOf& device) {
  NormTotals totals{};
  for (const Tensor& t : {dweight, dbias}) {
    if (!t.defined()) continue;
    totals.out[totals.count] = t.mutable_data_ptr();
    totals.dtype[totals.count++] = dtype_of(t);
  }
  launch_norm_sums(args.partials, chunks, args.n, totals, device.stream());
}

NormBackward norm_backward(const Tensor& dy, const OptionalTensor& dh, const Tensor& h,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           const Tensor& stats, int64_t dims, std::string_view kind, double offset,
                           double dropout_p, const OptionalTensor& seed,
                           std::array<bool, 4> output_mask) {
  auto outputs = norm_backward_outputs(dy, dh, h, weight, bias, stats, dims, kind, offset,
                                       dropout_p, seed, output_mask);
  const auto& [dresidual, dx, dweight, dbias] = outputs;
  if (h.numel() == 0) {
    if (output_mask[2]) dweight.zero_();
    if (output_mask[3]) dbias.zero_();
    return outputs;
  }
  const int64_t rows = stats.size(1), n = h.numel() / rows;
  if (!has_kernel(rows, n, {dy, dh, h, weight, bias})) {
    return norm_backward_composite(dy, dh, h, weight, bias, stats, dims, kind, offset, dropout_p,
                                   seed, output_mask);
  }
  const OnDeviceOf device(h);
  const Rows dy_rows(dy, n), h_rows(h, n);
  const Rows dh_rows(given(dh) ? dh->to(h.scalar_type()) : h, n);
  const Tensor scale = contiguous(weight);

  NormBackwardArgs args;
  args.dy = dy_rows.data();
  args.dy_stride = dy_rows.stride;
  args.dh = given(dh) ? dh_rows.data() : nullptr;
  args.dh_stride = dh_rows.stride;
  args.h = h_rows.data();
  args.h_stride = h_rows.stride;
  args.weight = data_or_null(scale);
  args.mean = stats.size(0) == 2 ? stats.const_data_ptr<double>() : nullptr;
  args.rstd = stats.const_data_ptr<double>() + (stats.size(0) - 1) * rows;
  args.dresidual = mutable_data_or_null(dresidual);
  args.dx = mutable_data_or_null(dx);
  args.rows = rows;
  args.n = static_cast<int>(n);
  args.per_n = 1.0 / static_cast<double>(n);
  args.offset = static_cast<float>(offset);
  args.dy_dtype = dtype_of(dy);
  args.h_dtype = dtype_of(h);
  args.weight_dtype = dtype_or(scale, args.h_dtype);
  args.dropout = dropout_of(dropout_p, seed);
  args.wants_dweight = output_mask[2];
  args.wants_dbias = output_mask[3];
  const int64_t sums = output_mask[2] + output_mask[3], chunks = norm_chunks(args);
  const Tensor partials =
      sums == 0 ? Tensor() : at::empty({chunks, sums, n}, stats.options().dtype(at::kFloat));
  args.partials = static_cast<float*>(mutable_data_or_null(partials));
  launch_norm_backward(args, device.stream());
  if (sums != 0) sum_partials(args, chunks, dweight, dbias, device);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("norm_forward", norm_forward);
  m.impl("norm_backward", norm_backward);
}

}  // namespace fusedops::cuda
