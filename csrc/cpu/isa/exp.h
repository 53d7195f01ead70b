// Polynomials, exponentials and tanh for CPU kernels. Vectors are passed by value: GCC stores an
// unused copy of a vector whose address is taken.
#pragma once

#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

// a + x (b + x (c + ...))
struct Horner {
  Vec operator()(Vec, float a) const { return Vec(a); }

  template <class... Rest>
  FUSEDOPS_INLINE Vec operator()(Vec x, float a, Rest... rest) const {
    return at::vec::fmadd(x, (*this)(x, rest...), Vec(a));
  }
};

// Whether faster, less exact instructions are accurate enough for T. AVX2 lacks them.
#if defined(CPU_CAPABILITY_AVX512)
template <class T>
constexpr bool kQuick = !std::is_same_v<T, float>;
#else
template <class T>
constexpr bool kQuick = false;
#endif

// exp(x), with relative error 1.3 * 2^-24. Denormal results are 0, x above 88.4 gives infinity, and
// NaN stays NaN.
//
// x = m ln 2 + r, |r| <= ln 2 / 2. The sum with 1.5 * 2^23 rounds x / ln 2 to m, and leaves m + 127
// in its low bits: shifted up they are 2^m, or 0 at m = -127, or infinity at m = 128.
FUSEDOPS_INLINE Vec exact_exp(Vec x) {
  const Vec magic(12582912.f + 127), y = at::vec::clamp(x, Vec(-88.f), Vec(89.f));
  const Vec bits = at::vec::fmadd(y, Vec(1.44269504f), magic), m = bits - magic;
  const Vec high = at::vec::fmadd(m, Vec(-0.693359375f), y);
  const Vec r = at::vec::fmadd(m, Vec(2.12194440e-4f), high);
  const Vec p =
      Horner()(r, 1.f, 1.f, 0.49999994f, 0.1666652f, 0.0416684f, 0.008368852f, 0.001381432f);
  using Ints = at::vec::Vectorized<int32_t>;
  return p * at::vec::cast<float>(at::vec::cast<int32_t>(bits) << Ints(23));
}

// exp(rate x). The quick one is within 2^-22 of itself, because a sum of many equal terms has each
// term's error: 2^y is 2^floor(y) times 2^(y - floor(y)), and both instructions reach 0 and
// infinity by themselves.
template <class T>
FUSEDOPS_INLINE Vec exp_of(Vec x, Vec rate) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kQuick<T>) {
    const Vec y = x * (rate * Vec(1.44269504f)), r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
    const Vec p =
        Horner()(r, 1.f, 0.6931513f, 0.24016444f, 0.055799913f, 0.00901703f, 0.0018671302f);
    return _mm512_scalef_ps(p, y);
  }
#endif
  return exact_exp(x * rate);
}

// A rounded product. The compiler would contract it into a fused multiply-add in one place and not
// in another, and z - lse would be off by a large z's whole rounding error.
FUSEDOPS_INLINE Vec as_rounded(Vec product) {
  Register bits = product;
  asm("" : "+v"(bits));
  return bits;
}

// exp(x) for sums whose largest term is near 1: within 2^-24 there; for small terms the error is
// that of rounding x log2 e.
FUSEDOPS_INLINE Vec exp_of_many(Vec x) {
#if defined(CPU_CAPABILITY_AVX512)
  const Vec y = x * Vec(1.44269504f), r = _mm512_reduce_ps(y, _MM_FROUND_TO_NEAREST_INT);
  const Vec p = Horner()(r, 1.f, 0.69314718f, 0.24022646f, 0.05550329f, 0.0096185198f, 0.001339986f,
                         0.00015337577f);
  return _mm512_scalef_ps(p, y - r);
#else
  return exact_exp(x);
#endif
}

// tanh within 3 * 2^-24 of itself: a polynomial near 0, where 1 - 2 / (1 + exp(2 x)) cancels.
FUSEDOPS_INLINE Vec exact_tanh(Vec x) {
  const Vec size = x.abs(), square = x * x, ones(1.f);
  const Vec p =
      Horner()(square, -0.33333332f, 0.13333118f, -0.05391007f, 0.02131275f, -0.00661576f);
  const Vec small = at::vec::fmadd(x, square * p, x);
  const Vec large = ones - Vec(2.f) / (ones + exact_exp(size + size));
  const Vec sign = Vec::blendv(ones, Vec(-1.f), x < Vec(0.f));
  return Vec::blendv(large * sign, small, size < Vec(0.55f));
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
