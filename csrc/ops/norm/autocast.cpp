// Under CUDA autocast a norm runs in float32, as torch's layer_norm and rms_norm do there. An
// RMSNorm that torch does not have (llama's rounding, Gemma's offset) does what its model's lines
// do: they cast by themselves. CPU autocast leaves norms alone, in torch and here.

#include <torch/library.h>

#include "csrc/ops/norm/operators.h"

namespace fusedops {
namespace {

struct NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::AutocastCUDA};
};

Tensor widened(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16 ? t.to(at::kFloat) : t;
}

OptionalTensor widened(const OptionalTensor& t) {
  return given(t) ? OptionalTensor(widened(*t)) : std::nullopt;
}

Tensor layer_norm_autocast(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                           const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const NoAutocast off;
  return layer_norm(widened(input), normalized_shape, widened(weight), widened(bias), eps);
}

bool torch_has(std::string_view rounding, double offset) {
  return rounding == "torch" && offset == 0;
}

Tensor rms_norm_autocast(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                         const OptionalTensor& weight, std::optional<double> eps,
                         std::string_view rounding, double offset) {
  const NoAutocast off;
  if (!torch_has(rounding, offset)) {
    return rms_norm(input, normalized_shape, weight, eps, rounding, offset);
  }
  return rms_norm(widened(input), normalized_shape, widened(weight), eps, rounding, offset);
}

// What `residual + x` leaves in 16 bits is normalised again, in float32.
c10::SymIntArrayRef normalized_shape(const Tensor& h, const OptionalTensor& weight) {
  return given(weight) ? weight->sym_sizes() : h.sym_sizes().slice(h.dim() - 1);
}

std::tuple<Tensor, Tensor> add_layer_norm_autocast(const Tensor& x, const Tensor& residual,
                                                   const OptionalTensor& weight,
                                                   const OptionalTensor& bias, double eps,
                                                   double dropout_p) {
  const NoAutocast off;
  const auto w = widened(weight), b = widened(bias);
  auto [y, h] = add_layer_norm(x, residual, w, b, eps, dropout_p);
  if (widened(y).is_same(y)) return {y, h};
  return {layer_norm(widened(h), normalized_shape(h, w), w, b, eps), h};
}

std::tuple<Tensor, Tensor> add_rms_norm_autocast(const Tensor& x, const Tensor& residual,
                                                 const OptionalTensor& weight,
                                                 std::optional<double> eps,
                                                 std::string_view rounding, double offset,
                                                 double dropout_p) {
  const NoAutocast off;
  if (!torch_has(rounding, offset)) {
    return add_rms_norm(x, residual, weight, eps, rounding, offset, dropout_p);
  }
  const auto w = widened(weight);
  auto [y, h] = add_rms_norm(x, residual, w, eps, rounding, offset, dropout_p);
  if (widened(y).is_same(y)) return {y, h};
  return {rms_norm(widened(h), normalized_shape(h, w), w, eps, rounding, offset), h};
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, AutocastCUDA, m) {
  m.impl("layer_norm", layer_norm_autocast);
  m.impl("rms_norm", rms_norm_autocast);
  m.impl("add_layer_norm", add_layer_norm_autocast);
  m.impl("add_rms_norm", add_rms_norm_autocast);
}

}  // namespace fusedops
