// Exports attention to Python.

#include "csrc/ops/attention/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::attention {

const Exports attention_exports([](py::module_& m) {
  export_operator<"fusedops::attention", attention>(m);
});

}  // namespace fusedops::attention
