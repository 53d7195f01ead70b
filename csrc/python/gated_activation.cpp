// Exports the gated activations to Python.

#include "csrc/ops/gated_activation/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::gated_activation {

const Exports gated_activation_exports([](py::module_& m) {
  export_operator<"fusedops::swiglu", swiglu>(m);
  export_operator<"fusedops::swiglu_quantized", swiglu_quantized>(m);
  export_operator<"fusedops::geglu", geglu>(m);
});

}  // namespace fusedops::gated_activation
