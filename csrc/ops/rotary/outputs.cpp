// Checks of the arguments, and the outputs that the kernels fill.

#include <ATen/Functions.h>

#include <vector>

#include "csrc/ops/rotary/operators.h"

namespace fusedops {
namespace {

constexpr const char* kOp = "rotary_embedding";

// How far from its end the unsqueezed cos has the dimension of heads: 2 or more.
int64_t from_end(const Tensor& cos, int64_t unsqueeze_dim) {
  return unsqueeze_dim < 0 ? -unsqueeze_dim : cos.dim() + 1 - unsqueeze_dim;
}

// Whether the size of cos unsqueezed in dimension `-end` goes with x's.
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

// Whether q and k differ in heads and in their width alone.
bool like(const Tensor& q, const Tensor& k, int64_t heads) {
  if (k.dim() != q.dim() || k.scalar_type() != q.scalar_type()) return false;
  for (int64_t d = 0; d < q.dim() - 1; ++d) {
    if (d != heads && k.sym_size(d) != q.sym_size(d)) return false;
  }
  return true;
}

// [x's shape], contiguous, or with heads and sequence changing places in memory where x has them
// so.
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

void rotary_check(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                  int64_t unsqueeze_dim) {
  check_table(cos, sin, unsqueeze_dim);
  check_same_device(kOp, "sin", sin, "cos", cos);
  check_heads("q", q, cos, unsqueeze_dim);
  check_heads("k", k, cos, unsqueeze_dim);
}

bool rotary_has_kernel(const OptionalTensor& q, const OptionalTensor& k, const Tensor& cos,
                       int64_t unsqueeze_dim) {
  const auto& first = given(q) ? *q : *k;
  return has_kernel(first, cos, unsqueeze_dim) &&
         (!given(q) || !given(k) || like(*q, *k, rotary_head_dim(*q, cos, unsqueeze_dim)));
}

c10::ScalarType rotary_dtype(c10::ScalarType x, const Tensor& cos, const Tensor& sin) {
  return c10::promoteTypes(x, c10::promoteTypes(cos.scalar_type(), sin.scalar_type()));
}

int64_t rotary_head_dim(const Tensor& x, const Tensor& cos, int64_t unsqueeze_dim) {
  return x.dim() - from_end(cos, unsqueeze_dim);
}

RotaryPair rotary_outputs(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                          int64_t unsqueeze_dim, bool) {
  rotary_check(q, k, cos, sin, unsqueeze_dim);
  TORCH_CHECK(rotary_has_kernel(q, k, cos, unsqueeze_dim), "rotary_forward: q ", describe(q),
              " and k ", describe(k), " must be alike but for their heads, and hold cos, got ",
              describe(cos));
  const auto heads = rotary_head_dim(q, cos, unsqueeze_dim);
  const auto dtype = rotary_dtype(q.scalar_type(), cos, sin);
  return {empty_like(q, heads, dtype), empty_like(k, heads, dtype)};
}

RotaryPair rotary_backward_outputs(const OptionalTensor& dq, const OptionalTensor& dk,
                                   const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim,
                                   bool, c10::ScalarType dtype) {
  TORCH_CHECK(given(dq) || given(dk), "rotary_backward: dq or dk must be there, got neither");
  const auto& first = given(dq) ? *dq : *dk;
  rotary_check(first, given(dk) ? *dk : first, cos, sin, unsqueeze_dim);
  const auto wanted = rotary_dtype(dtype, cos, sin);
  TORCH_CHECK(rotary_has_kernel(dq, dk, cos, unsqueeze_dim) && first.scalar_type() == wanted,
              "rotary_backward: dq and dk must be ", wanted,
              ", alike but for their heads, and hold cos, ", describe(cos), ", got ",
              describe(first));
  const auto heads = rotary_head_dim(first, cos, unsqueeze_dim);
  const auto of = [&](const OptionalTensor& x) {
    return given(x) ? empty_like(*x, heads, dtype) : Tensor();
  };
  return {of(dq), of(dk)};
}

}  // namespace fusedops
