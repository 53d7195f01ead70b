// Checks the rotary embedding's arguments and allocates the outputs that its kernels fill.

#include <ATen/Functions.h>

#include <vector>

#include "csrc/ops/checks.h"
#include "csrc/ops/rotary/operators.h"

namespace fusedops::rotary {
namespace {

constexpr const char* kOp = "rotary_embedding";

// The heads' dimension of the unsqueezed cos, counted from its end: 2 or more.
int64_t from_end(const Tensor& cos, int64_t unsqueeze_dim) {
  return unsqueeze_dim < 0 ? -unsqueeze_dim : cos.dim() + 1 - unsqueeze_dim;
}

// Whether `goes` holds for each size of x and of the unsqueezed cos, except the heads'.
template <class Compare>
bool all_sizes(const Tensor& x, const Tensor& cos, int64_t heads, const Compare& goes) {
  for (int64_t end = 2; end <= std::min(x.dim(), cos.dim() + 1); ++end) {
    if (end != heads && !goes(x.sym_size(-end), cos.sym_size(end < heads ? -end : 1 - end))) {
      return false;
    }
  }
  return true;
}

void check_table(const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim) {
  check_floating(kOp, "cos", cos);
  check_floating(kOp, "sin", sin);
  TORCH_CHECK(cos.dim() > 0 && cos.sym_size(-1) % 2 == 0, kOp,
              ": cos must have a last dimension of even size, got ", describe(cos));
  TORCH_CHECK(sin.sym_sizes().equals(cos.sym_sizes()), kOp, ": sin must have shape ",
              cos.sym_sizes(), " like cos, got ", describe(sin));
  TORCH_CHECK_VALUE(-cos.dim() - 1 <= unsqueeze_dim && unsqueeze_dim < cos.dim() &&
                        unsqueeze_dim != -1,
                    kOp, ": unsqueeze_dim must be a dimension before the last of ", describe(cos),
                    ", from ", -cos.dim() - 1, " to ", cos.dim() - 1, " and not -1, got ",
                    unsqueeze_dim);
}

void check_heads(const char* name, const Tensor& x, const Tensor& cos, int64_t unsqueeze_dim) {
  check_floating(kOp, name, x);
  check_same_device(kOp, name, x, "cos", cos);
  TORCH_CHECK(x.dim() > 0 && x.sym_size(-1) >= cos.sym_size(-1), kOp, ": ", name,
              " must have at least ", cos.sym_size(-1),
              " elements in its last dimension like cos, got ", describe(x));
  const auto broadcast = [](const c10::SymInt& a, const c10::SymInt& b) {
    return a == b || a == 1 || b == 1;
  };
  TORCH_CHECK(all_sizes(x, cos, from_end(cos, unsqueeze_dim), broadcast), kOp, ": ", name,
              " must broadcast with cos, ", describe(cos), " unsqueezed at ", unsqueeze_dim,
              ", got ", describe(x));
}

bool has_kernel(const Tensor& x, const Tensor& cos, int64_t unsqueeze_dim) {
  const int64_t heads = from_end(cos, unsqueeze_dim);
  return 1 < heads && heads <= cos.dim() + 1 && cos.dim() < x.dim() && x.dim() <= 4 &&
         all_sizes(
             x, cos, heads,
             [](const c10::SymInt& a, const c10::SymInt& b) { return b == a || b == 1; });
}

// Whether q and k differ only in heads and width.
bool like(const Tensor& q, const Tensor& k, int64_t heads) {
  if (k.dim() != q.dim() || k.scalar_type() != q.scalar_type()) return false;
  for (int64_t d = 0; d < q.dim() - 1; ++d) {
    if (d != heads && k.sym_size(d) != q.sym_size(d)) return false;
  }
  return true;
}

// [x's shape], contiguous, or with heads and sequence swapped in memory if x has them swapped.
Tensor empty_like(const Tensor& x, int64_t heads, c10::ScalarType dtype) {
  const int64_t seq = heads == x.dim() - 2 ? heads - 1 : x.dim() - 2;
  if (seq < 0 || (x.sym_stride(heads) < x.sym_stride(seq)) == (heads > seq)) {
    return empty_contiguous(x, dtype);
  }
  std::vector<c10::SymInt> strides(x.dim());
  c10::SymInt stride = 1;
  for (int64_t place = x.dim() - 1; place >= 0; --place) {
    const int64_t d = place == heads ? seq : place == seq ? heads : place;
    strides[d] = stride;
    stride = stride * x.sym_size(d);
  }
  return at::empty_strided_symint(x.sym_sizes(), strides, x.options().dtype(dtype));
}

}  // namespace

void rotary_check(const RotaryForward& a) {
  const auto& [cos, sin, unsqueeze_dim, interleaved] = a.table;
  check_table(cos, sin, unsqueeze_dim);
  check_same_device(kOp, "sin", sin, "cos", cos);
  check_heads("q", a.q, cos, unsqueeze_dim);
  check_heads("k", a.k, cos, unsqueeze_dim);
}

bool rotary_has_kernel(const OptionalTensor& q, const OptionalTensor& k, const RotaryTable& table) {
  const auto& first = is_defined(q) ? *q : *k;
  return has_kernel(first, table.cos, table.unsqueeze_dim) &&
         (!is_defined(q) || !is_defined(k) || like(*q, *k, rotary_head_dim(*q, table)));
}

c10::ScalarType rotary_dtype(c10::ScalarType x, const RotaryTable& table) {
  return c10::promoteTypes(x, c10::promoteTypes(table.cos.scalar_type(), table.sin.scalar_type()));
}

int64_t rotary_head_dim(const Tensor& x, const RotaryTable& table) {
  return x.dim() - from_end(table.cos, table.unsqueeze_dim);
}

RotaryPair rotary_outputs(const RotaryForward& a) {
  rotary_check(a);
  TORCH_CHECK(rotary_has_kernel(a.q, a.k, a.table), "rotary_forward: q ", describe(a.q), " and k ",
              describe(a.k), " must have equal shapes except for heads, and match cos, got ",
              describe(a.table.cos));
  const auto heads = rotary_head_dim(a.q, a.table);
  const auto dtype = rotary_dtype(a.q.scalar_type(), a.table);
  return {empty_like(a.q, heads, dtype), empty_like(a.k, heads, dtype)};
}

RotaryPair rotary_backward_outputs(const RotaryBackward& a) {
  TORCH_CHECK(is_defined(a.dq) || is_defined(a.dk),
              "rotary_backward: dq or dk must be given, got neither");
  const auto& first = is_defined(a.dq) ? *a.dq : *a.dk;
  rotary_check({first, is_defined(a.dk) ? *a.dk : first, a.table});
  TORCH_CHECK(at::isFloatingType(a.dtype), "rotary_backward: dtype must be floating-point, got ",
              a.dtype);
  const auto grad_dtype = rotary_dtype(a.dtype, a.table);
  TORCH_CHECK(rotary_has_kernel(a.dq, a.dk, a.table) && first.scalar_type() == grad_dtype,
              "rotary_backward: dq and dk must be ", grad_dtype,
              ", of equal shapes except for heads, and match cos ", describe(a.table.cos), ", got ",
              describe(first));
  const auto heads = rotary_head_dim(first, a.table);
  const auto of = [&](const OptionalTensor& x) {
    return is_defined(x) ? empty_like(*x, heads, a.dtype) : Tensor();
  };
  return {of(a.dq), of(a.dk)};
}

}  // namespace fusedops::rotary
