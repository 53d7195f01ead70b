// Exports rotary_embedding to Python.

#include "csrc/ops/rotary/operators.h"
#include "csrc/python/exports.h"

namespace fusedops::rotary {

const Exports rotary_exports([](py::module_& m) {
  export_operator<"fusedops::rotary_embedding", rotary_embedding>(m);
});

}  // namespace fusedops::rotary
