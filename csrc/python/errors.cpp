// Raises a TypeError that names the argument whose type does not fit the schema.

#include "csrc/python/errors.h"

#include <ATen/core/jit_type.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <set>
#include <string>
#include <utility>

namespace fusedops {
namespace {

struct Explained {
  py::object function;
  const c10::FunctionSchema* schema;
  std::string name;
  PyMethodDef definition;
};

const c10::Type& element_of(const c10::Type& type) { return *type.containedType(0); }

bool fits(py::handle value, const c10::Type& type) {
  PyObject* const v = value.ptr();
  switch (type.kind()) {
    case c10::TypeKind::OptionalType: return value.is_none() || fits(value, element_of(type));
    case c10::TypeKind::TensorType: return THPVariable_Check(v);
    case c10::TypeKind::FloatType: return PyFloat_Check(v) || PyLong_Check(v);
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return PyIndex_Check(v);
    case c10::TypeKind::BoolType: return PyBool_Check(v);
    case c10::TypeKind::StringType: return PyUnicode_Check(v);
    case c10::TypeKind::ScalarTypeType: return THPDtype_Check(v);
    case c10::TypeKind::ListType:
      if (!PyList_Check(v) && !PyTuple_Check(v)) return false;
      for (const auto& element : py::reinterpret_borrow<py::sequence>(value)) {
        if (!fits(element, element_of(type))) return false;
      }
      return true;
    default: return true;
  }
}

std::string words_for(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType: return words_for(element_of(type)) + " or None";
    case c10::TypeKind::TensorType: return "a Tensor";
    case c10::TypeKind::FloatType: return "a number";
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return "an int";
    case c10::TypeKind::BoolType: return "a bool";
    case c10::TypeKind::StringType: return "a str";
    case c10::TypeKind::ScalarTypeType: return "a torch.dtype";
    case c10::TypeKind::ListType: {
      const auto element_words = words_for(element_of(type));
      return "a list or tuple of " + element_words.substr(element_words.find(' ') + 1) + "s";
    }
    default: return type.str();
  }
}

std::string name_of_type(py::handle value) {
  const std::string name = Py_TYPE(value.ptr())->tp_name;
  return name.substr(name.rfind('.') + 1);
}

// The type; for a list, also those of its elements.
std::string given(py::handle value) {
  auto text = name_of_type(value);
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) return text;
  std::set<std::string> elements;
  for (const auto& element : py::reinterpret_borrow<py::sequence>(value)) {
    elements.insert(name_of_type(element));
  }
  const char* before = " of ";
  for (const auto& name : elements) text += std::exchange(before, ", ") + name;
  return text;
}

// Sets the error for the first argument that does not fit. Returns whether there is one.
bool explain(const Explained& of, PyObject* const* args, Py_ssize_t positional, PyObject* names) {
  const auto& arguments = of.schema->arguments();
  const auto check = [&](const c10::Argument& argument, py::handle value) {
    if (fits(value, *argument.type())) return false;
    PyErr_Format(PyExc_TypeError, "%s: %s must be %s, got %s", of.name.c_str(),
                 argument.name().c_str(), words_for(*argument.type()).c_str(),
                 given(value).c_str());
    return true;
  };
  for (Py_ssize_t i = 0; i < positional && i < static_cast<Py_ssize_t>(arguments.size()); ++i) {
    if (check(arguments[i], args[i])) return true;
  }
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const auto name = py::handle(PyTuple_GET_ITEM(names, i)).cast<std::string>();
    const auto at = of.schema->argumentIndexWithName(name);
    if (at && check(arguments[*at], args[positional + i])) return true;
  }
  return false;
}

PyObject* run(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* names) {
  const auto& of = *static_cast<Explained*>(PyCapsule_GetPointer(self, nullptr));
  PyObject* const result = PyObject_Vectorcall(of.function.ptr(), args, positional, names);
  if (result != nullptr || !PyErr_ExceptionMatches(PyExc_TypeError)) return result;
  py::error_already_set error;  // takes Python's error, which `restore` gives back
  try {
    const auto text = py::str(error.value()).cast<std::string>();
    const bool is_conversion = text.find("incompatible function arguments") != std::string::npos;
    if (is_conversion && explain(of, args, positional, names)) return nullptr;
  } catch (const std::exception&) {  // of an argument's own code: pybind11's error stays
  }
  error.restore();
  return nullptr;
}

}  // namespace

void explain_type_errors(py::module_& m, const char* name, const c10::FunctionSchema& schema) {
  // Lives as long as the process, like the module.
  auto* const of = new Explained{m.attr(name), &schema, name, {}};
  of->definition.ml_name = of->name.c_str();
  of->definition.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run));
  of->definition.ml_flags = METH_FASTCALL | METH_KEYWORDS;
  const auto self = py::reinterpret_steal<py::object>(PyCapsule_New(of, nullptr, nullptr));
  if (!self) throw py::error_already_set();
  const auto function =
      py::reinterpret_steal<py::object>(PyCFunction_New(&of->definition, self.ptr()));
  if (!function) throw py::error_already_set();
  m.attr(name) = function;
}

}  // namespace fusedops
