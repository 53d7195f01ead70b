// Checks LayerNorm's and RMSNorm's arguments and allocates the outputs that their kernels fill.

#include <ATen/Functions.h>

#include "csrc/ops/checks.h"
#include "csrc/ops/norm/operators.h"

namespace fusedops::norm {
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
  if (!is_defined(t)) return;
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
  TORCH_CHECK(p == 0 || (is_defined(seed) && seed->scalar_type() == at::kLong && seed->dim() == 0),
              op, ": a dropout needs a seed, an int64 tensor with no dimensions");
  if (is_defined(seed)) check_same_device(op, "seed", *seed, like, x);
}

void check_like_h(const char* name, const Tensor& t, const Tensor& h) {
  check_floating("norm_backward", name, t);
  check_same_device("norm_backward", name, t, "h", h);
  TORCH_CHECK(t.sym_sizes().equals(h.sym_sizes()), "norm_backward: ", name, " must have shape ",
              h.sym_sizes(), " like h, got ", describe(t));
}

// Returns the number of rows of a tensor whose last `dims` axes are normalized.
c10::SymInt row_count(const Tensor& x, int64_t dims) {
  c10::SymInt rows = 1;
  for (int64_t i = 0; i < x.dim() - dims; ++i) rows = rows * x.sym_size(i);
  return rows;
}

}  // namespace

c10::ScalarType norm_base_dtype(const Tensor& x, c10::ScalarType h, const OptionalTensor& weight) {
  return is_defined(weight) && weight->scalar_type() == h ? h : x.scalar_type();
}

void norm_check(const NormForwardArguments& a) {
  const bool add = is_defined(a.residual);
  const char* const op = operator_name(a.kind, add);
  const char* const name = add ? "x" : "input";
  check_floating(op, name, a.x);
  TORCH_CHECK(a.x.dim() >= a.dims, op, ": ", name, " must have at least ", a.dims,
              " dimensions to normalise, got ", describe(a.x));
  if (add) check_residual(op, a.x, *a.residual);
  check_row(op, "weight", a.weight, name, a.x, a.dims);
  check_row(op, "bias", a.bias, name, a.x, a.dims);
  check_dropout(op, a.dropout_p, a.seed, name, a.x);
}

NormForward norm_outputs(const NormForwardArguments& a) {
  norm_check(a);
  const bool add = is_defined(a.residual);
  const auto& x = a.x;
  const auto h =
      add ? c10::promoteTypes(x.scalar_type(), a.residual->scalar_type()) : x.scalar_type();
  auto y = norm_base_dtype(x, h, a.weight);
  if (a.kind == NormKind::rms_llama && is_defined(a.weight)) {
    y = c10::promoteTypes(y, a.weight->scalar_type());
  }
  return {empty_contiguous(x, y), add ? empty_contiguous(x, h) : Tensor(), norm_stats(a)};
}

NormQuantized norm_quantized_outputs(const NormQuantizedArguments& q) {
  const auto& a = q.norm;
  norm_check(a);
  const bool add = is_defined(a.residual);
  const char* const op = operator_name(a.kind, add);
  TORCH_CHECK(a.kind != NormKind::layer && !is_defined(a.bias), op, " has no output_format");
  TORCH_CHECK(a.dims == 1, op, ": output_format needs one normalised dimension, got ",
              row_shape(a.x, a.dims));
  const auto [codes, scale] = quantized_rows_outputs(op, a.x, a.x.sym_sizes().vec(), q.format);
  const auto h =
      add ? empty_contiguous(a.x, c10::promoteTypes(a.x.scalar_type(), a.residual->scalar_type()))
          : Tensor();
  return {codes, scale, h};
}

Tensor norm_stats(const NormForwardArguments& a) {
  return at::empty_symint({a.kind == NormKind::layer ? 2 : 1, row_count(a.x, a.dims)},
                          a.x.options().dtype(at::kDouble));
}

NormBackward norm_backward_outputs(const NormBackwardArguments& a) {
  constexpr const char* op = "norm_backward";
  const auto &h = a.h, &stats = a.stats;
  check_like_h("dy", a.dy, h);
  if (is_defined(a.dh)) check_like_h("dh", *a.dh, h);
  check_row(op, "weight", a.weight, "h", h, a.dims);
  check_row(op, "bias", a.bias, "h", h, a.dims);
  check_dropout(op, a.dropout_p, a.seed, "h", h);
  check_same_device(op, "stats", stats, "h", h);
  const int64_t kept = a.kind == NormKind::layer ? 2 : 1;
  TORCH_CHECK(stats.dim() == 2 && stats.scalar_type() == at::kDouble && stats.is_contiguous() &&
                  stats.sym_size(0) == kept && stats.sym_size(1) == row_count(h, a.dims),
              op, ": stats must be contiguous float64 [", kept, ", ", row_count(h, a.dims),
              "], got ", describe(stats));
  const auto like = [&](bool needs_grad, const OptionalTensor& t) {
    return needs_grad ? empty_contiguous(*t) : Tensor();
  };
  return {like(a.output_mask[0], h), like(a.output_mask[1], h), like(a.output_mask[2], a.weight),
          like(a.output_mask[3], a.bias)};
}

}  // namespace fusedops::norm
