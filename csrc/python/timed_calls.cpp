// Exports the timed calls, which choose between our kernels and torch's code, to Python.

#include "csrc/ops/calibration.h"

#include "csrc/python/exports.h"

namespace fusedops {

const Exports calibration_exports([](py::module_& m) {
  m.def("set_timed_calls",
        [](const std::string& kind, const std::vector<int64_t>& sizes,
           const std::vector<double>& ratios) { TimedCalls::of(kind).set(sizes, ratios); });
  m.def("timed_call_ratio", [](const std::string& kind, const std::vector<int64_t>& sizes) {
    return TimedCalls::of(kind).ratio(sizes);
  });
  m.def("timed_call_pays", [](const std::string& kind, const std::vector<int64_t>& sizes) {
    return TimedCalls::of(kind).pays(sizes);
  });
});

}  // namespace fusedops
