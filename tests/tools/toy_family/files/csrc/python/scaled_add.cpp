// Exports scaled_add to Python.

#include "csrc/ops/scaled_add/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::scaled_add {

const Exports scaled_add_exports([](py::module_& m) {
  export_operator<"fusedops::scaled_add", scaled_add>(m);
});

}  // namespace fusedops::scaled_add
