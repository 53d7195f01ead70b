// The rotary embedding in ATen calls: what runs where no kernel does, and the double backward.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "csrc/ops/rotary/operators.h"

namespace fusedops {
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

// cos and sin as they are broadcast, in the dtype of the formulas.
struct Table {
  Tensor cos, sin;
  bool interleaved;

  Table(const Tensor& cos_, const Tensor& sin_, int64_t unsqueeze_dim, bool interleaved_,
        c10::ScalarType wide)
      : cos(cos_.to(wide).unsqueeze(unsqueeze_dim)),
        sin(sin_.to(wide).unsqueeze(unsqueeze_dim)),
        interleaved(interleaved_) {}

  Tensor rotated(const Tensor& x) const { return x * cos + quarter_turn(x, interleaved) * sin; }
  Tensor rotated_back(const Tensor& x) const {
    return x * cos - quarter_turn(x * sin, interleaved);
  }
};

// The first elements of each head by f, the others as they are.
template <class Function>
Tensor of_heads(const Tensor& x, const Table& table, c10::ScalarType dtype, const Function& f) {
  const auto n = table.cos.sym_size(-1), past = x.sym_size(-1) - n;
  const auto y = f(x.narrow_symint(-1, 0, n).to(table.cos.scalar_type())).to(dtype);
  if (past == 0) return y;
  auto shape = y.sym_sizes().vec();
  shape.back() = past;
  return at::cat({y, x.narrow_symint(-1, n, past).to(dtype).expand_symint(shape)}, -1);
}

c10::ScalarType wide_of(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                        const Tensor& sin) {
  return any_float64({q, k, cos, sin}) ? at::kDouble : at::kFloat;
}

RotaryPair copied(const RotaryPair& into, const RotaryPair& from) {
  const auto [q, k] = into;
  if (q.defined()) q.copy_(std::get<0>(from));
  if (k.defined()) k.copy_(std::get<1>(from));
  return into;
}

}  // namespace

RotaryPair rotary_formula(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                          int64_t unsqueeze_dim, bool interleaved) {
  const Table table(cos, sin, unsqueeze_dim, interleaved, wide_of(q, k, cos, sin));
  const auto of = [&](const Tensor& x) {
    return of_heads(x, table, rotary_dtype(x.scalar_type(), cos, sin),
                    [&](const Tensor& turned) { return table.rotated(turned); });
  };
  return {of(q), of(k)};
}

RotaryPair rotary_backward_formula(const OptionalTensor& dq, const OptionalTensor& dk,
                                   const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim,
                                   bool interleaved, c10::ScalarType dtype) {
  const Table table(cos, sin, unsqueeze_dim, interleaved, wide_of(dq, dk, cos, sin));
  const auto of = [&](const OptionalTensor& dy) {
    if (!given(dy)) return Tensor();
    return of_heads(*dy, table, dtype,
                    [&](const Tensor& turned) { return table.rotated_back(turned); });
  };
  return {of(dq), of(dk)};
}

RotaryPair rotary_composite(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                            int64_t unsqueeze_dim, bool interleaved) {
  const auto outputs = rotary_outputs(q, k, cos, sin, unsqueeze_dim, interleaved);  // checks first
  return copied(outputs, rotary_formula(q, k, cos, sin, unsqueeze_dim, interleaved));
}

RotaryPair rotary_backward_composite(const OptionalTensor& dq, const OptionalTensor& dk,
                                     const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim,
                                     bool interleaved, c10::ScalarType dtype) {
  const auto outputs = rotary_backward_outputs(dq, dk, cos, sin, unsqueeze_dim, interleaved, dtype);
  return copied(outputs,
                rotary_backward_formula(dq, dk, cos, sin, unsqueeze_dim, interleaved, dtype));
}

}  // namespace fusedops
