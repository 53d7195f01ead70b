// scaled_add on CPUs: the elements as one row, split over threads.
//
// Memory traffic is the minimum: forward reads x and residual and writes y, backward reads dy and
// writes dresidual. Tensors that are not contiguous are copied first.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/scaled_add.h"
#include "csrc/ops/scaled_add/operators.h"

namespace fusedops::cpu::scaled_add {

using namespace fusedops::scaled_add;

namespace {

bool has_kernel(const Tensor& t) { return isa() != Isa::none && t.scalar_type() != at::kDouble; }

// x: undefined in the backward.
void spread(const Tensor& x, const Tensor& residual, const Tensor& y, double scale) {
  const auto dtype = dtype_of(y);
  const auto bytes = [&](const Tensor& t, int64_t i) {
    return t.defined() ? static_cast<const char*>(t.const_data_ptr()) + i * size_of(dtype)
                       : nullptr;
  };
  auto* const out = static_cast<char*>(y.mutable_data_ptr());
  at::parallel_for(0, y.numel(), kGrain, [&](int64_t begin, int64_t end) {
    scaled_add_elements_for_isa()(dtype, bytes(x, begin), bytes(residual, begin),
                                  out + begin * size_of(dtype), static_cast<float>(scale),
                                  end - begin);
  });
}

Tensor scaled_add_forward(const ScaledAddForward& a) {
  if (!has_kernel(a.x)) return scaled_add_composite(a);
  const auto y = scaled_add_outputs(a);
  spread(a.x.contiguous(), a.residual.contiguous(), y, a.scale);
  return y;
}

Tensor scaled_add_backward(const ScaledAddBackward& a) {
  if (!has_kernel(a.dy)) return scaled_add_backward_composite(a);
  const auto dresidual = scaled_add_backward_outputs(a);
  spread(Tensor(), a.dy.contiguous(), dresidual, a.scale);
  return dresidual;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("scaled_add_forward", flat<scaled_add_forward>);
  m.impl("scaled_add_backward", flat<scaled_add_backward>);
}

}  // namespace fusedops::cpu::scaled_add
