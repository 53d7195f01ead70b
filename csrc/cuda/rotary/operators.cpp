// The rotary embedding on GPUs: from tensors to the kernel of kernels.cu.

#include <torch/library.h>

#include "csrc/cuda/rotary/launch.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/rotary/operators.h"

namespace fusedops::cuda {
namespace {

RotaryPair rotary_forward(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                          int64_t unsqueeze_dim, bool interleaved) {
  if (any_float64({q, k, cos, sin})) {
    return rotary_composite(q, k, cos, sin, unsqueeze_dim, interleaved);
  }
  const auto outputs = rotary_outputs(q, k, cos, sin, unsqueeze_dim, interleaved);
  const OnDeviceOf device(cos);
  const RotaryRows rows(q, k, cos, sin, outputs, unsqueeze_dim, interleaved, false);
  launch_rotary(rows.arguments, device.stream());
  return outputs;
}

RotaryPair rotary_backward(const OptionalTensor& dq, const OptionalTensor& dk, const Tensor& cos,
                           const Tensor& sin, int64_t unsqueeze_dim, bool interleaved,
                           c10::ScalarType dtype) {
  if (any_float64({dq, dk, cos, sin})) {
    return rotary_backward_composite(dq, dk, cos, sin, unsqueeze_dim, interleaved, dtype);
  }
  const auto outputs = rotary_backward_outputs(dq, dk, cos, sin, unsqueeze_dim, interleaved, dtype);
  const OnDeviceOf device(cos);
  const RotaryRows rows(dq, dk, cos, sin, outputs, unsqueeze_dim, interleaved, true);
  launch_rotary(rows.arguments, device.stream());
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("rotary_forward", rotary_forward);
  m.impl("rotary_backward", rotary_backward);
}

}  // namespace fusedops::cuda
