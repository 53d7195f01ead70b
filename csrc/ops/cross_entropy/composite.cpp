// Cross entropy in ATen calls: runs if no kernel does, and in a double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops::cross_entropy {

Tensor mapped(const Tensor& x, const LogitMap& map) {
  const auto z = map.scale == 1 ? x : x * map.scale;
  return map.softcap == 0 ? z : at::tanh(z / map.softcap) * map.softcap;
}

Tensor through_map(const Tensor& dz, const Tensor& z, const LogitMap& map) {
  const auto dx = dz * map.scale;
  return map.softcap == 0 ? dx : dx * (1 - (z / map.softcap).square());
}

LinearGradients through_linear(const Tensor& dlogits, const Tensor& input,
                               const Tensor& linear_weight, const OptionalTensor& linear_bias,
                               std::array<bool, 3> output_mask) {
  return {output_mask[0] ? at::mm(dlogits, linear_weight) : Tensor(),
          output_mask[1] ? at::mm(dlogits.t(), input) : Tensor(),
          output_mask[2] && is_defined(linear_bias) ? dlogits.sum(0) : Tensor()};
}

namespace {

OptionalTensor as(const OptionalTensor& t, c10::ScalarType dtype) {
  return is_defined(t) ? OptionalTensor(t->to(dtype)) : std::nullopt;
}

// w_t of each target, 0 for an ignored one.
Tensor target_weight(const Tensor& target, const OptionalTensor& weight, int64_t ignore_index,
                     c10::ScalarType dtype) {
  const auto live = target != ignore_index;
  if (!is_defined(weight)) return live.to(dtype);
  const auto of_target = weight->to(dtype).index({at::where(live, target, 0)});
  return at::where(live, of_target, 0);
}

bool probabilities(const Tensor& target) { return at::isFloatingType(target.scalar_type()); }

Tensor z_term(const Tensor& z, const Tensor& target, const OptionalTensor& weight,
              const CrossEntropyOptions& options) {
  const auto squares = at::logsumexp(z, z.dim() > 1).square() * options.z_loss;
  const auto w = probabilities(target)
                     ? at::ones_like(squares)
                     : target_weight(target, weight, options.ignore_index, z.scalar_type());
  const auto terms = at::where(w != 0, squares * w, 0);
  if (options.is(Reduction::none)) return terms;
  return options.is(Reduction::mean) ? terms.sum() / w.sum() : terms.sum();
}

// The gradient of each row's loss, [rows, 1]; 0 if every target is ignored.
Tensor row_gradient(const Tensor& grad, const Tensor& live, const Tensor& w,
                    const CrossEntropyOptions& options) {
  const auto g = grad.to(w.scalar_type());
  if (options.is(Reduction::none)) return g.unsqueeze(-1);
  if (options.is(Reduction::sum)) return g;
  return at::where(live.any(), g / w.sum(), 0);
}

// lse and total, which a kernel saves for the backward.
std::tuple<Tensor, Tensor> kept(const Tensor& z, const Tensor& target, const OptionalTensor& weight,
                                const CrossEntropyOptions& options) {
  const auto w = target_weight(target, weight, options.ignore_index, at::kDouble);
  return {at::logsumexp(z.to(at::kDouble), -1), w.sum()};
}

}  // namespace

Tensor cross_entropy_formula(const LossInputs& in, const CrossEntropyOptions& options,
                             std::optional<c10::ScalarType> dtype) {
  const auto& [input, target, weight] = in;
  const auto wide = accumulation_dtype(input.scalar_type());
  const auto z = mapped(input.to(wide), options.map);
  const auto indices = target.scalar_type() == at::kByte ? target.to(at::kLong) : target;
  const auto loss =
      at::cross_entropy_loss_symint(z, probabilities(target) ? target.to(wide) : indices,
                                    as(weight, wide), options.reduction, options.ignore_index,
                                    options.label_smoothing);
  const auto whole = options.z_loss == 0 ? loss : loss + z_term(z, indices, weight, options);
  return whole.to(input.scalar_type() == at::kDouble ? at::kDouble
                                                     : dtype.value_or(input.scalar_type()));
}

