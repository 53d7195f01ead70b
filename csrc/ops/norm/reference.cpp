// LayerNorm and RMSNorm by their definition, fusedops/references/norm.py, and dropout's mask.

#include "csrc/ops/reference.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <vector>

#include "csrc/ops/norm/operators.h"

namespace fusedops::norm {
namespace {

// x with dropout by its mask. A gradient needs it for an x that is not saved.
Tensor dropped(const Tensor& x, double p, const OptionalTensor& seed, int64_t dims) {
  if (p == 0 || !x.defined()) return x;
  c10::SymInt rows = 1, n = 1;
  for (int64_t i = 0; i < x.dim(); ++i) (i < x.dim() - dims ? rows : n) *= x.sym_size(i);
  const auto keep =
      dispatch<"fusedops::dropout_mask", Tensor(const Tensor&, c10::SymInt, c10::SymInt, double)>(
          *seed, rows, n, p);
  return x * keep.view_symint(x.sym_sizes()) * dropout_scale(p);
}

Tensor dropout_mask_outputs(const Tensor& seed, c10::SymInt rows, c10::SymInt n, double p) {
  return at::empty_symint({std::move(rows), std::move(n)}, seed.options().dtype(at::kBool));
}

}  // namespace

std::tuple<Tensor, Tensor> norm_reference(const NormForwardArguments& a) {
  norm_check(a);
  return contiguous(call<"fusedops::norm_reference", std::tuple<Tensor, Tensor>>(a));
}

NormForward norm_forward_reference(const NormForwardArguments& a) {
  const auto [y, h] = norm_reference(a);
  return {y, h, norm_stats(a).zero_()};
}

NormQuantized norm_quantized_reference(const NormQuantizedArguments& a) {
  norm_quantized_outputs(a);
  return contiguous(call<"fusedops::norm_quantized_reference", NormQuantized>(a));
}

NormBackward norm_backward_reference(const NormBackwardArguments& a) {
  const auto& mask = a.output_mask;
  const auto definition = [&](const std::array<Tensor, 3>& inputs) -> variable_list {
    const auto weight = optional(inputs[1]), bias = optional(inputs[2]);
    const NormForwardArguments forward{inputs[0], std::nullopt, weight,   bias, a.dims,
                                       a.eps,     a.kind,       a.offset, 0,    std::nullopt};
    return {std::get<0>(call<"fusedops::norm_reference", std::tuple<Tensor, Tensor>>(forward))};
  };
  const std::array<bool, 3> needs_grad{mask[0] || mask[1], mask[2], mask[3]};
  auto [dh, dweight, dbias] =
      gradients_of<3>(definition, {a.h, value_or_undefined(a.weight), value_or_undefined(a.bias)},
                      needs_grad, {a.dy});
  if (is_defined(a.dh) && dh.defined()) dh = dh + a.dh->to(dh.scalar_type());
  return contiguous(NormBackward{mask[0] ? dh : Tensor(),
                                 mask[1] ? dropped(dh, a.dropout_p, a.seed, a.dims) : Tensor(),
                                 dweight, dbias});
}

// The mask is an operator because inductor miscompiles the wrapping int64 products inside it.
TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("norm_reference(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int dims,"
        " float eps, str kind, float offset, float dropout_p, Tensor? seed)"
        " -> (Tensor y, Tensor h)",
        pure);
  m.def("norm_quantized_reference(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias,"
        " int dims, float eps, str kind, float offset, float dropout_p, Tensor? seed,"
        " str output_format) -> (Tensor codes, Tensor scale, Tensor h)",
        pure);
  m.def("dropout_mask(Tensor seed, SymInt rows, SymInt n, float p) -> Tensor", pure);
}
TORCH_LIBRARY_IMPL(fusedops, Meta, m) { m.impl("dropout_mask", dropout_mask_outputs); }

}  // namespace fusedops::norm
