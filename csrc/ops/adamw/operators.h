// Arguments, checks and kernel tables of AdamW's operators: a step of many tensors at once, and the
// sum of squares and the scaling that clip gradients. Formulas: fusedops/functional/adamw.py. The
// step and the scaling write in place. The operators have no gradients.
#pragma once

#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "csrc/kernels/adamw.h"
#include "csrc/ops/operator.h"
#include "csrc/common.h"

namespace fusedops::adamw {

// The arguments of adamw_step; schema.cpp has the schema. A list has an entry for each tensor, or
// for each tensor that has such a state, in order.
struct AdamWArguments {
  at::TensorList params, grads, exp_avgs, exp_avg_sqs, steps;
  at::TensorList max_exp_avg_sqs;  // for tensors in groups with amsgrad, float32
  at::TensorList scales;           // for int8 moments: exp_avg's and exp_avg_sq's, float32 [blocks]
  at::TensorList remainders;       // for Rounding::remainder, int16
  at::IntArrayRef kinds;           // AdamWKind's numbers, per tensor
  at::ArrayRef<double> options;    // AdamWOption's numbers, per group
  at::TensorList lrs;              // per group, a scalar on the device; or empty
  int64_t seed;
  const OptionalTensor& squares;  // float64 [kSquareParts]: their sum is the squared norm
  double max_grad_norm;
  const OptionalTensor &grad_scale, &found_inf;  // GradScaler's
  const OptionalTensor &host_table, &table;      // uint8: a device's table, kept between steps

  static auto fields(auto& a) {
    return std::tie(a.params, a.grads, a.exp_avgs, a.exp_avg_sqs, a.steps, a.max_exp_avg_sqs,
                    a.scales, a.remainders, a.kinds, a.options, a.lrs, a.seed, a.squares,
                    a.max_grad_norm, a.grad_scale, a.found_inf, a.host_table, a.table);
  }
};

// A tensor's numbers: its group, its Rounding, and AdamWTensor's index, row (0: the whole tensor)
// and first_key.
struct AdamWKind {
  enum : int64_t { group, rounding, index, row, first_key, count };
};

// A group's numbers.
struct AdamWOption {
  enum : int64_t { lr, beta1, beta2, eps, weight_decay, maximize, amsgrad, bounded, count };
};

// A device's table is the AdamWTensors followed by this many bytes, in which a kernel counts.
constexpr int64_t kTableTail = 16;

// schema.cpp: also the Meta kernels.

void adamw_check(const AdamWArguments& a);
Tensor adamw_squares_output(at::TensorList grads);  // float64 [kSquareParts]
void adamw_scale_check(at::TensorList grads, const Tensor& squares, double max_norm);

// tensors.cpp: builds the kernels' arguments.

// Copies tensors whose memory layouts differ; write_back() copies the results back.
class AdamWTable {
 public:
  explicit AdamWTable(const AdamWArguments& a);

  std::vector<AdamWTensor> tensors;
  std::vector<AdamWGroup> groups;

  int64_t blocks() const;
  void write_back() const;

 private:
  Tensor laid_out(const Tensor& t, bool as_is, bool written);

  std::vector<std::pair<Tensor, Tensor>> copies_;  // destination, source
  std::vector<Tensor> kept_;
};

// Gradients, for the kernels that read or scale them.
struct GradientTable {
  explicit GradientTable(at::TensorList grads);

  std::vector<Tensor> kept;          // copies of gradients that overlap or have gaps
  std::vector<AdamWTensor> tensors;  // only grad, numel, first_block and dtype are set
  int64_t blocks() const;
};

}  // namespace fusedops::adamw
