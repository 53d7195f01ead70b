// Exports the norm operators, and the functions that allocate their outputs, to Python.

#include "csrc/ops/norm/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::norm {

const Exports norm_exports([](py::module_& m) {
  export_operator<"fusedops::layer_norm", layer_norm>(m);
  export_operator<"fusedops::rms_norm", rms_norm>(m);
  export_operator<"fusedops::add_layer_norm", add_layer_norm>(m);
  export_operator<"fusedops::add_rms_norm", add_rms_norm>(m);
  export_operator<"fusedops::rms_norm_quantized", rms_norm_quantized>(m);
  export_operator<"fusedops::add_rms_norm_quantized", add_rms_norm_quantized>(m);
  export_function(m, "norm_outputs", flat<norm_outputs>);
  export_function(m, "norm_backward_outputs", flat<norm_backward_outputs>);
});

}  // namespace fusedops::norm
