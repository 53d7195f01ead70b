// An optimizer's parameters and states, kept in C++ between steps. So a step runs no Python loop
// over the parameters.
#pragma once

#include <pybind11/pytypes.h>

#include <array>
#include <vector>

#include "csrc/ops/adamw/operators.h"

namespace fusedops::adamw {

// Parameters of one device with their states, as AdamW's step takes them. Every function needs the
// GIL.
class AdamWBucket {
 public:
  // params: plain tensors, or DTensors, of which the local tensor is meant. states: a dict for
  // each. kinds: as AdamWArguments has them.
  AdamWBucket(const std::vector<pybind11::handle>& params,
              const std::vector<pybind11::handle>& states, const std::vector<int64_t>& kinds);
  ~AdamWBucket();
  AdamWBucket(const AdamWBucket&) = delete;
  AdamWBucket& operator=(const AdamWBucket&) = delete;

  // Whether `state`, the optimizer's, has the dicts that it had and these the tensors that they
  // held, and every gradient is not there or one that the kernels take.
  bool unchanged(PyObject* state) const;

  // The sum of the squares of the gradients, float64; undefined where there are none.
  Tensor squares();

  // A step of the parameters that have gradients. options, lrs: as AdamWArguments has them.
  void step(const std::vector<double>& options, const std::vector<Tensor>& lrs, int64_t seed,
            const OptionalTensor& squares, double max_grad_norm, const OptionalTensor& grad_scale,
            const OptionalTensor& found_inf);

  // What is launched from now on has a table of its own. captured: it stays for good, for a CUDA
  // graph copies it again at each replay.
  void renew_table(bool captured);

 private:
  // The parameter is held as Python has it: torch may swap what lies behind, and does so where it
  // moves a module.
  struct Parameter {
    PyObject *owner, *state;
    Tensor step, exp_avg, exp_avg_sq, max_exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, remainder;
    std::array<int64_t, AdamWKind::count> kind;

    const Tensor& tensor() const;
    Tensor grad() const;
  };
  // A name in a state, and the tensor that it stands for.
  struct Known {
    PyObject *state, *name, *value;
  };

  std::vector<Parameter> parameters_;
  std::vector<Known> known_;
  OptionalTensor host_table_, table_;
};

// Whether two lists hold the same objects.
bool same_objects(PyObject* a, PyObject* b);

// Whether one of these has a gradient.
bool any_gradient(const std::vector<Tensor>& params);

}  // namespace fusedops::adamw
