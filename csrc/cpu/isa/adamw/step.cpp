// A step of AdamW over blocks of 256 elements, which is what an 8-bit scale belongs to.
//
// A block of 8-bit moments is read once: the new moments wait in 2 KiB of stack until the largest
// of them, and so the new scale, is known, and are encoded after the next block's update, so that
// the CPU need not wait for a maximum. Other moments are written as they come. A block that is no
// whole number of vectors is worked on in a copy.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "csrc/cpu/isa/adamw/adamw.h"
#include "csrc/cpu/isa/adamw/lanes.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {
namespace {

// Where a block lies.
template <class T>
struct Block {
  T* param;
  const T* grad;
  void *exp_avg, *exp_avg_sq;
  float* max_exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;
  int16_t* remainder;
  BlockKey key;
  int64_t count;  // a multiple of kLanes; at most kAdamWBlock where there are codes or keys
};

// The new moments of a block, until they are encoded.
struct Waiting {
  alignas(64) float m[kAdamWBlock], root[kAdamWBlock];  // root = sqrt(v)
  float most_m, most_root;                              // the largest |m| and root
};

FUSEDOPS_INLINE Vec load_floats(const float* p) { return Vec::loadu(p); }
template <class T>
FUSEDOPS_INLINE Vec load_floats(const T* p) {
  Vec v;
  at::vec::load_to_float(p, v);
  return v;
}

// The bits of a bfloat16, `offset` added to those that are cut off. A NaN stays one.
FUSEDOPS_INLINE Ints bfloat16_bits(const Vec& v, Ints offset) {
  const Ints x = bits(v), size = both(x, ints(0x7fffffff));
  return if_greater(size, ints(0x7f800000), ints(0x7fc0), right<16>(add(x, offset)));
}

FUSEDOPS_INLINE Ints nearest_even_offset(const Vec& v) {
  return add(ints(0x7fff), both(right<16>(bits(v)), ints(1)));
}

// The bits of a float16, up or down by chance; random: 16 bits.
FUSEDOPS_INLINE Ints float16_bits(const Vec& v, Ints random) {
  const Ints x = bits(v), size = both(x, ints(0x7fffffff));
  const Ints sign = right<16>(both(x, ints(0x80000000)));
  const Ints normal = subtract(right<13>(add(size, right<3>(random))), ints(112 << 10));
  const Vec units = floats(size) * Vec(0x1p24f);  // of the smallest denormal
  const Ints denormal = truncated(units + converted(random) * Vec(0x1p-16f));
  Ints found = if_greater(ints(0x38800000), size, denormal, least(normal, ints(0x7c00)));
  found = if_greater(size, ints(0x7f800000), ints(0x7e00), found);
  return either(found, sign);
}

FUSEDOPS_INLINE void store_nearest(float* p, const Vec& v) { v.store(p); }
FUSEDOPS_INLINE void store_nearest(BFloat16* p, const Vec& v) {
  store_halves(p, bfloat16_bits(v, nearest_even_offset(v)));
}
FUSEDOPS_INLINE void store_nearest(Half* p, const Vec& v) {
#if defined(CPU_CAPABILITY_AVX512)
  const auto halves = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
#else
  const auto halves = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
#endif
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

// random: the block's halves, where they are asked for
template <class T, Rounding kRounding>
FUSEDOPS_INLINE void store_param(const Block<T>& block, int64_t i, const Vec& v,
                                 const Random<kAdamWBlock / 2>& random) {
  T* const p = block.param + i;
  if constexpr (kRounding == Rounding::remainder) {
    const Ints size = both(bits(v), ints(0x7fffffff));  // a NaN's sum might be -0
    const Ints x = if_greater(size, ints(0x7f800000), ints(0x7fc00000), bits(v));
    store_halves(p, right<16>(add(x, ints(0x8000))));
    store_halves(block.remainder + i, x);
  } else if constexpr (kRounding == Rounding::nearest) {
    store_nearest(p, v);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    store_halves(p, bfloat16_bits(v, random.halves(i)));
  } else {
    store_halves(p, float16_bits(v, random.halves(i)));
  }
}

struct Pair {
  Vec m, v;
};

// The moments of the lanes from i on.
template <Moments kMoments, class T>
FUSEDOPS_INLINE Pair load_moments(const Block<T>& block, int64_t i, const Vec& m_scale,
                                  const Vec& v_scale) {
  if constexpr (kMoments == Moments::float32) {
    return {Vec::loadu(static_cast<const float*>(block.exp_avg) + i),
            Vec::loadu(static_cast<const float*>(block.exp_avg_sq) + i)};
  } else if constexpr (kMoments == Moments::bfloat16) {
    return {load_floats(static_cast<const BFloat16*>(block.exp_avg) + i),
            load_floats(static_cast<const BFloat16*>(block.exp_avg_sq) + i)};
  } else {
    const Vec c = converted(load_signed_bytes(static_cast<const int8_t*>(block.exp_avg) + i));
    const Vec d = converted(load_bytes(static_cast<const uint8_t*>(block.exp_avg_sq) + i));
    const Vec root = at::vec::fmadd(d, v_scale, v_scale), square = root * root;
    return {c * m_scale * c.abs(), square * square};
  }
}

// The codes of the moments that wait, and their scales.
template <class T>
FUSEDOPS_INLINE void encode(const Block<T> block, const Waiting& waiting) {
  const auto [most_m, most_root] = std::pair(waiting.most_m, waiting.most_root);
  const float least_normal = 1.17549435e-38f;
  Random<kAdamWBlock / 4> random;
  random.draw(block.key, kRandomSquare8);
  const Vec m_factor(most_m >= least_normal ? kMomentCodes * kMomentCodes / most_m : 0.f);
  const Vec root_factor(most_root >= least_normal ? kSquareCodes * kSquareCodes / most_root : 0.f);
  const Vec tiny(1e-30f);  // so that no root is of zero
  for (int64_t i = 0; i < block.count; i += kLanes) {
    const Vec m = Vec::loadu(waiting.m + i);
    const Vec x = at::vec::fmadd(m.abs(), m_factor, tiny);
    store_bytes(static_cast<int8_t*>(block.exp_avg) + i,
                nearest(with_sign_of(x * quick_rsqrt(x), m)));
    // c + 1 by chance down or up. The byte's middle: what a code stands for stays it. What is
    // below the first code is truncated to it.
    const Vec chance =
        at::vec::fmadd(converted(random.bytes(i)), Vec(1 / 256.f), Vec(1 / 512.f - 1.f));
    const Vec y = at::vec::fmadd(Vec::loadu(waiting.root + i), root_factor, tiny);
    store_limited_bytes(static_cast<uint8_t*>(block.exp_avg_sq) + i,
                        truncated(at::vec::fmadd(y, quick_rsqrt(y), chance)));
  }
  *block.exp_avg_scale = most_m;
  *block.exp_avg_sq_scale = std::sqrt(most_root);
}

template <class T, Moments kMoments, Rounding kRounding>
FUSEDOPS_INLINE void update(const Block<T> block, const AdamWFactors& f, float gradient_factor,
                            Waiting& waiting) {
  constexpr bool kCodes = kMoments == Moments::int8;
  Random<kAdamWBlock / 2> random_param, random_square;
  if constexpr (kRounding == Rounding::stochastic) random_param.draw(block.key, kRandomParam);
  if constexpr (kMoments == Moments::bfloat16) random_square.draw(block.key, kRandomSquare16);
  Vec most_m(0.f), most_root(0.f);
  const Vec m_scale(kCodes ? *block.exp_avg_scale * (1 / (kMomentCodes * kMomentCodes)) : 0.f);
  const Vec v_scale(kCodes ? *block.exp_avg_sq_scale * (1 / kSquareCodes) : 0.f);
  const Vec factor(gradient_factor), decay(f.decay), beta1(f.beta1), rate1(f.rate1), beta2(f.beta2),
      rate2(f.rate2), step_size(-f.step_size), denom(f.denom), eps(f.eps), infinity(INFINITY);
  const bool small_eps = f.eps < 1e-30f;  // quotient() is not for what may be denormal

  for (int64_t i = 0; i < block.count; i += kLanes) {
    const Vec g = load_floats(block.grad + i) * factor, square = g * g;
    const Vec p = load_param<T, kRounding>(block, i);
    const auto [m, v] = load_moments<kMoments>(block, i, m_scale, v_scale);
    const auto finite = below(square, infinity);  // another element keeps what it has
    const Vec new_m = choose(finite, at::vec::fmadd(rate1, g, m * beta1), m);
    const Vec new_v = choose(finite, at::vec::fmadd(rate2, square, v * beta2), v);
    Vec under_root = new_v;
    if (block.max_exp_avg_sq != nullptr) {
      const Vec most = Vec::loadu(block.max_exp_avg_sq + i);
      under_root = larger(most, new_v);
      under_root.store(block.max_exp_avg_sq + i);
    }
    const Vec root = under_root.sqrt();
    const Vec below_line = at::vec::fmadd(root, denom, eps);
    const Vec update = small_eps ? new_m / below_line : quotient(new_m, below_line);
    const Vec new_p = choose(finite, at::vec::fmadd(step_size, update, p * decay), p);
    store_param<T, kRounding>(block, i, new_p, random_param);

    if constexpr (kMoments == Moments::float32) {
      new_m.store(static_cast<float*>(block.exp_avg) + i);
      new_v.store(static_cast<float*>(block.exp_avg_sq) + i);
    } else if constexpr (kMoments == Moments::bfloat16) {
      store_nearest(static_cast<BFloat16*>(block.exp_avg) + i, new_m);
      store_halves(static_cast<BFloat16*>(block.exp_avg_sq) + i,
                   bfloat16_bits(new_v, random_square.halves(i)));
    } else {
      const Vec own_root = block.max_exp_avg_sq != nullptr ? new_v.sqrt() : root;
      new_m.store(waiting.m + i);
      own_root.store(waiting.root + i);
      most_m = larger_size(most_m, new_m);
      most_root = larger(most_root, own_root);
    }
  }
  if constexpr (kCodes) {
    const auto largest = [](const Vec& v) {
      return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return larger(a, b); }, v);
    };
    waiting.most_m = largest(most_m);
    waiting.most_root = largest(most_root);
  }
}

