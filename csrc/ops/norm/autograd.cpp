// The public operators: schema, autograd, and the choice between kernels and ATen calls.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <limits>
#include <string>

#include "csrc/ops/autograd.h"
#include "csrc/ops/norm/operators.h"

namespace fusedops {
namespace {

NormForward norm_forward(const Tensor& x, const OptionalTensor& residual,
                         const OptionalTensor& weight, const OptionalTensor& bias, int64_t dims,
                         double eps, std::string_view kind, double offset, double dropout_p,
                         const OptionalTensor& seed) {
  static const auto op = handle<decltype(norm_outputs)>("fusedops::norm_forward");
  return op.call(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
}

struct NormNode {
  static constexpr const char* kName = "FusedNormBackward";
  static constexpr size_t kInputs = 4;                          // x, residual, weight, bias
  enum : size_t { kH, kWeight, kBias, kStats, kSeed, kSaved };  // h: x, where there is no residual

  int64_t dims;
  double eps;
  std::string kind;
  double offset, dropout_p;
  bool add;

  static auto fields(auto& self) {
    return std::tie(self.dims, self.eps, self.kind, self.offset, self.dropout_p, self.add);
  }

  // grads: of y and, with a residual, of h.
  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 4> wanted) const {
    const auto dh = add ? optional(grads[1]) : std::nullopt;
    const bool drops = dropout_p > 0, through = grads[0].defined();
    if (!through && !drops) return {dh.value_or(Tensor()), dh.value_or(Tensor()), {}, {}};
    if (!through && !dh) return variable_list(4);

    const auto h = saved[kH];
    const auto weight = optional(saved[kWeight]), bias = optional(saved[kBias]);
    const auto seed = optional(saved[kSeed]);
    const auto dy = through ? grads[0] : at::zeros_like(*dh);  // the kernel knows the mask
    const std::array<bool, 4> mask{(add && wanted[1]) || (!drops && wanted[0]), drops && wanted[0],
                                   through && wanted[2], through && wanted[3]};
    NormGradients d;
    if (at::GradMode::is_enabled()) {  // double backward: the formula, differentiable
      const auto acc = norm_accumulator(h);
      const auto [mean, rstd] = norm_statistics(acc, dims, eps, norm_kind(kind));
      d = norm_gradients(dy, dh, acc, h.scalar_type(), weight, bias, mean, rstd, dims, offset,
                         dropout_p, seed, mask);
    } else {
      static const auto op = handle<decltype(norm_backward_outputs)>("fusedops::norm_backward");
      std::tie(d.dresidual, d.dx, d.dweight, d.dbias) =
          op.call(dy, dh, h, weight, bias, saved[kStats], dims, kind, offset, dropout_p, seed,
                  mask);
    }
    return {wanted[0] ? (drops ? d.dx : d.dresidual) : Tensor(),
            add && wanted[1] ? d.dresidual : Tensor(), d.dweight, d.dbias};
  }
};

std::tuple<Tensor, Tensor> with_gradient(const Tensor& x, const OptionalTensor& residual,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         int64_t dims, double eps, std::string_view kind,
                                         double offset, double dropout_p,
                                         const OptionalTensor& seed) {
  const auto node = make_node<FusedNode<NormNode>>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, value_or_undefined(residual),
                                                           value_or_undefined(weight),
                                                           value_or_undefined(bias)));
  const auto [y, h, stats] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return norm_forward(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
  }();
  torch::autograd::set_history(y, node);
  const bool add = given(residual);
  const bool through_h = add && (x.requires_grad() || residual->requires_grad());
  if (through_h) torch::autograd::set_history(h, node);
  node->backward = {dims, eps, std::string(kind), offset, dropout_p, through_h};
  node->saved = {SavedVariable(add ? h : x, through_h),
                 SavedVariable(value_or_undefined(weight), false),
                 SavedVariable(value_or_undefined(bias), false), SavedVariable(stats, false),
                 SavedVariable(value_or_undefined(seed), false)};
  return {y, h};
}

