// Reads the optimizer's Python objects and calls AdamW's operators.

#include "csrc/python/adamw.h"

#include <ATen/ops/zeros.h>
#include <pybind11/gil.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>

#include "csrc/python/exports.h"

namespace fusedops::adamw {
namespace {

// A DTensor's local part; any other tensor unchanged.
Tensor local(const Tensor& t) {
  if (!t.key_set().has(c10::DispatchKey::Python)) return t;
  static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
  PyObject* const object = THPVariable_Wrap(t);
  PyObject* const part = PyObject_GetAttr(object, name);
  Py_DECREF(object);
  if (part == nullptr) {
    PyErr_Clear();
    return t;
  }
  const Tensor local_tensor = THPVariable_Unpack(part);
  Py_DECREF(part);
  return local_tensor;
}

// Whether a gradient is sharded like its parameter; always true unless it is a DTensor.
bool cut_alike(const Tensor& grad, PyObject* owner) {
  if (!grad.key_set().has(c10::DispatchKey::Python)) return true;
  const auto spec_of = [](PyObject* object) {
    static PyObject* const name = PyUnicode_InternFromString("_spec");
    PyObject* const spec = PyObject_GetAttr(object, name);
    if (spec == nullptr) PyErr_Clear();
    return THPObjectPtr(spec);
  };
  THPObjectPtr object(THPVariable_Wrap(grad));
  THPObjectPtr ours = spec_of(object.get()), theirs = spec_of(owner);
  if (ours.get() == theirs.get()) return true;
  if (!ours || !theirs) return false;
  THPObjectPtr cuts(PyObject_GetAttrString(ours.get(), "placements"));
  THPObjectPtr owner_cuts(PyObject_GetAttrString(theirs.get(), "placements"));
  const int same =
      cuts && owner_cuts ? PyObject_RichCompareBool(cuts.get(), owner_cuts.get(), Py_EQ) : -1;
  if (same < 0) PyErr_Clear();
  return same == 1;
}

}  // namespace

const Tensor& AdamWBucket::Parameter::tensor() const { return THPVariable_Unpack(owner); }

Tensor AdamWBucket::Parameter::grad() const {
  const auto& grad = tensor().grad();
  return grad.defined() ? local(grad) : grad;
}

AdamWBucket::AdamWBucket(const std::vector<pybind11::handle>& params,
                         const std::vector<pybind11::handle>& states,
                         const std::vector<int64_t>& kinds) {
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* const state = states[i].ptr();
    Parameter p{Py_NewRef(params[i].ptr()), Py_NewRef(state)};
    std::copy_n(&kinds[AdamWKind::count * i], AdamWKind::count, p.kind.begin());
    const auto take = [&](const char* name, Tensor& into) {
      PyObject* const value = PyDict_GetItemString(state, name);  // borrowed
      if (value == nullptr || !THPVariable_Check(value)) return;
      into = local(THPVariable_Unpack(value));
      known_.push_back({Py_NewRef(state), PyUnicode_InternFromString(name), Py_NewRef(value)});
    };
    take("step", p.step);
    take("exp_avg", p.exp_avg);
    take("exp_avg_sq", p.exp_avg_sq);
    take("max_exp_avg_sq", p.max_exp_avg_sq);
    take("exp_avg_scale", p.exp_avg_scale);
    take("exp_avg_sq_scale", p.exp_avg_sq_scale);
    take("remainder", p.remainder);
    p.options = p.tensor().options();
    parameters_.push_back(std::move(p));
  }
}

AdamWBucket::~AdamWBucket() {
  for (const auto& entry : known_) {
    for (PyObject* object : {entry.state, entry.name, entry.value}) Py_DECREF(object);
  }
  for (const auto& p : parameters_) {
    Py_DECREF(p.owner);
    Py_DECREF(p.state);
  }
}

bool AdamWBucket::unchanged(PyObject* state) const {
  for (const auto& entry : known_) {
    if (PyDict_GetItemWithError(entry.state, entry.name) != entry.value) return false;
  }
  return std::all_of(parameters_.begin(), parameters_.end(), [&](const Parameter& p) {
    if (PyDict_GetItemWithError(state, p.owner) != p.state) return false;
    const auto& param = p.tensor();
    if (param.dtype() != p.options.dtype() || param.device() != p.options.device()) return false;
    if (!param.grad().defined()) return true;
    const auto grad = p.grad();
    return grad.layout() == at::kStrided && grad.scalar_type() == param.scalar_type() &&
           grad.device() == param.device() && !grad.key_set().has(c10::DispatchKey::Python) &&
           cut_alike(param.grad(), p.owner);
  });
}

