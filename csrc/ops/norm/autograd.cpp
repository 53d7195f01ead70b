// The operators of LayerNorm and RMSNorm: schemas, autograd, autocast, and the choice between
// kernels and the definition.

#include <ATen/Functions.h>

#include <limits>

#include "csrc/ops/autograd.h"
#include "csrc/ops/norm/operators.h"

namespace fusedops::norm {
namespace {

NormForward norm_forward(const NormForwardArguments& a) {
  return below_autograd([&] { return call<"fusedops::norm_forward", NormForward>(a); });
}

struct NormNode {
  static constexpr const char* kName = "FusedNormBackward";
  static constexpr size_t kInputs = 4;                          // x, residual, weight, bias
  enum : size_t { kH, kWeight, kBias, kStats, kSeed, kSaved };  // h: x, where there is no residual

  int64_t dims;
  double eps;
  NormKind kind;
  double offset, dropout_p;
  bool add;

  static auto fields(auto& a) {
    return std::tie(a.dims, a.eps, a.kind, a.offset, a.dropout_p, a.add);
  }

  // grads: the gradients of y and, with a residual, of h.
  variable_list run(const Saved& saved, variable_list grads, std::array<bool, 4> needs_grad) const {
    const auto dh = add ? optional(grads[1]) : std::nullopt;
    const bool drops = dropout_p > 0, through = grads[0].defined();
    if (!through && !drops) return {dh.value_or(Tensor()), dh.value_or(Tensor()), {}, {}};
    if (!through && !dh) return variable_list(4);

    const auto h = saved[kH], stats = saved[kStats];
    const auto weight = optional(saved[kWeight]), bias = optional(saved[kBias]);
    const auto seed = optional(saved[kSeed]);
    const auto dy = through ? grads[0] : at::zeros_like(*dh);  // the kernel knows the mask
    const NormBackwardArguments a{dy,
                                  dh,
                                  h,
                                  weight,
                                  bias,
                                  stats,
                                  dims,
                                  eps,
                                  kind,
                                  offset,
                                  dropout_p,
                                  seed,
                                  {(add && needs_grad[1]) || (!drops && needs_grad[0]),
                                   drops && needs_grad[0], through && needs_grad[2],
                                   through && needs_grad[3]}};
    const auto [dresidual, dx, dweight, dbias] =
        at::GradMode::is_enabled()  // double backward: of the definition, differentiable
            ? norm_backward_reference(a)
            : call<"fusedops::norm_backward", NormBackward>(a);
    return {needs_grad[0] ? (drops ? dx : dresidual) : Tensor(),
            add && needs_grad[1] ? dresidual : Tensor(), dweight, dbias};
  }
};

std::tuple<Tensor, Tensor> with_gradient(const NormForwardArguments& a) {
  const auto node = node_of<FusedNode<NormNode>>(a.x, a.residual, a.weight, a.bias);
  const auto [y, h, stats] = norm_forward(a);
  torch::autograd::set_history(y, node);
  const bool add = is_defined(a.residual);
  const bool through_h = add && (a.x.requires_grad() || a.residual->requires_grad());
  if (through_h) torch::autograd::set_history(h, node);
  node->backward = {a.dims, a.eps, a.kind, a.offset, a.dropout_p, through_h};
  node->saved = {SavedVariable(add ? h : a.x, through_h), saved(a.weight), saved(a.bias),
                 saved(stats), saved(a.seed)};
  return {y, h};
}

std::tuple<Tensor, Tensor> run(const NormForwardArguments& a) {
  if (needs_composite({a.x, a.residual, a.weight, a.bias})) return norm_reference(a);
  if (needs_gradient({a.x, a.residual, a.weight, a.bias})) return with_gradient(a);
  const auto [y, h, stats] = norm_forward(a);
  return {y, h};
}

NormQuantized run_quantized(const NormForwardArguments& a, RowFormat format) {
  const char* const op = is_defined(a.residual) ? "add_rms_norm" : "rms_norm";
  check_no_gradient(op, format, {a.x, a.residual, a.weight});
  if (needs_composite({a.x, a.residual, a.weight})) return norm_quantized_reference({a, format});
  return below_autograd([&] {
    return call<"fusedops::norm_quantized", NormQuantized>(NormQuantizedArguments{a, format});
  });
}

double epsilon(const Tensor& x, const Tensor& residual, std::optional<double> eps) {
  if (eps.has_value()) return *eps;
  return any_float64({x, residual}) ? std::numeric_limits<double>::epsilon()
                                    : std::numeric_limits<float>::epsilon();
}

NormKind rms_kind(const char* op, std::string_view rounding) {
  if (rounding == "torch") return NormKind::rms;
  TORCH_CHECK_VALUE(rounding == "llama", op, ": rounding must be 'torch' or 'llama', got '",
                    rounding, "'");
  return NormKind::rms_llama;
}

// The number of dimensions in normalized_shape, which must be the end of input's shape.
int64_t normalized_dims(const char* op, const Tensor& input, c10::SymIntArrayRef shape) {
  const auto dims = static_cast<int64_t>(shape.size());
  TORCH_CHECK(dims > 0, op, ": normalized_shape must name at least one dimension, got []");
  TORCH_CHECK(input.dim() >= dims && input.sym_sizes().slice(input.dim() - dims).equals(shape), op,
              ": normalized_shape must be the end of input's shape ", input.sym_sizes(), ", got ",
              shape);
  return dims;
}

// add_* normalise as many dimensions as the weight has, or the last one without a weight.
int64_t row_dims(const char* op, const OptionalTensor& weight) {
  if (!is_defined(weight)) return 1;
  TORCH_CHECK(weight->dim() > 0, op, ": weight must have at least one dimension, got ",
              describe(*weight));
  return weight->dim();
}

bool is_narrow(const Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

// Under CUDA autocast a norm runs in float32, like torch's layer_norm and rms_norm. RMSNorms that
// torch lacks (llama's rounding, Gemma's offset) are not cast; the model's own code does that. CPU
// autocast has no rule for norms, in torch or here.
struct InFloat32 {
  static constexpr bool kCudaOnly = true;

  template <class Arguments>
  static constexpr bool kAdds = std::is_same_v<std::tuple_element_t<1, Arguments>, Tensor>;
  template <class Arguments>
  static constexpr bool kLayer = std::is_same_v<std::tuple_element_t<3, Arguments>, OptionalTensor>;

  template <class Arguments>
  static bool torch_has(const Arguments& args) {
    if constexpr (kLayer<Arguments>)
      return true;
    else
      return std::get<std::string_view>(args) == "torch" && std::get<5>(args) == 0;  // offset
  }

  template <class Arguments>
  static void apply(Arguments& args, c10::ScalarType, c10::DeviceType) {
    if (!torch_has(args)) return;
    const auto widen = [](OptionalTensor& t) {
      if (is_defined(t) && is_narrow(*t)) t = t->to(at::kFloat);
    };
    widen(std::get<2>(args));
    if constexpr (kLayer<Arguments>) widen(std::get<3>(args));
    auto& input = std::get<0>(args);
    if (!kAdds<Arguments> && is_narrow(input)) input = input.to(at::kFloat);
  }

  // Normalizes a 16-bit sum again, in float32.
  template <class Arguments>
  static void finish(std::tuple<Tensor, Tensor>& outputs, const Arguments& args) {
    auto& [y, h] = outputs;
    if (!torch_has(args) || !is_narrow(y)) return;
    const auto& weight = std::get<2>(args);
    const auto shape = is_defined(weight) ? weight->sym_sizes() : h.sym_sizes().slice(h.dim() - 1);
    const auto wide = h.to(at::kFloat);
    if constexpr (kLayer<Arguments>) {
      y = layer_norm(wide, shape, weight, std::get<3>(args), std::get<4>(args));
    } else {
      y = rms_norm(wide, shape, weight, std::get<3>(args), "torch", 0);
    }
  }
};

}  // namespace

Tensor layer_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                  const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  if (input.is_nested()) {  // torch's own
    return at::layer_norm_symint(input, normalized_shape, weight, bias, eps);
  }
  const auto dims = normalized_dims("layer_norm", input, normalized_shape);
  return std::get<0>(
      run({input, std::nullopt, weight, bias, dims, eps, NormKind::layer, 0, 0, std::nullopt}));
}

Tensor rms_norm(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                const OptionalTensor& weight, std::optional<double> eps, std::string_view rounding,
                double offset) {
  if ((input.is_nested() || input.is_complex()) && rounding == "torch" && offset == 0) {
    return at::rms_norm_symint(input, normalized_shape, weight, eps);  // torch's own
  }
  const auto dims = normalized_dims("rms_norm", input, normalized_shape);
  return std::get<0>(
      run({input, std::nullopt, weight, std::nullopt, dims, epsilon(input, input, eps),
           rms_kind("rms_norm", rounding), offset, 0, std::nullopt}));
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const OptionalTensor& weight, const OptionalTensor& bias,
                                          double eps, double dropout_p) {
  return run({x, residual, weight, bias, row_dims("add_layer_norm", weight), eps, NormKind::layer,
              0, dropout_p, draw_seed(x, dropout_p)});
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const OptionalTensor& weight, std::optional<double> eps,
                                        std::string_view rounding, double offset,
                                        double dropout_p) {
  return run({x, residual, weight, std::nullopt, row_dims("add_rms_norm", weight),
              epsilon(x, residual, eps), rms_kind("add_rms_norm", rounding), offset, dropout_p,
              draw_seed(x, dropout_p)});
}

QuantizedRows rms_norm_quantized(const Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, std::optional<double> eps,
                                 std::string_view rounding, double offset,
                                 std::string_view output_format) {
  constexpr const char* op = "rms_norm";
  const auto format = fusedops::output_format(op, output_format);
  const auto dims = normalized_dims(op, input, normalized_shape);
  const auto [codes, scale, h] =
      run_quantized({input, std::nullopt, weight, std::nullopt, dims, epsilon(input, input, eps),
                     rms_kind(op, rounding), offset, 0, std::nullopt},
                    format);
  return {codes, scale};
}

NormQuantized add_rms_norm_quantized(const Tensor& x, const Tensor& residual,
                                     const OptionalTensor& weight, std::optional<double> eps,
                                     std::string_view rounding, double offset, double dropout_p,
                                     std::string_view output_format) {
  constexpr const char* op = "add_rms_norm";
  const auto format = fusedops::output_format(op, output_format);
  return run_quantized({x, residual, weight, std::nullopt, row_dims(op, weight),
                        epsilon(x, residual, eps), rms_kind(op, rounding), offset, dropout_p,
                        draw_seed(x, dropout_p)},
                       format);
}

const Operators operators([](Operators& o) {
  o.add_public<layer_norm, InFloat32>(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,"
      " Tensor? bias=None, float eps=1e-05) -> Tensor",
      {.takes_nested = true});
  o.add_public<rms_norm, InFloat32>(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *,"
      " str rounding='torch', float offset=0.0) -> Tensor",
      {.takes_nested = true});
  o.add_public<add_layer_norm, InFloat32>(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None,"
      " float eps=1e-05, *, float dropout_p=0.0) -> (Tensor y, Tensor h)",
      {.random = true});
  o.add_public<add_rms_norm, InFloat32>(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06, *,"
      " str rounding='llama', float offset=0.0, float dropout_p=0.0) -> (Tensor y, Tensor h)",
      {.random = true});
  o.add_public(
      "rms_norm_quantized(Tensor input, SymInt[] normalized_shape, Tensor? weight=None,"
      " float? eps=None, *, str rounding='torch', float offset=0.0, str output_format='int8')"
      " -> (Tensor codes, Tensor scale)",
      rms_norm_quantized);
  o.add_public(
      "add_rms_norm_quantized(Tensor x, Tensor residual, Tensor? weight=None, float? eps=1e-06, *,"
      " str rounding='llama', float offset=0.0, float dropout_p=0.0, str output_format='int8')"
      " -> (Tensor codes, Tensor scale, Tensor h)",
      add_rms_norm_quantized, {.random = true});
  o.add_kernel("norm_quantized(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int dims,"
               " float eps, str kind, float offset, float dropout_p, Tensor? seed,"
               " str output_format) -> (Tensor codes, Tensor scale, Tensor h)",
               flat<norm_quantized_outputs>, flat<norm_quantized_reference>);
  o.add_kernel("norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, int dims,"
               " float eps, str kind, float offset, float dropout_p, Tensor? seed)"
               " -> (Tensor y, Tensor h, Tensor stats)",
               flat<norm_outputs>, flat<norm_forward_reference>);
  o.add_kernel(
      "norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias,"
      " Tensor stats, int dims, float eps, str kind, float offset, float dropout_p, Tensor? seed,"
      " bool[4] output_mask)"
      " -> (Tensor dresidual, Tensor dx, Tensor dweight, Tensor dbias)",
      flat<norm_backward_outputs>, flat<norm_backward_reference>);
});

}  // namespace fusedops::norm
