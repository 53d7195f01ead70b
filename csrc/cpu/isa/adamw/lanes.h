// Vectors of AdamW: as many lanes as a Vec has, of bytes and halves in memory, of random words.
#pragma once

#include <immintrin.h>

#include "csrc/adamw.h"
#include "csrc/cpu/vec.h"

#define FUSEDOPS_INLINE inline __attribute__((always_inline))

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

constexpr int kLanes = Vec::size();

#if defined(CPU_CAPABILITY_AVX512)

using Ints = __m512i;

FUSEDOPS_INLINE Ints ints(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
FUSEDOPS_INLINE Ints lane_numbers() {
  return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}
FUSEDOPS_INLINE Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
FUSEDOPS_INLINE Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
FUSEDOPS_INLINE Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
FUSEDOPS_INLINE Ints least(Ints a, Ints b) { return _mm512_min_epi32(a, b); }
FUSEDOPS_INLINE Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
FUSEDOPS_INLINE Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
FUSEDOPS_INLINE Ints one_of(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
template <int kBits>
FUSEDOPS_INLINE Ints right(Ints a) {
  return _mm512_srli_epi32(a, kBits);
}
template <int kBits>
FUSEDOPS_INLINE Ints left(Ints a) {
  return _mm512_slli_epi32(a, kBits);
}
// where a > b, else otherwise
FUSEDOPS_INLINE Ints if_greater(Ints a, Ints b, Ints where, Ints otherwise) {
  return _mm512_mask_mov_epi32(otherwise, _mm512_cmpgt_epi32_mask(a, b), where);
}

FUSEDOPS_INLINE Ints bits(const Vec& v) { return _mm512_castps_si512(v); }
FUSEDOPS_INLINE Vec floats(Ints i) { return _mm512_castsi512_ps(i); }
FUSEDOPS_INLINE Vec converted(Ints i) { return _mm512_cvtepi32_ps(i); }
FUSEDOPS_INLINE Ints truncated(const Vec& v) { return _mm512_cvttps_epi32(v); }
FUSEDOPS_INLINE Ints nearest(const Vec& v) { return _mm512_cvtps_epi32(v); }

FUSEDOPS_INLINE Ints load(const Ints* p) { return _mm512_loadu_si512(p); }
FUSEDOPS_INLINE void store(Ints* p, Ints i) { _mm512_storeu_si512(p, i); }
FUSEDOPS_INLINE Ints load_signed_bytes(const void* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
FUSEDOPS_INLINE Ints load_bytes(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
FUSEDOPS_INLINE Ints load_halves(const void* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
FUSEDOPS_INLINE Ints load_signed_halves(const void* p) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
// The low bytes and halves.
FUSEDOPS_INLINE void store_bytes(void* p, Ints i) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(i));
}
FUSEDOPS_INLINE void store_halves(void* p, Ints i) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(i));
}

// The low bytes, limited to what they hold.
FUSEDOPS_INLINE void store_limited_bytes(void* p, Ints i) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(i));
}

using Lanes = __mmask16;

FUSEDOPS_INLINE Lanes below(const Vec& a, const Vec& b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
FUSEDOPS_INLINE Vec choose(Lanes lanes, const Vec& where, const Vec& otherwise) {
  return _mm512_mask_mov_ps(otherwise, lanes, where);
}
FUSEDOPS_INLINE Vec larger(const Vec& a, const Vec& b) { return _mm512_max_ps(a, b); }
// The larger of a, which is not negative, and |b|.
FUSEDOPS_INLINE Vec larger_size(const Vec& a, const Vec& b) { return _mm512_range_ps(a, b, 0xb); }
FUSEDOPS_INLINE Vec with_sign_of(const Vec& size, const Vec& sign) {
  return _mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(bits(size), bits(sign),
                                _mm512_set1_epi32(static_cast<int>(0x80000000)), 0xf8));
}

// 1 / sqrt(x), 2^-14 of itself off.
FUSEDOPS_INLINE Vec quick_rsqrt(const Vec& x) { return _mm512_rsqrt14_ps(x); }
// a / b, half an ulp off or a little more; b is of normal size.
FUSEDOPS_INLINE Vec quotient(const Vec& a, const Vec& b) {
  const __m512 q = _mm512_rcp14_ps(b);
  return _mm512_mul_ps(a, _mm512_fmadd_ps(q, _mm512_fnmadd_ps(b, q, _mm512_set1_ps(1)), q));
}

#else

using Ints = __m256i;

