// linear_log_probs in ATen calls: runs if no kernel does, and in a double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <limits>

#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops::cross_entropy {
namespace {

// The rows' z, log p and p over the classes, their targets as indices, and which rows count.
struct LogProbRows {
  Tensor z, log_p, p, target, live;

  LogProbRows(const LogProbInputs& in, const LogProbOptions& options) {
    const auto logits = at::linear(in.input, in.linear_weight, in.linear_bias);
    z = mapped(logits.to(accumulation_dtype(logits.scalar_type())), options.map);
    log_p = at::log_softmax(z, -1);
    p = log_p.exp();
    live = in.target != options.ignore_index;
    target = at::where(live, in.target, 0).unsqueeze(-1);
  }

  Tensor of_live(const Tensor& t) const { return at::where(live, t, 0); }
  Tensor log_probs() const { return of_live(log_p.gather(-1, target).squeeze(-1)); }
  // log p, finite where p is 0: such a class adds 0 to the entropy.
  Tensor finite_log_p() const { return log_p.clamp_min(std::numeric_limits<float>::lowest()); }
  Tensor entropy() const { return -(p * finite_log_p()).sum(-1); }
  Tensor top1(const Tensor& log_probs) const {
    if (z.sym_numel() == 0) return at::zeros_like(live);
    return (z.argmax(-1) == target.squeeze(-1)).logical_and(live).logical_and(~log_probs.isnan());
  }
};

}  // namespace

LogProbs linear_log_probs_formula(const LogProbInputs& in, const LogProbOptions& options,
                                  std::optional<c10::ScalarType> dtype,
                                  std::array<bool, 2> wanted) {
  const LogProbRows rows(in, options);
  const auto input_dtype = in.input.scalar_type();
  const auto to = input_dtype == at::kDouble ? at::kDouble : dtype.value_or(input_dtype);
  const auto log_probs = rows.log_probs();
  return {log_probs.to(to), wanted[0] ? rows.of_live(rows.entropy()).to(to) : Tensor(),
          wanted[1] ? rows.top1(log_probs) : Tensor()};
}

LinearGradients linear_log_probs_gradients(const OptionalTensor& grad_log_probs,
                                           const OptionalTensor& grad_entropy,
                                           const LogProbInputs& in, const LogProbOptions& options,
                                           std::array<bool, 3> output_mask) {
  if (output_mask == std::array<bool, 3>{}) return {};
  const LogProbRows rows(in, options);
  auto dz = at::zeros_like(rows.z);
  const auto column = [&](const Tensor& grad) {
    return grad.to(rows.z.scalar_type()).unsqueeze(-1);
  };
  if (is_defined(grad_log_probs)) {
    const auto classes = at::arange(at::Scalar(rows.z.sym_size(-1)), rows.target.options());
    const auto onehot = classes.eq(rows.target).to(rows.z.scalar_type());
    dz = dz + column(*grad_log_probs) * (onehot - rows.p);
  }
  if (is_defined(grad_entropy)) {
    const auto centred = rows.finite_log_p() + rows.entropy().unsqueeze(-1);
    dz = dz - column(*grad_entropy) * rows.p * centred;
  }
  dz = at::where(rows.live.unsqueeze(-1), dz, 0);
  const auto dlogits = through_map(dz, rows.z, options.map).to(in.input.scalar_type());
  return through_linear(dlogits, in.input, in.linear_weight, in.linear_bias, output_mask);
}

LogProbsAndSums linear_log_probs_composite(const LogProbArguments& a) {
  linear_log_probs_outputs(a);
  const auto options = a.numbers.options();
  const auto [log_probs, entropy, top1] =
      linear_log_probs_formula(a.in, options, a.dtype, a.wanted);
  const LogProbRows rows(a.in, options);
  const auto lse = at::logsumexp(rows.z.to(at::kDouble), -1);
  const auto mean = a.wanted[0] ? rows.of_live(lse - rows.entropy()) : Tensor();
  return {log_probs, entropy, top1, rows.of_live(lse), mean};
}

LinearGradients linear_log_probs_backward_composite(const LogProbBackwardArguments& a) {
  linear_log_probs_backward_outputs(a);
  return contiguous(linear_log_probs_gradients(a.grad_log_probs, a.grad_entropy, a.in,
                                               a.numbers.options(), a.output_mask));
}

}  // namespace fusedops::cross_entropy