std::tuple<Tensor, Tensor> run(const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               int64_t dims, double eps, std::string_view kind, double offset,
                               double dropout_p, const OptionalTensor& seed) {
  if (needs_composite({x, residual, weight, bias})) {
    norm_check(x, residual, weight, bias, dims, norm_kind(kind), dropout_p, seed);
    const auto result = norm_composite(x, residual, weight, bias, dims, eps, norm_kind(kind),
                                       offset, dropout_p, seed);
    return {result.y.contiguous(), given(residual) ? result.h.contiguous() : result.h};
  }
  if (needs_gradient({x, residual, weight, bias})) {
    return with_gradient(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto [y, h, stats] =
      norm_forward(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
  return {y, h};
}

double epsilon(const Tensor& x, const Tensor& residual, std::optional<double> eps) {
  if (eps.has_value()) return *eps;
  return any_float64({x, residual}) ? std::numeric_limits<double>::epsilon()
                                    : std::numeric_limits<float>::epsilon();
}

const char* rms_kind(const char* op, std::string_view rounding) {
  if (rounding == "torch") return "rms";
  TORCH_CHECK_VALUE(rounding == "llama", op, ": rounding must be 'torch' or 'llama', got '",
                    rounding, "'");
  return "rms_llama";
}

// The number of axes that normalised_shape names, which must be the last of input.
int64_t normalized_dims(const char* op, const Tensor& input, c10::SymIntArrayRef shape) {
  const auto dims = static_cast<int64_t>(shape.size());
  TORCH_CHECK(dims > 0, op, ": normalized_shape must name at least one dimension, got []");
  TORCH_CHECK(input.dim() >= dims && input.sym_sizes().slice(input.dim() - dims).equals(shape), op,
              ": normalized_shape must be the end of input's shape ", input.sym_sizes(), ", got ",
              shape);
  return dims;
}

// add_* read the dimensions to normalise off the weight; without one it is the last.
int64_t row_dims(const char* op, const OptionalTensor& weight) {
  if (!given(weight)) return 1;
  TORCH_CHECK(weight->dim() > 0, op, ": weight must have at least one dimension, got ",
              describe(*weight));
  return weight->dim();
}

// Drawn by ATen: `torch.manual_seed` reproduces it, and nothing waits for the device.
OptionalTensor draw_seed(const Tensor& x, double dropout_p) {
  if (dropout_p == 0) return std::nullopt;
  return at::randint(std::numeric_limits<int64_t>::max(), {}, x.options().dtype(at::kLong));
}

}  // namespace

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  if (input.is_nested()) {  // torch's own
    return at::layer_norm_symint(input, normalized_shape, weight, bias, eps);
  }
  const auto dims = normalized_dims("layer_norm", input, normalized_shape);
  return std::get<0>(
      run(input, std::nullopt, weight, bias, dims, eps, "layer", 0, 0, std::nullopt));
}

Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps, std::string_view rounding,
                double offset) {
  if ((input.is_nested() || input.is_complex()) && rounding == "torch" && offset == 0) {
    return at::rms_norm_symint(input, normalized_shape, weight, eps);  // torch's own
  }
  const auto dims = normalized_dims("rms_norm", input, normalized_shape);
  return std::get<0>(run(input, std::nullopt, weight, std::nullopt, dims,
                         epsilon(input, input, eps), rms_kind("rms_norm", rounding), offset, 0,
                         std::nullopt));
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, double dropout_p) {
  return run(x, residual, weight, bias, row_dims("add_layer_norm", weight), eps, "layer", 0,
             dropout_p, draw_seed(x, dropout_p));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        std::string_view rounding, double offset,
                                        double dropout_p) {
  return run(x, residual, weight, std::nullopt, row_dims("add_rms_norm", weight),
             epsilon(x, residual, eps), rms_kind("add_rms_norm", rounding), offset, dropout_p,
             draw_seed(x, dropout_p));
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> random{at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,"
        " Tensor? bias=None, float eps=1e-05) -> Tensor",
        pure);
  m.def("rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *,"
        " str rounding='torch', float offset=0.0) -> Tensor",
        pure);
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None,"
        " float eps=1e-05, *, float dropout_p=0.0) -> (Tensor y, Tensor h)",
        random);
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06, *,"
        " str rounding='llama', float offset=0.0, float dropout_p=0.0) -> (Tensor y, Tensor h)",
        random);
  m.def("norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int dims,"
        " float eps, str kind, float offset, float dropout_p, Tensor? seed)"
        " -> (Tensor y, Tensor h, Tensor stats)",
        pure);
  m.def("norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias,"
        " Tensor stats, int dims, str kind, float offset, float dropout_p, Tensor? seed,"
        " bool[4] output_mask) -> (Tensor dresidual, Tensor dx, Tensor dweight, Tensor dbias)",
        pure);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutograd, m) {
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm", rms_norm);
  m.impl("add_layer_norm", add_layer_norm);
  m.impl("add_rms_norm", add_rms_norm);
}

// Under vmap the same: it then sees ATen calls, not an operator to loop over.
TORCH_LIBRARY_IMPL(fusedops, FuncTorchBatched, m) {
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm", rms_norm);
  m.impl("add_layer_norm", add_layer_norm);
  m.impl("add_rms_norm", add_rms_norm);
}

TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) {
  m.impl("norm_forward", norm_forward_composite);
  m.impl("norm_backward", norm_backward_composite);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("norm_forward", norm_outputs);
  m.impl("norm_backward", norm_backward_outputs);
}

TORCH_LIBRARY_IMPL(fusedops, Autograd, m) {
  m.impl("norm_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("norm_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fusedops
