#include "csrc/optimizer.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace fusedops {
namespace {

// The part of a DTensor that lies on this rank; any other tensor is itself.
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
  const Tensor found = THPVariable_Unpack(part);
  Py_DECREF(part);
  return found;
}

}  // namespace

Tensor AdamWBucket::Parameter::grad() const {
  const auto& grad = owner.grad();
  return grad.defined() ? local(grad) : grad;
}

AdamWBucket::AdamWBucket(const std::vector<Tensor>& params, const std::vector<PyObject*>& states,
                         const std::vector<int64_t>& kinds) {
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter p{params[i], local(params[i])};
    std::copy_n(&kinds[kKinds * i], kKinds, p.kind.begin());
    const auto take = [&](const char* name, Tensor& into) {
      PyObject* const value = PyDict_GetItemString(states[i], name);  // borrowed
      if (value == nullptr || !THPVariable_Check(value)) return;
      into = local(THPVariable_Unpack(value));
      known_.push_back({Py_NewRef(states[i]), PyUnicode_InternFromString(name), Py_NewRef(value)});
    };
    take("step", p.step);
    take("exp_avg", p.exp_avg);
    take("exp_avg_sq", p.exp_avg_sq);
    take("max_exp_avg_sq", p.max_exp_avg_sq);
    take("exp_avg_scale", p.exp_avg_scale);
    take("exp_avg_sq_scale", p.exp_avg_sq_scale);
    take("remainder", p.remainder);
    parameters_.push_back(std::move(p));
  }
}

AdamWBucket::~AdamWBucket() {
  for (const auto& known : known_) {
    for (PyObject* object : {known.state, known.name, known.value}) Py_DECREF(object);
  }
}

bool AdamWBucket::unchanged() const {
  for (const auto& known : known_) {
    if (PyDict_GetItemWithError(known.state, known.name) != known.value) return false;
  }
  return std::all_of(parameters_.begin(), parameters_.end(), [](const Parameter& p) {
    const auto grad = p.grad();
    return !grad.defined() ||
           (grad.layout() == at::kStrided && grad.scalar_type() == p.param.scalar_type() &&
            grad.device() == p.param.device() && !grad.key_set().has(c10::DispatchKey::Python));
  });
}

Tensor AdamWBucket::squares() {
  std::vector<Tensor> grads;
  grads.reserve(parameters_.size());
  for (const auto& p : parameters_) {
    if (const auto grad = p.grad(); grad.defined()) grads.push_back(grad);
  }
  if (grads.empty()) return {};
  static const auto op = handle<Tensor(at::TensorList)>("fusedops::adamw_squares");
  return op.call(grads);
}

void AdamWBucket::step(const std::vector<double>& options, const std::vector<Tensor>& lrs,
                       int64_t seed, const OptionalTensor& squares, double max_grad_norm,
                       const OptionalTensor& grad_scale, const OptionalTensor& found_inf) {
  std::vector<Tensor> params, grads, exp_avgs, exp_avg_sqs, steps, most, scales, remainders;
  std::vector<int64_t> kinds;
  for (auto* list : {&params, &grads, &exp_avgs, &exp_avg_sqs, &steps}) {
    list->reserve(parameters_.size());
  }
  kinds.reserve(kKinds * parameters_.size());
  for (const auto& p : parameters_) {
    const auto grad = p.grad();
    if (!grad.defined()) continue;
    params.push_back(p.param);
    grads.push_back(grad);
    steps.push_back(p.step);
    exp_avgs.push_back(p.exp_avg);
    exp_avg_sqs.push_back(p.exp_avg_sq);
    if (options[p.kind[0] * kOptions + 6] != 0) most.push_back(p.max_exp_avg_sq);
    if (p.exp_avg_scale.defined()) {
      scales.push_back(p.exp_avg_scale);
      scales.push_back(p.exp_avg_sq_scale);
    }
    if (p.remainder.defined()) remainders.push_back(p.remainder);
    kinds.insert(kinds.end(), p.kind.begin(), p.kind.end());
    p.owner.unsafeGetTensorImpl()->bump_version();
  }
  if (params.empty()) return;
  if (!table_ && !params[0].is_cpu()) renew_table();
  static const auto op = handle<AdamWStep>("fusedops::adamw_step");
  op.call(params, grads, exp_avgs, exp_avg_sqs, steps, most, scales, remainders, kinds, options,
          lrs, seed, squares, max_grad_norm, grad_scale, found_inf, host_table_, table_);
}

void AdamWBucket::renew_table() {
  if (table_) {
    old_tables_.push_back(*host_table_);
    old_tables_.push_back(*table_);
  }
  const auto bytes = static_cast<int64_t>(parameters_.size() * sizeof(AdamWTensor));
  const auto options = at::TensorOptions().dtype(at::kByte);
  host_table_ = at::zeros({bytes}, options);
  table_ = at::zeros({bytes + kTableTail}, options.device(parameters_[0].param.device()));
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

}  // namespace fusedops
