// cross_entropy on CPUs: rows spread over threads.
//
// Memory traffic is the minimum. The forward reads the logits once. The backward reads them once
// and writes the gradient once. A forward with gradients reads a row from memory once, and a second
// time from cache.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "csrc/cpu/cross_entropy/rows.h"

namespace fusedops::cpu::cross_entropy {
namespace {

constexpr int64_t kGrain = 16384;  // approximate number of logits per task

// The rows of the logits, and of their gradient.
class LogitRows {
 public:
  LogitRows(const Tensor& input, const Targets& targets, const LogitMap& map)
      : rows_(input, input.size(1)), targets_(targets), map_(map), n_(input.size(1)) {}

  Logits operator[](int64_t row) const {
    const auto* const x = static_cast<const char*>(rows_.data());
    return {x + row * rows_.stride * rows_.tensor.element_size(),
            n_,
            dtype_of(rows_.tensor),
            targets_.weights(),
            targets_[row],
            map_};
  }

  void write_gradient(int64_t row, const LogitGradient& of, const Tensor& dinput) const {
    logit_gradients_for_isa()((*this)[row], of, place(row, dinput));
  }

  void write_zeros(int64_t row, const Tensor& dinput) const {
    std::memset(place(row, dinput), 0, n_ * dinput.element_size());
  }

 private:
  void* place(int64_t row, const Tensor& dinput) const {
    return static_cast<char*>(dinput.mutable_data_ptr()) + row * n_ * dinput.element_size();
  }

  Rows rows_;
  const Targets& targets_;
  LogitMap map_;
  int64_t n_;
};

template <class Function>
void each_row(const Tensor& input, const Function& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, input.size(1)));
  at::parallel_for(0, input.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

Loss cross_entropy_forward(const LossArguments& a) {
  const auto& [input, target, weight] = a.in;
  if (!has_kernel(input)) return cross_entropy_forward_reference(a);
  const auto outputs = cross_entropy_outputs(a);
  const auto& [loss, lse, total, dinput] = outputs;
  const bool with_gradient = a.with_gradient;
  const CrossEntropyOptions options(a.numbers);
  const Targets targets("cross_entropy", target, weight, input.size(1), options.ignore_index);
  const RowFormula formula(options, targets, input.size(1));
  const RowGradients ones(options, targets.total());
  const LogitRows logits(input, targets, options.map);
  std::vector<double> losses(input.size(0));
  auto* const lses = lse.mutable_data_ptr<double>();
  each_row(input, [&](int64_t row) {
    losses[row] = lses[row] = 0;
    if (targets.ignored(row)) {
      if (with_gradient) logits.write_zeros(row, dinput);
      return;
    }
    LogitSums sums;
    add_logits_for_isa()(logits[row], formula.sums(), sums);
    lses[row] = RowFormula::lse(sums);
    losses[row] = formula.loss(row, sums, lses[row]);
    if (with_gradient) {
      logits.write_gradient(row, formula.gradient(row, lses[row], ones[row]), dinput);
    }
  });
  reduce(losses, options, targets.total(), loss, total);
  return outputs;
}

Tensor cross_entropy_backward(const LossBackwardArguments& a) {
  const auto& [input, target, weight] = a.in;
  if (!has_kernel(input)) return cross_entropy_backward_reference(a);
  const auto dinput = cross_entropy_backward_outputs(a);
  const CrossEntropyOptions options(a.numbers);
  const Targets targets("cross_entropy", target, weight, input.size(1), options.ignore_index);
  const RowFormula formula(options, targets, input.size(1));
  const RowGradients gradients(a.grad, options, a.total.item<double>());
  const LogitRows logits(input, targets, options.map);
  const auto lses = a.lse.contiguous();
  const auto* const lse_of = lses.const_data_ptr<double>();
  each_row(input, [&](int64_t row) {
    if (targets.ignored(row)) return logits.write_zeros(row, dinput);
    logits.write_gradient(row, formula.gradient(row, lse_of[row], gradients[row]), dinput);
  });
  return dinput;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("cross_entropy_forward", flat<cross_entropy_forward>);
  m.impl("cross_entropy_backward", flat<cross_entropy_backward>);
}

}  // namespace fusedops::cpu::cross_entropy
