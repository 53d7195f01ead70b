// Builds the rotary kernels' arguments (pointers, strides, sizes) from tensors.

#include "csrc/ops/rotary/operators.h"

namespace fusedops::rotary {
namespace {

// The indices of x's dimensions; negative for a dimension that x lacks.
struct Dimensions {
  int64_t batch, head, seq;

  Dimensions(int64_t dims, int64_t head_) : head(head_) {
    seq = head == dims - 2 ? head - 1 : dims - 2;
    batch = std::min(head, seq) - 1;
    if (dims == 4 && head == 0) batch = 1;
  }
};

int64_t size_or_1(const Tensor& x, int64_t d) { return d < 0 ? 1 : x.size(d); }

int64_t stride_or_0(const Tensor& x, int64_t d) { return d < 0 ? 0 : x.stride(d); }

RotaryStrides strides_of(const Tensor& x, const Dimensions& at) {
  return {stride_or_0(x, at.batch), stride_or_0(x, at.head), stride_or_0(x, at.seq)};
}

Tensor with_contiguous_rows(const Tensor& x) {
  return x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

// The strides of a table that is broadcast over x.
RotaryStrides table_strides(const Tensor& table) {
  const auto stride = [&](int64_t end) {
    return table.dim() < end || table.size(-end) == 1 ? 0 : table.stride(-end);
  };
  return {stride(3), 0, stride(2)};
}

}  // namespace

RotaryRows::RotaryRows(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table,
                       const RotaryPair& outputs, bool transposed)
    : q_(value_or_undefined(q)), k_(value_or_undefined(k)) {
  const auto& [cos, sin, unsqueeze_dim, interleaved] = table;
  const auto& [q_out, k_out] = outputs;
  auto& a = arguments;
  const auto add = [&](Tensor& x, const Tensor& y) {
    if (!x.defined() || x.numel() == 0) return;
    x = with_contiguous_rows(x);
    const Dimensions at(x.dim(), rotary_head_dim(x, table));
    a.tensors[a.count++] = {x.const_data_ptr(), y.mutable_data_ptr(), strides_of(x, at),
                            strides_of(y, at),  x.size(at.head),      x.size(-1)};
    a.batch = size_or_1(x, at.batch);
    a.seq = size_or_1(x, at.seq);
    a.from = dtype_of(x);
    a.to = dtype_of(y);
  };
  add(q_, q_out);
  add(k_, k_out);
  if (a.count == 0) return;

  const auto& some = q_.defined() ? q_ : k_;
  const bool same =
      cos.scalar_type() == sin.scalar_type() && cos.scalar_type() == some.scalar_type();
  const auto dtype = same ? cos.scalar_type() : at::kFloat;
  cos_ = with_contiguous_rows(cos.to(dtype));
  sin_ = with_contiguous_rows(sin.to(dtype));
  a.table = dtype_of(cos_);
  a.cos = cos_.const_data_ptr();
  a.sin = sin_.const_data_ptr();
  a.cos_at = table_strides(cos_);
  a.sin_at = table_strides(sin_);
  a.rotary = cos.size(-1);
  a.interleaved = interleaved;
  a.transposed = transposed;
}

}  // namespace fusedops::rotary
