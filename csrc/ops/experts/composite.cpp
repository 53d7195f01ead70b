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

// What multiplies rows from the right: a matrix [n, columns] for each expert.
struct Factor {
  virtual ~Factor() = default;
  virtual c10::SymInt columns() const = 0;
  virtual Tensor times(const Tensor& rows, int64_t expert) const = 0;  // of one expert's rows
  virtual Tensor times_all(const Tensor& rows) const = 0;              // rows [E or 1, tokens, n]
};

class FloatFactor : public Factor {
 public:
  explicit FloatFactor(Tensor w) : w_(std::move(w)) {}  // [E, n, columns]

  c10::SymInt columns() const override { return w_.sym_size(2); }
  Tensor times(const Tensor& rows, int64_t expert) const override {
    return at::matmul(rows, w_.select(0, expert));
  }
  Tensor times_all(const Tensor& rows) const override { return at::matmul(rows, w_); }

 private:
  Tensor w_;
};

// The weights [E, n, k]: rows become rows w^T, or rows w if across. One expert's floats at a time.
class QuantizedFactor : public Factor {
 public:
  QuantizedFactor(QuantizedTensors w, Compute compute, bool across)
      : w_(std::move(w)), compute_(compute), across_(across) {}

  c10::SymInt columns() const override { return across_ ? w_.k : w_.n; }
  Tensor times(const Tensor& rows, int64_t expert) const override {
    const auto qweight = w_.qweight.select(0, expert), scales = w_.scales.select(0, expert);
    const auto zeros =
        is_defined(w_.zeros) ? OptionalTensor(w_.zeros->select(0, expert)) : std::nullopt;
    const QuantizedTensors weight({qweight, scales, zeros}, {w_.format, w_.n, w_.k, w_.group_size});
    if (across_) {
      return std::get<0>(
          quantized_linear::quantized_gradients(rows, weight, compute_, {true, false}));
    }
    return quantized_linear::quantized_product(rows, weight, std::nullopt,
                                               quantized_linear::InputFormat::none, compute_);
  }
  Tensor times_all(const Tensor& rows) const override {
    const int64_t experts = w_.qweight.size(0);
    const bool shared = rows.size(0) == 1;
    std::vector<Tensor> parts;
    for (int64_t e = 0; e < experts; ++e) parts.push_back(times(rows.select(0, shared ? 0 : e), e));
    return at::stack(parts);
  }

 private:
  QuantizedTensors w_;
  Compute compute_;
  bool across_;
};

struct Rows {
  virtual ~Rows() = default;
  virtual Tensor gather(const Tensor& tokens) const = 0;      // rows of [tokens, n]
  virtual Tensor weights(const Tensor& slots) const = 0;      // a row's weight, [..., 1]
  virtual Tensor slots(const Tensor& row_numbers) const = 0;  // [..., 1] to [tokens, k]
  virtual Tensor scatter(const Tensor& rows) const = 0;       // sums of rows: [tokens, n]
  virtual Tensor product(const Tensor& rows, const Factor& w) const = 0;
  virtual Tensor of_experts(const Tensor& bias) const = 0;           // a row's row of [E, n]
  virtual Tensor outer(const Tensor& a, const Tensor& b) const = 0;  // a^T b for each expert
  virtual Tensor sums(const Tensor& rows) const = 0;                 // for each expert: [E, n]
};

