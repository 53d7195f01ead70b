// AdamW's step and gradient clipping on CPUs: a parallel loop over the blocks of all tensors calls
// the loops of csrc/cpu/isa/adamw.
//
// Memory traffic is the minimum: a step reads and writes the parameters and their moments, and
// reads the gradients; the sum of squares reads the gradients once more.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "csrc/cpu/isa/adamw/adamw.h"
#include "csrc/ops/adamw/operators.h"

namespace fusedops::cpu::adamw {
namespace {

constexpr int64_t kBlocks = 64;  // minimum number of blocks per task

void check_isa(const char* op) {
  TORCH_CHECK(isa() != Isa::none, op, ": this CPU has no AVX2, which its kernel needs");
}

// Splits blocks [begin, end) at the tensors' ends and calls body(tensor, begin, end) for each
// piece, with blocks numbered within their tensor.
template <class Body>
void each_piece(const std::vector<AdamWTensor>& tensors, int64_t begin, int64_t end,
                const Body& body) {
  const auto after = [](int64_t block, const AdamWTensor& t) { return block < t.first_block; };
  auto t = std::upper_bound(tensors.begin(), tensors.end(), begin, after) - 1;
  for (int64_t block = begin; block < end; ++t) {
    const int64_t first = block - t->first_block;
    const int64_t last = std::min(end - t->first_block, blocks_of(*t));
    body(t - tensors.begin(), first, last);
    block = std::max(block, t->first_block + last);
  }
}

double sum_of(const Tensor& squares) {
  const auto* const parts = squares.const_data_ptr<double>();
  return std::accumulate(parts, parts + kSquareParts, 0.0);
}

// The gradients' factor, and whether the step is skipped.
struct Scaling {
  float factor = 1;
  bool skip = false;

  explicit Scaling(const AdamWArguments& a) {
    double unscale = 1;
    if (is_defined(a.grad_scale)) unscale = 1.0 / *a.grad_scale->const_data_ptr<float>();
    if (is_defined(a.squares)) {
      const double norm = std::sqrt(sum_of(*a.squares)) * unscale;
      skip = !std::isfinite(norm);
      unscale *= std::min(1.0, a.max_grad_norm / (norm + 1e-6));
    }
    if (is_defined(a.found_inf)) skip = skip || *a.found_inf->const_data_ptr<float>() != 0;
    factor = static_cast<float>(unscale);
  }
};

// The values that a tensor's blocks share in a step.
struct Step {
  AdamWFactors factors;
  uint64_t key;
  float gradient_factor;
};

// Counts the step of every tensor. Most tensors are at the same step and share their factors.
std::vector<Step> counted(const AdamWTable& table, uint64_t seed, float factor) {
  std::vector<Step> steps;
  steps.reserve(table.tensors.size());
  const AdamWTensor* last = nullptr;
  for (const auto& t : table.tensors) {
    const auto& group = table.groups[t.group];
    const float number = *t.step += 1;
    if (last == nullptr || last->group != t.group || *last->step != number) {
      const double lr = group.lr_at == nullptr ? group.lr : *group.lr_at;
      steps.push_back({factors_of(group, lr, number), 0, group.maximize ? -factor : factor});
    } else {
      steps.push_back(steps.back());
    }
    steps.back().key = adamw_key(seed, static_cast<uint64_t>(number), t.index);
    last = &t;
  }
  return steps;
}

void adamw_step(const AdamWArguments& a) {
  check_isa("adamw_step");
  adamw_check(a);
  const AdamWTable table(a);
  const Scaling scaling(a);
  if (scaling.skip) return;
  const auto steps = counted(table, a.seed, scaling.factor);
  auto* const run = adamw_blocks_for_isa();
  at::parallel_for(0, table.blocks(), kBlocks, [&](int64_t begin, int64_t end) {
    each_piece(table.tensors, begin, end, [&](int64_t i, int64_t first, int64_t last) {
      run(table.tensors[i], steps[i].key, steps[i].factors, steps[i].gradient_factor, first, last);
    });
  });
  table.write_back();
}

// Calls body(grad, dtype, elements) for the gradients of blocks [begin, end).
template <class Body>
void each_gradient(const GradientTable& table, int64_t begin, int64_t end, const Body& body) {
  each_piece(table.tensors, begin, end, [&](int64_t i, int64_t first, int64_t last) {
    const auto& t = table.tensors[i];
    const int64_t from = first * kAdamWBlock, to = std::min(t.numel, last * kAdamWBlock);
    body(static_cast<const char*>(t.grad) + from * size_of(t.dtype), t.dtype, to - from);
  });
}

// The parts, and so the sum, do not depend on the number of threads.
Tensor adamw_squares(at::TensorList grads) {
  check_isa("adamw_squares");
  const auto squares = adamw_squares_output(grads);
  const GradientTable gradients(grads);
  auto* const sums = squares.mutable_data_ptr<double>();
  auto* const add = sum_of_squares_for_isa();
  const int64_t run = (gradients.blocks() + kSquareParts - 1) / kSquareParts;
  const int64_t grain = std::max<int64_t>(1, kBlocks / std::max<int64_t>(1, run));
  at::parallel_for(0, kSquareParts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      sums[part] = 0;
      each_gradient(gradients, part * run, std::min(gradients.blocks(), (part + 1) * run),
                    [&](const char* grad, Dtype dtype, int64_t n) {
                      add(grad, dtype, n, &sums[part]);
                    });
    }
  });
  return squares;
}

void adamw_scale(at::TensorList grads, const Tensor& squares, double max_norm) {
  check_isa("adamw_scale");
  adamw_scale_check(grads, squares, max_norm);
  const double factor = max_norm / (std::sqrt(sum_of(squares)) + 1e-6);
  if (factor >= 1) return;  // but not for NaN, which the gradients become, as in torch
  const GradientTable gradients(grads);
  auto* const scale = scale_in_place_for_isa();
  at::parallel_for(0, gradients.blocks(), kBlocks, [&](int64_t begin, int64_t end) {
    each_gradient(gradients, begin, end, [&](const char* grad, Dtype dtype, int64_t n) {
      scale(const_cast<char*>(grad), dtype, n, static_cast<float>(factor));
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("adamw_step", flat<adamw_step>);
  m.impl("adamw_squares", adamw_squares);
  m.impl("adamw_scale", adamw_scale);
}

}  // namespace fusedops::cpu::adamw
