// What a row of logits adds to the loss, and what its gradient is made of. Formulas:
// csrc/cross_entropy.h.
#pragma once

#include <ATen/Functions.h>

#include <cmath>
#include <limits>

#include "csrc/cpu/isa/cross_entropy.h"
#include "csrc/ops/cross_entropy/cross_entropy.h"

namespace fusedops::cpu {

// The targets of rows, and the weights of the classes.
class Targets {
 public:
  // Raises IndexError for a target that is no class.
  Targets(const char* op, const Tensor& target, const OptionalTensor& weight, int64_t classes,
          int64_t ignore_index)
      : target_(target.contiguous()),
        weight_(given(weight) ? weight->to(at::kFloat).contiguous() : Tensor()),
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
                        ignore_index, ", got ", data_[row], " in row ", row);
      total_ += weight_of(row);
    }
  }

  int64_t operator[](int64_t row) const { return data_[row]; }
  bool ignored(int64_t row) const { return data_[row] == ignore_index_; }
  double weight_of(int64_t row) const { return weights_ == nullptr ? 1 : weights_[data_[row]]; }
  const float* weights() const { return weights_; }
  double all() const { return all_; }      // sum of the w_c
  double total() const { return total_; }  // sum of the w_t

 private:
  Tensor target_, weight_;
  const int64_t* data_;
  const float* weights_ = nullptr;
  int64_t ignore_index_;
  double all_, total_ = 0;
};

// The formulas of one call: what is the same for all rows, and then for one.
class RowFormula {
 public:
  RowFormula(const CrossEntropyOptions& options, const Targets& targets, int64_t classes)
      : options_(options), targets_(targets), share_(options.label_smoothing / classes) {}

  bool weighted() const { return share_ != 0; }  // whether sums of w_c z_c are needed

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

// The gradient of each row's loss, from that of the whole. Where no target counts it is 0.
class RowGradients {
 public:
  RowGradients(const Tensor& grad, const CrossEntropyOptions& options, double total)
      : rows_(grad.to(at::kDouble).contiguous()), per_row_(options.is(Reduction::none)) {
    data_ = rows_.const_data_ptr<double>();
    if (options.is(Reduction::mean)) factor_ = total == 0 ? 0 : 1 / total;
  }

  double operator[](int64_t row) const { return data_[per_row_ ? row : 0] * factor_; }

 private:
  Tensor rows_;
  const double* data_;
  bool per_row_;
  double factor_ = 1;
};

// Fills loss and total. row_losses: float64, 0 where the target is ignored.
inline void reduce(const Tensor& row_losses, const CrossEntropyOptions& options, double total_of,
                   const Tensor& loss, const Tensor& total) {
  total.fill_(total_of);
  if (options.is(Reduction::none)) {
    loss.copy_(row_losses);
    return;
  }
  const auto* const rows = row_losses.const_data_ptr<double>();
  double sum = 0;
  for (int64_t row = 0; row < row_losses.numel(); ++row) sum += rows[row];
  loss.copy_(at::scalar_tensor(options.is(Reduction::mean) ? sum / total_of : sum, at::kDouble));
}

}  // namespace fusedops::cpu
