// The tiles of linear_cross_entropy's and linear_log_probs' logits: torch computes a tile
// [rows, classes], and loops over the logits follow. Rows with an ignored target are skipped.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "csrc/cpu/cross_entropy/products.h"
#include "csrc/cpu/cross_entropy/rows.h"

namespace fusedops::cpu::cross_entropy {

constexpr int64_t kRows = 1024, kClasses = 1024;  // per tile, 4 MiB

// The rows whose target is not ignored, and their part of the call.
struct Problem {
  CrossEntropyOptions options;
  Tensor live;  // the rows' indices; undefined: all rows
  Tensor input, target, linear_weight, linear_bias;
  int64_t rows, classes, features;
  Targets targets;
  RowFormula formula;

  Problem(const char* op, const LinearLossInputs& in, const CrossEntropyOptions& options_)
      : options(options_),
        live(live_rows(in.target, options.ignore_index)),
        input(gather(in.input)),
        target(gather(in.target)),
        linear_weight(in.linear_weight),
        linear_bias(is_defined(in.linear_bias) ? in.linear_bias->to(at::kFloat) : Tensor()),
        rows(target.numel()),
        classes(linear_weight.size(0)),
        features(linear_weight.size(1)),
        targets(op, target, in.weight, classes, options.ignore_index, live),
        formula(options, targets, classes) {}

  Tensor gather(const Tensor& t) const {
    return live.defined() && t.dim() > 0 ? t.index_select(0, live) : t;
  }

  // The place of one of these rows among all rows.
  int64_t row_of(int64_t i) const { return live.defined() ? live.const_data_ptr<int64_t>()[i] : i; }

  // Scatters to all rows, with zeros for ignored ones.
  void put(const Tensor& of, const Tensor& all) const {
    if (!live.defined()) {
      all.copy_(of);
    } else {
      all.zero_().index_copy_(0, live, of.to(all.scalar_type()));
    }
  }

  std::vector<double> scatter(const std::vector<double>& of, int64_t rows) const {
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

  void add_to(const Problem& problem, SumKind kind, std::vector<LogitSums>& sums) const {
    each_row([&](int64_t i) { add_logits_for_isa()(row(i, problem), kind, sums[from + i]); });
  }

  // Overwrites the logits with their gradients. gradient_of_row: a row's LogitGradient.
  template <class GradientOfRow>
  void make_gradients(const Problem& problem, const GradientOfRow& gradient_of_row) const {
    each_row([&](int64_t i) {
      auto* const over = static_cast<char*>(logits.mutable_data_ptr());
      logit_gradients_for_isa()(row(i, problem), gradient_of_row(from + i), over + i * row_bytes());
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
        auto& target_grad = g[i * logits.stride(0) + t];
        const float whole = target_grad;
        target_grad = whole / 4096;
        taken[from + i] = whole - static_cast<float>(target_grad);
      }
    });
  }

 private:
  int64_t row_bytes() const { return logits.stride(0) * logits.element_size(); }
};

// Calls f for every tile, one stripe of classes after another, and finish_stripe after each stripe.
template <class Function, class FinishStripe>
void each_tile(const Problem& problem, const LogitProducts& products, const Function& f,
               const FinishStripe& finish_stripe) {
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
    finish_stripe(first, classes);
  }
}

}  // namespace fusedops::cpu::cross_entropy