// A block in a copy, with zeros up to whole vectors.
template <class T, Moments kMoments>
struct Staged {
  static constexpr int kMomentBytes = kMoments == Moments::float32    ? 4
                                      : kMoments == Moments::bfloat16 ? 2
                                                                      : 1;
  alignas(64) T param[kAdamWBlock], grad[kAdamWBlock];
  alignas(64) char exp_avg[kAdamWBlock * kMomentBytes], exp_avg_sq[kAdamWBlock * kMomentBytes];
  alignas(64) float max_exp_avg_sq[kAdamWBlock];
  alignas(64) int16_t remainder[kAdamWBlock];

  template <class Step>
  void run(Block<T> block, int64_t count, const Step& step) {
    std::memset(static_cast<void*>(this), 0, sizeof(*this));
    const Block<T> at = block;
    copy(param, at.param, count * sizeof(T));
    copy(grad, at.grad, count * sizeof(T));
    copy(exp_avg, at.exp_avg, count * kMomentBytes);
    copy(exp_avg_sq, at.exp_avg_sq, count * kMomentBytes);
    copy(max_exp_avg_sq, at.max_exp_avg_sq, count * sizeof(float));
    copy(remainder, at.remainder, count * sizeof(int16_t));
    block.param = param;
    block.grad = grad;
    block.exp_avg = exp_avg;
    block.exp_avg_sq = exp_avg_sq;
    block.max_exp_avg_sq = at.max_exp_avg_sq == nullptr ? nullptr : max_exp_avg_sq;
    block.remainder = remainder;
    block.count = (count + kLanes - 1) / kLanes * kLanes;
    step(block);
    copy(at.param, param, count * sizeof(T));
    copy(at.exp_avg, exp_avg, count * kMomentBytes);
    copy(at.exp_avg_sq, exp_avg_sq, count * kMomentBytes);
    copy(at.max_exp_avg_sq, max_exp_avg_sq, count * sizeof(float));
    copy(at.remainder, remainder, count * sizeof(int16_t));
  }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (to != nullptr && from != nullptr) std::memcpy(to, from, bytes);
  }
};

