// Keeps AdamW's parameters and optimizer states in C++ between steps, so that a step needs no
// Python loop over the parameters.
#pragma once

#include <pybind11/pytypes.h>

#include <array>
#include <vector>

#include "csrc/ops/adamw/operators.h"

namespace fusedops::adamw {

// One device's parameters and their states, as AdamW's step takes them. Every function needs the
// GIL.
class AdamWBucket {
 public:
  // params: plain tensors, or DTensors, whose local tensors are used. states: a dict for each.
  // kinds: AdamWArguments::kinds.
  AdamWBucket(const std::vector<pybind11::handle>& params,
              const std::vector<pybind11::handle>& states, const std::vector<int64_t>& kinds);
  ~AdamWBucket();
  AdamWBucket(const AdamWBucket&) = delete;
  AdamWBucket& operator=(const AdamWBucket&) = delete;

  // Whether the optimizer's `state` still holds the same dicts with the same tensors, no parameter
  // has another dtype or device, and every gradient is missing or one that the kernels take.
  bool unchanged(PyObject* state) const;

  // The sum of the gradients' squares, float64; undefined if there are no gradients.
  Tensor squares();

  // Steps the parameters that have gradients. options, lrs: those of AdamWArguments.
  void step(const std::vector<double>& options, const std::vector<Tensor>& lrs, int64_t seed,
            const OptionalTensor& squares, double max_grad_norm, const OptionalTensor& grad_scale,
            const OptionalTensor& found_inf);

  // Makes a new table for later launches. captured: it is never freed, because a CUDA graph copies
  // it again at each replay.
  void renew_table(bool captured);

 private:
  // The parameter is held as a Python object, because torch may replace the tensor behind it, as it
  // does when it moves a module.
  struct Parameter {
    PyObject *owner, *state;
    Tensor step, exp_avg, exp_avg_sq, max_exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, remainder;
    std::array<int64_t, AdamWKind::count> kind;
    at::TensorOptions options;  // the dtype and device that the kind and the states are for

    const Tensor& tensor() const;
    Tensor grad() const;
  };
  // A state's name and its tensor.
  struct Known {
    PyObject *state, *name, *value;
  };

  std::vector<Parameter> parameters_;
  std::vector<Known> known_;
  OptionalTensor host_table_, table_;
};

// Whether two lists hold the same objects.
bool same_objects(PyObject* a, PyObject* b);

// Whether any of these has a gradient.
bool any_gradient(const std::vector<Tensor>& params);

}  // namespace fusedops::adamw
