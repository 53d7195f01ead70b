// Quantizes float32 groups to 4-bit codes, on CPUs.
//
// A vector holds one element of each of kLanes neighbouring groups, so a group's maximum, scale and
// sums stay in one lane. No sum crosses lanes, and every instruction set adds in the reference's
// order. No multiplication is fused with an addition, because that would round differently: the
// bytes are the same on all devices.
//
// The kLanes groups are transposed once into a buffer that fits the first-level cache, where each
// candidate scale is tried. Then the best scale's codes are computed, packed eight to a word, and
// stored.

#include "csrc/cpu/isa/quantized_linear/quantize.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "csrc/cpu/isa/exp.h"

namespace fusedops::cpu::quantized_linear {
namespace CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

using Ints = at::vec::Vectorized<int32_t>;

constexpr int kLanes = Vec::size();
constexpr int kLargestGroup = 128;

struct Block {
  alignas(64) float at[kLargestGroup][kLanes];

  Vec operator[](int64_t i) const { return Vec::loadu(at[i]); }
  void set(int64_t i, Vec v) { v.store(at[i]); }
};

inline Vec finite_or_nan(Vec v) {
  return Vec::blendv(Vec(std::numeric_limits<float>::quiet_NaN()), v, v.abs() < Vec(kInfinity));
}

inline Vec zero_if_nan(Vec v) { return Vec::blendv(Vec(0), v, v == v); }

constexpr float middle(int i) { return (kNf4[i] + kNf4[i + 1]) / 2; }

// nf4's codes. A code is the number of midpoints between nf4's values that are below x.
class Nf4 {
 public:
#if defined(CPU_CAPABILITY_AVX512)
  Nf4() : values_(_mm512_loadu_ps(kNf4)) {
    alignas(64) float by[3][16];
    for (int i = 0; i < 16; ++i) {
      for (int s = 0; s < 3; ++s) by[s][i] = middle(std::min(i + (1 << s) - 1, 14));
    }
    for (int s = 0; s < 3; ++s) middles_[s] = _mm512_load_ps(by[s]);
  }
  Vec code(Vec x) const { return _mm512_cvtepi32_ps(index(x)); }
  Vec value(Vec x) const { return _mm512_permutexvar_ps(index(x), values_); }

 private:
  // Binary search: middles_[s] has, for each possible first code i, the midpoint of the 2^(s+1)
  // codes that are left.
  __m512i index(__m512 x) const {
    const auto above = _mm512_cmp_ps_mask(x, _mm512_set1_ps(middle(7)), _CMP_GT_OQ);
    __m512i i = _mm512_maskz_set1_epi32(above, 8);
    for (int s = 2; s >= 0; --s) {
      const auto past = _mm512_cmp_ps_mask(x, _mm512_permutexvar_ps(i, middles_[s]), _CMP_GT_OQ);
      i = _mm512_mask_add_epi32(i, past, i, _mm512_set1_epi32(1 << s));
    }
    return i;
  }
  __m512 values_, middles_[3];
#else
  Vec code(Vec x) const {
    Vec codes(0);
    for (int i = 0; i < 15; ++i) codes = codes + ((x > Vec(middle(i))) & Vec(1));
    return codes;
  }
  Vec value(Vec x) const {
    Vec nearest(kNf4[0]);
    for (int i = 0; i < 15; ++i) {
      nearest = Vec::blendv(nearest, Vec(kNf4[i + 1]), x > Vec(middle(i)));
    }
    return nearest;
  }
#endif
};

// One format's scale, codes and values for kLanes groups and one share.

struct AsNf4 {
  Nf4 table;
  Vec largest{0}, scale{0}, inverse{0}, zero{0};

  void cover(const Block& w, int64_t size) {
    largest = w[0].abs();
    for (int64_t i = 1; i < size; ++i) largest = at::vec::maximum(largest, w[i].abs());
    largest = finite_or_nan(largest);
  }
  void choose(double share) { take(largest * Vec(static_cast<float>(share)), Vec(0)); }
  void take(Vec absmax, Vec) {
    scale = absmax;
    inverse = at::vec::maximum(absmax, Vec(kSmallestScale)).reciprocal();
  }
  Vec code(Vec w) const { return table.code(zero_if_nan(w * inverse)); }
  Vec value(Vec w) const { return table.value(w * inverse) * scale; }
};

struct AsInt4 {
  Vec low{0}, high{0}, scale{0}, inverse{0}, zero{0};

