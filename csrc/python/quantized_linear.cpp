// Exports quantized_linear, its choice of kernels and its constants to Python.

#include "csrc/cpu/quantized_linear/plan.h"
#include "csrc/ops/quantized_linear/gpu_kernel.h"
#include "csrc/python/exports.h"

namespace fusedops::quantized_linear {

const Exports quantized_linear_exports([](py::module_& m) {
  export_operator<"fusedops::quantized_linear", quantized_linear>(m);
  export_function(m, "quantized_linear_plan", cpu::quantized_linear::quantized_linear_plan);
  export_function(m, "quantized_linear_gpu_plan", quantized_linear_gpu_plan);
  export_function(m, "quantized_linear_gpu_kernel", quantized_linear_gpu_kernel);
  export_function(m, "quantized_linear_few_rows", quantized_linear_few_rows);
  m.attr("most_integers") = kMostIntegers;
  m.def("nf4_table", [] { return std::vector<float>(std::begin(kNf4), std::end(kNf4)); });
});

}  // namespace fusedops::quantized_linear
