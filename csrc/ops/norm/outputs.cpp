// Checks of the arguments, and the outputs that the kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/norm/operators.h"

namespace fusedops {
namespace {

const char* operator_name(NormKind kind, bool add) {
  if (kind == NormKind::layer) return add ? "add_layer_norm" : "layer_norm";
  return add ? "add_rms_norm" : "rms_norm";
}

c10::SymIntArrayRef row_shape(const Tensor& x, int64_t dims) {
  return x.sym_sizes().slice(x.dim() - dims);
}

void check_row(const char* op, const char* name, const OptionalTensor& t, const char* like,
               const Tensor& x, int64_t dims) {
  if (!given(t)) return;
  check_floating(op, name, *t);
  check_same_device(op, name, *t, like, x);
  TORCH_CHECK(t->sym_sizes().equals(row_shape(x, dims)), op, ": ", name, " must have shape ",
              row_shape(x, dims), ", the end of ", like, "'s shape ", x.sym_sizes(), ", got ",
              describe(*t));
}

void check_residual(const char* op, const Tensor& x, const Tensor& residual) {
  check_floating(op, "residual", residual);
  check_same_device(op, "residual", residual, "x", x);
  TORCH_CHECK(residual.sym_sizes().equals(x.sym_sizes()), op, ": residual must be ", describe(x),
              " like x, got ", describe(residual));
}

void check_dropout(const char* op, double p, const OptionalTensor& seed, const char* like,
                   const Tensor& x) {
  TORCH_CHECK(p >= 0 && p <= 1, op, ": dropout_p must be in [0, 1], got ", p);
  TORCH_CHECK(p == 0 || (given(seed) && seed->scalar_type() == at::kLong && seed->dim() == 0), op,
              ": a dropout needs a seed, an int64 tensor with no dimensions");
  if (given(seed)) check_same_device(op, "seed", *seed, like, x);
}

void check_like_h(const char* name, const Tensor& t, const Tensor& h) {
  check_floating("norm_backward", name, t);
  check_same_device("norm_backward", name, t, "h", h);
  TORCH_CHECK(t.sym_sizes().equals(h.sym_sizes()), "norm_backward: ", name, " must have shape ",
              h.sym_sizes(), " like h, got ", describe(t));
}

// [rows] of a tensor whose last `dims` axes are normalised
c10::SymInt row_count(const Tensor& x, int64_t dims) {
  c10::SymInt rows = 1;
  for (int64_t i = 0; i < x.dim() - dims; ++i) rows = rows * x.sym_size(i);
  return rows;
}

}  // namespace

NormKind norm_kind(std::string_view kind) {
  if (kind == "layer") return NormKind::layer;
  if (kind == "rms") return NormKind::rms;
  TORCH_INTERNAL_ASSERT(kind == "rms_llama", "norm kind ", kind);
  return NormKind::rms_llama;
}

c10::ScalarType norm_base_dtype(const Tensor& x, c10::ScalarType h, const OptionalTensor& weight) {
  return given(weight) && weight->scalar_type() == h ? h : x.scalar_type();
}

void norm_check(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                const OptionalTensor& bias, int64_t dims, NormKind kind, double dropout_p,
                const OptionalTensor& seed) {
  const bool add = given(residual);
  const char* const op = operator_name(kind, add);
  const char* const name = add ? "x" : "input";
  check_floating(op, name, x);
  TORCH_CHECK(x.dim() >= dims, op, ": ", name, " must have at least ", dims,
              " dimensions to normalise, got ", describe(x));
  if (add) check_residual(op, x, *residual);
  check_row(op, "weight", weight, name, x, dims);
  check_row(op, "bias", bias, name, x, dims);
  check_dropout(op, dropout_p, seed, name, x);
}

NormForward norm_outputs(const Tensor& x, const OptionalTensor& residual,
                         const OptionalTensor& weight, const OptionalTensor& bias, int64_t dims,
                         double eps, std::string_view kind_name, double offset, double dropout_p,
                         const OptionalTensor& seed) {
  const auto kind = norm_kind(kind_name);
  const bool add = given(residual);
  norm_check(x, residual, weight, bias, dims, kind, dropout_p, seed);
  const auto h =
      add ? c10::promoteTypes(x.scalar_type(), residual->scalar_type()) : x.scalar_type();
  auto y = norm_base_dtype(x, h, weight);
  if (kind == NormKind::rms_llama && given(weight)) y = c10::promoteTypes(y, weight->scalar_type());
  const auto stats = x.options().dtype(at::kDouble);
  return {empty_contiguous(x, y), add ? empty_contiguous(x, h) : Tensor(),
          at::empty_symint({kind == NormKind::layer ? 2 : 1, row_count(x, dims)}, stats)};
}

NormBackward norm_backward_outputs(const Tensor& dy, const OptionalTensor& dh, const Tensor& h,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   const Tensor& stats, int64_t dims, std::string_view kind,
                                   double offset, double dropout_p, const OptionalTensor& seed,
                                   std::array<bool, 4> output_mask) {
  constexpr const char* op = "norm_backward";
  check_like_h("dy", dy, h);
  if (given(dh)) check_like_h("dh", *dh, h);
  check_row(op, "weight", weight, "h", h, dims);
  check_row(op, "bias", bias, "h", h, dims);
  check_dropout(op, dropout_p, seed, "h", h);
  check_same_device(op, "stats", stats, "h", h);
  const int64_t kept = norm_kind(kind) == NormKind::layer ? 2 : 1;
  TORCH_CHECK(stats.dim() == 2 && stats.scalar_type() == at::kDouble && stats.is_contiguous() &&
                  stats.sym_size(0) == kept && stats.sym_size(1) == row_count(h, dims),
              op, ": stats must be contiguous float64 [", kept, ", ", row_count(h, dims), "], got ",
              describe(stats));
  const auto row = [&](bool wanted, const OptionalTensor& t) {
    return wanted ? empty_contiguous(*t) : Tensor();
  };
  return {output_mask[0] ? empty_contiguous(h) : Tensor(),
          output_mask[1] ? empty_contiguous(h) : Tensor(), row(output_mask[2], weight),
          row(output_mask[3], bias)};
}

}  // namespace fusedops
