// Checks the arguments and allocates the outputs that kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/checks.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::experts {
namespace {

constexpr const char* kName = "experts";

void check_options(const Options& o) {
  TORCH_CHECK_VALUE(!o.limit || *o.limit >= 0, kName, ": limit must be at least 0, got ",
                    o.limit.value_or(0));
  TORCH_CHECK_VALUE(o.gated || (!o.limit && o.up_offset == 0 && !o.interleaved), kName,
                    ": limit, up_offset and interleaved need gated=True");
  TORCH_CHECK_VALUE(o.activation == Activation::silu || o.alpha == 1, kName,
                    ": alpha needs activation='silu', got alpha ", o.alpha);
}

void check_routing(const Inputs& a) {
  const auto &index = a.top_k_index, &weights = a.top_k_weights;
  const auto tokens = a.hidden.sym_size(0);
  TORCH_CHECK(index.scalar_type() == at::kLong && index.dim() == 2 && index.sym_size(0) == tokens,
              kName, ": top_k_index must be int64 [", tokens, ", k], got ", describe(index));
  check_same_device(kName, "top_k_index", index, "hidden", a.hidden);
  check_floating(kName, "top_k_weights", weights);
  check_same_device(kName, "top_k_weights", weights, "hidden", a.hidden);
  check_shape(kName, "top_k_weights", weights, index.sym_sizes().vec());
}

// Checks that a weight is [E, rows, columns], or [E, columns, rows] if transposed.
void check_weight(const char* name, const Tensor& weight, const Inputs& a, const c10::SymInt& rows,
                  const c10::SymInt& columns) {
  const auto experts = a.gate_up.sym_size(0);
  check_like(kName, name, weight, "hidden", a.hidden);
  a.options.transposed ? check_shape(kName, name, weight, {experts, columns, rows})
                       : check_shape(kName, name, weight, {experts, rows, columns});
}

void check_bias(const char* name, const OptionalTensor& bias, const Inputs& a,
                const c10::SymInt& columns) {
  if (!given(bias)) return;
  check_like(kName, name, *bias, "hidden", a.hidden);
  check_shape(kName, name, *bias, {a.gate_up.sym_size(0), columns});
}

}  // namespace

Sizes::Sizes(const Inputs& a)
    : tokens(a.hidden.sym_size(0)),
      k(a.top_k_index.sym_size(1)),
      experts(a.gate_up.sym_size(0)),
      hidden(a.hidden.sym_size(1)),
      inner(a.down.sym_size(a.options.transposed ? 1 : 2)),
      wide(a.options.gated ? inner * 2 : inner) {}

void experts_check(const Inputs& a) {
  check_options(a.options);
  check_floating(kName, "hidden", a.hidden);
  TORCH_CHECK(a.hidden.dim() == 2, kName, ": hidden must be [tokens, H], got ", describe(a.hidden));
  check_routing(a);
  TORCH_CHECK(a.gate_up.dim() == 3, kName, ": gate_up must have 3 dimensions, got ",
              describe(a.gate_up));
  TORCH_CHECK(a.down.dim() == 3, kName, ": down must have 3 dimensions, got ", describe(a.down));
  const Sizes n(a);
  check_weight("down", a.down, a, n.hidden, n.inner);
  check_weight("gate_up", a.gate_up, a, n.wide, n.hidden);
  check_bias("gate_up_bias", a.gate_up_bias, a, n.wide);
  check_bias("down_bias", a.down_bias, a, n.hidden);
}

ExpertsForward experts_outputs(const ForwardArguments& a) {
  experts_check(a.inputs);
  const Sizes n(a.inputs);
  const auto options = a.inputs.hidden.options();
  return {at::empty_symint({n.tokens, n.hidden}, options),
          a.keep_z ? at::empty_symint({n.tokens * n.k, n.wide}, options) : Tensor()};
}

ExpertsBackward experts_backward_outputs(const BackwardArguments& a) {
  const auto& in = a.inputs;
  experts_check(in);
  const Sizes n(in);
  check_like("experts_backward", "dy", a.dy, "hidden", in.hidden);
  check_shape("experts_backward", "dy", a.dy, in.hidden.sym_sizes().vec());
  check_like("experts_backward", "z", a.z, "hidden", in.hidden);
  check_shape("experts_backward", "z", a.z, {n.tokens * n.k, n.wide});
  const auto& mask = a.output_mask;
  TORCH_CHECK((given(in.gate_up_bias) || !mask[4]) && (given(in.down_bias) || !mask[5]),
              "experts_backward: the gradient of a bias needs that bias");
  const auto like = [](const OptionalTensor& t, bool wanted) {
    return wanted ? empty_contiguous(*t) : Tensor();
  };
  return {like(in.hidden, mask[0]), like(in.top_k_weights, mask[1]), like(in.gate_up, mask[2]),
          like(in.down, mask[3]),   like(in.gate_up_bias, mask[4]),  like(in.down_bias, mask[5])};
}

}  // namespace fusedops::experts
