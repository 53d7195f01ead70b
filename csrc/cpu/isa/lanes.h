// Sums the lanes of many vector registers at once, on CPUs.
#pragma once

#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

#if defined(CPU_CAPABILITY_AVX512)

// Returns the lane sums of 16 registers of 32-bit numbers, which `add` adds.
template <class Add>
FUSEDOPS_INLINE __m512 sums_of_lanes(const __m512 (&x)[16], const Add& add) {
  __m512 by_2[8], by_4[4], by_8[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = x[2 * i], b = x[2 * i + 1];
    by_2[i] = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto a = _mm512_castps_pd(by_2[2 * i]), b = _mm512_castps_pd(by_2[2 * i + 1]);
    by_4[i] =
        add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto halves = [&](__m512 a, __m512 b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  for (int i = 0; i < 2; ++i) by_8[i] = halves(by_4[2 * i], by_4[2 * i + 1]);
  return halves(by_8[0], by_8[1]);
}

#else

// Returns the lane sums of 8 registers of float32.
FUSEDOPS_INLINE __m256 sums_of_lanes(const __m256 (&x)[8]) {
  __m256 by_2[4], by_4[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 a = x[2 * i], b = x[2 * i + 1];
    by_2[i] = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256d a = (__m256d)by_2[2 * i], b = (__m256d)by_2[2 * i + 1];
    by_4[i] = (__m256)_mm256_unpacklo_pd(a, b) + (__m256)_mm256_unpackhi_pd(a, b);
  }
  return _mm256_permute2f128_ps(by_4[0], by_4[1], 0x20) +
         _mm256_permute2f128_ps(by_4[0], by_4[1], 0x31);
}

#endif

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
