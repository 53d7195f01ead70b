// The rotary embedding on GPUs: calls the kernel of kernels.cu with tensors.

#include <torch/library.h>

#include "csrc/cuda/rotary/launch.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/rotary/operators.h"

namespace fusedops::cuda::rotary {
namespace {

RotaryPair rotary_forward(const RotaryForward& a) {
  if (any_float64({a.q, a.k, a.table.cos, a.table.sin})) return rotary_forward_reference(a);
  const auto outputs = rotary_outputs(a);
  const OnDeviceOf device(a.table.cos);
  const RotaryRows rows(a.q, a.k, a.table, outputs, false);
  launch_rotary(rows.arguments, device.stream());
  return outputs;
}

RotaryPair rotary_backward(const RotaryBackward& a) {
  if (any_float64({a.dq, a.dk, a.table.cos, a.table.sin})) return rotary_backward_reference(a);
  const auto outputs = rotary_backward_outputs(a);
  const OnDeviceOf device(a.table.cos);
  const RotaryRows rows(a.dq, a.dk, a.table, outputs, true);
  launch_rotary(rows.arguments, device.stream());
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("rotary_forward", flat<rotary_forward>);
  m.impl("rotary_backward", flat<rotary_backward>);
}

}  // namespace fusedops::cuda::rotary
