// Builds AdamW's kernel arguments from tensors, and copies tensors that a kernel cannot take.

#include <ATen/Functions.h>

#include "csrc/ops/adamw/operators.h"

namespace fusedops::adamw {
namespace {

int64_t all_blocks(const std::vector<AdamWTensor>& tensors) {
  return tensors.empty() ? 0 : tensors.back().first_block + blocks_of(tensors.back());
}

Moments moments_of(const Tensor& exp_avg) {
  switch (exp_avg.scalar_type()) {
    case at::kFloat: return Moments::float32;
    case at::kBFloat16: return Moments::bfloat16;
    default: return Moments::int8;
  }
}

// Whether a parameter's states have its memory layout, so that elements can be processed in memory
// order. Elements that share a scale, and random numbers, need the indices' order (`ordered`).
bool same_layout(const Tensor& param, std::initializer_list<const Tensor*> others, bool ordered) {
  bool contiguous = param.is_contiguous(), same = param.is_non_overlapping_and_dense();
  for (const auto* t : others) {
    contiguous = contiguous && t->is_contiguous();
    same = same && t->strides() == param.strides();
  }
  return contiguous || (same && !ordered);
}

}  // namespace

// t itself if a kernel can take it, or a contiguous copy.
Tensor AdamWTable::laid_out(const Tensor& t, bool as_is, bool written) {
  if (as_is || t.is_contiguous()) return t;
  kept_.push_back(t.contiguous());
  if (written) copies_.emplace_back(t, kept_.back());
  return kept_.back();
}

AdamWTable::AdamWTable(const AdamWArguments& a) {
  using Option = AdamWOption;
  groups.reserve(a.options.size() / Option::count);
  for (size_t i = 0; i < a.options.size(); i += Option::count) {
    const auto* const o = &a.options[i];
    const auto* const lr =
        a.lrs.empty() ? nullptr : a.lrs[i / Option::count].const_data_ptr<float>();
    groups.push_back({o[Option::lr], o[Option::beta1], o[Option::beta2], o[Option::eps],
                      o[Option::weight_decay], lr, o[Option::maximize] != 0,
                      o[Option::amsgrad] != 0, o[Option::bounded] != 0});
  }

  tensors.reserve(a.params.size());
  size_t with_amsgrad = 0, with_scales = 0, with_remainder = 0;
  int64_t first_block = 0;
  for (size_t i = 0; i < a.params.size(); ++i) {
    const auto *const param = &a.params[i], *const grad = &a.grads[i];
    const auto *const m = &a.exp_avgs[i], *const v = &a.exp_avg_sqs[i];
    AdamWTensor row{};
    const auto kind = a.kinds.slice(AdamWKind::count * i, AdamWKind::count);
    row.group = static_cast<int32_t>(kind[AdamWKind::group]);
    row.rounding = static_cast<Rounding>(kind[AdamWKind::rounding]);
    row.index = kind[AdamWKind::index];
    row.moments = moments_of(*m);
    const Tensor* const most =
        groups[row.group].amsgrad ? &a.max_exp_avg_sqs[with_amsgrad++] : param;
    const Tensor* const rest =
        row.rounding == Rounding::remainder ? &a.remainders[with_remainder++] : param;
    const bool ordered = row.moments != Moments::float32 || row.rounding == Rounding::stochastic;
    const bool as_is = same_layout(*param, {grad, m, v, most, rest}, ordered);
    row.param = laid_out(*param, as_is, true).mutable_data_ptr();
    row.grad = laid_out(*grad, as_is, false).const_data_ptr();
    row.exp_avg = laid_out(*m, as_is, true).mutable_data_ptr();
    row.exp_avg_sq = laid_out(*v, as_is, true).mutable_data_ptr();
    if (most != param) {
      row.max_exp_avg_sq = laid_out(*most, as_is, true).mutable_data_ptr<float>();
    }
    if (rest != param) row.remainder = laid_out(*rest, as_is, true).mutable_data_ptr<int16_t>();
    if (row.moments == Moments::int8) {
      row.exp_avg_scale = a.scales[with_scales++].mutable_data_ptr<float>();
      row.exp_avg_sq_scale = a.scales[with_scales++].mutable_data_ptr<float>();
    }
    row.step = a.steps[i].mutable_data_ptr<float>();
    row.numel = param->numel();
    row.row = kind[AdamWKind::row] == 0 ? row.numel : kind[AdamWKind::row];
    row.first_key = kind[AdamWKind::first_key];
    row.dtype = dtype_of(*param);
    row.first_block = first_block;
    first_block += blocks_of(row);
    tensors.push_back(row);
  }
}

int64_t AdamWTable::blocks() const { return all_blocks(tensors); }

void AdamWTable::write_back() const {
  for (const auto& [to, from] : copies_) to.copy_(from);
}

GradientTable::GradientTable(at::TensorList grads) {
  tensors.reserve(grads.size());
  int64_t first_block = 0;
  for (const auto& grad : grads) {
    AdamWTensor row{};
    const bool dense = grad.is_non_overlapping_and_dense();
    if (!dense) kept.push_back(grad.contiguous());
    row.grad = (dense ? grad : kept.back()).const_data_ptr();
    row.numel = row.row = grad.numel();
    row.dtype = dtype_of(grad);
    row.first_block = first_block;
    first_block += blocks_of(row);
    tensors.push_back(row);
  }
}

int64_t GradientTable::blocks() const { return all_blocks(tensors); }

}  // namespace fusedops::adamw
