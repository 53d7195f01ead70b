// AdamW's operators: their schemas, argument checks and Meta kernels.

#include <torch/library.h>

#include "csrc/ops/adamw/operators.h"

namespace fusedops::adamw {
namespace {

constexpr const char* kOp = "adamw_step";

void check_count(const char* name, size_t expected, size_t got) {
  TORCH_CHECK(got == expected, kOp, ": ", name, " must have ", expected, " elements, got ", got);
}

void check_like(const char* name, const Tensor& t, const Tensor& param, c10::ScalarType dtype) {
  TORCH_CHECK(t.scalar_type() == dtype && t.device() == param.device() &&
                  t.sym_sizes() == param.sym_sizes(),
              kOp, ": ", name, " must be ", describe(dtype, param.sym_sizes()), " on ",
              param.device(), " like its parameter, got ", describe(t), " on ", t.device());
}

void check_state(const char* name, const Tensor& t, const Tensor& param, c10::ScalarType dtype,
                 const c10::SymInt& numel) {
  TORCH_CHECK(t.scalar_type() == dtype && t.device() == param.device() && t.sym_numel() == numel &&
                  t.is_contiguous(),
              kOp, ": ", name, " must be ", describe(dtype, {numel}), " on ", param.device(),
              ", got ", describe(t), " on ", t.device());
}

// exp_avg_sq's dtype for an exp_avg: float32, bfloat16, or uint8 beside int8.
c10::ScalarType square_dtype(const Tensor& exp_avg) {
  const auto dtype = exp_avg.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kChar, kOp,
              ": exp_avgs must be float32, bfloat16 or int8, got ", describe(exp_avg));
  return dtype == at::kChar ? at::kByte : dtype;
}

void check_scalar(const char* name, const OptionalTensor& t, const Tensor& param) {
  TORCH_CHECK(!is_defined(t) || (t->scalar_type() == at::kFloat && t->sym_numel() == 1 &&
                                 t->device() == param.device()),
              kOp, ": ", name, " must be a float32 scalar on ", param.device(), ", got ",
              describe(*t), " on ", t->device());
}

void check_gradients(const char* op, at::TensorList grads) {
  TORCH_CHECK(!grads.empty(), op, ": grads must have a tensor, got none");
  for (const auto& grad : grads) {
    const auto dtype = grad.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, op,
                ": grads must be float32, float16 or bfloat16, got ", describe(grad));
    TORCH_CHECK(grad.device() == grads[0].device(), op, ": grads must be on one device, got ",
                grad.device(), " and ", grads[0].device());
  }
}

void check_squares(const char* op, const Tensor& squares, const Tensor& like) {
  TORCH_CHECK(squares.scalar_type() == at::kDouble && squares.sym_numel() == kSquareParts &&
                  squares.is_contiguous() && squares.device() == like.device(),
              op, ": squares must be float64 [", kSquareParts, "] on ", like.device(), ", got ",
              describe(squares), " on ", squares.device());
}

}  // namespace

