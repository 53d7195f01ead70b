// Looks up the float32 values of 4-bit codes by vpshufb, for CPUs with AVX2 but without AVX-512.
#pragma once

#include <bit>

#include "csrc/cpu/isa/quantized_linear/codes.h"
#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu::quantized_linear {
namespace CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

#if !defined(CPU_CAPABILITY_AVX512)

constexpr int kNibbles = 32;  // codes that are decoded at once

// kInt4: numbers 0 to 15, else nf4's. vpshufb looks up one byte, so a table is the numbers' bytes:
// their first bytes, their second bytes, and so on. The lower two of a small integer are 0.
template <bool kInt4>
class NibbleTable {
 public:
  NibbleTable() {
    for (int byte = kInt4 ? 2 : 0; byte < 4; ++byte) {
      uint8_t plane[16];
      for (int code = 0; code < 16; ++code) {
        const float number = kInt4 ? static_cast<float>(code) : kNf4[code];
        plane[code] = static_cast<uint8_t>(std::bit_cast<uint32_t>(number) >> 8 * byte);
      }
      planes_[byte] =
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(plane)));
    }
  }

  // numbers = those of kNibbles codes, two to a byte, in order.
  FUSEDOPS_INLINE void look_up(const uint8_t* bytes, __m256 (&numbers)[4]) const {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
    // Each byte twice, for its two codes: where unpacking puts them in order.
    const __m256i order = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13,  //
                                           2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
    const __m256i twice = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(packed), order);
    const __m256i first = _mm256_and_si256(_mm256_srli_epi16(twice, 4), _mm256_set1_epi16(0x000f));
    const __m256i second = _mm256_and_si256(twice, _mm256_set1_epi16(0x0f00));
    const __m256i codes = _mm256_or_si256(first, second);
    const auto plane = [&](int byte) { return _mm256_shuffle_epi8(planes_[byte], codes); };
    const __m256i high_low = _mm256_unpacklo_epi8(plane(2), plane(3));
    const __m256i high_high = _mm256_unpackhi_epi8(plane(2), plane(3));
    __m256i low_low = _mm256_setzero_si256(), low_high = low_low;
    if constexpr (!kInt4) {
      low_low = _mm256_unpacklo_epi8(plane(0), plane(1));
      low_high = _mm256_unpackhi_epi8(plane(0), plane(1));
    }
    numbers[0] = (__m256)_mm256_unpacklo_epi16(low_low, high_low);
    numbers[1] = (__m256)_mm256_unpackhi_epi16(low_low, high_low);
    numbers[2] = (__m256)_mm256_unpacklo_epi16(low_high, high_high);
    numbers[3] = (__m256)_mm256_unpackhi_epi16(low_high, high_high);
  }

 private:
  __m256i planes_[4];
};

#endif

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::quantized_linear
