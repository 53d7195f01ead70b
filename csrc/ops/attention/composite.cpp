// Attention in ATen calls: runs if no kernel does, and in a double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <limits>

#include "csrc/ops/attention/operators.h"
#include "csrc/ops/seed.h"

namespace fusedops::attention {

std::pair<Tensor, Tensor> places(const Tensor& cu_seqlens, const c10::SymInt& tokens) {
  const auto cu = cu_seqlens.to(at::kLong);
  const auto token = at::arange(c10::Scalar(tokens), cu.options());
  const auto sequence = at::searchsorted(cu, token, false, true) - 1;
  const auto last = cu.sym_size(0) - 1;
  const auto inside = sequence < c10::Scalar(last);
  return {at::where(inside, sequence, -1), token - cu.index({sequence})};
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor without_padding(const Tensor& lse, const OptionalTensor& cu_seqlens_q) {
  if (!is_defined(cu_seqlens_q)) return lse;
  return at::where(places(*cu_seqlens_q, lse.sym_size(2)).first.lt(0), -kInfinity, lse);
}

namespace {

// Repeats the heads of [B, Hkv, S, D] to match q's.
Tensor repeated(const Tensor& t, const c10::SymInt& heads) {
  if (t.sym_size(1) == heads) return t;
  return t.repeat_interleave_symint(heads / t.sym_size(1), 1);
}

// The mask [Sq, Sk] of the keys that each query sees; undefined if it sees all.
Tensor visible(const Tensor& q, const Tensor& k, const OptionalTensor& cu_seqlens_q,
               const OptionalTensor& cu_seqlens_k, const AttentionOptions& options) {
  const bool varlen = is_defined(cu_seqlens_q);
  if (!varlen && options.left < 0 && options.right < 0) return {};
  const auto queries = q.sym_size(2), keys = k.sym_size(2);
  const auto longs = q.options().dtype(at::kLong);
  Tensor i = at::arange(c10::Scalar(queries), longs), j = at::arange(c10::Scalar(keys), longs);
  Tensor offset = at::full({}, c10::Scalar(keys - queries), longs), seen;
  if (varlen) {
    const auto [q_of, q_place] = places(*cu_seqlens_q, queries);
    const auto [k_of, k_place] = places(*cu_seqlens_k, keys);
    const auto lengths = cu_seqlens_k->diff() - cu_seqlens_q->diff();
    const auto none = lengths.new_zeros({1});  // for tokens past the last sequence
    offset = at::cat({lengths, none}).index({q_of}).to(at::kLong).unsqueeze(1);
    seen = q_of.unsqueeze(1).eq(k_of) & q_of.ge(0).unsqueeze(1);
    i = q_place, j = k_place;
  }
  const auto at = i.unsqueeze(1) + (options.bottom_right ? offset : at::zeros_like(offset));
  const auto with = [&](const Tensor& more) { seen = seen.defined() ? seen & more : more; };
  if (options.left >= 0) with(j >= at - options.left);
  if (options.right >= 0) with(j <= at + options.right);
  return seen;
}

Tensor dropped(const Tensor& p, const OptionalTensor& seed, double dropout_p) {
  if (dropout_p == 0 || !is_defined(seed)) return p;
  static const auto mask =
      handle<Tensor(const Tensor&, c10::SymInt, c10::SymInt, double)>("fusedops::dropout_mask");
  const auto keep =
      mask.call(*seed, p.sym_size(0) * p.sym_size(1) * p.sym_size(2), p.sym_size(3), dropout_p);
  return p * keep.view_symint(p.sym_sizes()) * dropout_scale(dropout_p);
}

// All scores of a call, with the names of csrc/kernels/attention.h; slope: da over ds, undefined
// without a softcap. A row that sees no key is dead: its scores are 0 and do not count.
struct Scores {
  Tensor s, slope, dead;

  Scores(const Tensor& q, const Tensor& keys, const OptionalTensor& bias, Tensor seen,
         const AttentionOptions& options)
      : s(at::matmul(q, keys.transpose(-2, -1)) * options.scale) {
    if (options.softcap != 0) {
      const auto t = at::tanh(s / options.softcap);
      s = t * options.softcap;
      slope = 1 - t.square();
    }
    if (is_defined(bias) && bias->scalar_type() == at::kBool) {
      seen = seen.defined() ? seen & *bias : *bias;
    } else if (is_defined(bias)) {
      s = s + bias->to(q.scalar_type());
    }
    if (seen.defined()) s = at::where(seen, s, -kInfinity);
    dead = s.eq(-kInfinity).all(-1, true);
    s = at::where(dead, 0, s);
  }

  // [B, Hq, Sq, 1]
  Tensor lse(const OptionalTensor& sinks) const {
    const auto none = at::full_like(dead, -kInfinity, s.options());
    if (!is_defined(sinks)) return s.sym_size(3) == 0 ? none : at::where(dead, none, logsumexp());
    const auto sink = sinks->to(s.scalar_type()).view({-1, 1, 1});
    if (s.sym_size(3) == 0) return at::where(dead, sink, none);
    // logaddexp(-inf, sink) is the sink, but its second derivative is NaN.
    return at::where(dead, sink, at::logaddexp(at::where(dead, 0, logsumexp()), sink));
  }

  // Not from lse: near the most negative float32, lse loses the logarithm of the number of keys.
  Tensor p(const OptionalTensor& sinks) const {
    if (!is_defined(sinks)) return at::where(dead, 0, at::softmax(s, -1));
    auto shape = s.sym_sizes().vec();
    shape.back() = 1;
    const auto sink = sinks->to(s.scalar_type()).view({-1, 1, 1}).expand_symint(shape);
    const auto all = at::softmax(at::cat({s, sink}, -1), -1);
    return at::where(dead, 0, all.narrow_symint(-1, 0, s.sym_size(3)));
  }

 private:
  // at::logsumexp after subtracting the largest: its gradient exp(s - lse) has lse's rounding.
  Tensor logsumexp() const {
    const auto largest = s.detach().amax(-1, true);
    const auto most = at::where(largest.isfinite(), largest, 0);
    return most + at::logsumexp(s - most, -1, true);
  }
};

}  // namespace

OutAndLse attention_formula(const AttentionInputs& in, const AttentionOptions& options) {
  const auto& [q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed] = in;
  const auto wide = accumulation_dtype(q.scalar_type());
  const auto keys = repeated(k.to(wide), q.sym_size(1));
  const auto values = repeated(v.to(wide), q.sym_size(1));
  const Scores scores(q.to(wide), keys, bias, visible(q, k, cu_seqlens_q, cu_seqlens_k, options),
                      options);
  const auto lse = without_padding(scores.lse(sinks).squeeze(-1), cu_seqlens_q);
  const auto p = dropped(scores.p(sinks), seed, options.dropout_p);
  return {at::matmul(p, values).to(q.scalar_type()), lse.to(at::kDouble)};
}

OutAndLse attention_composite(const AttentionArguments& a) {
  const auto outputs = attention_outputs(a);
  copy_defined(outputs, attention_formula(a.in, a.numbers.options()));
  return outputs;
}

AttentionGradients attention_gradients(const Tensor& grad, const OptionalTensor& grad_lse,
                                       const AttentionInputs& in, const AttentionOptions& options,
                                       std::array<bool, 5> output_mask) {
  const auto& [q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, seed] = in;
  const auto wide = accumulation_dtype(q.scalar_type());
  const auto queries = q.to(wide), g = grad.to(wide);
  const auto keys = repeated(k.to(wide), q.sym_size(1));
  const auto values = repeated(v.to(wide), q.sym_size(1));
  const Scores scores(queries, keys, bias, visible(q, k, cu_seqlens_q, cu_seqlens_k, options),
                      options);
  const auto p = scores.p(sinks);
  const auto dp = dropped(at::matmul(g, values.transpose(-2, -1)), seed, options.dropout_p);
  auto delta = (dp * p).sum(-1, true);
  if (is_defined(grad_lse)) delta = delta - grad_lse->to(wide).unsqueeze(-1);
  const auto ds = at::where(scores.dead, 0, p * (dp - delta));  // grad_lse may be NaN there
  const auto da = (scores.slope.defined() ? ds * scores.slope : ds) * options.scale;
  // Sums q's heads to k's and v's.
  const auto of_heads = [](const Tensor& t, const Tensor& like) {
    const auto heads = like.sym_size(1);
    const bool grouped = heads != t.sym_size(1);
    return (grouped ? t.unflatten_symint(1, {heads, -1}).sum(2) : t).to(like.scalar_type());
  };
  Tensor dq, dk, dv, dbias, dsinks;
  if (output_mask[0]) dq = at::matmul(da, keys).to(q.scalar_type());
  if (output_mask[1]) dk = of_heads(at::matmul(da.transpose(-2, -1), queries), k);
  if (output_mask[2]) {
    dv = of_heads(at::matmul(dropped(p, seed, options.dropout_p).transpose(-2, -1), g), v);
  }
  if (output_mask[3] && is_defined(bias)) {
    dbias = ds.sum_to_size_symint(bias->sym_sizes()).to(bias->scalar_type());
  }
  if (output_mask[4] && is_defined(sinks)) {
    const auto lse = without_padding(scores.lse(sinks).squeeze(-1), cu_seqlens_q);
    const auto padding = lse.eq(-kInfinity);
    const auto exponent = at::where(padding, -kInfinity, sinks->to(wide).view({-1, 1}) - lse);
    const auto shares = at::exp(exponent) * at::where(padding, 0, delta.squeeze(-1));
    dsinks = -shares.sum(at::IntArrayRef({0, 2})).to(sinks->scalar_type());
  }
  return {dq, dk, dv, dbias, dsinks};
}

AttentionGradients attention_backward_composite(const AttentionBackwardArguments& a) {
  const auto outputs = attention_backward_outputs(a);
  copy_defined(outputs,
               attention_gradients(a.grad, a.grad_lse, a.in, a.numbers.options(), a.output_mask));
  return outputs;
}

}  // namespace fusedops::attention
