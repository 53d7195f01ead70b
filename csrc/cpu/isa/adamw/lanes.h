// Vector operations for AdamW: integers of 8, 16 and 32 bits, comparisons, roots, random words.
#pragma once

#include <immintrin.h>

#include "csrc/kernels/adamw.h"
#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu::adamw {

using namespace fusedops::adamw;

namespace CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

constexpr int kLanes = Vec::size();

#if defined(CPU_CAPABILITY_AVX512)

using Ints = __m512i;

FUSEDOPS_INLINE Ints ints(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
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
// Returns `where` in lanes with a > b, `otherwise` in the other lanes.
FUSEDOPS_INLINE Ints if_greater(Ints a, Ints b, Ints where, Ints otherwise) {
  return _mm512_mask_mov_epi32(otherwise, _mm512_cmpgt_epi32_mask(a, b), where);
}

FUSEDOPS_INLINE Ints bits(const Vec& v) { return _mm512_castps_si512(v); }
FUSEDOPS_INLINE Vec floats(Ints i) { return _mm512_castsi512_ps(i); }
FUSEDOPS_INLINE Vec converted(Ints i) { return _mm512_cvtepi32_ps(i); }
FUSEDOPS_INLINE Ints truncated(const Vec& v) { return _mm512_cvttps_epi32(v); }
FUSEDOPS_INLINE Ints nearest(const Vec& v) { return _mm512_cvtps_epi32(v); }

FUSEDOPS_INLINE Ints load_words(const void* p) { return _mm512_loadu_si512(p); }
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

// Packs two vectors of 32-bit words to one of 16-bit halves, or two of halves to one of bytes, with
// saturation. The result interleaves four lanes of the first, four of the second, and so on.
FUSEDOPS_INLINE Ints signed_halves(Ints a, Ints b) { return _mm512_packs_epi32(a, b); }
FUSEDOPS_INLINE Ints halves(Ints a, Ints b) { return _mm512_packus_epi32(a, b); }
FUSEDOPS_INLINE Ints signed_bytes(Ints a, Ints b) { return _mm512_packs_epi16(a, b); }
FUSEDOPS_INLINE Ints bytes(Ints a, Ints b) { return _mm512_packus_epi16(a, b); }
// Undoes that with zero extension: returns the first vector, or the second, of interleaved halves
// or bytes.
FUSEDOPS_INLINE Ints first_words(Ints i) { return _mm512_unpacklo_epi16(i, Ints{}); }
FUSEDOPS_INLINE Ints second_words(Ints i) { return _mm512_unpackhi_epi16(i, Ints{}); }
FUSEDOPS_INLINE Ints first_halves(Ints i) { return _mm512_unpacklo_epi8(i, Ints{}); }
FUSEDOPS_INLINE Ints second_halves(Ints i) { return _mm512_unpackhi_epi8(i, Ints{}); }
FUSEDOPS_INLINE Ints add_limited_halves(Ints a, Ints b) { return _mm512_adds_epu16(a, b); }
FUSEDOPS_INLINE Ints add_halves(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
FUSEDOPS_INLINE Ints add_bytes(Ints a, uint8_t b) {
  return _mm512_add_epi8(a, _mm512_set1_epi8(static_cast<char>(b)));
}
FUSEDOPS_INLINE Ints larger_bits(Ints a, Ints b) { return _mm512_max_epu32(a, b); }
FUSEDOPS_INLINE Ints high_bytes(Ints halves) { return _mm512_srli_epi16(halves, 8); }
FUSEDOPS_INLINE Ints signed_high_bytes(Ints halves) { return _mm512_srai_epi16(halves, 8); }
FUSEDOPS_INLINE Ints larger_signed_bytes(Ints a, int8_t b) {
  return _mm512_max_epi8(a, _mm512_set1_epi8(b));
}
// The permutation of words that puts interleaved halves in order.
FUSEDOPS_INLINE Ints words_of_halves() {
  return _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
}
// Stores interleaved bytes in order.
FUSEDOPS_INLINE void store_bytes(void* p, Ints i) {
  const Ints order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, i));
}
FUSEDOPS_INLINE void store_halves(void* p, Ints i) {
  const Ints pairs = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi64(pairs, i));
}

using Lanes = __mmask16;

FUSEDOPS_INLINE Lanes below(const Vec& a, const Vec& b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
FUSEDOPS_INLINE bool all_below(const Vec& a, const Vec& b) { return below(a, b) == 0xffff; }
FUSEDOPS_INLINE Vec choose(Lanes lanes, const Vec& where, const Vec& otherwise) {
  return _mm512_mask_mov_ps(otherwise, lanes, where);
}
FUSEDOPS_INLINE Vec larger(const Vec& a, const Vec& b) { return _mm512_max_ps(a, b); }
// Returns max(a, |b|) for a >= 0.
FUSEDOPS_INLINE Vec larger_size(const Vec& a, const Vec& b) { return _mm512_range_ps(a, b, 0xb); }
// Returns min(|a|, b) with a's sign, for b >= 0.
FUSEDOPS_INLINE Vec limited(const Vec& a, const Vec& b) { return _mm512_range_ps(a, b, 0x2); }
// Returns a >= 0 with b's sign.
FUSEDOPS_INLINE Vec with_sign(const Vec& a, const Vec& b) {
  return floats(_mm512_ternarylogic_epi32(bits(a), bits(b), ints(0x80000000), 0xf8));
}

// 1 / sqrt(x), with relative error 2^-14.
FUSEDOPS_INLINE Vec quick_rsqrt(const Vec& x) { return _mm512_rsqrt14_ps(x); }
// 1 / x, with an error of slightly over half an ulp. x is a normal number, or infinite if not
// kFinite.
template <bool kFinite>
FUSEDOPS_INLINE Vec inverse(const Vec& x) {
  const __m512 y = _mm512_rcp14_ps(x), rest = _mm512_fnmadd_ps(x, y, _mm512_set1_ps(1));
  if constexpr (kFinite) return _mm512_fmadd_ps(y, rest, y);
  const auto finite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(INFINITY), _CMP_NEQ_UQ);
  return _mm512_mask_fmadd_ps(y, finite, rest, y);
}

