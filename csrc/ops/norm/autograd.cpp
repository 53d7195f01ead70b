// The public operators: schema, autograd, and the choice between kernels and ATen calls.

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <string>

#include "csrc/ops/norm/norm.h"

namespace fusedops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <class Signature>
auto handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

NormForward norm_forward(const Tensor& x, const OptionalTensor& residual,
                         const OptionalTensor& weight, const OptionalTensor& bias, int64_t dims,
                         double eps, std::string_view kind, double offset, double dropout_p,
                         const OptionalTensor& seed) {
  static const auto op = handle<decltype(norm_outputs)>("fusedops::norm_forward");
  return op.call(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
}

// What the backward needs beside tensors. One object: `saved_data` is slow for each entry.
struct NormArguments {
  int64_t dims;
  double eps;
  std::string kind;
  double offset, dropout_p;
  bool needs_residual, needs_x, needs_weight, needs_bias;
};

struct NormSaved : NormArguments, torch::CustomClassHolder {
  explicit NormSaved(NormArguments arguments) : NormArguments(std::move(arguments)) {}
};

struct Norm : torch::autograd::Function<Norm> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x,
                               const OptionalTensor& residual, const OptionalTensor& weight,
                               const OptionalTensor& bias, int64_t dims, double eps,
                               std::string_view kind, double offset, double dropout_p,
                               const OptionalTensor& seed) {
    const auto needs = [](const OptionalTensor& t) { return given(t) && t->requires_grad(); };
    auto saved = c10::make_intrusive<NormSaved>(
        NormArguments{dims, eps, std::string(kind), offset, dropout_p, needs(residual),
                      x.requires_grad(), needs(weight), needs(bias)});
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, h, stats] = norm_forward(x, residual, weight, bias, dims, eps, kind, offset,
                                      dropout_p, seed);
    ctx->set_materialize_grads(false);  // a gradient that nobody asked for stays undefined
    ctx->save_for_backward({given(residual) ? h : x, value_or_undefined(weight),
                            value_or_undefined(bias), stats, value_or_undefined(seed)});
    const bool h_differentiable = saved->needs_x || saved->needs_residual;
    ctx->saved_data["saved"] = at::IValue::make_capsule(std::move(saved));
    if (!given(residual)) return {y};
    if (!h_differentiable) ctx->mark_non_differentiable({h});
    return {y, h};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grad) {
    const auto tensors = ctx->get_saved_variables();
    const Tensor &h = tensors[0], &stats = tensors[3];
    const OptionalTensor weight = optional(tensors[1]), bias = optional(tensors[2]),
                         seed = optional(tensors[4]);
    const auto capsule = ctx->saved_data["saved"].toCapsule();
    const auto& saved = static_cast<const NormSaved&>(*capsule);
    const bool add = grad.size() > 1, drops = saved.dropout_p > 0, through = grad[0].defined();
    const auto dh = add ? optional(grad[1]) : OptionalTensor();
    const auto dy = through ? grad[0] : at::zeros_like(*dh);
    const std::array<bool, 4> mask{saved.needs_residual || (!drops && saved.needs_x),
                                   drops && saved.needs_x, through && saved.needs_weight,
                                   through && saved.needs_bias};

    NormGradients d;
    if (at::GradMode::is_enabled()) {  // double backward: the formula, differentiable
      const auto [mean, rstd] = norm_statistics(h, saved.dims, saved.eps, norm_kind(saved.kind));
      d = norm_gradients(dy, dh, h, weight, bias, mean, rstd, saved.dims, saved.offset,
                         saved.dropout_p, seed, mask);
    } else {
      static const auto op = handle<decltype(norm_backward_outputs)>("fusedops::norm_backward");
      std::tie(d.dresidual, d.dx, d.dweight, d.dbias) =
          op.call(dy, dh, h, weight, bias, stats, saved.dims, saved.kind, saved.offset,
                  saved.dropout_p, seed, mask);
    }
    const auto& dx = drops ? d.dx : d.dresidual;
    return {saved.needs_x ? dx : Tensor(), saved.needs_residual ? d.dresidual : Tensor(),
            d.dweight, d.dbias, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }

  static OptionalTensor optional(const Tensor& t) {
    return t.defined() ? OptionalTensor(t) : std::nullopt;
  }
};