template <class T>
T* shifted(T* p, int64_t elements) {
  return p == nullptr ? nullptr : p + elements;
}

// Blocks of a tensor, in order.
template <class T, Moments kMoments, Rounding kRounding>
struct Run {
  static constexpr bool kCodes = kMoments == Moments::int8;
  // What needs neither a scale nor a key is one long block.
  static constexpr bool kOneByOne =
      kMoments != Moments::float32 || kRounding == Rounding::stochastic;

  const AdamWFactors& factors;
  float gradient_factor;
  Waiting waiting[2];
  Block<T> last;  // updated, not encoded
  int turn = 0;
  bool pending = false;

  void step(const Block<T>& block) {
    update<T, kMoments, kRounding>(block, factors, gradient_factor, waiting[turn]);
    finish();
    if constexpr (kCodes) {
      last = block;
      pending = true;
      turn ^= 1;
    }
  }

  void finish() {
    if constexpr (kCodes) {
      if (pending) encode(last, waiting[turn ^ 1]);
      pending = false;
    }
  }
};

template <class T, Moments kMoments, Rounding kRounding>
void blocks(const AdamWTensor& t, uint64_t key, const AdamWFactors& factors, float gradient_factor,
            int64_t begin, int64_t end) {
  constexpr int kBytes = Staged<T, kMoments>::kMomentBytes;
  using Steps = Run<T, kMoments, kRounding>;
  Steps run{factors, gradient_factor};
  for (int64_t b = begin, taken = 1; b < end; b += taken) {
    auto [first, count] = place_of(t, b);
    if (!Steps::kOneByOne && count == kAdamWBlock && t.row == t.numel) {
      taken = std::min(end, t.numel / kAdamWBlock) - b;
      count = taken * kAdamWBlock;
    } else {
      taken = 1;
    }
    const Block<T> block{static_cast<T*>(t.param) + first,
                         static_cast<const T*>(t.grad) + first,
                         static_cast<char*>(t.exp_avg) + first * kBytes,
                         static_cast<char*>(t.exp_avg_sq) + first * kBytes,
                         shifted(t.max_exp_avg_sq, first),
                         shifted(t.exp_avg_scale, b),
                         shifted(t.exp_avg_sq_scale, b),
                         shifted(t.remainder, first),
                         block_key(key, t.first_key + b),
                         count};
    if (count % kLanes == 0) {
      run.step(block);
      continue;
    }
    Staged<T, kMoments>().run(block, count, [&](const Block<T>& copy) {
      run.step(copy);
      run.finish();
    });
  }
  run.finish();
}

