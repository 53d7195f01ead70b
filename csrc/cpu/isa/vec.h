// Vectors of float32 for csrc/cpu/isa, loaded from and stored to float32, bfloat16 or float16.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "csrc/cpu/isa.h"

// Also where GCC would call: a call stores the vectors that are in registers.
#define FUSEDOPS_INLINE inline __attribute__((always_inline))

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

using at::BFloat16;
using at::Half;
using Vec = at::vec::Vectorized<float>;

#if defined(CPU_CAPABILITY_AVX512)
using Register = __m512;
#else
using Register = __m256;
#endif

// GCC keeps arrays of this type in registers, but arrays of at::vec's class in memory.
using Lanes = float __attribute__((vector_size(sizeof(Vec)), aligned(4), may_alias));

inline Lanes& lanes(float* p) { return *reinterpret_cast<Lanes*>(p); }
inline const Lanes& lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }

template <class T>
constexpr Dtype dtype_of = std::is_same_v<T, float>      ? Dtype::float32
                           : std::is_same_v<T, BFloat16> ? Dtype::bfloat16
                                                         : Dtype::float16;

// A vector of a 16-bit dtype holds as many elements as two of float32, so every loop step has two.
constexpr int kStep = 2 * Vec::size();

struct Floats {
  Vec lo{0.f}, hi{0.f};
};

// A step's number of elements: kStep, a compile-time constant, or the rest of a row.
struct Full {
  static constexpr int count = kStep;
};
struct Tail {
  int count;  // 1 to kStep - 1
};

template <class Body>
FUSEDOPS_INLINE void each_step(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) body(i, Full{});
  if (i < n) body(i, Tail{static_cast<int>(n - i)});
}

inline int low(Tail tail) { return tail.count < Vec::size() ? tail.count : Vec::size(); }
inline int high(Tail tail) { return tail.count - low(tail); }

inline Floats load(const float* p, Full) { return {Vec::loadu(p), Vec::loadu(p + Vec::size())}; }
inline Floats load(const float* p, Tail tail) {
  return {Vec::loadu(p, low(tail)), Vec::loadu(p + low(tail), high(tail))};
}
// Converts the two vectors to one of T, rounded to nearest even.
template <class T>
inline at::vec::Vectorized<T> narrow(const Floats& v) {
#if defined(__AVX512BF16__)
  // One instruction instead of twenty; it also flushes float32's denormals (< 1.2e-38) to 0.
  if constexpr (std::is_same_v<T, BFloat16>) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(v.hi, v.lo));
  }
#endif
  return at::vec::convert_from_float<T>(v.lo, v.hi);
}
template <class T>
inline Floats widen(const at::vec::Vectorized<T>& v) {
  Register lo, hi;  // convert_to_float's tuple would go through memory
  at::vec::cvt_to_fp32<T>(v, lo, hi);
  return {lo, hi};
}
template <class T>
inline Floats load(const T* p, Full) {
  Floats v;  // two loads: one wide load would have to be split
  at::vec::load_to_float(p, v.lo);
  at::vec::load_to_float(p + Vec::size(), v.hi);
  return v;
}
template <class T>
inline Floats load(const T* p, Tail tail) {
  return widen<T>(at::vec::Vectorized<T>::loadu(p, tail.count));
}

// Loads a register of any dtype as float32.
FUSEDOPS_INLINE Register widened(const float* p) { return Vec::loadu(p); }
FUSEDOPS_INLINE Register widened(const BFloat16* p) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#else
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#endif
}
FUSEDOPS_INLINE Register widened(const Half* p) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}

// Stores v and returns what was stored: v rounded to T.
inline Floats store(float* p, const Floats& v, Full) {
  v.lo.store(p);
  v.hi.store(p + Vec::size());
  return v;
}
inline Floats store(float* p, const Floats& v, Tail tail) {
  v.lo.store(p, low(tail));
  v.hi.store(p + low(tail), high(tail));
  return v;
}
template <class T>
inline Floats store(T* p, const Floats& v, Full) {
  const auto stored = narrow<T>(v);
  stored.store(p);
  return widen<T>(stored);
}
template <class T>
inline Floats store(T* p, const Floats& v, Tail tail) {
  const auto stored = narrow<T>(v);
  stored.store(p, tail.count);
  return widen<T>(stored);
}

template <class T>
inline Floats rounded(const Floats& v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    return widen<T>(narrow<T>(v));
  }
}

// Replaces the elements past the end of the row by 0.
inline Floats live(const Floats& v, Full) { return v; }
inline Floats live(const Floats& v, Tail tail) {
  return {Vec::set(Vec(0.f), v.lo, low(tail)), Vec::set(Vec(0.f), v.hi, high(tail))};
}

// Prefetches a step of p, which may be past the end of its tensor.
template <class T>
inline void prefetch(const T* p) {
  for (size_t byte = 0; byte < kStep * sizeof(T); byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + byte, 0, 2);
  }
}

inline Floats operator+(const Floats& a, const Floats& b) { return {a.lo + b.lo, a.hi + b.hi}; }
inline Floats operator-(const Floats& a, const Floats& b) { return {a.lo - b.lo, a.hi - b.hi}; }
inline Floats operator*(const Floats& a, const Floats& b) { return {a.lo * b.lo, a.hi * b.hi}; }
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return {at::vec::fmadd(a.lo, b.lo, c.lo), at::vec::fmadd(a.hi, b.hi, c.hi)};
}
inline Floats all(double x) { return {Vec(static_cast<float>(x)), Vec(static_cast<float>(x))}; }

inline float sum(const Floats& v) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, v.lo + v.hi);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Replaces the elements past the end of the row by -infinity, which is never the maximum and whose
// exponential is 0.
inline Floats padded(const Floats& v, Full) { return v; }
inline Floats padded(const Floats& v, Tail tail) {
  const Vec none(-kInfinity);
  return {Vec::set(none, v.lo, low(tail)), Vec::set(none, v.hi, high(tail))};
}

inline Floats largest(const Floats& a, const Floats& b) {  // NaN counts as the largest
  return {at::vec::maximum(a.lo, b.lo), at::vec::maximum(a.hi, b.hi)};
}

inline float largest(const Floats& v) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); },
                                        at::vec::maximum(v.lo, v.hi));
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
