// SiLU and both GELUs, exact and tanh, on CPUs: the factors of x and their derivatives.
// Vectors are passed by value: GCC stores an unused copy of a vector whose address is taken.
#pragma once

#include "csrc/cpu/isa/exp.h"
#include "csrc/kernels/gated_activation.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

using namespace fusedops::gated_activation;

// S and S' of csrc/kernels/gated_activation.h. An activation is x S(x), its derivative is
// S(x) + x S'(x).
struct Gate {
  Vec value, slope;
};

// sigmoid(-rate x), and its slope over -rate. 1 - S is e S, which keeps its digits if S is nearly
// 1; at an infinite e, S = 0 makes the slope 0. Unless it is quick, a Newton step corrects the
// rounding of the sum and the quotient.
template <class T>
FUSEDOPS_INLINE Gate sigmoid_of_minus(Vec x, Vec rate) {
  const Vec ones(1.f), e = exp_of<T>(x, rate), finite = at::vec::clamp_max(e, Vec(1.7e38f));
  Vec s = ones / (ones + e);
  if constexpr (!kQuick<T>) s = at::vec::fmadd(s, at::vec::fnmadd(s, finite, ones - s), s);
  return {s, s * (s * finite)};
}

template <class T>
FUSEDOPS_INLINE Gate normal(Vec g) {
  const Vec x = at::vec::clamp_max(g.abs() * Vec(kTailScale), Vec(kTailEnd));
  const Vec s = x / (Vec(1.f) + x);
  const Vec density = exp_of<T>(g * g, Vec(-0.5f));
  const Vec tail = density * scaled_normal_tail(s, Horner());
  return {Vec::blendv(Vec(1.f) - tail, tail, g < Vec(0.f)), density * Vec(kDensity)};
}

template <class T>
FUSEDOPS_INLINE Gate tanh_gate(Vec g) {
  constexpr float slope = kTanhSlope, cubic = kTanhCubic;
  const Vec x = at::vec::clamp(g, Vec(-kTanhEnd), Vec(kTanhEnd)), xx = x * x;
  const auto s = sigmoid_of_minus<T>(x, at::vec::fmadd(xx, Vec(-slope * cubic), Vec(-slope)));
  return {s.value, s.slope * at::vec::fmadd(xx, Vec(3 * slope * cubic), Vec(slope))};
}

// The row of an output that starts `offset` elements after p, or null if there is no output.
template <class T>
T* row_or_null(void* p, int64_t offset) {
  return p == nullptr ? nullptr : static_cast<T*>(p) + offset;
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