class Sorted : public Rows {
 public:
  explicit Sorted(const Routed& a)
      : tokens_(a.hidden.size(0)),
        k_(a.top_k_index.size(1)),
        experts_(a.experts.guard_int(__FILE__, __LINE__)) {
    const auto index = a.top_k_index.flatten();
    if (index.numel() > 0) {
      const auto [least, most] = index.aminmax();
      const auto first = least.item<int64_t>(), last = most.item<int64_t>();
      TORCH_CHECK_VALUE(first >= 0 && last <= experts_, "experts: top_k_index must be from 0 to ",
                        experts_, ", got ", first < 0 ? first : last);
    }
    const auto counts = at::bincount(index, {}, experts_ + 1).cpu();
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
  Tensor product(const Tensor& rows, const Factor& w) const override {
    std::vector<Tensor> parts;
    each([&](int64_t expert, int64_t first, int64_t count) {
      parts.push_back(w.times(rows.narrow(0, first, count), expert));
    });
    if (!parts.empty()) return at::cat(parts, 0);
    // No rows, but results that autograd can follow to the weights.
    return experts_ ? w.times(rows, 0) : rows.new_empty_symint({0, w.columns()});
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
  explicit Dense(const Routed& a) : experts_(a.experts) {
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
  Tensor product(const Tensor& rows, const Factor& w) const override {
    return chosen(w.times_all(rows));
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

std::unique_ptr<Rows> rows_of(const Routed& a) {
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

// linear's of the same name; not for relu2.
linear::Activation of_linear(Activation activation) {
  return static_cast<linear::Activation>(activation);
}

Tensor activated(const Tensor& g, const Options& o) {
  if (o.activation == Activation::relu2) return g.relu().square();
  return o.alpha == 1 ? linear::activate(g, of_linear(o.activation)) : g * (o.alpha * g).sigmoid();
}

// The gradient of g, of d, that of its activation.
Tensor activated_backward(const Tensor& d, const Tensor& g, const Options& o) {
  if (o.activation == Activation::relu2) return at::threshold_backward(d * 2 * g.relu(), g, 0);
  if (o.alpha == 1) return linear::gradient_of_z(d, {}, g, of_linear(o.activation));
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
Tensor rows_of_z(const Rows& rows, const Routed& a, const Factor& gate_up) {
  const auto z = rows.product(rows.gather(a.hidden), gate_up);
  return is_defined(a.gate_up_bias) ? z + rows.of_experts(*a.gate_up_bias) : z;
}

// z as the kernels keep it: [tokens * k, N], with zeros for the slots of no expert.
Tensor padded(const Tensor& z, int64_t slots) {
  return at::constant_pad_nd(z, {0, 0, 0, slots - z.size(0)}).contiguous();
}

ExpertsForward forward(const Routed& a, const Factor& gate_up, const Factor& down, bool keep_z) {
  const auto dtype = a.hidden.scalar_type(), wide = accumulation_dtype(dtype);
  const auto rows = rows_of(a);
  const auto z = rows_of_z(*rows, a, gate_up);
  const auto h = gate(z.to(wide), a.options).to(dtype);
  auto o = rows->product(h, down);
  if (is_defined(a.down_bias)) o = o + rows->of_experts(*a.down_bias);
  const auto y = rows->scatter(o.to(wide) * rows->weights(a.top_k_weights).to(wide));
  return {y.to(dtype).contiguous(), keep_z ? padded(z, a.top_k_index.numel()) : Tensor()};
}

// gate_up makes z; across: the factors of the gradients.
struct Factors {
  const Factor &gate_up, &gate_up_across, &down_across;
};

ExpertsBackward backward(const Routed& a, const Tensor& dy_of_tokens, const Factors& factors,
                         std::array<bool, 6> mask) {
  const auto& o = a.options;
  const auto dtype = a.hidden.scalar_type(), wide = accumulation_dtype(dtype);
  const auto rows = rows_of(a);
  const auto z = rows_of_z(*rows, a, factors.gate_up).to(wide), h = gate(z, o).to(dtype);
  const auto weights = rows->weights(a.top_k_weights).to(wide);
  const auto dy = rows->gather(dy_of_tokens);
  const auto dh = rows->product(dy, factors.down_across).to(wide);  // before the routing weight
  const auto dz = gate_backward(dh * weights, z, o).to(dtype);
  const auto weighted = (dy.to(wide) * weights).to(dtype);
  const auto as_stored = [&](const Tensor& t) {
    return (o.transposed ? t.transpose(1, 2) : t).contiguous();
  };
  ExpertsBackward found;
  auto& [dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias] = found;
  if (mask[0]) {
    const auto dx = rows->product(dz, factors.gate_up_across);
    dhidden = rows->scatter(dx.to(wide)).to(dtype).contiguous();
  }
  if (mask[1]) {
    auto d = (dh * h.to(wide)).sum(-1, true);
    if (is_defined(a.down_bias)) {
      d = d + (dy.to(wide) * rows->of_experts(*a.down_bias).to(wide)).sum(-1, true);
    }
    dweights = rows->slots(d).to(a.top_k_weights.scalar_type()).contiguous();
  }
  if (mask[2]) dgate_up = as_stored(rows->outer(dz, rows->gather(a.hidden)));
  if (mask[3]) ddown = as_stored(rows->outer(weighted, h));
  if (mask[4]) dgate_up_bias = rows->sums(dz);
  if (mask[5]) ddown_bias = rows->sums(weighted);
  return found;
}

}  // namespace

ExpertsForward experts_composite(const ForwardArguments& arguments) {
  const auto& a = arguments.inputs;
  experts_check(a);
  const FloatFactor gate_up(upright(a.gate_up, a.options).transpose(1, 2)),
      down(upright(a.down, a.options).transpose(1, 2));
  return forward(a, gate_up, down, arguments.keep_z);
}

ExpertsBackward experts_backward_composite(const BackwardArguments& arguments) {
  const auto& a = arguments.inputs;
  const auto gate_up = upright(a.gate_up, a.options), down = upright(a.down, a.options);
  return backward(a, arguments.dy,
                  {FloatFactor(gate_up.transpose(1, 2)), FloatFactor(gate_up), FloatFactor(down)},
                  arguments.output_mask);
}

ExpertsForward quantized_experts_composite(const QuantizedForwardArguments& arguments) {
  const auto& a = arguments.inputs;
  experts_check(a);
  const auto compute = a.weights.compute;
  return forward(a, QuantizedFactor(gate_up_of(a), compute, false),
                 QuantizedFactor(down_of(a), compute, false), arguments.keep_z);
}

QuantizedExpertsBackward quantized_experts_backward_composite(
    const QuantizedBackwardArguments& arguments) {
  const auto& a = arguments.inputs;
  const auto gate_up = gate_up_of(a), down = down_of(a);
  const auto compute = a.weights.compute;
  const auto& mask = arguments.output_mask;
  const auto found =
      backward(a, arguments.dy,
               {QuantizedFactor(gate_up, compute, false), QuantizedFactor(gate_up, compute, true),
                QuantizedFactor(down, compute, true)},
               {mask[0], mask[1], false, false, mask[2], mask[3]});
  return {std::get<0>(found), std::get<1>(found), std::get<4>(found), std::get<5>(found)};
}

}  // namespace fusedops::experts
