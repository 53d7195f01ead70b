// LayerNorm and RMSNorm in ATen calls: runs if no kernel does, and in a double backward. Also has
// the operator that makes a dropout mask.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "csrc/ops/norm/operators.h"

namespace fusedops::norm {
namespace {

std::vector<int64_t> last_axes(int64_t dims) {
  std::vector<int64_t> axes(dims);
  for (int64_t i = 0; i < dims; ++i) axes[i] = i - dims;
  return axes;
}

Tensor scale_of(const Tensor& weight, double offset, c10::ScalarType accumulation) {
  const auto w = weight.to(accumulation);
  return offset == 0 ? w : w + offset;
}

// [rows, n], true for the elements that are kept. `dropout_reference` is the definition.
Tensor dropout_mask(const Tensor& seed, c10::SymInt rows, c10::SymInt n, double p) {
  constexpr int64_t low = 0xFFFFFFFF;
  const auto options = seed.options();
  const auto row = at::arange(c10::Scalar(rows), options).unsqueeze(-1);
  const auto zero = at::zeros_symint({rows, (n + 3) / 4}, options);
  Tensor c0 = zero + at::arange(c10::Scalar((n + 3) / 4), options);
  Tensor c1 = zero + row.bitwise_and(low), c2 = zero + row.__rshift__(32), c3 = zero;
  Tensor k0 = seed.bitwise_and(low), k1 = seed.__rshift__(32);
  const auto high_word = [&](const Tensor& t) { return t.__rshift__(32).bitwise_and(low); };
  for (int round = 0; round < 7; ++round) {
    const Tensor p0 = c0 * int64_t{0xD2511F53}, p1 = c2 * int64_t{0xCD9E8D57};
    c0 = high_word(p1).bitwise_xor(c1).bitwise_xor(k0);
    c2 = high_word(p0).bitwise_xor(c3).bitwise_xor(k1);
    c1 = p1.bitwise_and(low);
    c3 = p0.bitwise_and(low);
    k0 = (k0 + int64_t{0x9E3779B9}).bitwise_and(low);
    k1 = (k1 + int64_t{0xBB67AE85}).bitwise_and(low);
  }
  const Tensor words = at::stack({c0, c1, c2, c3}, -1).flatten(1).narrow_symint(1, 0, n);
  return words.ge(int64_t{dropout_threshold(p)});
}

Tensor dropout_mask_outputs(const Tensor& seed, c10::SymInt rows, c10::SymInt n, double p) {
  return at::empty_symint({std::move(rows), std::move(n)}, seed.options().dtype(at::kBool));
}

// x with dropout of probability p, by the mask of `dropout_reference`.
Tensor norm_dropout(const Tensor& x, double p, const OptionalTensor& seed, int64_t dims) {
  if (p == 0) return x;
  c10::SymInt rows = 1, n = 1;
  for (int64_t i = 0; i < x.dim(); ++i) (i < x.dim() - dims ? rows : n) *= x.sym_size(i);
  static const auto op = handle<decltype(dropout_mask)>("fusedops::dropout_mask");
  const auto keep = op.call(*seed, rows, n, p).view_symint(x.sym_sizes());
  return x * keep * dropout_scale(p);
}

}  // namespace

Tensor norm_accumulator(const Tensor& h) { return h.to(accumulation_dtype(h.scalar_type())); }

std::pair<Tensor, Tensor> norm_statistics(const Tensor& acc, int64_t dims, double eps,
                                          NormKind kind) {
  const auto axes = last_axes(dims);
  if (kind != NormKind::layer) {
    return {Tensor(), (acc.square().mean(axes, true) + eps).rsqrt()};
  }
  const auto [var, mean] = at::var_mean(acc, axes, std::optional<c10::Scalar>(0), true);
  return {mean, (var + eps).rsqrt()};
}

NormComposite norm_composite(const NormForwardArguments& a, bool rounds) {
  const auto h =
      is_defined(a.residual) ? *a.residual + norm_dropout(a.x, a.dropout_p, a.seed, a.dims) : a.x;
  const auto base = norm_base_dtype(a.x, h.scalar_type(), a.weight);
  const auto acc = norm_accumulator(h);  // only once: the backward would round its parts separately
  const auto accumulation = acc.scalar_type();
  const auto [mean, rstd] = norm_statistics(acc, a.dims, a.eps, a.kind);
  const bool llama = a.kind == NormKind::rms_llama;
  auto dtype = base;
  auto y = (mean.defined() ? acc - mean : acc) * rstd;
  if (llama) y = y.to(base).to(accumulation);
  if (llama && is_defined(a.weight)) dtype = c10::promoteTypes(base, a.weight->scalar_type());
  if (is_defined(a.weight)) y = y * scale_of(*a.weight, a.offset, accumulation);
  if (is_defined(a.bias)) y = y + a.bias->to(accumulation);
  return {rounds ? y.to(dtype) : y, h, mean, rstd};
}

NormBackward norm_gradients(const NormBackwardArguments& a, const Tensor& acc, const Tensor& mean,
                            const Tensor& rstd) {
  const auto axes = last_axes(a.dims);
  const auto accumulation = acc.scalar_type(), h = a.h.scalar_type();
  const auto dacc = a.dy.to(accumulation);
  const auto n = (mean.defined() ? acc - mean : acc) * rstd;  // h, normalised
  const auto g = is_defined(a.weight) ? dacc * scale_of(*a.weight, a.offset, accumulation) : dacc;
  Tensor dresidual, dx, dweight, dbias;
  if (a.output_mask[0] || a.output_mask[1]) {
    auto along = g - n * (g * n).mean(axes, true);
    if (mean.defined()) along = along - g.mean(axes, true);
    auto d = along * rstd;
    if (is_defined(a.dh)) d = d + *a.dh;
    if (a.output_mask[0]) dresidual = d.to(h);
    if (a.output_mask[1]) dx = norm_dropout(d, a.dropout_p, a.seed, a.dims).to(h);
  }
  std::vector<int64_t> rows(acc.dim() - a.dims);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  const auto over_rows = [&](const Tensor& t, const Tensor& like) {
    return (rows.empty() ? t : t.sum(rows)).to(like.scalar_type());
  };
  if (a.output_mask[2]) dweight = over_rows(dacc * n, *a.weight);
  if (a.output_mask[3]) dbias = over_rows(dacc, *a.bias);
  return {dresidual, dx, dweight, dbias};
}

NormForward norm_forward_composite(const NormForwardArguments& a) {
  norm_check(a);
  const auto [y, h, mean, rstd] = norm_composite(a);
  const auto stats =
      mean.defined() ? at::stack({mean.flatten(), rstd.flatten()}) : rstd.flatten().unsqueeze(0);
  return {y.contiguous(), is_defined(a.residual) ? h.contiguous() : Tensor(),
          stats.to(at::kDouble)};
}

NormQuantized norm_quantized_composite(const NormQuantizedArguments& a) {
  norm_quantized_outputs(a);
  const auto [y, h, mean, rstd] = norm_composite(a.norm, /*rounds=*/false);
  const auto [codes, scale] = quantized_rows(y, a.format);
  return {codes, scale, is_defined(a.norm.residual) ? h.contiguous() : Tensor()};
}

NormBackward norm_backward_composite(const NormBackwardArguments& a) {
  std::vector<c10::SymInt> kept(a.h.dim(), 1);
  for (int64_t i = 0; i < a.h.dim() - a.dims; ++i) kept[i] = a.h.sym_size(i);
  const auto saved = a.stats.to(accumulation_dtype(a.h.scalar_type()));
  const auto mean = a.stats.sym_size(0) == 2 ? saved.select(0, 0).view_symint(kept) : Tensor();
  const auto rstd = saved.select(0, -1).view_symint(kept);
  return contiguous(norm_gradients(a, norm_accumulator(a.h), mean, rstd));
}

// The mask is an operator because inductor miscompiles the wrapping int64 products inside it.
TORCH_LIBRARY_FRAGMENT(fusedops, m) {
  m.def("dropout_mask(Tensor seed, SymInt rows, SymInt n, float p) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(fusedops, CompositeExplicitAutograd, m) { m.impl("dropout_mask", dropout_mask); }
TORCH_LIBRARY_IMPL(fusedops, Meta, m) { m.impl("dropout_mask", dropout_mask_outputs); }

}  // namespace fusedops::norm
