// Checks the arguments that request rows of 8-bit codes, and allocates them.

#include "csrc/ops/quantize_rows.h"

#include <ATen/Functions.h>

#include "csrc/ops/autograd.h"
#include "csrc/ops/checks.h"

namespace fusedops {

RowFormat output_format(const char* op, std::string_view name) {
  if (name == "int8") return RowFormat::int8;
  TORCH_CHECK_VALUE(name == "fp8", op, ": output_format must be None, 'int8' or 'fp8', got '", name,
                    "'");
  return RowFormat::fp8;
}

void check_no_gradient(const char* op, RowFormat format, Arguments inputs) {
  bool needs_grad = needs_gradient(inputs);
  for (const auto& [t] : inputs) needs_grad = needs_grad || (t && t->_fw_grad(0).defined());
  TORCH_CHECK(!needs_grad, op, ": output_format='", to_name(format),
              "' has no gradient, but an input requires one (call it under torch.no_grad())");
}

QuantizedRows quantized_rows_outputs(const char* op, const Tensor& like,
                                     const std::vector<c10::SymInt>& shape, RowFormat format) {
  TORCH_CHECK(!shape.empty(), op, ": output_format needs at least one dimension, got ",
              describe(like));
  auto scale = shape;
  scale.back() = 1;
  return {at::empty_symint(shape, like.options().dtype(code_dtype(format))),
          at::empty_symint(scale, like.options().dtype(at::kFloat))};
}

}  // namespace fusedops
