// Exports the attention operators to Python.

#include "csrc/ops/attention/cached.h"
#include "csrc/python/exports.h"

namespace fusedops::attention {

const Exports attention_exports([](py::module_& m) {
  export_operator<"fusedops::attention", attention>(m);
  export_operator<"fusedops::cached_attention", cached_attention>(m);
});

}  // namespace fusedops::attention
