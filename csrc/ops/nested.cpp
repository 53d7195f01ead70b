// Refuses nested tensors: a public operator raises a TypeError that names the nested argument,
// unless it passes nested tensors to torch's functions (takes_nested). Jagged tensors do not come
// here: fusedops/functional/jagged.py runs functions of rows on their values.

#include "csrc/ops/operator.h"

namespace fusedops {

void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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

}  // namespace fusedops
