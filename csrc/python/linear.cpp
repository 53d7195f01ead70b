// Exports linear, and the functions that choose between its kernels and torch's, to Python.

#include "csrc/ops/linear/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::linear {
namespace {

// linear_short may call torch's own product without the dispatcher.
Tensor short_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                    std::optional<std::string_view> activation) {
  return exports_onnx() ? linear(input, weight, bias, activation)
                        : linear_short(input, weight, bias, activation);
}

}  // namespace

const Exports linear_exports([](py::module_& m) {
  export_call<"fusedops::linear">(m, short_linear);
  export_function(m, "linear_always", linear_always);
  export_function(m, "own_product_pays", own_product_pays);
  export_function(m, "few_rows_pay", few_rows_pay);
});

}  // namespace fusedops::linear
