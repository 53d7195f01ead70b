// Wraps a bound function so that an argument of a wrong type raises a TypeError that names it.
// pybind11's own error lists the whole signature and prints all tensors.
#pragma once

#include <ATen/core/function_schema.h>
#include <torch/csrc/utils/pybind.h>

namespace fusedops {

// Replaces m.name by a function that calls it. If an argument's type does not fit the schema, that
// raises TypeError("name: argument must be ..., got ...").
void explain_type_errors(py::module_& m, const char* name, const c10::FunctionSchema& schema);

}  // namespace fusedops
