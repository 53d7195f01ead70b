// Reads and writes a block's AdamW moments on CPUs, in every format. Codes: csrc/kernels/adamw.h.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "csrc/cpu/isa/adamw/rounding.h"

namespace fusedops::cpu::adamw {
namespace CPU_CAPABILITY {

struct Pair {
  Vec m, v;
};

// Loads the moments from i, times factors. Codes are decoded relative to their scales.
template <Moments kMoments, class T>
FUSEDOPS_INLINE Pair load_moments(const Block<T>& block, int64_t i, const Pair& factors) {
  if constexpr (kMoments == Moments::int8) {
    const Vec c = converted(load_signed_bytes(static_cast<const int8_t*>(block.exp_avg) + i));
    const Vec d = converted(load_bytes(static_cast<const uint8_t*>(block.exp_avg_sq) + i));
    const Vec root = at::vec::fmadd(d, factors.v, factors.v), square = root * root;
    return {c * factors.m * c.abs(), square * square};
  } else {
    using Moment = std::conditional_t<kMoments == Moments::float32, float, BFloat16>;
    return {load_floats(static_cast<const Moment*>(block.exp_avg) + i) * factors.m,
            load_floats(static_cast<const Moment*>(block.exp_avg_sq) + i) * factors.v};
  }
}

// Returns load_moments' factors for m * times.m and v * times.v. For codes they include the scales,
// and v is multiplied by times.v^4.
template <Moments kMoments, class T>
FUSEDOPS_INLINE Pair moment_factors(const Block<T>& block, const Pair& times) {
  if constexpr (kMoments == Moments::int8) {
    return {times.m * Vec(*block.exp_avg_scale * (1 / (kMomentCodes * kMomentCodes))),
            times.v * Vec(*block.exp_avg_sq_scale * (1 / kSquareCodes))};
  } else {
    return times;
  }
}

// Stores two vectors of moments as float32 or bfloat16. 8-bit moments go through `Waiting`.
template <Moments kMoments, class T>
FUSEDOPS_INLINE void store_moments(const Block<T>& block, int64_t i, const Floats& m,
                                   const Floats& v) {
  if constexpr (kMoments == Moments::float32) {
    store_nearest(static_cast<float*>(block.exp_avg) + i, m);
    store_nearest(static_cast<float*>(block.exp_avg_sq) + i, v);
  } else {
    store_nearest(static_cast<BFloat16*>(block.exp_avg) + i, m);
    store_by_chance(static_cast<BFloat16*>(block.exp_avg_sq) + i, v,
                    random_halves(block.key, kRandomSquare16, i));
  }
}

// A block's new moments before they are encoded.
struct Waiting {
  alignas(64) float m[kAdamWBlock], root[kAdamWBlock];  // root = sqrt(v)
  float most_m = 0, most_root = 0;                      // the largest |m| and root
};

// Byte 1 of each element's distance from the turn's first threshold, interleaved as `signed_bytes`
// does.
struct Thresholds {
  alignas(64) uint8_t at[kTurn];
  constexpr Thresholds() : at() {
    for (int byte = 0; byte < kTurn; ++byte) {
      const int lane = byte / 4, word = kLanes / 4 * (lane % 4) + lane / 4;
      at[byte] = static_cast<uint8_t>(kThresholdElement * (4 * word + byte % 4) >> 8);
    }
  }
};
constexpr Thresholds kThresholds;

// Encodes a block's waiting moments into codes and scales.
template <class T>
class Encoding {
 public:
  FUSEDOPS_INLINE Encoding(const Block<T>& block, const Waiting& waiting)
      : block_(block),
        waiting_(waiting),
        less_(static_cast<float>(block.first_threshold & 0xff) / 256 - 256.5f) {
    const auto [most_m, most_root] = std::pair(waiting.most_m, waiting.most_root);
    if (most_m >= kLeastMomentScale) m_factor_ = Vec(256 * kMomentCodes * kMomentCodes / most_m);
    if (most_root >= kLeastNormal) {
      root_factor_ = Vec(256 * kSquareCodes / std::sqrt(most_root));
    }
  }

  // Writes the codes of one turn from element i, if the block has any left.
  FUSEDOPS_INLINE void turn(int64_t i) const {
    if (i < 0 || i >= block_.count) return;
    const uint32_t threshold =
        block_.first_threshold + kThresholdElement * static_cast<uint32_t>(i);
    const Ints thresholds =
        add_bytes(load_words(kThresholds.at), static_cast<uint8_t>(threshold >> 8));
    const Ints first = first_halves(thresholds), second = second_halves(thresholds);
    const Ints m_low = signed_halves(m_code(i), m_code(i + kLanes));
    const Ints m_high = signed_halves(m_code(i + 2 * kLanes), m_code(i + 3 * kLanes));
    const Ints codes = signed_bytes(signed_high_bytes(add_halves(m_low, first)),
                                    signed_high_bytes(add_halves(m_high, second)));
    store_bytes(static_cast<int8_t*>(block_.exp_avg) + i,
                larger_signed_bytes(codes, -127));  // an inexact root can give -128
    const Ints low = halves(root_code(i), root_code(i + kLanes));
    const Ints high = halves(root_code(i + 2 * kLanes), root_code(i + 3 * kLanes));
    store_bytes(static_cast<uint8_t*>(block_.exp_avg_sq) + i,
                bytes(high_bytes(add_limited_halves(low, first)),
                      high_bytes(add_limited_halves(high, second))));
  }

  // Writes the codes of all turns from element i, and the scales.
  FUSEDOPS_INLINE void rest(int64_t i) const {
    for (; i < block_.count; i += kTurn) turn(i);
    if (block_.count == 0) return;
    *block_.exp_avg_scale = waiting_.most_m;
    *block_.exp_avg_sq_scale = std::sqrt(waiting_.most_root);
  }

 private:
  static constexpr float kLeastNormal = 1.17549435e-38f;

  // The code of m before rounding, in units of 1 / 256; see kMomentVariance.
  FUSEDOPS_INLINE Ints m_code(int64_t i) const {
    const Vec m = Vec::loadu(waiting_.m + i) * m_factor_;
    const Vec square = at::vec::fmadd(larger_size(Vec(256 * kLeastMoment), m), Vec(256.f),
                                      Vec(-65536 * kMomentVariance));
    return nearest(limited(m, square * quick_rsqrt(square)));
  }
  // The code of root: sqrt(root) - 1, in units of 1 / 256, rounded by the thresholds' byte 0. For
  // root = 0 the value is NaN, which converts to the smallest int and packs to 0.
  FUSEDOPS_INLINE Ints root_code(int64_t i) const {
    const Vec root = Vec::loadu(waiting_.root + i);
    return nearest(at::vec::fmadd(root * quick_rsqrt(root), root_factor_, less_));
  }

  const Block<T>& block_;
  const Waiting& waiting_;
  Vec m_factor_{0.f}, root_factor_{0.f}, less_;
};

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::adamw
