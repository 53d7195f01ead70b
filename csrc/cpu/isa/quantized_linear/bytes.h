// Converts vectors of int8 and float8_e4m3fn from and to float32, and loads and stores them.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu::quantized_linear {
namespace CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

// Converts a step of 8-bit numbers to float32.
inline Floats widen_bytes(const int8_t* p) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto at = [&](int i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  };
#else
  const auto at = [&](int i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  };
#endif
  return {at(0), at(Vec::size())};
}

inline Floats load(const int8_t* p, Full) { return widen_bytes(p); }
inline Floats load(const int8_t* p, Tail tail) {
  int8_t bytes[kStep] = {};
  std::memcpy(bytes, p, tail.count);
  return widen_bytes(bytes);
}

// Decodes float8_e4m3fn: sign, 4 exponent bits with bias 7, 3 fraction bits, no infinity.
inline float from_e4m3(uint8_t code) {
  const uint32_t size = code & 127;
  const float normal = std::bit_cast<float>((size << 20) + (120u << 23));
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9f;
  const float number = size < 8 ? small : size == 127 ? NAN : normal;
  return code & 128 ? -number : number;
}

#if defined(CPU_CAPABILITY_AVX512)
inline __m512 from_e4m3(__m128i codes) {
  const __m512i wide = _mm512_cvtepu8_epi32(codes);
  const __m512i size = _mm512_and_si512(wide, _mm512_set1_epi32(127));
  const __m512i normal =
      _mm512_add_epi32(_mm512_slli_epi32(size, 20), _mm512_set1_epi32(120 << 23));
  const __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(size), _mm512_set1_ps(0x1p-9f));
  const auto is_small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(8));
  const auto is_nan = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(127));
  const __m512 number = _mm512_mask_blend_ps(is_small, (__m512)normal, small);
  const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(wide, size), 24);
  return _mm512_mask_blend_ps(is_nan, (__m512)_mm512_or_si512((__m512i)number, sign),
                              _mm512_set1_ps(NAN));
}
#else
// A code's bits, shifted into a float16's exponent and fraction, are its value / 256, subnormals
// included.
inline Floats from_e4m3(__m128i codes) {
  const __m256i wide = _mm256_cvtepi8_epi16(codes);  // the sign fills the upper byte
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256i largest = _mm256_set1_epi16(0x3f80);
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, largest), largest);
  const __m256i number = _mm256_or_si256(half, is_nan);
  const Vec factor(256.f);
  return {Vec(_mm256_cvtph_ps(_mm256_castsi256_si128(number))) * factor,
          Vec(_mm256_cvtph_ps(_mm256_extracti128_si256(number, 1))) * factor};
}
#endif

#if defined(__AVX512BF16__)
// The bfloat16 numbers of float8_e4m3fn's codes 0 to 7, whose exponent is 0: multiples of 2^-9.
alignas(64) constexpr uint16_t kTinyE4m3[32] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                0x3c00, 0x3c20, 0x3c40, 0x3c60};

// Converts 32 float8_e4m3fn to bfloat16.
inline __m512i widen_e4m3(__m256i codes) {
  const __m512i tiny = _mm512_load_si512(kTinyE4m3);
  const __m512i wide = _mm512_cvtepu8_epi16(codes);
  const __m512i size = _mm512_and_si512(wide, _mm512_set1_epi16(127));
  __m512i number = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  const auto is_tiny = _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8));
  number = _mm512_mask_permutexvar_epi16(number, is_tiny, size, tiny);
  const auto is_nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(127));
  number = _mm512_mask_mov_epi16(number, is_nan, _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(number, _mm512_slli_epi16(_mm512_xor_si512(wide, size), 8));
}
#endif

inline Floats load(const uint8_t* p, Full) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto* const codes = reinterpret_cast<const __m128i*>(p);
  return {from_e4m3(_mm_loadu_si128(codes)), from_e4m3(_mm_loadu_si128(codes + 1))};
#else
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return from_e4m3(codes);
#endif
}
inline Floats load(const uint8_t* p, Tail tail) {
  uint8_t bytes[kStep] = {};
  std::memcpy(bytes, p, tail.count);
  return load(bytes, Full());
}

using Ints = at::vec::Vectorized<int32_t>;

template <class Byte, class Part>
inline void store_bytes(Byte* p, Ints lo, Ints hi, Part part) {
  alignas(64) int32_t wide[kStep];
  lo.store(wide);
  hi.store(wide + Ints::size());
  for (int i = 0; i < part.count; ++i) p[i] = static_cast<Byte>(wide[i]);
}

// Byte: int8_t, or uint8_t of numbers from 0 to 255.
template <class Byte>
inline void store_bytes(Byte* p, Ints lo, Ints hi, Full) {
  auto* const to = reinterpret_cast<__m128i*>(p);
#if defined(CPU_CAPABILITY_AVX512)
  _mm_storeu_si128(to, _mm512_cvtepi32_epi8(lo));
  _mm_storeu_si128(to + 1, _mm512_cvtepi32_epi8(hi));
#else
  // The pack interleaves the registers' halves: 0xd8 brings them back into order.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
  const __m128i first = _mm256_castsi256_si128(words), second = _mm256_extracti128_si256(words, 1);
  constexpr bool kSigned = std::is_signed_v<Byte>;
  _mm_storeu_si128(to, kSigned ? _mm_packs_epi16(first, second) : _mm_packus_epi16(first, second));
#endif
}

// Returns the codes of numbers that float8_e4m3fn represents exactly.
inline Ints to_e4m3(Vec number) {
  const Vec magnitude = number.abs();
  const Ints bits = at::vec::cast<int32_t>(magnitude);
  const Ints normal = (bits >> Ints(20)) - Ints(120 << 3);
  const Ints small = at::vec::convert_to_int_of_same_size(magnitude * Vec(0x1p9f));
  const Ints sign = (at::vec::cast<int32_t>(number) >> Ints(24)) & Ints(128);
  return Ints::blendv(normal, small, bits < Ints(121 << 23)) | sign;
}

// Stores numbers that are exact in 8 bits.
template <class Part>
inline void store_codes(int8_t* p, const Floats& v, Part part) {
  using at::vec::convert_to_int_of_same_size;
  store_bytes(p, convert_to_int_of_same_size(v.lo), convert_to_int_of_same_size(v.hi), part);
}
template <class Part>
inline void store_codes(uint8_t* p, const Floats& v, Part part) {
  store_bytes(p, to_e4m3(v.lo), to_e4m3(v.hi), part);
}
template <class T, class Part>
inline void store_codes(T* p, const Floats& v, Part part) {
  store(p, v, part);
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::quantized_linear