void adamw_check(const AdamWArguments& a) {
  const auto count = a.params.size();
  check_count("grads", count, a.grads.size());
  check_count("exp_avgs", count, a.exp_avgs.size());
  check_count("exp_avg_sqs", count, a.exp_avg_sqs.size());
  check_count("steps", count, a.steps.size());
  check_count("kinds", AdamWKind::count * count, a.kinds.size());
  const auto groups = static_cast<int64_t>(a.options.size() / AdamWOption::count);
  check_count("options", groups * AdamWOption::count, a.options.size());
  if (!a.lrs.empty()) check_count("lrs", groups, a.lrs.size());
  size_t with_amsgrad = 0, with_scales = 0, with_remainder = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto& param = a.params[i];
    const auto dtype = param.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, kOp,
                ": params must be float32, float16 or bfloat16, got ", describe(param));
    TORCH_CHECK(param.device() == a.params[0].device(), kOp, ": params must be on one device, got ",
                param.device(), " and ", a.params[0].device());
    check_like("grads", a.grads[i], param, dtype);
    check_like("exp_avgs", a.exp_avgs[i], param, a.exp_avgs[i].scalar_type());
    check_like("exp_avg_sqs", a.exp_avg_sqs[i], param, square_dtype(a.exp_avgs[i]));
    check_scalar("steps", a.steps[i], param);
    const auto kind = a.kinds.slice(AdamWKind::count * i, AdamWKind::count);
    const auto group = kind[AdamWKind::group], rounding = kind[AdamWKind::rounding];
    const auto row = kind[AdamWKind::row] == 0 ? param.numel() : kind[AdamWKind::row];
    TORCH_CHECK(0 <= group && group < groups, kOp, ": kinds must name one of ", groups,
                " groups, got ", group);
    TORCH_CHECK(0 <= rounding && rounding <= 2 && (rounding < 2 || dtype == at::kBFloat16), kOp,
                ": kinds must name a rounding 0 to 2, 2 with bfloat16 alone, got ", rounding,
                " with ", describe(param));
    TORCH_CHECK(row == param.numel() || (row > 0 && param.numel() % row == 0), kOp,
                ": kinds must name a row that divides ", describe(param), ", got ", row);
    if (a.options[group * AdamWOption::count + AdamWOption::amsgrad] != 0) {
      TORCH_CHECK(with_amsgrad < a.max_exp_avg_sqs.size(), kOp,
                  ": max_exp_avg_sqs must have one of each tensor with amsgrad, got ",
                  a.max_exp_avg_sqs.size());
      check_like("max_exp_avg_sqs", a.max_exp_avg_sqs[with_amsgrad++], param, at::kFloat);
    }
    if (a.exp_avgs[i].scalar_type() == at::kChar) {
      TORCH_CHECK(with_scales + 2 <= a.scales.size(), kOp,
                  ": scales must have two of each tensor with int8 moments, got ", a.scales.size());
      const auto blocks = param.numel() == 0 ? 0 : param.numel() / row * blocks_of_row(row);
      check_state("scales", a.scales[with_scales++], param, at::kFloat, blocks);
      check_state("scales", a.scales[with_scales++], param, at::kFloat, blocks);
    }
    if (rounding == 2) {
      TORCH_CHECK(with_remainder < a.remainders.size(), kOp,
                  ": remainders must have one of each tensor with rounding 2, got ",
                  a.remainders.size());
      check_like("remainders", a.remainders[with_remainder++], param, at::kShort);
    }
  }
  check_count("max_exp_avg_sqs", with_amsgrad, a.max_exp_avg_sqs.size());
  check_count("scales", with_scales, a.scales.size());
  check_count("remainders", with_remainder, a.remainders.size());
  if (count == 0) return;
  for (const auto& lr : a.lrs) check_scalar("lrs", lr, a.params[0]);
  check_scalar("grad_scale", a.grad_scale, a.params[0]);
  check_scalar("found_inf", a.found_inf, a.params[0]);
  if (is_defined(a.squares)) check_squares(kOp, *a.squares, a.params[0]);
}

Tensor adamw_squares_output(at::TensorList grads) {
  check_gradients("adamw_squares", grads);
  return at::empty({kSquareParts}, grads[0].options().dtype(at::kDouble));
}

void adamw_scale_check(at::TensorList grads, const Tensor& squares, double) {
  check_gradients("adamw_scale", grads);
  check_squares("adamw_scale", squares, grads[0]);
  for (const auto& grad : grads) {
    TORCH_CHECK(grad.is_non_overlapping_and_dense(),
                "adamw_scale: grads must not overlap or have gaps, got ", describe(grad),
                " with strides ", grad.strides());
  }
}

TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("adamw_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs,"
        " Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] steps, Tensor(e!)[] max_exp_avg_sqs,"
        " Tensor(f!)[] scales, Tensor(g!)[] remainders, int[] kinds, float[] options,"
        " Tensor[] lrs, int seed, Tensor? squares=None, float max_grad_norm=0.,"
        " Tensor? grad_scale=None, Tensor? found_inf=None, Tensor(h!)? host_table=None,"
        " Tensor(i!)? table=None) -> ()",
        tags);
  m.def("adamw_squares(Tensor[] grads) -> Tensor", tags);
  m.def("adamw_scale(Tensor(a!)[] grads, Tensor squares, float max_norm) -> ()", tags);
}

TORCH_LIBRARY_IMPL(fusedops, Meta, m) {
  m.impl("adamw_step", flat<adamw_check>);
  m.impl("adamw_squares", adamw_squares_output);
  m.impl("adamw_scale", adamw_scale_check);
}

}  // namespace fusedops::adamw