Tensor cross_entropy_gradient(const Tensor& grad, const LossInputs& in,
                              const CrossEntropyOptions& options) {
  const auto& [input, target, weight] = in;
  const auto wide = accumulation_dtype(input.scalar_type());
  const auto z = mapped(input.to(wide), options.map);
  const auto w = target_weight(target, weight, options.ignore_index, wide);
  const auto live = (target != options.ignore_index).unsqueeze(-1);
  const double smoothing = options.label_smoothing;
  const at::Scalar classes(input.sym_size(-1));
  const auto class_weight = is_defined(weight) ? weight->to(wide) : at::ones_like(z.slice(0, 0, 1));

  const auto softmax = at::softmax(z, -1), lse = at::logsumexp(z, -1, true);
  const auto wt = w.unsqueeze(-1);
  const auto onehot = at::arange(classes, target.options()).eq(target.unsqueeze(-1));
  auto dz = softmax * (wt * (lse * (2 * options.z_loss) + (1 - smoothing))) -
            at::where(onehot, wt * (1 - smoothing), 0);
  if (smoothing != 0) {
    dz = dz + (softmax * class_weight.sum() - class_weight) * smoothing / classes;
  }
  dz = at::where(live, dz * row_gradient(grad, live, w, options), 0);
  return through_map(dz, z, options.map).to(input.scalar_type());
}

LinearGradients linear_cross_entropy_gradients(const Tensor& grad, const LinearLossInputs& in,
                                               const CrossEntropyOptions& options,
                                               std::array<bool, 3> output_mask) {
  if (output_mask == std::array<bool, 3>{}) return {};
  const auto logits = at::linear(in.input, in.linear_weight, in.linear_bias);
  const auto dlogits = cross_entropy_gradient(grad, {logits, in.target, in.weight}, options);
  return through_linear(dlogits, in.input, in.linear_weight, in.linear_bias, output_mask);
}

Loss cross_entropy_composite(const LossArguments& a) {
  cross_entropy_outputs(a);
  const CrossEntropyOptions options(a.numbers);
  const auto& [input, target, weight] = a.in;
  const auto loss = cross_entropy_formula(a.in, options, a.dtype);
  const auto z = mapped(input.to(accumulation_dtype(input.scalar_type())), options.map);
  const auto [lse, total] = kept(z, target, weight, options);
  Tensor dinput;
  if (a.with_gradient) dinput = cross_entropy_gradient(at::ones_like(loss), a.in, options);
  return {loss, lse, total, dinput};
}

Tensor cross_entropy_backward_composite(const LossBackwardArguments& a) {
  cross_entropy_backward_outputs(a);
  return cross_entropy_gradient(a.grad, a.in, CrossEntropyOptions(a.numbers)).contiguous();
}

LinearLoss linear_cross_entropy_composite(const LinearLossArguments& a) {
  linear_cross_entropy_outputs(a);
  const auto logits = at::linear(a.in.input, a.in.linear_weight, a.in.linear_bias);
  const auto [loss, lse, total, none] =
      cross_entropy_composite({{logits, a.in.target, a.in.weight}, a.numbers, a.dtype, false});
  const auto [dinput, dweight, dbias] =
      linear_cross_entropy_gradients(at::ones_like(loss), a.in, CrossEntropyOptions(a.numbers),
                                     a.gradients);
  return {loss, lse, total, dinput, dweight, dbias};
}

LinearGradients linear_cross_entropy_backward_composite(const LinearLossBackwardArguments& a) {
  linear_cross_entropy_backward_outputs(a);
  return contiguous(
      linear_cross_entropy_gradients(a.grad, a.in, CrossEntropyOptions(a.numbers), a.output_mask));
}

}  // namespace fusedops::cross_entropy
