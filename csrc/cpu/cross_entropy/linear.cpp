// linear_cross_entropy on CPUs: torch's products with loops over the logits between them, a tile
// [rows, classes] at a time.
//
// The forward visits all tiles of a stripe of classes in turn, so that the stripe's weights are
// read and converted once; each row's sums continue from tile to tile. The backward does the same
// and recomputes the logits: the weight's gradient is complete when the stripe is. A forward that
// computes gradients needs a row's sum before its gradient, so it takes a few whole rows at a time
// and adds to the weight's gradient in place, in float32.

#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "csrc/cpu/cross_entropy/gradients.h"

namespace fusedops::cpu::cross_entropy {
namespace {

// Computes the losses and lse of rows [from, end).
void finish(const Problem& problem, const std::vector<LogitSums>& sums, int64_t from, int64_t end,
            std::vector<double>& losses, double* lse) {
  for (int64_t row = from; row < end; ++row) {
    lse[row] = RowFormula::lse(sums[row]);
    losses[row] = problem.formula.loss(row, sums[row], lse[row]);
  }
}

// How many rows at a time: an eighth of the logits, but at least 128, so that a pass over the
// weight's gradient costs less than its product, and no more logits than the weight has elements.
int64_t whole_rows(const Problem& problem) {
  constexpr int64_t kLeast = 128;
  const int64_t rows = std::clamp(problem.rows / 8, kLeast, std::max(problem.features, kLeast));
  return std::clamp<int64_t>(rows, 1, std::max<int64_t>(problem.rows, 1));
}

// Computes losses, lse and gradients, a few whole rows at a time.
void make_whole_rows(const Problem& problem, const LogitProducts& products, Gradients gradients,
                     std::vector<double>& losses, double* lse) {
  const RowGradients ones(problem.options, problem.targets.total());
  const int64_t step = whole_rows(problem);
  const auto buffer = at::empty({step, problem.classes}, products.input.options());
  std::vector<LogitSums> sums(problem.rows);
  for (int64_t from = 0; from < problem.rows; from += step) {
    const int64_t rows = std::min(step, problem.rows - from);
    const auto each_stripe = [&](const auto& f) {
      for (int64_t first = 0; first < problem.classes; first += kClasses) {
        const int64_t classes = std::min(kClasses, problem.classes - first);
        const auto all = part_of(buffer, 0, rows);
        const auto logits = classes == problem.classes ? all : all.narrow(1, first, classes);
        f(Tile{logits, from, first}, products.weight(first, classes));
      }
    };
    each_stripe([&](const Tile& tile, const Tensor& weight) {
      products.make(tile.logits, from, tile.first, weight);
      tile.add_to(problem, problem.formula.sums(), sums);
    });
    finish(problem, sums, from, from + rows, losses, lse);
    each_stripe([&](const Tile& tile, const Tensor& weight) {
      tile.make_gradients(problem, [&](int64_t row) {
        return problem.formula.gradient(row, lse[row], ones[row]);
      });
      gradients.add(products, problem, tile, weight);
    });
    gradients.add_targets_to_input(problem, from, from + rows);
    gradients.add_targets_to_weight(problem, from, from + rows, 0);
  }
}

LinearLoss linear_cross_entropy_forward(const LinearLossArguments& a) {
  const auto& linear_weight = a.in.linear_weight;
  if (!has_kernel(a.in.input)) return linear_cross_entropy_forward_reference(a);
  const auto outputs = linear_cross_entropy_outputs(a);
  const auto& [loss, lse, total, dinput, dlinear_weight, dlinear_bias] = outputs;
  const Problem problem("linear_cross_entropy", a.in, CrossEntropyOptions(a.numbers));
  const LogitProducts products(problem.input, linear_weight, problem.linear_bias);
  std::vector<double> losses(problem.rows);
  const auto row_lse = problem.live.defined() ? at::empty({problem.rows}, lse.options()) : lse;
  auto* const lses = row_lse.mutable_data_ptr<double>();
  if (a.gradients == std::array<bool, 3>{}) {
    std::vector<LogitSums> sums(problem.rows);
    each_tile(
        problem, products,
        [&](const Tile& tile, const Tensor&) {
          tile.add_to(problem, problem.formula.sums(), sums);
        },
        [](int64_t, int64_t) {});
    finish(problem, sums, 0, problem.rows, losses, lses);
  } else {
    const bool in_place = linear_weight.scalar_type() == at::kFloat && dlinear_weight.defined();
    const Gradients gradients{float_zeros(dinput, problem.input.sizes()),
                              in_place ? dlinear_weight.zero_()
                                       : float_zeros(dlinear_weight, linear_weight.sizes()),
                              float_zeros(dlinear_bias, {problem.classes}),
                              {}};
    make_whole_rows(problem, products, gradients, losses, lses);
    if (dinput.defined()) problem.put(gradients.input, dinput);
    if (dlinear_weight.defined() && !in_place) dlinear_weight.copy_(gradients.linear_weight);
    if (dlinear_bias.defined()) dlinear_bias.copy_(gradients.linear_bias);
  }
  if (problem.live.defined()) problem.put(row_lse, lse);
  if (problem.options.is(Reduction::none)) losses = problem.scatter(losses, a.in.target.numel());
  reduce(losses, problem.options, problem.targets.total(), loss, total);
  return outputs;
}

LinearGradients linear_cross_entropy_backward(const LinearLossBackwardArguments& a) {
  if (!has_kernel(a.in.input)) return linear_cross_entropy_backward_reference(a);
  const auto outputs = linear_cross_entropy_backward_outputs(a);
  const Problem problem("linear_cross_entropy", a.in, CrossEntropyOptions(a.numbers));
  const LogitProducts products(problem.input, a.in.linear_weight, problem.linear_bias);
  const RowGradients row_gradients(problem.gather(a.grad), problem.options, a.total.item<double>());
  const auto row_lse = problem.gather(a.lse).contiguous();
  const auto* const lses = row_lse.const_data_ptr<double>();
  const auto gradient_of_row = [&](int64_t row) {
    return problem.formula.gradient(row, lses[row], row_gradients[row]);
  };
  backward(problem, products, gradient_of_row, outputs);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("linear_cross_entropy_forward", flat<linear_cross_entropy_forward>);
  m.impl("linear_cross_entropy_backward", flat<linear_cross_entropy_backward>);
}

}  // namespace fusedops::cpu::cross_entropy
