// linear_cross_entropy on CPUs: torch's products with loops over the logits between them, a tile
// [rows, classes] at a time. Rows with an ignored target are skipped.
//
// The forward visits all tiles of a stripe of classes in turn, so that the stripe's weights are
// read and converted once; each row's sums continue from tile to tile. The backward does the same
// and recomputes the logits: the weight's gradient is complete when the stripe is. A forward that
// computes gradients needs a row's sum before its gradient, so it takes a few whole rows at a time
// and adds to the weight's gradient in place, in float32.
//
// The gradient of a target's logit is far larger than the row's others. The input's gradient adds
// it last; otherwise each partial sum would be rounded at its size.

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "csrc/cpu/cross_entropy/products.h"
#include "csrc/cpu/cross_entropy/rows.h"

namespace fusedops::cpu::cross_entropy {
namespace {

constexpr int64_t kRows = 1024, kClasses = 1024;  // per tile, 4 MiB

// The rows whose target is not ignored, and their part of the call.
struct Problem {
  CrossEntropyOptions options;
  Tensor live;  // the rows' indices; undefined: all rows
  Tensor input, target, linear_weight, linear_bias;
  int64_t rows, classes, features;
  Targets targets;
  RowFormula formula;

  Problem(const LinearLossInputs& in, const CrossEntropyOptions& options_)
      : options(options_),
        live(live_rows(in.target, options.ignore_index)),
        input(of_live(in.input)),
        target(of_live(in.target)),
        linear_weight(in.linear_weight),
        linear_bias(given(in.linear_bias) ? in.linear_bias->to(at::kFloat) : Tensor()),
        rows(target.numel()),
        classes(linear_weight.size(0)),
        features(linear_weight.size(1)),
        targets("linear_cross_entropy", target, in.weight, classes, options.ignore_index, live),
        formula(options, targets, classes) {}

  Tensor of_live(const Tensor& t) const {
    return live.defined() && t.dim() > 0 ? t.index_select(0, live) : t;
  }

  // Scatters to all rows, with zeros for ignored ones.

  void put(const Tensor& of, const Tensor& all) const {
    if (!live.defined()) {
      all.copy_(of);
    } else {
      all.zero_().index_copy_(0, live, of.to(all.scalar_type()));
    }
  }

  std::vector<double> of_all(const std::vector<double>& of, int64_t rows) const {
    if (!live.defined()) return of;
    std::vector<double> all(rows);
    const auto* const row = live.const_data_ptr<int64_t>();
    for (size_t i = 0; i < of.size(); ++i) all[row[i]] = of[i];
    return all;
  }

 private:
  static Tensor live_rows(const Tensor& target, int64_t ignore_index) {
    const auto all = target.contiguous();
    const auto* const data = all.const_data_ptr<int64_t>();
    if (std::find(data, data + all.numel(), ignore_index) == data + all.numel()) return {};
    return at::nonzero(all.ne(ignore_index)).squeeze(1);
  }
};

// Rows [from, from + count) of logits, and classes [first, first + n).
struct Tile {
  Tensor logits;
  int64_t from, first;

  Logits row(int64_t i, const Problem& problem) const {
    const auto* const x = static_cast<const char*>(logits.const_data_ptr());
    const auto* const weights = problem.targets.weights();
    return {x + i * row_bytes(),
            logits.size(1),
            dtype_of(logits),
            weights == nullptr ? nullptr : weights + first,
            problem.targets[from + i] - first,
            problem.options.map};
  }

  template <class Function>
  void each_row(const Function& f) const {
    at::parallel_for(0, logits.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) f(i);
    });
  }

  void add_to(const Problem& problem, std::vector<LogitSums>& sums) const {
    each_row([&](int64_t i) {
      add_logits_for_isa()(row(i, problem), problem.formula.weighted(), sums[from + i]);
    });
  }

  // Overwrites the logits with their gradients.
  void make_gradients(const Problem& problem, const double* lse,
                      const RowGradients& gradients) const {
    each_row([&](int64_t i) {
      const auto at = row(i, problem);
      const auto of = problem.formula.gradient(from + i, lse[from + i], gradients[from + i]);
      auto* const over = static_cast<char*>(logits.mutable_data_ptr());
      logit_gradients_for_isa()(at, of, over + i * row_bytes());
    });
  }

