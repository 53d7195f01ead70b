// Gated activations on GPUs: calls the kernels of kernels.cu with tensors.

#include <torch/library.h>

#include "csrc/cuda/gated_activation/launch.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::cuda::gated_activation {
namespace {

Tensor gated_activation_forward(const GatedArguments& a) {
  if (any_float64({a.gate, a.up})) return gated_activation_reference(a);
  const auto y = gated_activation_outputs(a);
  if (y.numel() == 0) return y;
  const OnDeviceOf device(a.gate);
  const GatedRows rows(a);
  launch_gated_forward(rows.forward(y), device.stream());
  return y;
}

QuantizedRows gated_activation_quantized(const GatedQuantizedArguments& q) {
  const auto& a = q.forward;
  const auto outputs = gated_activation_quantized_outputs(q);
  const auto& [codes, scale] = outputs;
  const bool counted = scale.numel() <= int64_t{1} << 30;  // a row is a block
  if (any_float64({a.gate, a.up}) || a.options.kind != GatedKind::swiglu || !counted) {
    return gated_activation_quantized_reference(q);
  }
  if (codes.numel() == 0) {
    scale.zero_();
    return outputs;
  }
  const OnDeviceOf device(a.gate);
  const GatedRows rows(a);
  auto args = rows.by_row();
  args.y = codes.mutable_data_ptr();
  launch_swiglu_codes(args, q.format, scale.mutable_data_ptr<float>(), device.stream());
  return outputs;
}

GatedGradients gated_activation_backward(const GatedBackwardArguments& a) {
  if (any_float64({a.dy, a.forward.gate, a.forward.up})) {
    return gated_activation_backward_reference(a);
  }
  const auto gradients = gated_activation_backward_outputs(a);
  if (a.dy.numel() == 0) return gradients;
  const OnDeviceOf device(a.forward.gate);
  const GatedRows rows(a.forward);
  const Rows dy_rows(a.dy, rows.n);
  launch_gated_backward(rows.backward(dy_rows, gradients), device.stream());
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("gated_activation_forward", flat<gated_activation_forward>);
  m.impl("gated_activation_backward", flat<gated_activation_backward>);
  m.impl("gated_activation_quantized", flat<gated_activation_quantized>);
}

}  // namespace fusedops::cuda::gated_activation