  void cover(const Block& w, int64_t size) {
    low = high = w[0];
    for (int64_t i = 1; i < size; ++i) {
      low = at::vec::minimum(low, w[i]);
      high = at::vec::maximum(high, w[i]);
    }
    low = finite_or_nan(at::vec::minimum(low, Vec(0)));
    high = finite_or_nan(at::vec::maximum(high, Vec(0)));
  }
  void choose(double share) {
    const Vec step = (high - low) * Vec(static_cast<float>(share / 15));
    take(step, Vec(0));
    zero = clamped((low * Vec(static_cast<float>(-share)) * inverse).round());
  }
  void take(Vec step, Vec at) {
    scale = step;
    inverse = Vec::blendv(step.reciprocal(), Vec(0), step < Vec(kSmallestScale));
    zero = at;
  }
  Vec code(Vec w) const { return zero_if_nan(nearest(w)); }
  Vec value(Vec w) const { return (nearest(w) - zero) * scale; }

 private:
  static Vec clamped(Vec v) { return at::vec::clamp(v, Vec(0), Vec(15)); }
  Vec nearest(Vec w) const { return clamped((w * inverse).round() + zero); }
};

// Returns each lane's squared error. Halves are added pairwise until one is left, as in the
// reference.
template <class Format>
Vec squared_error(const Format& format, const Block& w, int64_t size) {
  const auto square = [&](int64_t i) {
    const Vec error = as_rounded(format.value(w[i])) - w[i];
    return as_rounded(error * error);
  };
  Block sums;
  int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) sums.set(i, square(i) + square(i + half));
  while ((half /= 2) > 0) {
    for (int64_t i = 0; i < half; ++i) sums.set(i, sums[i] + sums[i + half]);
  }
  return sums[0];
}

// Tries all shares and leaves the format with the best one.
template <class Format>
void fit(Format& format, const Block& w, const QuantizeGroups& args) {
  format.cover(w, args.size);
  format.choose(args.shares[0]);
  if (args.count == 1) return;
  Vec scale = format.scale, zero = format.zero, least = squared_error(format, w, args.size);
  for (int64_t i = 1; i < args.count; ++i) {
    format.choose(args.shares[i]);
    const Vec error = squared_error(format, w, args.size), better = error < least;
    scale = Vec::blendv(scale, format.scale, better);
    zero = Vec::blendv(zero, format.zero, better);
    least = Vec::blendv(least, error, better);
  }
  format.take(scale, zero);
}

// Packs eight codes from element i into one word per lane. The first of a pair is the byte's high
// half.
template <class Format>
Ints word(const Format& format, const Block& w, int64_t i) {
  Ints all(0);
  for (int b = 0; b < 4; ++b) {
    const Vec pair = format.code(w[i + 2 * b]) * Vec(16) + format.code(w[i + 2 * b + 1]);
    all = all | (at::vec::convert_to_int_of_same_size(pair) << Ints(8 * b));
  }
  return all;
}

template <class Format>
void quantize_lanes(const QuantizeGroups& args, int64_t first, int64_t groups) {
  Block w;
  for (int64_t lane = 0; lane < kLanes; ++lane) {  // lanes past the last group repeat it
    const float* const from = args.w + (first + std::min(lane, groups - 1)) * args.size;
    for (int64_t i = 0; i < args.size; ++i) w.at[i][lane] = from[i];
  }
  Format format;
  fit(format, w, args);
  format.scale.store(args.scales + first, static_cast<int>(groups));
  alignas(64) int32_t words[kLanes];
  for (int64_t i = 0; i < args.size; i += 8) {
    word(format, w, i).store(words);
    for (int64_t lane = 0; lane < groups; ++lane) {
      std::memcpy(args.codes + ((first + lane) * args.size + i) / 2, &words[lane], 4);
    }
  }
  if (args.zeros == nullptr) return;
  alignas(64) float zeros[kLanes];
  zero_if_nan(format.zero).store(zeros);
  for (int64_t lane = 0; lane < groups; ++lane) {
    args.zeros[first + lane] = static_cast<uint8_t>(zeros[lane]);
  }
}

}  // namespace

void quantize_groups(const QuantizeGroups& args, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t groups = std::min<int64_t>(kLanes, end - first);
    if (args.nf4) {
      quantize_lanes<AsNf4>(args, first, groups);
    } else {
      quantize_lanes<AsInt4>(args, first, groups);
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::quantized_linear
