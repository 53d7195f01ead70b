// Exports experts and quantized_experts to Python.

#include "csrc/ops/experts/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::experts {

const Exports experts_exports([](py::module_& m) {
  export_operator<"fusedops::experts", experts>(m);
  export_operator<"fusedops::quantized_experts", quantized_experts>(m);
});

}  // namespace fusedops::experts
