// Reads AdamW's parameters and moments as float32 and writes them rounded: to nearest,
// stochastically, or to bfloat16 with the remainder in another tensor.
#pragma once

#include <type_traits>

#include "csrc/cpu/isa/adamw/block.h"

namespace fusedops::cpu::adamw {
namespace CPU_CAPABILITY {

FUSEDOPS_INLINE Vec load_floats(const float* p) { return Vec::loadu(p); }
template <class T>
FUSEDOPS_INLINE Vec load_floats(const T* p) {
  Vec v;
  at::vec::load_to_float(p, v);
  return v;
}

// Returns the bits of a bfloat16 after adding `offset` to the bits that are cut off. With kAnyNaN
// every NaN stays NaN, otherwise only a NaN whose lower half is zero.
template <bool kAnyNaN = true>
FUSEDOPS_INLINE Ints bfloat16_bits(const Vec& v, Ints offset) {
  const Ints x = bits(v), rounded = right<16>(add(x, offset));
  if constexpr (!kAnyNaN) return rounded;
  return if_greater(both(x, ints(0x7fffffff)), ints(0x7f800000), ints(0x7fc0), rounded);
}

FUSEDOPS_INLINE Ints nearest_even_offset(const Vec& v) {
  return add(ints(0x7fff), both(right<16>(bits(v)), ints(1)));
}

// Returns the bits of a stochastically rounded float16; random: 16 bits.
FUSEDOPS_INLINE Ints float16_bits(const Vec& v, Ints random) {
  const Ints x = bits(v), size = both(x, ints(0x7fffffff));
  const Ints sign = right<16>(both(x, ints(0x80000000)));
  const Ints normal = subtract(right<13>(add(size, right<3>(random))), ints(112 << 10));
  const Vec units = floats(size) * Vec(0x1p24f);  // multiples of the smallest denormal
  const Ints denormal = truncated(units + converted(random) * Vec(0x1p-16f));
  Ints magnitude = if_greater(ints(0x38800000), size, denormal, least(normal, ints(0x7c00)));
  magnitude = if_greater(size, ints(0x7f800000), ints(0x7e00), magnitude);
  return either(magnitude, sign);
}

// Stores two vectors, rounded to nearest.
FUSEDOPS_INLINE void store_nearest(float* p, const Floats& v) { store(p, v, Full{}); }
FUSEDOPS_INLINE void store_nearest(BFloat16* p, const Floats& v) {
  store_halves(p, halves(bfloat16_bits(v.lo, nearest_even_offset(v.lo)),
                         bfloat16_bits(v.hi, nearest_even_offset(v.hi))));
}
FUSEDOPS_INLINE void store_nearest(Half* p, const Floats& v) { store(p, v, Full{}); }

// Stores two vectors, rounded stochastically.
template <bool kAnyNaN = true>
FUSEDOPS_INLINE void store_by_chance(BFloat16* p, const Floats& v, Ints random) {
  store_halves(p, halves(bfloat16_bits<kAnyNaN>(v.lo, first_words(random)),
                         bfloat16_bits<kAnyNaN>(v.hi, second_words(random))));
}
template <bool = true>
FUSEDOPS_INLINE void store_by_chance(Half* p, const Floats& v, Ints random) {
  store_halves(p, halves(float16_bits(v.lo, first_words(random)),
                         float16_bits(v.hi, second_words(random))));
}

template <class T, Rounding kRounding>
FUSEDOPS_INLINE Vec load_param(const Block<T>& block, int64_t i) {
  if constexpr (kRounding == Rounding::remainder) {
    const Ints high = left<16>(load_halves(block.param + i));
    return floats(add(high, load_signed_halves(block.remainder + i)));
  } else {
    return load_floats(block.param + i);
  }
}

template <class T, Rounding kRounding, bool kAnyNaN>
FUSEDOPS_INLINE void store_param(const Block<T>& block, int64_t i, const Floats& v) {
  T* const p = block.param + i;
  if constexpr (kRounding == Rounding::nearest) {
    store_nearest(p, v);
  } else if constexpr (kRounding == Rounding::stochastic) {
    store_by_chance<kAnyNaN>(p, v, random_halves(block.key, kRandomParam, i));
  } else {
    const auto number_or_nan = [](const Vec& x) {  // adding to another NaN's bits might give -0
      const Ints size = both(bits(x), ints(0x7fffffff));
      return if_greater(size, ints(0x7f800000), ints(0x7fc00000), bits(x));
    };
    const Ints lo = number_or_nan(v.lo), hi = number_or_nan(v.hi);
    const auto high = [](Ints x) { return right<16>(add(x, ints(0x8000))); };
    const auto rest = [](Ints x) { return both(x, ints(0xffff)); };
    store_halves(p, halves(high(lo), high(hi)));
    store_halves(block.remainder + i, halves(rest(lo), rest(hi)));
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::adamw
