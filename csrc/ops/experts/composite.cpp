// A mixture of experts in ATen calls: runs if no kernel does, and in a double backward.
//
// The formulas are written once over rows, in two forms. Sorted: a row for each slot, by expert,
// one product for each expert that was hit; reads the index. Dense: a row for each expert and
// token, with weight 0 for the others, for function transforms and traces, which have no numbers.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <memory>
#include <vector>

#include "csrc/ops/autograd.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::experts {
namespace {

struct Rows {
  virtual ~Rows() = default;
  virtual Tensor gather(const Tensor& tokens) const = 0;      // rows of [tokens, n]
  virtual Tensor weights(const Tensor& slots) const = 0;      // a row's weight, [..., 1]
  virtual Tensor slots(const Tensor& row_numbers) const = 0;  // [..., 1] to [tokens, k]
  virtual Tensor scatter(const Tensor& rows) const = 0;       // sums of rows: [tokens, n]
  virtual Tensor product(const Tensor& rows, const Tensor& w) const = 0;  // w [E, n, columns]
  virtual Tensor of_experts(const Tensor& bias) const = 0;                // a row's row of [E, n]
  virtual Tensor outer(const Tensor& a, const Tensor& b) const = 0;       // a^T b for each expert
  virtual Tensor sums(const Tensor& rows) const = 0;                      // for each expert: [E, n]
};

class Sorted : public Rows {
 public:
  explicit Sorted(const Inputs& a)
      : tokens_(a.hidden.size(0)), k_(a.top_k_index.size(1)), experts_(a.gate_up.size(0)) {
    const auto index = a.top_k_index.flatten();
    const auto counts = at::bincount(index, {}, experts_ + 1).cpu();
    TORCH_CHECK_VALUE(counts.size(0) == experts_ + 1, "experts: top_k_index must be at most ",
                      experts_, ", got ", counts.size(0) - 1);
    counts_.assign(counts.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>() + experts_);
    order_ = index.argsort(/*stable=*/true, 0).narrow(0, 0, sum_of_counts());
    expert_ = index.index_select(0, order_);
  }

  Tensor gather(const Tensor& tokens) const override {
    return tokens.index_select(0, at::div(order_, std::max<int64_t>(k_, 1), "floor"));
  }
  Tensor weights(const Tensor& slots) const override {
    return slots.flatten().index_select(0, order_).unsqueeze(1);
  }
  Tensor slots(const Tensor& row_numbers) const override {
    return at::zeros({tokens_ * k_}, row_numbers.options())
        .index_copy(0, order_, row_numbers.squeeze(1))
        .view({tokens_, k_});
  }
  Tensor scatter(const Tensor& rows) const override {
    return at::zeros({tokens_ * k_, rows.size(1)}, rows.options())
        .index_copy(0, order_, rows)
        .view({tokens_, k_, rows.size(1)})
        .sum(1);
  }
  Tensor product(const Tensor& rows, const Tensor& w) const override {
    std::vector<Tensor> parts{rows.new_empty({0, w.size(2)})};
    each([&](int64_t expert, int64_t first, int64_t count) {
      parts.push_back(at::matmul(rows.narrow(0, first, count), w.select(0, expert)));
    });
    return at::cat(parts, 0);
  }
  Tensor of_experts(const Tensor& bias) const override { return bias.index_select(0, expert_); }
  Tensor outer(const Tensor& a, const Tensor& b) const override {
    std::vector<Tensor> parts(experts_, at::zeros({a.size(1), b.size(1)}, a.options()));
    each([&](int64_t expert, int64_t first, int64_t count) {
      parts[expert] = at::matmul(a.narrow(0, first, count).t(), b.narrow(0, first, count));
    });
    return at::stack(parts);
  }
  Tensor sums(const Tensor& rows) const override {
    std::vector<Tensor> parts(experts_, at::zeros({rows.size(1)}, rows.options()));
    each([&](int64_t expert, int64_t first, int64_t count) {
      parts[expert] = rows.narrow(0, first, count).sum(0);
    });
    return at::stack(parts);
  }

 private:
  int64_t sum_of_counts() const {
    int64_t sum = 0;
    for (const auto count : counts_) sum += count;
    return sum;
  }

