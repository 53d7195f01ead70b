// Exports scaled_copy to Python.

#include "csrc/ops/scaled_copy/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::scaled_copy {

const Exports scaled_copy_exports([](py::module_& m) {
  export_operator<"fusedops::scaled_copy", scaled_copy>(m);
});

}  // namespace fusedops::scaled_copy
