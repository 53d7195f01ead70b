// The gradients of the linear layer that computes the logits, summed over the logits' tiles.
//
// The gradient of a target's logit is far larger than the row's others. The input's gradient adds
// it last; otherwise each partial sum would be rounded at its size.
#pragma once

#include <vector>

#include "csrc/cpu/cross_entropy/tiles.h"

namespace fusedops::cpu::cross_entropy {

// into[j] += a rows[row, j] for j in [begin, end)
inline void add_row(float* into, float a, const Tensor& rows, int64_t row, int64_t begin,
                    int64_t end) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, rows.scalar_type(), "add_row", [&] {
    const auto* const from = rows.const_data_ptr<scalar_t>() + row * rows.stride(0);
    const int64_t stride = rows.stride(1);
    for (int64_t j = begin; j < end; ++j) into[j] += a * static_cast<float>(from[j * stride]);
  });
}

// The float32 sums of the requested gradients; the others are undefined. linear_weight covers all
// classes or the tile's.
struct Gradients {
  Tensor input, linear_weight, linear_bias;
  std::vector<float> targets;  // the gradient of each row's target's logit

  // Everything but the targets' logits' share of the input's and the weight's gradient.
  void add(const LogitProducts& products, const Problem& problem, const Tile& tile,
           const Tensor& weight) {
    const auto& g = tile.logits;
    const int64_t n = g.size(0), classes = g.size(1);
    if (linear_bias.defined()) {
      part_of(linear_bias, tile.first, classes).add_(g.sum(0, false, at::kFloat));
    }
    targets.resize(problem.rows);
    tile.take_targets(problem, targets);
    if (input.defined()) products.add(part_of(input, tile.from, n), g, weight);
    if (linear_weight.defined()) {
      products.add(part_of(linear_weight, tile.first, classes), g.t(),
                   part_of(products.input, tile.from, n));
    }
  }

  void add_targets_to_input(const Problem& problem, int64_t from, int64_t end) const {
    if (!input.defined()) return;
    auto* const dx = input.mutable_data_ptr<float>();
    at::parallel_for(from, end, 16, [&](int64_t begin, int64_t last) {
      for (int64_t row = begin; row < last; ++row) {
        add_row(dx + row * problem.features, targets[row], problem.linear_weight,
                problem.targets[row], 0, problem.features);
      }
    });
  }

  // Takes rows [from, end) whose target is among linear_weight's classes, which start at `first`.
  void add_targets_to_weight(const Problem& problem, int64_t from, int64_t end,
                             int64_t first) const {
    if (!linear_weight.defined()) return;
    auto* const dw = linear_weight.mutable_data_ptr<float>();
    at::parallel_for(0, problem.features, 64, [&](int64_t begin, int64_t last) {
      for (int64_t row = from; row < end; ++row) {
        const int64_t t = problem.targets[row] - first;
        if (t < 0 || t >= linear_weight.size(0)) continue;
        add_row(dw + t * problem.features, targets[row], problem.input, row, begin, last);
      }
    });
  }
};

// A sum for each requested gradient; undefined for the others.
inline Tensor float_zeros(const Tensor& gradient, at::IntArrayRef sizes) {
  if (!gradient.defined()) return gradient;
  return at::zeros(sizes, gradient.options().dtype(at::kFloat));
}

// Computes the gradients from the logits, which are made again. gradient_of_row: a row's
// LogitGradient.
template <class GradientOfRow>
void backward(const Problem& problem, const LogitProducts& products,
              const GradientOfRow& gradient_of_row, const LinearGradients& outputs) {
  const auto& [dinput, dlinear_weight, dlinear_bias] = outputs;
  Gradients gradients{float_zeros(dinput, problem.input.sizes()),
                      Tensor(),
                      float_zeros(dlinear_bias, {problem.classes}),
                      {}};
  const auto stripe =
      float_zeros(dlinear_weight, {std::min(kClasses, problem.classes), problem.features});
  each_tile(
      problem, products,
      [&](const Tile& tile, const Tensor& weight_tile) {
        if (stripe.defined()) gradients.linear_weight = stripe.narrow(0, 0, tile.logits.size(1));
        tile.make_gradients(problem, gradient_of_row);
        gradients.add(products, problem, tile, weight_tile);
      },
      [&](int64_t first, int64_t classes) {
        if (!stripe.defined()) return;
        gradients.add_targets_to_weight(problem, 0, problem.rows, first);
        dlinear_weight.narrow(0, first, classes).copy_(stripe.narrow(0, 0, classes));
        stripe.zero_();
      });
  gradients.add_targets_to_input(problem, 0, problem.rows);
  if (dinput.defined()) problem.put(gradients.input, dinput);
  if (dlinear_bias.defined()) dlinear_bias.copy_(gradients.linear_bias);
}

}  // namespace fusedops::cpu::cross_entropy