  // Calls f(expert, first row, number of rows) for each expert that was hit.
  template <class Function>
  void each(const Function& f) const {
    int64_t first = 0;
    for (int64_t expert = 0; expert < experts_; ++expert) {
      if (counts_[expert] > 0) f(expert, first, counts_[expert]);
      first += counts_[expert];
    }
  }

  int64_t tokens_, k_, experts_;
  std::vector<int64_t> counts_;
  Tensor order_, expert_;  // of each row: its slot, its expert
};

class Dense : public Rows {
 public:
  explicit Dense(const Inputs& a) : experts_(a.gate_up.sym_size(0)) {
    const auto every = at::arange(experts_, a.top_k_index.options()).view_symint({experts_, 1, 1});
    hits_ = a.top_k_index.unsqueeze(0) == every;
    hit_ = hits_.any(-1, true);
  }

  Tensor gather(const Tensor& tokens) const override { return chosen(tokens.unsqueeze(0)); }
  Tensor weights(const Tensor& slots) const override {
    return at::where(hits_, slots, 0.0).sum(-1, true).to(slots.scalar_type());
  }
  Tensor slots(const Tensor& row_numbers) const override {
    return at::where(hits_, row_numbers, 0.0).sum(0).to(row_numbers.scalar_type());
  }
  Tensor scatter(const Tensor& rows) const override { return chosen(rows).sum(0); }
  Tensor product(const Tensor& rows, const Tensor& w) const override {
    return chosen(at::matmul(rows, w));
  }
  Tensor of_experts(const Tensor& bias) const override { return chosen(bias.unsqueeze(1)); }
  Tensor outer(const Tensor& a, const Tensor& b) const override {
    return at::matmul(a.transpose(1, 2), b);
  }
  Tensor sums(const Tensor& rows) const override { return rows.sum(1); }

 private:
  // Zeros in the rows of tokens that did not choose the expert: a NaN in its weights then reaches
  // neither their results nor, through the derivative of this, their gradients.
  Tensor chosen(const Tensor& rows) const {
    return at::where(hit_, rows, 0.0).to(rows.scalar_type());
  }

  c10::SymInt experts_;
  Tensor hits_,
      hit_;  // whether the slot, or one of the token's, is the expert's: [E, tokens, k or 1]
};

std::unique_ptr<Rows> rows_of(const Inputs& a) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const bool transformed =
      keys.included_.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode) || is_recorded();
  if (transformed || !has_numbers(a.top_k_index)) return std::make_unique<Dense>(a);
  return std::make_unique<Sorted>(a);
}

// Both weights as [E, outputs, inputs].
Tensor upright(const Tensor& weight, const Options& o) {
  return o.transposed ? weight.transpose(1, 2) : weight;
}

struct Halves {
  Tensor gate, up;

  Halves(const Tensor& z, const Options& o) {
    if (o.interleaved) {
      gate = z.slice(-1, 0, std::nullopt, 2);
      up = z.slice(-1, 1, std::nullopt, 2);
    } else {
      const auto parts = z.chunk(2, -1);
      gate = parts[0];
      up = parts[1];
    }
  }
};

Tensor activated(const Tensor& g, const Options& o) {
  return o.alpha == 1 ? linear::activate(g, o.activation) : g * (o.alpha * g).sigmoid();
}

// The gradient of g, of d, that of its activation.
Tensor activated_backward(const Tensor& d, const Tensor& g, const Options& o) {
  if (o.alpha == 1) return linear::gradient_of_z(d, {}, g, o.activation);
  const auto s = (o.alpha * g).sigmoid();
  return d * (s * (1 + o.alpha * g * (1 - s)));
}

// h [..., I] of z [..., N], in z's dtype
Tensor gate(const Tensor& z, const Options& o) {
  if (!o.gated) return activated(z, o);
  auto [g, u] = Halves(z, o);
  if (o.limit) {
    g = g.clamp(std::nullopt, *o.limit);
    u = u.clamp(-*o.limit, *o.limit);
  }
  return activated(g, o) * (u + o.up_offset);
}

