// A step of AdamW over blocks of 256 elements, which is what an 8-bit scale belongs to.
//
// A block of 8-bit moments is read once: the new moments wait in 2 KiB of stack until the largest
// of them, and so the new scale, is known, and are encoded after the next block's update, so that
// the CPU need not wait for a maximum. Other moments are written as they come. A block that is no
// whole number of turns of the loop is worked on in a copy.
//
// A block whose gradients are all finite, as nearly every one is, is not asked again for each
// element. What is needed two blocks later is asked for early and arrives while this one is
// computed: the CPU's own prefetching stops at every page, and a loop of so much arithmetic holds
// few loads.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "csrc/cpu/isa/adamw/adamw.h"
#include "csrc/cpu/isa/adamw/lanes.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {
namespace {

constexpr int kTurn = 4 * kLanes;  // what a turn of the loops covers: a vector of bytes
constexpr int64_t kBlocksAhead = 2;
constexpr int64_t kLag = 2 * kTurn;  // of encoding behind updating: a block's scale is known late

template <Moments kMoments>
constexpr int kMomentBytes = kMoments == Moments::float32    ? 4
                             : kMoments == Moments::bfloat16 ? 2
                                                             : 1;

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
  int64_t count;  // a multiple of kTurn; at most kAdamWBlock where there are codes or keys
  int64_t ahead;  // of an element lies what is needed soon; 0: no more comes
};

// The new moments of a block, until they are encoded.
struct Waiting {
  alignas(64) float m[kAdamWBlock], root[kAdamWBlock];  // root = sqrt(v)
  float most_m = 0, most_root = 0;                      // the largest |m| and root
};

FUSEDOPS_INLINE Vec load_floats(const float* p) { return Vec::loadu(p); }
template <class T>
FUSEDOPS_INLINE Vec load_floats(const T* p) {
  Vec v;
  at::vec::load_to_float(p, v);
  return v;
}

