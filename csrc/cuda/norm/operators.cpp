// RMSNorm and LayerNorm on GPUs: calls the kernels of forward.cu and backward.cu with tensors.
// Nothing here waits for the device: the kernels read the dropout's seed.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/cuda/norm/launch.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/norm/operators.h"

namespace fusedops::cuda::norm {
namespace {

// Blocks and columns are counted in 32 bits.
bool has_kernel(int64_t rows, int64_t n, Arguments arguments) {
  constexpr int64_t most = int64_t{1} << 30;
  return rows <= most && n <= most && !any_float64(arguments);
}

Tensor contiguous(const OptionalTensor& t) { return is_defined(t) ? t->contiguous() : Tensor(); }

Dtype dtype_or(const Tensor& t, Dtype otherwise) { return t.defined() ? dtype_of(t) : otherwise; }

// A forward's tensors, weight and bias included.
struct ForwardTensors {
  ForwardTensors(const NormForwardArguments& a, const NormForward& outputs)
      : rows(a, outputs), weight(contiguous(a.weight)), bias(contiguous(a.bias)) {}

  NormForwardArgs arguments() const {
    NormForwardArgs args{};
    rows.describe(args);
    args.weight = data_or_null(weight);
    args.bias = data_or_null(bias);
    args.n = static_cast<int>(rows.n);
    args.per_n = 1.0 / static_cast<double>(rows.n);
    args.offset = static_cast<float>(rows.a.offset);
    args.weight_dtype = dtype_or(weight, args.x_dtype);
    args.bias_dtype = dtype_or(bias, args.x_dtype);
    return args;
  }

  NormForwardTensors rows;
  Tensor weight, bias;
};

NormForward norm_forward(const NormForwardArguments& a) {
  auto outputs = norm_outputs(a);
  if (a.x.numel() == 0) return outputs;
  const int64_t rows = std::get<2>(outputs).size(1);
  if (!has_kernel(rows, a.x.numel() / rows, {a.x, a.residual, a.weight, a.bias})) {
    return norm_forward_reference(a);
  }
  const OnDeviceOf device(a.x);
  const ForwardTensors tensors(a, outputs);
  auto args = tensors.arguments();
  const int64_t parts = norm_parts(args);
  const Tensor moments =
      parts == 1 ? Tensor() : at::empty({rows, parts, 2}, std::get<2>(outputs).options());
  args.moments = static_cast<double*>(mutable_data_or_null(moments));
  launch_norm_forward(args, device.stream());
  return outputs;
}

NormQuantized norm_quantized(const NormQuantizedArguments& q) {
  const auto& a = q.norm;
  auto outputs = norm_quantized_outputs(q);
  const auto& [codes, scale, h] = outputs;
  if (codes.numel() == 0) {
    scale.zero_();
    return outputs;
  }
  const int64_t rows = scale.numel();
  if (!has_kernel(rows, a.x.numel() / rows, {a.x, a.residual, a.weight})) {
    return norm_quantized_reference(q);
  }
  const OnDeviceOf device(a.x);
  const NormForward all{codes, h, norm_stats(a)};
  const ForwardTensors tensors(a, all);
  auto args = tensors.arguments();
  args.format = q.format;
  args.scale = scale.mutable_data_ptr<float>();
  launch_rms_norm_codes(args, device.stream());
  return outputs;
}

// Sums the blocks' parts of dweight and dbias.
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

NormBackward norm_backward(const NormBackwardArguments& a) {
  auto outputs = norm_backward_outputs(a);
  const auto& [dresidual, dx, dweight, dbias] = outputs;
  const bool wants_dweight = a.output_mask[2], wants_dbias = a.output_mask[3];
  if (a.h.numel() == 0) {
    if (wants_dweight) dweight.zero_();
    if (wants_dbias) dbias.zero_();
    return outputs;
  }
  const int64_t rows = a.stats.size(1);
  if (!has_kernel(rows, a.h.numel() / rows, {a.dy, a.dh, a.h, a.weight, a.bias})) {
    return norm_backward_reference(a);
  }
  const OnDeviceOf device(a.h);
  const NormBackwardTensors tensors(a, a.dy, outputs);
  const Tensor scale = contiguous(a.weight);
  NormBackwardArgs args;
  tensors.describe(args);
  args.weight = data_or_null(scale);
  args.n = static_cast<int>(tensors.n);
  args.per_n = 1.0 / static_cast<double>(tensors.n);
  args.offset = static_cast<float>(a.offset);
  args.weight_dtype = dtype_or(scale, args.h_dtype);
  args.wants_dweight = wants_dweight;
  args.wants_dbias = wants_dbias;
  const int64_t sums = wants_dweight + wants_dbias, chunks = norm_chunks(args);
  const Tensor partials =
      sums == 0 ? Tensor()
                : at::empty({chunks, sums, tensors.n}, a.stats.options().dtype(at::kFloat));
  args.partials = static_cast<float*>(mutable_data_or_null(partials));
  launch_norm_backward(args, device.stream());
  if (sums != 0) sum_partials(args, chunks, dweight, dbias, device);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("norm_forward", flat<norm_forward>);
  m.impl("norm_backward", flat<norm_backward>);
  m.impl("norm_quantized", flat<norm_quantized>);
}

}  // namespace fusedops::cuda::norm