Tensor AdamWBucket::squares() {
  std::vector<Tensor> grads;
  grads.reserve(parameters_.size());
  for (const auto& p : parameters_) {
    if (const auto grad = p.grad(); grad.defined()) grads.push_back(grad);
  }
  if (grads.empty()) return {};
  pybind11::gil_scoped_release no_gil;
  return dispatch<"fusedops::adamw_squares", Tensor(at::TensorList)>(grads);
}

void AdamWBucket::step(const std::vector<double>& options, const std::vector<Tensor>& lrs,
                       int64_t seed, const OptionalTensor& squares, double max_grad_norm,
                       const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  std::vector<Tensor> params, grads, exp_avgs, exp_avg_sqs, steps, max_exp_avg_sqs, scales,
      remainders;
  std::vector<int64_t> kinds;
  for (auto* list : {&params, &grads, &exp_avgs, &exp_avg_sqs, &steps}) {
    list->reserve(parameters_.size());
  }
  kinds.reserve(AdamWKind::count * parameters_.size());
  for (const auto& p : parameters_) {
    const auto grad = p.grad();
    if (!grad.defined()) continue;
    params.push_back(local(p.tensor()));
    grads.push_back(grad);
    steps.push_back(p.step);
    exp_avgs.push_back(p.exp_avg);
    exp_avg_sqs.push_back(p.exp_avg_sq);
    const auto group = p.kind[AdamWKind::group] * AdamWOption::count;
    if (options[group + AdamWOption::amsgrad] != 0) max_exp_avg_sqs.push_back(p.max_exp_avg_sq);
    if (p.exp_avg_scale.defined()) {
      scales.push_back(p.exp_avg_scale);
      scales.push_back(p.exp_avg_sq_scale);
    }
    if (p.remainder.defined()) remainders.push_back(p.remainder);
    kinds.insert(kinds.end(), p.kind.begin(), p.kind.end());
    p.tensor().unsafeGetTensorImpl()->bump_version();
  }
  if (params.empty()) return;
  if (!table_ && !params[0].is_cpu()) renew_table(false);
  pybind11::gil_scoped_release no_gil;
  call<"fusedops::adamw_step", void>(AdamWArguments{params, grads, exp_avgs, exp_avg_sqs, steps,
                                                    max_exp_avg_sqs, scales, remainders, kinds,
                                                    options, lrs, seed, squares, max_grad_norm,
                                                    grad_scale, found_inf, host_table_, table_});
}

void AdamWBucket::renew_table(bool captured) {
  const auto bytes = static_cast<int64_t>(parameters_.size() * sizeof(AdamWTensor));
  const auto options = at::TensorOptions().dtype(at::kByte);
  host_table_ = at::zeros({bytes}, options);
  table_ = at::zeros({bytes + kTableTail}, options.device(parameters_[0].tensor().device()));
  static auto* const kept = new std::vector<Tensor>();  // never freed: CUDA may shut down first
  if (captured) kept->insert(kept->end(), {*host_table_, *table_});
}

bool same_objects(PyObject* a, PyObject* b) {
  return PyList_GET_SIZE(a) == PyList_GET_SIZE(b) &&
         std::equal(PySequence_Fast_ITEMS(a), PySequence_Fast_ITEMS(a) + PyList_GET_SIZE(a),
                    PySequence_Fast_ITEMS(b));
}

bool any_gradient(const std::vector<Tensor>& params) {
  return std::any_of(params.begin(), params.end(),
                     [](const Tensor& p) { return p.grad().defined(); });
}

const Exports adamw_exports([](py::module_& m) {
  using Objects = const std::vector<py::handle>&;
  py::class_<AdamWBucket>(m, "AdamWBucket")
      .def(py::init<Objects, Objects, const std::vector<int64_t>&>())
      .def("unchanged",
           [](const AdamWBucket& b, const py::dict& s) { return b.unchanged(s.ptr()); })
      .def("squares", torch::wrap_pybind_function(&AdamWBucket::squares))
      .def("step", torch::wrap_pybind_function(&AdamWBucket::step))
      .def("renew_table", &AdamWBucket::renew_table);
  m.def("same_objects",
        [](const py::list& a, const py::list& b) { return same_objects(a.ptr(), b.ptr()); });
  m.def("any_gradient", any_gradient);
});

}  // namespace fusedops::adamw
