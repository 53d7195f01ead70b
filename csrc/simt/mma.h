// Emulates the products of tensor cores, and arithmetic on the bits, bytes and halves of words.
// For one product the lanes of a warp read each other's registers.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>

#include "csrc/simt/warp.h"

namespace fusedops::simt {

// A lane's registers. csrc/cuda/launch.cuh says which elements they hold.
struct MmaLane {
  const uint32_t* a;
  uint32_t b[2];
  float* c;
};

// Returns the low or the high T of a word.
template <class T>
FUSEDOPS_SIMT_UNSEEN inline float half_of(uint32_t word, int high) {
  return static_cast<float>(T(static_cast<uint16_t>(word >> 16 * high), T::from_bits()));
}

// Returns c plus 16 products, as inexact as tensor cores may be: they shift each term to the
// largest term's exponent and drop the bits below its 24, and round the sum toward zero.
FUSEDOPS_SIMT_UNSEEN inline float truncated_sum(const float* a, const float* b, float c) {
  double terms[17], largest = fabs(c), plain = c;
  terms[16] = c;
  for (int k = 0; k < 16; ++k) {
    terms[k] = static_cast<double>(a[k]) * b[k];
    largest = fabs(terms[k]) > largest ? fabs(terms[k]) : largest;
    plain += terms[k];
  }
  if (!(fabs(plain) < 0x1p127) || largest < 0x1p-100) return static_cast<float>(plain);
  uint64_t bits;
  std::memcpy(&bits, &largest, sizeof(bits));
  bits &= 0x7ff0000000000000;  // the largest term's power of two
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  const double unit = power * 0x1p-23, inverse = 1 / unit;
  int64_t sum = 0;
  for (const double term : terms) sum += static_cast<int64_t>(term * inverse);
  int64_t step = 1;  // of a float of this size
  while (sum / step >= 1 << 24 || sum / step <= -(1 << 24)) step *= 2;
  return static_cast<float>(static_cast<double>(sum / step * step) * unit);
}

template <class T>
FUSEDOPS_SIMT_UNSEEN void serve_mma(Block&, Thread* lanes, uint32_t) {
  float a[16][16], b[8][16];  // b by columns
  const auto lane = [lanes](int i) { return reinterpret_cast<const MmaLane*>(lanes[i].value); };
  for (int k = 0; k < 16; ++k) {
    const int quad = k % 8 / 2, right = k / 8;
    for (int row = 0; row < 16; ++row) {
      const MmaLane* from = lane(row % 8 * 4 + quad);
      a[row][k] = half_of<T>(from->a[right * 2 + row / 8], k % 2);
    }
    for (int n = 0; n < 8; ++n) b[n][k] = half_of<T>(lane(n * 4 + quad)->b[right], k % 2);
  }
  for (int row = 0; row < 16; ++row) {
    for (int n = 0; n < 8; ++n) {
      float& c = lane(row % 8 * 4 + n / 2)->c[row / 8 * 2 + n % 2];
      c = truncated_sum(a[row], b[n], c);
    }
  }
}

}  // namespace fusedops::simt

namespace fusedops::cuda {

template <class T>
__forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         std::source_location at = std::source_location::current()) {
  const simt::MmaLane lane{a, {b0, b1}, c};
  simt::call_meet("mma", ~0u, reinterpret_cast<uint64_t>(&lane), 0, simt::serve_mma<T>, at);
  asm volatile("" ::: "memory");  // the last lane to arrive has written c
}

__forceinline__ uint32_t masked_or(uint32_t a, uint32_t mask, uint32_t set) {
  return (a & mask) | set;
}
__forceinline__ uint32_t masked_xor(uint32_t a, uint32_t mask, uint32_t flip) {
  return (a & mask) ^ flip;
}

__forceinline__ uint32_t dot_of_bytes(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xff) * (b >> i & 0xff);
  return sum;
}

template <class T>
__forceinline__ uint32_t exact_difference(uint32_t a, uint32_t b) {
  const auto half_difference = [a, b](int high) {
    const float difference = simt::half_of<T>(a, high) - simt::half_of<T>(b, high);
    return static_cast<uint32_t>(T(difference).x);
  };
  return half_difference(1) << 16 | half_difference(0);
}

}  // namespace fusedops::cuda
