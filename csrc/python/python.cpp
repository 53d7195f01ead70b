// Defines the Python module fusedops._C: exports of csrc/python, and functions about the CPU.

#include "csrc/cpu/isa.h"
#include "csrc/ops/cpu_features.h"
#include "csrc/python/exports.h"

namespace fusedops {
namespace {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  for (const auto add : Exports::every()) add(m);
  export_function(m, "bfloat16_products", bfloat16_products);
  m.def("cpu_isa", [] { return cpu::isa_name(cpu::isa()); });
  m.def("has_amx", has_amx);
}

}  // namespace
}  // namespace fusedops
