// Builds the gated activation kernels' arguments (pointers, strides, sizes) from tensors.

#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::gated_activation {
namespace {

// Returns a row's number of elements: the last dimension, or half of it if packed.
int64_t row_size(const Tensor& gate, bool packed) {
  const int64_t n = gate.dim() == 0 ? 1 : gate.size(-1);
  return packed ? n / 2 : n;
}

}  // namespace

GatedRows::GatedRows(const GatedArguments& a_)
    : a(a_),
      packed(!is_defined(a.up)),
      n(row_size(a.gate, packed)),
      rows(a.gate.numel() / (packed ? 2 * n : n)),
      gate(a.gate, packed ? 2 * n : n),
      up(packed ? gate.tensor : *a.up, packed ? 2 * n : n) {}

void GatedRows::describe(GatedInput& input) const {
  input.dtype = dtype_of(gate.tensor);
  input.gate = gate.data();
  input.gate_stride = gate.stride;
  input.up = static_cast<const char*>(up.data()) + (packed ? n * size_of(input.dtype) : 0);
  input.up_stride = up.stride;
  input.rows = rows;
  input.n = n;
  const auto& [kind, limit, alpha, up_offset] = a.options;
  input.kind = kind == GatedKind::swiglu && limit ? GatedKind::swiglu_limited : kind;
  input.limit = static_cast<float>(limit.value_or(0));
  input.alpha = static_cast<float>(alpha);
  input.up_offset = static_cast<float>(up_offset);
}

GatedForward GatedRows::forward(const Tensor& y) const {
  GatedForward args;
  describe(args);
  args.y = y.mutable_data_ptr();
  args.y_stride = n;
  args.y_dtype = args.dtype;
  if (gate.stride == n && up.stride == n) {  // one long row
    args.n = args.gate_stride = args.up_stride = rows * n;
    args.rows = 1;
  }
  return args;
}

GatedForward GatedRows::by_row() const {
  GatedForward args;
  describe(args);
  args.y = nullptr;
  args.y_stride = 0;
  args.y_dtype = Dtype::float32;
  return args;
}

GatedBackward GatedRows::backward(const Rows& dy, const GatedGradients& gradients) const {
  const auto& [dgate, dup] = gradients;
  GatedBackward args;
  describe(args);
  args.dy = dy.data();
  args.dy_stride = dy.stride;
  args.dgate = mutable_data_or_null(dgate);
  args.dup = mutable_data_or_null(dup);
  args.d_stride = packed ? 2 * n : n;
  if (packed && dgate.defined()) {
    args.dup = static_cast<char*>(args.dgate) + n * size_of(args.dtype);
  }
  if (gate.stride == n && up.stride == n && dy.stride == n && !packed) {  // one long row
    args.n = args.gate_stride = args.up_stride = args.dy_stride = rows * n;
    args.rows = 1;
  }
  return args;
}

}  // namespace fusedops::gated_activation