// dz of dh
Tensor gate_backward(const Tensor& dh, const Tensor& z, const Options& o) {
  if (!o.gated) return activated_backward(dh, z, o);
  const Halves raw(z, o);
  auto [g, u] = raw;
  if (o.limit) {
    g = g.clamp(std::nullopt, *o.limit);
    u = u.clamp(-*o.limit, *o.limit);
  }
  auto dgate = activated_backward(dh * (u + o.up_offset), g, o), dup = dh * activated(g, o);
  if (o.limit) {
    dgate = at::where(raw.gate.le(*o.limit), dgate, 0.0).to(dh.scalar_type());
    dup = at::where(raw.up.abs().le(*o.limit), dup, 0.0).to(dh.scalar_type());
  }
  if (o.interleaved) return at::stack({dgate, dup}, -1).flatten(-2);
  return at::cat({dgate, dup}, -1);
}

// The rows before the gate.
Tensor rows_of_z(const Rows& rows, const Inputs& a) {
  const auto x = rows.gather(a.hidden);
  const auto z = rows.product(x, upright(a.gate_up, a.options).transpose(1, 2));
  return given(a.gate_up_bias) ? z + rows.of_experts(*a.gate_up_bias) : z;
}

// z as the kernels keep it: [tokens * k, N], with zeros for the slots of no expert.
Tensor padded(const Tensor& z, int64_t slots) {
  return at::constant_pad_nd(z, {0, 0, 0, slots - z.size(0)}).contiguous();
}

}  // namespace

ExpertsForward experts_composite(const ForwardArguments& arguments) {
  const auto& a = arguments.inputs;
  experts_check(a);
  const auto dtype = a.hidden.scalar_type(), wide = accumulation_dtype(dtype);
  const auto rows = rows_of(a);
  const auto z = rows_of_z(*rows, a);
  const auto h = gate(z.to(wide), a.options).to(dtype);
  auto o = rows->product(h, upright(a.down, a.options).transpose(1, 2));
  if (given(a.down_bias)) o = o + rows->of_experts(*a.down_bias);
  const auto y = rows->scatter(o.to(wide) * rows->weights(a.top_k_weights).to(wide));
  return {y.to(dtype).contiguous(), arguments.keep_z ? padded(z, a.top_k_index.numel()) : Tensor()};
}

ExpertsBackward experts_backward_composite(const BackwardArguments& arguments) {
  const auto& a = arguments.inputs;
  const auto& mask = arguments.output_mask;
  const auto& o = a.options;
  const auto dtype = a.hidden.scalar_type(), wide = accumulation_dtype(dtype);
  const auto rows = rows_of(a);
  const auto z = rows_of_z(*rows, a).to(wide), h = gate(z, o).to(dtype);
  const auto weights = rows->weights(a.top_k_weights).to(wide);
  const auto dy = rows->gather(arguments.dy);
  const auto dh = rows->product(dy, upright(a.down, o)).to(wide);  // before the routing weight
  const auto dz = gate_backward(dh * weights, z, o).to(dtype);
  const auto weighted = (dy.to(wide) * weights).to(dtype);
  const auto as_stored = [&](const Tensor& t) {
    return (o.transposed ? t.transpose(1, 2) : t).contiguous();
  };
  ExpertsBackward found;
  auto& [dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias] = found;
  if (mask[0]) dhidden = rows->scatter(rows->product(dz, upright(a.gate_up, o)).to(wide));
  if (mask[1]) {
    auto d = (dh * h.to(wide)).sum(-1, true);
    if (given(a.down_bias)) {
      d = d + (dy.to(wide) * rows->of_experts(*a.down_bias).to(wide)).sum(-1, true);
    }
    dweights = rows->slots(d).to(a.top_k_weights.scalar_type()).contiguous();
  }
  if (mask[0]) dhidden = dhidden.to(dtype).contiguous();
  if (mask[2]) dgate_up = as_stored(rows->outer(dz, rows->gather(a.hidden)));
  if (mask[3]) ddown = as_stored(rows->outer(weighted, h));
  if (mask[4]) dgate_up_bias = rows->sums(dz);
  if (mask[5]) ddown_bias = rows->sums(weighted);
  return found;
}

}  // namespace fusedops::experts
