// The norm family on GPUs: from tensors to the kernels of forward.cu and backward.cu. Nothing here
// waits for the device: the dropout's seed is read by the kernels.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/cuda/norm/launch.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/norm/operators.h"

namespace fusedops::cuda {
namespace {

// Blocks and columns are counted in 32 bits.
bool has_kernel(int64_t rows, int64_t n, std::initializer_list<OptionalTensor> tensors) {
  constexpr int64_t most = int64_t{1} << 30;
  return rows <= most && n <= most && !any_float64(tensors);
}

Tensor contiguous(const OptionalTensor& t) { return given(t) ? t->contiguous() : Tensor(); }

Dtype dtype_or(const Tensor& t, Dtype otherwise) { return t.defined() ? dtype_of(t) : otherwise; }

NormForward norm_forward(const Tensor& x, const OptionalTensor& residual,
                         const OptionalTensor& weight, const OptionalTensor& bias, int64_t dims,
                         double eps, std::string_view kind, double offset, double dropout_p,
                         const OptionalTensor& seed) {
  auto outputs = norm_outputs(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
  if (x.numel() == 0) return outputs;
  const int64_t rows = std::get<2>(outputs).size(1);
  if (!has_kernel(rows, x.numel() / rows, {x, residual, weight, bias})) {
    return norm_forward_composite(x, residual, weight, bias, dims, eps, kind, offset, dropout_p,
                                  seed);
  }
  const OnDeviceOf device(x);
  const NormForwardTensors tensors(x, residual, outputs);
  const Tensor scale = contiguous(weight), shift = contiguous(bias);
  NormForwardArgs args;
  tensors.describe(args, weight, eps, kind, dropout_p, seed);
  args.weight = data_or_null(scale);
  args.bias = data_or_null(shift);
  args.n = static_cast<int>(tensors.n);
  args.per_n = 1.0 / static_cast<double>(tensors.n);
  args.offset = static_cast<float>(offset);
  args.weight_dtype = dtype_or(scale, args.x_dtype);
  args.bias_dtype = dtype_or(shift, args.x_dtype);
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
  if (!has_kernel(stats.size(1), h.numel() / stats.size(1), {dy, dh, h, weight, bias})) {
    return norm_backward_composite(dy, dh, h, weight, bias, stats, dims, kind, offset, dropout_p,
                                   seed, output_mask);
  }
  const OnDeviceOf device(h);
  const NormBackwardTensors tensors(dy, dh, h, stats, outputs);
  const Tensor scale = contiguous(weight);
  NormBackwardArgs args;
  tensors.describe(args, dropout_p, seed);
  args.weight = data_or_null(scale);
  args.n = static_cast<int>(tensors.n);
  args.per_n = 1.0 / static_cast<double>(tensors.n);
  args.offset = static_cast<float>(offset);
  args.weight_dtype = dtype_or(scale, args.h_dtype);
  args.wants_dweight = output_mask[2];
  args.wants_dbias = output_mask[3];
  const int64_t sums = output_mask[2] + output_mask[3], chunks = norm_chunks(args);
  const Tensor partials =
      sums == 0 ? Tensor()
                : at::empty({chunks, sums, tensors.n}, stats.options().dtype(at::kFloat));
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
