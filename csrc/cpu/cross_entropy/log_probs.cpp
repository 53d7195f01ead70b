// linear_log_probs on CPUs: forward and backward take one pass each over the logits' tiles. The
// backward recomputes the logits. As in linear.cpp, a row's sums continue from tile to tile.

#include <torch/library.h>

#include <cmath>
#include <vector>

#include "csrc/cpu/cross_entropy/gradients.h"

namespace fusedops::cpu::cross_entropy {
namespace {

// A row's results, from its sums.
struct RowResult {
  double log_prob, entropy, lse, mean;
  bool top;

  // Differences from base come first: z_t, lse and mean may be large, and nearly equal.
  explicit RowResult(const LogitSums& sums)
      : lse(RowFormula::lse(sums)), top(sums.top && !std::isnan(lse)) {
    const double log_sum = std::log(sums.exponentials), moment = sums.moment / sums.exponentials;
    log_prob = std::isnan(lse) ? lse : sums.target - sums.base - log_sum;
    entropy = std::isnan(lse) ? lse : log_sum - moment;
    mean = sums.base + moment;
  }
};

// The outputs of all rows, zeros for ignored ones.
class Results {
 public:
  explicit Results(const LogProbsAndSums& outputs) : outputs_(outputs) {
    const auto& [log_probs, entropy, top1, lse, mean] = outputs;
    wide_ = at::zeros({2, lse.size(0)}, lse.options());
    lse.zero_();
    if (mean.defined()) mean.zero_();
    if (top1.defined()) top1.zero_();
  }

  void put(int64_t row, const RowResult& of) {
    const auto& [log_probs, entropy, top1, lse, mean] = outputs_;
    auto* const wide = wide_.mutable_data_ptr<double>();
    wide[row] = of.log_prob;
    wide[wide_.size(1) + row] = of.entropy;
    lse.mutable_data_ptr<double>()[row] = of.lse;
    if (mean.defined()) mean.mutable_data_ptr<double>()[row] = of.mean;
    if (top1.defined()) top1.mutable_data_ptr<bool>()[row] = of.top;
  }

  void finish() const {
    const auto& [log_probs, entropy, top1, lse, mean] = outputs_;
    log_probs.copy_(wide_[0]);
    if (entropy.defined()) entropy.copy_(wide_[1]);
  }

 private:
  const LogProbsAndSums& outputs_;
  Tensor wide_;  // log-probabilities and entropies before they are rounded
};

LogProbsAndSums linear_log_probs_forward(const LogProbArguments& a) {
  if (!has_kernel(a.in.input)) return linear_log_probs_forward_reference(a);
  const auto outputs = linear_log_probs_outputs(a);
  const Problem problem("linear_log_probs", a.in.loss_inputs(), a.numbers.options().loss_options());
  const LogitProducts products(problem.input, problem.linear_weight, problem.linear_bias);
  const auto kind =
      a.optional_outputs[0] || a.optional_outputs[1] ? SumKind::moment : SumKind::plain;
  std::vector<LogitSums> sums(problem.rows);
  each_tile(
      problem, products, [&](const Tile& tile, const Tensor&) { tile.add_to(problem, kind, sums); },
      [](int64_t, int64_t) {});
  Results results(outputs);
  for (int64_t i = 0; i < problem.rows; ++i) results.put(problem.row_of(i), RowResult(sums[i]));
  results.finish();
  return outputs;
}

// Each row's gradient of an output, [rows] float64; null if there is none.
struct RowGrads {
  Tensor rows;
  const double* data = nullptr;

  RowGrads(const Problem& problem, const OptionalTensor& of) {
    if (!is_defined(of)) return;
    rows = problem.gather(*of).to(at::kDouble).contiguous();
    data = rows.const_data_ptr<double>();
  }
  double operator[](int64_t row) const { return data == nullptr ? 0 : data[row]; }
};

LinearGradients linear_log_probs_backward(const LogProbBackwardArguments& a) {
  if (!has_kernel(a.in.input)) return linear_log_probs_backward_reference(a);
  const auto outputs = linear_log_probs_backward_outputs(a);
  const Problem problem("linear_log_probs", a.in.loss_inputs(), a.numbers.options().loss_options());
  const LogitProducts products(problem.input, problem.linear_weight, problem.linear_bias);
  const RowGrads log_prob_grads(problem, a.grad_log_probs), entropy_grads(problem, a.grad_entropy);
  const RowGrads lse(problem, a.lse), mean(problem, a.mean);
  const auto gradient_of_row = [&](int64_t row) {
    auto of = problem.formula.gradient(row, lse[row], -log_prob_grads[row]);
    of.entropy = entropy_grads[row];
    of.mean = mean[row];
    return of;
  };
  backward(problem, products, gradient_of_row, outputs);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("linear_log_probs_forward", flat<linear_log_probs_forward>);
  m.impl("linear_log_probs_backward", flat<linear_log_probs_backward>);
}

}  // namespace fusedops::cpu::cross_entropy