// The bits of a bfloat16, `offset` added to those that are cut off. A NaN stays one where kAnyNaN;
// otherwise one whose lower half is zero does.
template <bool kAnyNaN = true>
FUSEDOPS_INLINE Ints bfloat16_bits(const Vec& v, Ints offset) {
  const Ints x = bits(v), rounded = right<16>(add(x, offset));
  if constexpr (!kAnyNaN) return rounded;
  return if_greater(both(x, ints(0x7fffffff)), ints(0x7f800000), ints(0x7fc0), rounded);
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

// Two vectors of a dtype that are as near as can be.
FUSEDOPS_INLINE void store_nearest(float* p, const Floats& v) { store(p, v, Full{}); }
FUSEDOPS_INLINE void store_nearest(BFloat16* p, const Floats& v) {
  store_halves(p, halves(bfloat16_bits(v.lo, nearest_even_offset(v.lo)),
                         bfloat16_bits(v.hi, nearest_even_offset(v.hi))));
}
FUSEDOPS_INLINE void store_nearest(Half* p, const Floats& v) { store(p, v, Full{}); }

// Two vectors up or down by chance.
template <bool kAnyNaN = true>
FUSEDOPS_INLINE void store_by_chance(BFloat16* p, const Floats& v, Ints random) {
  store_halves(p, halves(bfloat16_bits<kAnyNaN>(v.lo, first_words(random)),
                         bfloat16_bits<kAnyNaN>(v.hi, second_words(random))));
}
template <bool = true>
FUSEDOPS_INLINE void store_by_chance(Half* p, const Floats& v, Ints random) {
  store_halves(p, halves(float16_bits(v.lo, first_words(random)),
                         float16_bits(v.hi, second_words(random))));
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

template <class T, Rounding kRounding, bool kAnyNaN>
FUSEDOPS_INLINE void store_param(const Block<T>& block, int64_t i, const Floats& v) {
  T* const p = block.param + i;
  if constexpr (kRounding == Rounding::nearest) {
    store_nearest(p, v);
  } else if constexpr (kRounding == Rounding::stochastic) {
    store_by_chance<kAnyNaN>(p, v, random_halves(block.key, kRandomParam, i));
  } else {
    const auto number_or_nan = [](const Vec& x) {  // another NaN's sum might be -0
      const Ints size = both(bits(x), ints(0x7fffffff));
      return if_greater(size, ints(0x7f800000), ints(0x7fc00000), bits(x));
    };
    const Ints lo = number_or_nan(v.lo), hi = number_or_nan(v.hi);
    const auto high = [](Ints x) { return right<16>(add(x, ints(0x8000))); };
    const auto rest = [](Ints x) { return both(x, ints(0xffff)); };
    store_halves(p, halves(high(lo), high(hi)));
    store_halves(block.remainder + i, halves(rest(lo), rest(hi)));
  }
}

struct Pair {
  Vec m, v;
};

// A step's factors as the loops take them.
struct Factors {
  float gradient_factor, decay, rate1, rate2, step_size;
  Pair betas, in_scales;  // what the moments, and what the scales of codes are multiplied by
  // step_size / (root denom + eps) is 1 / (root denom + eps) where both are divided by step_size.
  bool divided;
  float denom, eps;
  float limit;  // of the gradients of a regular block; 0: none is

  Factors(const AdamWFactors& f, float gradient_factor)
      : gradient_factor(gradient_factor),
        decay(f.decay),
        rate1(f.rate1),
        rate2(f.rate2),
        step_size(f.step_size),
        betas{Vec(f.beta1), Vec(f.beta2)},
        in_scales{Vec(f.beta1), Vec(std::sqrt(std::sqrt(f.beta2)))} {
    const float small_denom = f.denom / f.step_size, small_eps = f.eps / f.step_size;
    divided = small_eps > 1e-30f && small_eps < 1e30f && small_denom < 1e15f;  // of normal size
    denom = divided ? small_denom : f.denom;
    eps = divided ? small_eps : f.eps;
    const float size = std::abs(gradient_factor);
    limit = size > 1e-15f && size <= 1 ? 1e18f : 0;
  }
};

// The moments of the lanes from i on, times factors: those of codes are within their scales.
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

// The factors that give the moments times `times`: of codes, times the first and its fourth power.
template <Moments kMoments, class T>
FUSEDOPS_INLINE Pair moment_factors(const Block<T>& block, const Pair& times) {
  if constexpr (kMoments == Moments::int8) {
    return {times.m * Vec(*block.exp_avg_scale * (1 / (kMomentCodes * kMomentCodes))),
            times.v * Vec(*block.exp_avg_sq_scale * (1 / kSquareCodes))};
  } else {
    return times;
  }
}

// Stores two vectors of moments, or keeps them until they can be encoded.
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

// The moments of a block that wait, on their way to codes and scales.
template <class T>
class Encoding {
 public:
  FUSEDOPS_INLINE Encoding(const Block<T>& block, const Waiting& waiting)
      : block_(block), waiting_(waiting) {
    const auto [most_m, most_root] = std::pair(waiting.most_m, waiting.most_root);
    if (most_m >= kLeastNormal) m_factor_ = Vec(kMomentCodes / std::sqrt(most_m));
    if (most_root >= kLeastNormal) {
      root_factor_ = Vec(256 * kSquareCodes / std::sqrt(most_root));
    }
  }

  // The codes of the elements from i on, if there are any.
  FUSEDOPS_INLINE void turn(int64_t i) const {
    if (i < 0 || i >= block_.count) return;
    store_bytes(static_cast<int8_t*>(block_.exp_avg) + i,
                signed_bytes(signed_halves(m_code(i), m_code(i + kLanes)),
                             signed_halves(m_code(i + 2 * kLanes), m_code(i + 3 * kLanes))));
    const Ints random = random_bytes(block_.key, kRandomSquare8, i);
    const Ints low = halves(root_code(i), root_code(i + kLanes));
    const Ints high = halves(root_code(i + 2 * kLanes), root_code(i + 3 * kLanes));
    store_bytes(static_cast<uint8_t*>(block_.exp_avg_sq) + i,
                bytes(high_bytes(add_halves(low, first_halves(random))),
                      high_bytes(add_halves(high, second_halves(random)))));
  }

  // The turns from i on, and the scales.
  FUSEDOPS_INLINE void rest(int64_t i) const {
    for (; i < block_.count; i += kTurn) turn(i);
    if (block_.count == 0) return;
    *block_.exp_avg_scale = waiting_.most_m;
    *block_.exp_avg_sq_scale = std::sqrt(waiting_.most_root);
  }

 private:
  static constexpr float kLeastNormal = 1.17549435e-38f;

  // sqrt(|m|), with m's sign
  FUSEDOPS_INLINE Ints m_code(int64_t i) const {
    const Vec m = Vec::loadu(waiting_.m + i);
    return nearest(m * quick_rsqrt(larger_size(Vec(kLeastNormal), m)) * m_factor_);
  }
  // sqrt(root), 1 less, in 256ths: a random byte is added before these are dropped. Of 0 it is NaN,
  // which is the least of all ints and packed to 0.
  FUSEDOPS_INLINE Ints root_code(int64_t i) const {
    const Vec root = Vec::loadu(waiting_.root + i);
    return nearest(at::vec::fmadd(root * quick_rsqrt(root), root_factor_, Vec(-256.f)));
  }

  const Block<T>& block_;
  const Waiting& waiting_;
  Vec m_factor_{0.f}, root_factor_{0.f};
};

// Whether the squares of the gradients are below limit^2. It may say no where they are just so.
FUSEDOPS_INLINE bool all_within(const Block<float>& block, float limit) {
  Vec sums[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
  for (int64_t i = 0; i < block.count; i += kTurn) {
    for (int k = 0; k < 4; ++k) {
      const Vec g = Vec::loadu(block.grad + i + k * kLanes);
      sums[k] = at::vec::fmadd(g, g, sums[k]);
    }
  }
  return all_below((sums[0] + sums[1]) + (sums[2] + sums[3]), Vec(limit * limit));
}
template <class T>
FUSEDOPS_INLINE bool all_within(const Block<T>& block, float limit) {
  Ints most{};  // the bits of a larger number are more, and a NaN's are most
  for (int64_t i = 0; i < block.count; i += 2 * kLanes) {
    most = larger_halves(most, both(load_words(block.grad + i), ints(0x7fff7fff)));
  }
  const T largest = std::min(limit, static_cast<float>(std::numeric_limits<T>::max()));
  return all_halves_up_to(most, largest.x);
}

template <class T>
FUSEDOPS_INLINE void ask_for(const T* p, int64_t elements) {
  const auto* const bytes = reinterpret_cast<const char*>(p);
  for (size_t byte = 0; byte < elements * sizeof(T); byte += 64) __builtin_prefetch(bytes + byte);
}

template <class T, Moments kMoments, Rounding kRounding>
FUSEDOPS_INLINE void ask_ahead(const Block<T>& block, int64_t i) {
  constexpr int kBytes = kMomentBytes<kMoments>;
  i += block.ahead;
  ask_for(block.param + i, kTurn);
  ask_for(block.grad + i, kTurn);
  ask_for(static_cast<const char*>(block.exp_avg) + i * kBytes, kTurn * kBytes);
  ask_for(static_cast<const char*>(block.exp_avg_sq) + i * kBytes, kTurn * kBytes);
  if constexpr (kRounding == Rounding::remainder) ask_for(block.remainder + i, kTurn);
}

// A step of a block, and beside it what waits for being encoded: each has much that depends on
// what it has just computed, and the other to do meanwhile.
// kRegular: as Run::is_regular says. In another block, an element whose g^2 is not finite keeps
// what it has.
template <class T, Moments kMoments, Rounding kRounding, bool kRegular>
FUSEDOPS_INLINE void update(const Block<T>& block, const Factors& f, Waiting& waiting,
                            const Encoding<T>& encoding) {
  constexpr bool kCodes = kMoments == Moments::int8;
  Vec most_m(0.f), most_root(0.f);
  const Pair as_they_are = moment_factors<kMoments>(block, {1.f, 1.f});
  const Pair decayed = moment_factors<kMoments>(block, kCodes ? f.in_scales : f.betas);
  const Vec factor(f.gradient_factor), decay(f.decay);
  const Vec rate1(kRegular ? f.rate1 * f.gradient_factor : f.rate1);
  const Vec rate2(kRegular ? f.rate2 * f.gradient_factor * f.gradient_factor : f.rate2);

  for (int64_t turn = 0; turn < block.count; turn += kTurn) {
    ask_ahead<T, kMoments, kRounding>(block, turn);
    Vec m[4], v[4], root[4];
    Lanes finite[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int64_t i = turn + k * kLanes;
      Vec g = load_floats(block.grad + i);
      if constexpr (!kRegular) g = g * factor;
      const Vec square = g * g;
      const auto old = load_moments<kMoments>(block, i, decayed);
      m[k] = at::vec::fmadd(rate1, g, old.m);
      v[k] = at::vec::fmadd(rate2, square, old.v);
      if constexpr (!kRegular) {
        const auto kept = load_moments<kMoments>(block, i, as_they_are);
        finite[k] = below(square, Vec(INFINITY));
        m[k] = choose(finite[k], m[k], kept.m);
        v[k] = choose(finite[k], v[k], kept.v);
      }
      root[k] = v[k].sqrt();
      if constexpr (kCodes) {
        m[k].store(waiting.m + i);
        root[k].store(waiting.root + i);
        most_m = larger_size(most_m, m[k]);
        most_root = larger(most_root, root[k]);
      }
      if (block.max_exp_avg_sq != nullptr) {
        const Vec most = larger(Vec::loadu(block.max_exp_avg_sq + i), v[k]);
        most.store(block.max_exp_avg_sq + i);
        root[k] = most.sqrt();
      }
    }
    if constexpr (kCodes) encoding.turn(turn - kLag);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Vec size = f.divided
                           ? inverse(at::vec::fmadd(root[k], Vec(f.denom), Vec(f.eps)))
                           : Vec(f.step_size) / at::vec::fmadd(root[k], Vec(f.denom), Vec(f.eps));
      const Vec p = load_param<T, kRounding>(block, turn + k * kLanes);
      root[k] = at::vec::fnmadd(size, m[k], p * decay);
      if constexpr (!kRegular) root[k] = choose(finite[k], root[k], p);
    }
#pragma GCC unroll 2
    for (int k = 0; k < 4; k += 2) {
      const int64_t i = turn + k * kLanes;
      store_param<T, kRounding, !kRegular>(block, i, {root[k], root[k + 1]});
      if constexpr (!kCodes) store_moments<kMoments>(block, i, {m[k], m[k + 1]}, {v[k], v[k + 1]});
    }
  }
  if constexpr (kCodes) {
    const auto largest = [](const Vec& v) {
      return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return larger(a, b); }, v);
    };
    waiting.most_m = largest(most_m);
    waiting.most_root = largest(most_root);
    encoding.rest(std::max<int64_t>(0, block.count - kLag));
  }
}