  // Moves the gradients of the targets' logits from the tile to `taken`, except a 4096th: 0 times
  // an infinite weight would be NaN.
  void take_targets(const Problem& problem, std::vector<float>& taken) const {
    AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, logits.scalar_type(), "take_targets", [&] {
      auto* const g = logits.mutable_data_ptr<scalar_t>();
      for (int64_t i = 0; i < logits.size(0); ++i) {
        const int64_t t = problem.targets[from + i] - first;
        if (t < 0 || t >= logits.size(1)) continue;
        auto& of_target = g[i * logits.stride(0) + t];
        const float whole = of_target;
        of_target = whole / 4096;
        taken[from + i] = whole - static_cast<float>(of_target);
      }
    });
  }

 private:
  int64_t row_bytes() const { return logits.stride(0) * logits.element_size(); }
};

// into[j] += a rows[row, j] for j in [begin, end)
void add_row(float* into, float a, const Tensor& rows, int64_t row, int64_t begin, int64_t end) {
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
Tensor float_zeros(const Tensor& gradient, at::IntArrayRef sizes) {
  if (!gradient.defined()) return gradient;
  return at::zeros(sizes, gradient.options().dtype(at::kFloat));
}

// Calls f for every tile, one stripe of classes after another, and of_stripe after each stripe.
template <class Function, class OfStripe>
void each_tile(const Problem& problem, const LogitProducts& products, const Function& f,
               const OfStripe& of_stripe) {
  const auto buffer =
      at::empty({std::min(kRows, problem.rows), std::min(kClasses, problem.classes)},
                products.input.options());
  for (int64_t first = 0; first < problem.classes; first += kClasses) {
    const int64_t classes = std::min(kClasses, problem.classes - first);
    const auto weight = products.weight(first, classes);
    for (int64_t from = 0; from < problem.rows; from += kRows) {
      const int64_t rows = std::min(kRows, problem.rows - from);
      const bool whole = rows == buffer.size(0) && classes == buffer.size(1);
      const Tile tile{whole ? buffer : buffer.as_strided({rows, classes}, {classes, 1}), from,
                      first};
      products.make(tile.logits, from, first, weight);
      f(tile, weight);
    }
    of_stripe(first, classes);
  }
}

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
      tile.add_to(problem, sums);
    });
    finish(problem, sums, from, from + rows, losses, lse);
    each_stripe([&](const Tile& tile, const Tensor& weight) {
      tile.make_gradients(problem, lse, ones);
      gradients.add(products, problem, tile, weight);
    });
    gradients.add_targets_to_input(problem, from, from + rows);
    gradients.add_targets_to_weight(problem, from, from + rows, 0);
  }
}

LinearLoss linear_cross_entropy_forward(const LinearLossArguments& a) {
  const auto& linear_weight = a.in.linear_weight;
  if (!has_kernel(a.in.input)) return linear_cross_entropy_composite(a);
  const auto outputs = linear_cross_entropy_outputs(a);
  const auto& [loss, lse, total, dinput, dlinear_weight, dlinear_bias] = outputs;
  const Problem problem(a.in, CrossEntropyOptions(a.numbers));
  const LogitProducts products(problem.input, linear_weight, problem.linear_bias);
  std::vector<double> losses(problem.rows);
  const auto row_lse = problem.live.defined() ? at::empty({problem.rows}, lse.options()) : lse;
  auto* const lses = row_lse.mutable_data_ptr<double>();
  if (a.gradients == std::array<bool, 3>{}) {
    std::vector<LogitSums> sums(problem.rows);
    each_tile(
        problem, products, [&](const Tile& tile, const Tensor&) { tile.add_to(problem, sums); },
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
  if (problem.options.is(Reduction::none)) losses = problem.of_all(losses, a.in.target.numel());
  reduce(losses, problem.options, problem.targets.total(), loss, total);
  return outputs;
}

LinearGradients linear_cross_entropy_backward(const LinearLossBackwardArguments& a) {
  if (!has_kernel(a.in.input)) return linear_cross_entropy_backward_composite(a);
  const auto outputs = linear_cross_entropy_backward_outputs(a);
  const auto& [dinput, dlinear_weight, dlinear_bias] = outputs;
  const Problem problem(a.in, CrossEntropyOptions(a.numbers));
  const LogitProducts products(problem.input, a.in.linear_weight, problem.linear_bias);
  const RowGradients row_gradients(problem.of_live(a.grad), problem.options,
                                   a.total.item<double>());
  const auto row_lse = problem.of_live(a.lse).contiguous();
  const auto* const lses = row_lse.const_data_ptr<double>();

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
        tile.make_gradients(problem, lses, row_gradients);
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
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("linear_cross_entropy_forward", flat<linear_cross_entropy_forward>);
  m.impl("linear_cross_entropy_backward", flat<linear_cross_entropy_backward>);
}

}  // namespace fusedops::cpu::cross_entropy
