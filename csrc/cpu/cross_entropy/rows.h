// A row's loss and the factors of its gradient, from its sums over the logits. Formulas:
// csrc/kernels/cross_entropy.h.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "csrc/cpu/isa/cross_entropy.h"
#include "csrc/ops/cross_entropy/operators.h"

namespace fusedops::cpu::cross_entropy {

inline bool has_kernel(const Tensor& input) {
  return isa() != Isa::none && input.scalar_type() != at::kDouble;
}

// The rows' targets and the classes' weights.
class Targets {
 public:
  // Raises IndexError for a target that is not a class. live: the rows' numbers for that error, if
  // some rows are left out.
  Targets(const char* op, const Tensor& target, const OptionalTensor& weight, int64_t classes,
          int64_t ignore_index, const Tensor& live = {})
      : target_(target.contiguous()),
        weight_(is_defined(weight) ? weight->to(at::kFloat).contiguous() : Tensor()),
        ignore_index_(ignore_index) {
    data_ = target_.const_data_ptr<int64_t>();
    if (weight_.defined()) {
      weights_ = weight_.const_data_ptr<float>();
      all_ = weight_.sum(at::kDouble).item<double>();
    } else {
      all_ = static_cast<double>(classes);
    }
    for (int64_t row = 0; row < target_.numel(); ++row) {
      if (ignored(row)) continue;
      TORCH_CHECK_INDEX(0 <= data_[row] && data_[row] < classes, op,
                        ": target must be a class from 0 to ", classes - 1, " or ignore_index ",
                        ignore_index, ", got ", data_[row], " in row ",
                        live.defined() ? live.const_data_ptr<int64_t>()[row] : row);
      total_ += weight_of(row);
    }
  }

  int64_t operator[](int64_t row) const { return data_[row]; }
  bool ignored(int64_t row) const { return data_[row] == ignore_index_; }
  double weight_of(int64_t row) const { return weights_ == nullptr ? 1 : weights_[data_[row]]; }
  const float* weights() const { return weights_; }
  double all() const { return all_; }      // sum of w_c over the classes
  double total() const { return total_; }  // sum of w_t over the rows

 private:
  Tensor target_, weight_;
  const int64_t* data_;
  const float* weights_ = nullptr;
  int64_t ignore_index_;
  double all_, total_ = 0;
};

// The formulas of one call: factors that all rows share, then those of one row.
class RowFormula {
 public:
  RowFormula(const CrossEntropyOptions& options, const Targets& targets, int64_t classes)
      : options_(options), targets_(targets), share_(options.label_smoothing / classes) {}

  // The sums that `loss` needs.
  SumKind sums() const { return share_ != 0 ? SumKind::weighted : SumKind::plain; }

  static double lse(const LogitSums& sums) {
    if (sums.base == -std::numeric_limits<float>::infinity()) return std::nan("");
    return sums.base + std::log(sums.exponentials);
  }

  double loss(int64_t row, const LogitSums& sums, double lse) const {
    const double w = targets_.weight_of(row), sharp = 1 - options_.label_smoothing;
    double loss = sharp * w * (lse - sums.target);
    if (options_.z_loss != 0) loss += w * options_.z_loss * lse * lse;
    if (share_ != 0) loss += share_ * (targets_.all() * (lse - sums.origin) - sums.weighted);
    return loss;
  }

  // g: the gradient of the row's loss.
  LogitGradient gradient(int64_t row, double lse, double g) const {
    const double w = targets_.weight_of(row), sharp = 1 - options_.label_smoothing;
    return {lse, g * sharp * w, g * share_, targets_.all(), g * w * 2 * options_.z_loss * lse};
  }

 private:
  CrossEntropyOptions options_;
  const Targets& targets_;
  double share_;
};

// The gradient of each row's loss, from the whole loss's gradient.
class RowGradients {
 public:
  // For a whole loss whose gradient is 1.
  RowGradients(const CrossEntropyOptions& options, double total) {
    if (options.is(Reduction::mean)) factor_ = 1 / total;
  }

  RowGradients(const Tensor& grad, const CrossEntropyOptions& options, double total)
      : RowGradients(options, total) {
    if (options.is(Reduction::none)) {
      rows_ = grad.to(at::kDouble).contiguous();
      data_ = rows_.const_data_ptr<double>();
    } else {
      factor_ *= grad.item<double>();
    }
  }

  double operator[](int64_t row) const { return data_ == nullptr ? factor_ : data_[row]; }

 private:
  Tensor rows_;
  const double* data_ = nullptr;
  double factor_ = 1;
};

// Fills loss and total. row_losses: one per row, 0 if the target is ignored.
inline void reduce(const std::vector<double>& row_losses, const CrossEntropyOptions& options,
                   double total_of, const Tensor& loss, const Tensor& total) {
  *total.mutable_data_ptr<double>() = total_of;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, loss.scalar_type(), "reduce", [&] {
    auto* const to = loss.mutable_data_ptr<scalar_t>();
    if (options.is(Reduction::none)) {
      std::copy(row_losses.begin(), row_losses.end(), to);
      return;
    }
    double sum = std::accumulate(row_losses.begin(), row_losses.end(), 0.0);
    if (options.is(Reduction::mean)) sum = total_of == 0 ? std::nan("") : sum / total_of;
    *to = static_cast<scalar_t>(sum);
  });
}

}  // namespace fusedops::cpu::cross_entropy