template <class T, Moments kMoments>
auto* with_rounding(Rounding rounding) {
  if constexpr (std::is_same_v<T, float>) {
    return blocks<T, kMoments, Rounding::nearest>;
  } else {
    if (rounding == Rounding::nearest) return blocks<T, kMoments, Rounding::nearest>;
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (rounding == Rounding::remainder) return blocks<T, kMoments, Rounding::remainder>;
    }
    return blocks<T, kMoments, Rounding::stochastic>;
  }
}

template <class T>
auto* with_moments(const AdamWTensor& t) {
  switch (t.moments) {
    case Moments::float32: return with_rounding<T, Moments::float32>(t.rounding);
    case Moments::bfloat16: return with_rounding<T, Moments::bfloat16>(t.rounding);
    default: return with_rounding<T, Moments::int8>(t.rounding);
  }
}

}  // namespace

void adamw_blocks(const AdamWTensor& t, uint64_t key, const AdamWFactors& factors,
                  float gradient_factor, int64_t begin, int64_t end) {
  switch (t.dtype) {
    case Dtype::float32:
      return with_moments<float>(t)(t, key, factors, gradient_factor, begin, end);
    case Dtype::bfloat16:
      return with_moments<BFloat16>(t)(t, key, factors, gradient_factor, begin, end);
    default: return with_moments<Half>(t)(t, key, factors, gradient_factor, begin, end);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