// functorch's transforms and forward-mode gradients see through ATen calls, not through Norm.
bool needs_composite(std::initializer_list<OptionalTensor> tensors) {
  using c10::DispatchKey;
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  if (keys.has(DispatchKey::FuncTorchDynamicLayerBackMode)) return true;
  for (const auto& t : tensors) {
    if (given(t) && (t->scalar_type() == at::kDouble || t->_fw_grad(0).defined())) return true;
  }
  return false;
}

bool needs_gradient(std::initializer_list<OptionalTensor> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto& t : tensors) {
    if (given(t) && t->requires_grad()) return true;
  }
  return false;
}

std::tuple<Tensor, Tensor> run(const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               int64_t dims, double eps, std::string_view kind, double offset,
                               double dropout_p, const OptionalTensor& seed) {
  if (needs_composite({x, residual, weight, bias})) {
    norm_check(x, residual, weight, bias, dims, norm_kind(kind), dropout_p, seed);
    const auto result = norm_composite(x, residual, weight, bias, dims, eps, norm_kind(kind),
                                       offset, dropout_p, seed);
    return {result.y, result.h};
  }
  if (needs_gradient({x, residual, weight, bias})) {
    const auto result =
        Norm::apply(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
    return {result[0], result.size() > 1 ? result[1] : Tensor()};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  auto [y, h, stats] =
      norm_forward(x, residual, weight, bias, dims, eps, kind, offset, dropout_p, seed);
  return {y, h};
}


double epsilon(const Tensor& x, std::optional<double> eps) {
  if (eps.has_value()) return *eps;
  return x.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
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

int64_t row_dims(const OptionalTensor& weight) { return given(weight) ? weight->dim() : 1; }

// Drawn by ATen: `torch.manual_seed` reproduces it, and nothing waits for the device.
OptionalTensor draw_seed(const Tensor& x, double dropout_p) {
  if (dropout_p == 0) return std::nullopt;
  return at::randint(std::numeric_limits<int64_t>::max(), {}, x.options().dtype(at::kLong));
}

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const auto dims = normalized_dims("layer_norm", input, normalized_shape);
  return std::get<0>(
      run(input, std::nullopt, weight, bias, dims, eps, "layer", 0, 0, std::nullopt));
}

Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps, std::string_view rounding,
                double offset) {
  const auto dims = normalized_dims("rms_norm", input, normalized_shape);
  return std::get<0>(run(input, std::nullopt, weight, std::nullopt, dims, epsilon(input, eps),
                         rms_kind("rms_norm", rounding), offset, 0, std::nullopt));
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, double dropout_p) {
  return run(x, residual, weight, bias, row_dims(weight), eps, "layer", 0, dropout_p,
             draw_seed(x, dropout_p));
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        std::string_view rounding, double offset,
                                        double dropout_p) {
  return run(x, residual, weight, std::nullopt, row_dims(weight), epsilon(x, eps),
             rms_kind("add_rms_norm", rounding), offset, dropout_p, draw_seed(x, dropout_p));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> random{at::Tag::nondeterministic_seeded, at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> pure{at::Tag::pt2_compliant_tag};
  m.def("layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,"
        " Tensor? bias=None, float eps=1e-05) -> Tensor", pure);
  m.def("rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *,"
        " str rounding='torch', float offset=0.0) -> Tensor", pure);
  m.def("add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None,"
        " float eps=1e-05, *, float dropout_p=0.0) -> (Tensor y, Tensor h)", random);
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06, *,"
        " str rounding='llama', float offset=0.0, float dropout_p=0.0) -> (Tensor y, Tensor h)",
        random);
  m.def("norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int dims,"
        " float eps, str kind, float offset, float dropout_p, Tensor? seed)"
        " -> (Tensor y, Tensor h, Tensor stats)", pure);
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
