// Exports the cross entropy operators to Python.

#include "csrc/ops/cross_entropy/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::cross_entropy {

const Exports cross_entropy_exports([](py::module_& m) {
  export_operator<"fusedops::cross_entropy", cross_entropy>(m);
  export_operator<"fusedops::linear_cross_entropy", linear_cross_entropy>(m);
  export_operator<"fusedops::linear_log_probs", linear_log_probs>(m);
});

}  // namespace fusedops::cross_entropy