FUSEDOPS_INLINE Ints ints(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
FUSEDOPS_INLINE Ints lane_numbers() { return _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0); }
FUSEDOPS_INLINE Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
FUSEDOPS_INLINE Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
FUSEDOPS_INLINE Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
FUSEDOPS_INLINE Ints least(Ints a, Ints b) { return _mm256_min_epi32(a, b); }
FUSEDOPS_INLINE Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
FUSEDOPS_INLINE Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
FUSEDOPS_INLINE Ints one_of(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
template <int kBits>
FUSEDOPS_INLINE Ints right(Ints a) {
  return _mm256_srli_epi32(a, kBits);
}
template <int kBits>
FUSEDOPS_INLINE Ints left(Ints a) {
  return _mm256_slli_epi32(a, kBits);
}
FUSEDOPS_INLINE Ints if_greater(Ints a, Ints b, Ints where, Ints otherwise) {
  return _mm256_blendv_epi8(otherwise, where, _mm256_cmpgt_epi32(a, b));
}

FUSEDOPS_INLINE Ints bits(const Vec& v) { return _mm256_castps_si256(v); }
FUSEDOPS_INLINE Vec floats(Ints i) { return _mm256_castsi256_ps(i); }
FUSEDOPS_INLINE Vec converted(Ints i) { return _mm256_cvtepi32_ps(i); }
FUSEDOPS_INLINE Ints truncated(const Vec& v) { return _mm256_cvttps_epi32(v); }
FUSEDOPS_INLINE Ints nearest(const Vec& v) { return _mm256_cvtps_epi32(v); }

FUSEDOPS_INLINE Ints load(const Ints* p) { return _mm256_loadu_si256(p); }
FUSEDOPS_INLINE void store(Ints* p, Ints i) { _mm256_storeu_si256(p, i); }
FUSEDOPS_INLINE Ints load_signed_bytes(const void* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
FUSEDOPS_INLINE Ints load_bytes(const void* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
FUSEDOPS_INLINE Ints load_halves(const void* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
FUSEDOPS_INLINE Ints load_signed_halves(const void* p) {
  return _mm256_cvtepi16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
// The eight halves of 16 bits in order.
FUSEDOPS_INLINE __m128i packed_halves(Ints i) {
  const Ints low = _mm256_and_si256(i, _mm256_set1_epi32(0xffff));
  const Ints pairs = _mm256_packus_epi32(low, low);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
}
FUSEDOPS_INLINE void store_halves(void* p, Ints i) {
  _mm_storeu_si128(static_cast<__m128i*>(p), packed_halves(i));
}
FUSEDOPS_INLINE void store_bytes(void* p, Ints i) {
  const __m128i halves = packed_halves(both(i, ints(0xff)));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}

FUSEDOPS_INLINE void store_limited_bytes(void* p, Ints i) { store_bytes(p, least(i, ints(255))); }

using Lanes = Vec;

FUSEDOPS_INLINE Lanes below(const Vec& a, const Vec& b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
FUSEDOPS_INLINE Vec choose(const Lanes& lanes, const Vec& where, const Vec& otherwise) {
  return _mm256_blendv_ps(otherwise, where, lanes);
}
FUSEDOPS_INLINE Vec larger(const Vec& a, const Vec& b) { return _mm256_max_ps(a, b); }
FUSEDOPS_INLINE Vec larger_size(const Vec& a, const Vec& b) { return larger(a, b.abs()); }
FUSEDOPS_INLINE Vec with_sign_of(const Vec& size, const Vec& sign) {
  return floats(either(bits(size), both(bits(sign), ints(0x80000000))));
}

FUSEDOPS_INLINE Vec quotient(const Vec& a, const Vec& b) { return a / b; }
FUSEDOPS_INLINE Vec quick_rsqrt(const Vec& x) {
  const Vec y = _mm256_rsqrt_ps(x);  // 2^-11, and a step of Newton's
  return y * at::vec::fmadd(x * y, y * Vec(-0.5f), Vec(1.5f));
}

#endif

// lane numbers + first as random words of csrc/adamw.h
FUSEDOPS_INLINE Ints random_words(BlockKey key, uint32_t first) {
  Ints x = one_of(add(lane_numbers(), ints(first)), ints(key.low));
  x = multiply(one_of(x, right<16>(x)), ints(0x7FEB352D));
  x = one_of(x, ints(key.high));
  x = multiply(one_of(x, right<15>(x)), ints(0x846CA68B));
  return one_of(x, right<16>(x));
}

// The bytes or halves of `count` words from `first` on.
template <int kCount>
struct Random {
  alignas(64) uint32_t words[kCount];

  FUSEDOPS_INLINE void draw(BlockKey key, uint32_t first) {
    for (int i = 0; i < kCount; i += kLanes) {
      store(reinterpret_cast<Ints*>(words + i), random_words(key, first + i));
    }
  }
  FUSEDOPS_INLINE Ints bytes(int i) const {
    return load_bytes(reinterpret_cast<const char*>(words) + i);
  }
  FUSEDOPS_INLINE Ints halves(int i) const {
    return load_halves(reinterpret_cast<const char*>(words) + 2 * i);
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
