// scaled_copy on CPUs: the elements, as one flat array, are split among threads.
//
// Memory traffic is the minimum: x is read once and y is written once. An x that is not contiguous
// is copied first.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/scaled_copy.h"
#include "csrc/ops/scaled_copy/operators.h"

namespace fusedops::cpu::scaled_copy {
namespace {

Tensor scaled_copy_forward(const Tensor& x, double scale) {
  using namespace fusedops::scaled_copy;
  if (isa() == Isa::none || x.scalar_type() == at::kDouble) return scaled_copy_composite(x, scale);
  const auto from = x.contiguous(), y = scaled_copy_outputs(x, scale);
  const auto dtype = dtype_of(y);
  const auto* const in = static_cast<const char*>(from.const_data_ptr());
  auto* const out = static_cast<char*>(y.mutable_data_ptr());
  at::parallel_for(0, y.numel(), kGrain, [&](int64_t begin, int64_t end) {
    const auto offset = begin * size_of(dtype);
    scale_elements_for_isa()(dtype, in + offset, out + offset, static_cast<float>(scale),
                             end - begin);
  });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { m.impl("scaled_copy_forward", scaled_copy_forward); }

}  // namespace fusedops::cpu::scaled_copy