#else

using Ints = __m256i;

FUSEDOPS_INLINE Ints ints(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
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

FUSEDOPS_INLINE Ints load_words(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
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

FUSEDOPS_INLINE Ints signed_halves(Ints a, Ints b) { return _mm256_packs_epi32(a, b); }
FUSEDOPS_INLINE Ints halves(Ints a, Ints b) { return _mm256_packus_epi32(a, b); }
FUSEDOPS_INLINE Ints signed_bytes(Ints a, Ints b) { return _mm256_packs_epi16(a, b); }
FUSEDOPS_INLINE Ints bytes(Ints a, Ints b) { return _mm256_packus_epi16(a, b); }
FUSEDOPS_INLINE Ints first_words(Ints i) { return _mm256_unpacklo_epi16(i, Ints{}); }
FUSEDOPS_INLINE Ints second_words(Ints i) { return _mm256_unpackhi_epi16(i, Ints{}); }
FUSEDOPS_INLINE Ints first_halves(Ints i) { return _mm256_unpacklo_epi8(i, Ints{}); }
FUSEDOPS_INLINE Ints second_halves(Ints i) { return _mm256_unpackhi_epi8(i, Ints{}); }
FUSEDOPS_INLINE Ints add_limited_halves(Ints a, Ints b) { return _mm256_adds_epu16(a, b); }
FUSEDOPS_INLINE Ints add_halves(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
FUSEDOPS_INLINE Ints add_bytes(Ints a, uint8_t b) {
  return _mm256_add_epi8(a, _mm256_set1_epi8(static_cast<char>(b)));
}
FUSEDOPS_INLINE Ints larger_bits(Ints a, Ints b) { return _mm256_max_epu32(a, b); }
FUSEDOPS_INLINE Ints high_bytes(Ints halves) { return _mm256_srli_epi16(halves, 8); }
FUSEDOPS_INLINE Ints signed_high_bytes(Ints halves) { return _mm256_srai_epi16(halves, 8); }
FUSEDOPS_INLINE Ints larger_signed_bytes(Ints a, int8_t b) {
  return _mm256_max_epi8(a, _mm256_set1_epi8(b));
}
FUSEDOPS_INLINE Ints words_of_halves() { return _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7); }
FUSEDOPS_INLINE void store_bytes(void* p, Ints i) {
  const Ints order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(i, order));
}
FUSEDOPS_INLINE void store_halves(void* p, Ints i) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(i, 0xd8));
}

using Lanes = Vec;

FUSEDOPS_INLINE Lanes below(const Vec& a, const Vec& b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
FUSEDOPS_INLINE bool all_below(const Vec& a, const Vec& b) {
  return _mm256_movemask_ps(below(a, b)) == 0xff;
}
FUSEDOPS_INLINE Vec choose(const Lanes& lanes, const Vec& where, const Vec& otherwise) {
  return _mm256_blendv_ps(otherwise, where, lanes);
}
FUSEDOPS_INLINE Vec larger(const Vec& a, const Vec& b) { return _mm256_max_ps(a, b); }
FUSEDOPS_INLINE Vec larger_size(const Vec& a, const Vec& b) { return larger(a, b.abs()); }
FUSEDOPS_INLINE Vec with_sign(const Vec& a, const Vec& b) {
  return floats(either(bits(a), both(bits(b), ints(0x80000000))));
}
FUSEDOPS_INLINE Vec limited(const Vec& a, const Vec& b) {
  return with_sign(_mm256_min_ps(b, a.abs()), a);
}

template <bool>
FUSEDOPS_INLINE Vec inverse(const Vec& x) {
  return Vec(1.f) / x;
}
FUSEDOPS_INLINE Vec quick_rsqrt(const Vec& x) {
  const Vec y = _mm256_rsqrt_ps(x);  // relative error 2^-11, before a Newton step
  return y * at::vec::fmadd(x * y, y * Vec(-0.5f), Vec(1.5f));
}

#endif

// Returns the random words of csrc/kernels/adamw.h with these indices.
FUSEDOPS_INLINE Ints random_words(BlockKey key, Ints numbers) {
  Ints x = one_of(numbers, ints(key.low));
  x = multiply(one_of(x, right<16>(x)), ints(0x7FEB352D));
  x = one_of(x, ints(key.high));
  x = multiply(one_of(x, right<15>(x)), ints(0x846CA68B));
  return one_of(x, right<16>(x));
}

// Returns random halves for elements i to i + 2 kLanes, interleaved.
FUSEDOPS_INLINE Ints random_halves(BlockKey key, uint32_t first, int64_t i) {
  return random_words(key, add(words_of_halves(), ints(first + static_cast<uint32_t>(i) / 2)));
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::adamw
