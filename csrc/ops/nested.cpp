// Refuses nested tensors: operators without a counterpart in torch raise a TypeError that names the
// argument. The others pass nested tensors to torch's functions. Jagged tensors do not come here:
// fusedops/functional/jagged.py runs functions of rows on their values.

#include <ATen/core/stack.h>
#include <torch/library.h>

#include "csrc/common.h"

namespace fusedops {
namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const auto name = schema.name().substr(schema.name().find("::") + 2);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool nested = arguments[i].isTensor() && arguments[i].toTensor().defined() &&
                        arguments[i].toTensor().is_nested();
    TORCH_CHECK_TYPE(!nested, name, ": ", schema.arguments()[i].name(),
                     " must be a dense tensor, got a nested one");
  }
  TORCH_INTERNAL_ASSERT(false, name, " was dispatched to nested tensors without one");
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CompositeImplicitAutogradNestedTensor, m) {
  for (const char* name :
       {"add_layer_norm", "add_rms_norm", "swiglu", "geglu", "quantized_linear", "rotary_embedding",
        "attention", "cross_entropy", "linear_cross_entropy"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace fusedops
