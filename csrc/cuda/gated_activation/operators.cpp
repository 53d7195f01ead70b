// Gated activations on GPUs: from tensors to the kernels of kernels.cu.

#include <torch/library.h>

#include "csrc/cuda/gated_activation/launch.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::cuda {
namespace {

Tensor gated_activation_forward(const Tensor& gate, const OptionalTensor& up, std::string_view kind,
                                std::optional<double> limit, double alpha, double up_offset) {
  if (any_float64({gate, up})) {
    return gated_activation_composite(gate, up, kind, limit, alpha, up_offset);
  }
  const auto y = gated_activation_outputs(gate, up, kind, limit, alpha, up_offset);
  if (y.numel() == 0) return y;
  const OnDeviceOf device(gate);
  const GatedRows rows(gate, up);
  launch_gated_forward(rows.forward(y, gated_kind(kind, limit), limit, alpha, up_offset),
                       device.stream());
  return y;
}

GatedGradients gated_activation_backward(const Tensor& dy, const Tensor& gate,
                                         const OptionalTensor& up, std::string_view kind,
                                         std::optional<double> limit, double alpha,
                                         double up_offset, std::array<bool, 2> output_mask) {
  if (any_float64({dy, gate, up})) {
    return gated_activation_backward_composite(dy, gate, up, kind, limit, alpha, up_offset,
                                               output_mask);
  }
  const auto gradients =
      gated_activation_backward_outputs(dy, gate, up, kind, limit, alpha, up_offset, output_mask);
  if (dy.numel() == 0) return gradients;
  const OnDeviceOf device(gate);
  const GatedRows rows(gate, up);
  const Rows dy_rows(dy, rows.n);
  launch_gated_backward(rows.backward(dy_rows, gradients, gated_kind(kind, limit), limit, alpha,
                                      up_offset),
                        device.stream());
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("gated_activation_forward", gated_activation_forward);
  m.impl("gated_activation_backward", gated_activation_backward);
}

}  // namespace fusedops::cuda