// A block in a copy, with zeros up to whole turns.
template <class T, Moments kMoments>
struct Staged {
  static constexpr int kBytes = kMomentBytes<kMoments>;
  alignas(64) T param[kAdamWBlock], grad[kAdamWBlock];
  alignas(64) char exp_avg[kAdamWBlock * kBytes], exp_avg_sq[kAdamWBlock * kBytes];
  alignas(64) float max_exp_avg_sq[kAdamWBlock];
  alignas(64) int16_t remainder[kAdamWBlock];

  template <class Step>
  void run(Block<T> block, int64_t count, const Step& step) {
    std::memset(static_cast<void*>(this), 0, sizeof(*this));
    const Block<T> at = block;
    copy(param, at.param, count * sizeof(T));
    copy(grad, at.grad, count * sizeof(T));
    copy(exp_avg, at.exp_avg, count * kBytes);
    copy(exp_avg_sq, at.exp_avg_sq, count * kBytes);
    copy(max_exp_avg_sq, at.max_exp_avg_sq, count * sizeof(float));
    copy(remainder, at.remainder, count * sizeof(int16_t));
    block.param = param;
    block.grad = grad;
    block.exp_avg = exp_avg;
    block.exp_avg_sq = exp_avg_sq;
    block.max_exp_avg_sq = at.max_exp_avg_sq == nullptr ? nullptr : max_exp_avg_sq;
    block.remainder = remainder;
    block.ahead = 0;
    block.count = (count + kTurn - 1) / kTurn * kTurn;
    step(block);
    copy(at.param, param, count * sizeof(T));
    copy(at.exp_avg, exp_avg, count * kBytes);
    copy(at.exp_avg_sq, exp_avg_sq, count * kBytes);
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

  const Factors factors;
  Waiting waiting[2];
  Block<T> last = {};  // updated, not encoded; of no elements: there is none
  int turn = 0;

  explicit Run(const Factors& factors) : factors(factors) {}

  void step(const Block<T>& block) {
    const Encoding<T> encoding(last, waiting[turn ^ 1]);
    if (is_regular(block)) {
      update<T, kMoments, kRounding, true>(block, factors, waiting[turn], encoding);
    } else {
      update<T, kMoments, kRounding, false>(block, factors, waiting[turn], encoding);
    }
    if constexpr (kCodes) {
      last = block;
      turn ^= 1;
    }
  }

  // Whether all is finite, and far from where it would not be.
  FUSEDOPS_INLINE bool is_regular(const Block<T>& block) const {
    if constexpr (!kCodes) return false;
    return factors.limit > 0 && *block.exp_avg_scale < INFINITY &&
           *block.exp_avg_sq_scale < INFINITY && all_within(block, factors.limit);
  }

  void finish() {
    if constexpr (kCodes) {
      Encoding<T>(last, waiting[turn ^ 1]).rest(0);
      last.count = 0;
    }
  }
};

template <class T, Moments kMoments, Rounding kRounding>
void blocks(const AdamWTensor& t, uint64_t key, const AdamWFactors& factors, float gradient_factor,
            int64_t begin, int64_t end) {
  constexpr int kBytes = kMomentBytes<kMoments>;
  using Steps = Run<T, kMoments, kRounding>;
  Steps run(Factors(factors, gradient_factor));
  for (int64_t b = begin, taken = 1; b < end; b += taken) {
    auto [first, count] = place_of(t, b);
    if (!Steps::kOneByOne && count == kAdamWBlock && t.row == t.numel) {
      taken = std::min(end, t.numel / kAdamWBlock) - b;
      if (taken > kBlocksAhead) taken -= kBlocksAhead;
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
                         count,
                         b + taken + kBlocksAhead <= end ? kBlocksAhead * kAdamWBlock : 0};
    if (count % kTurn == 0) {
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
