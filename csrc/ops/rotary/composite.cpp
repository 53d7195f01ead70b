// The rotary embedding in ATen calls: runs if no kernel does, and in a double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "csrc/ops/rotary/operators.h"

namespace fusedops::rotary {
namespace {

// (a, b) -> (-b, a)
Tensor quarter_turn(const Tensor& x, bool interleaved) {
  if (!interleaved) {
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  const auto pairs = x.unflatten_symint(-1, {x.sym_size(-1) / 2, 2}).unbind(-1);
  return at::stack({-pairs[1], pairs[0]}, -1).flatten(-2);
}

// cos and sin, unsqueezed to broadcast, in the dtype of the formulas.
struct Table {
  Tensor cos, sin;
  bool interleaved;

  Table(const RotaryTable& from, c10::ScalarType wide)
      : cos(from.cos.to(wide).unsqueeze(from.unsqueeze_dim)),
        sin(from.sin.to(wide).unsqueeze(from.unsqueeze_dim)),
        interleaved(from.interleaved) {}

  Tensor rotated(const Tensor& x) const { return x * cos + quarter_turn(x, interleaved) * sin; }
  Tensor rotated_back(const Tensor& x) const {
    return x * cos - quarter_turn(x * sin, interleaved);
  }
};

// f of each head's rotated elements; the other elements are copied.
template <class Function>
Tensor of_heads(const Tensor& x, const Table& table, c10::ScalarType dtype, const Function& f) {
  const auto n = table.cos.sym_size(-1), past = x.sym_size(-1) - n;
  const auto y = f(x.narrow_symint(-1, 0, n).to(table.cos.scalar_type())).to(dtype);
  if (past == 0) return y;
  auto shape = y.sym_sizes().vec();
  shape.back() = past;
  return at::cat({y, x.narrow_symint(-1, n, past).to(dtype).expand_symint(shape)}, -1);
}

c10::ScalarType wide_of(const OptionalTensor& q, const OptionalTensor& k,
                        const RotaryTable& table) {
  return any_float64({q, k, table.cos, table.sin}) ? at::kDouble : at::kFloat;
}

}  // namespace

RotaryPair rotary_formula(const RotaryForward& a) {
  const Table table(a.table, wide_of(a.q, a.k, a.table));
  const auto of = [&](const Tensor& x) {
    return of_heads(x, table, rotary_dtype(x.scalar_type(), a.table),
                    [&](const Tensor& turned) { return table.rotated(turned); });
  };
  return {of(a.q), of(a.k)};
}

RotaryPair rotary_backward_formula(const RotaryBackward& a) {
  const Table table(a.table, wide_of(a.dq, a.dk, a.table));
  const auto of = [&](const OptionalTensor& dy) {
    if (!is_defined(dy)) return Tensor();
    return of_heads(*dy, table, a.dtype,
                    [&](const Tensor& turned) { return table.rotated_back(turned); });
  };
  return {of(a.dq), of(a.dk)};
}

RotaryPair rotary_composite(const RotaryForward& a) {
  const auto outputs = rotary_outputs(a);  // checks first
  copy_defined(outputs, rotary_formula(a));
  return outputs;
}

RotaryPair rotary_backward_composite(const RotaryBackward& a) {
  const auto outputs = rotary_backward_outputs(a);
  copy_defined(outputs, rotary_backward_formula(a));
  return outputs;
}

}  // namespace fusedops::rotary
