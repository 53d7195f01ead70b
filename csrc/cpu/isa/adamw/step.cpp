// A step of AdamW on CPUs, in blocks of 256 elements. 8-bit moments have a scale for each block.
//
// A block of 8-bit moments is read once. Its first loop keeps the new moments in 2 KiB of stack,
// and finds the largest, which give the new scales. Its second loop updates the parameter and
// writes the codes. Other moments are written immediately, in one loop. A block that is not a whole
// number of the loop's turns is updated in a copy.
//
// Almost every block has only finite gradients. With 8-bit moments, that is checked once per block,
// from the largest new moment; a block that has others is computed again. Data is prefetched
// two blocks ahead, because the CPU's own prefetching stops at every page, and a loop with so much
// arithmetic keeps few loads in flight.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "csrc/cpu/isa/adamw/adamw.h"
#include "csrc/cpu/isa/adamw/moments.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::adamw {
namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kBlocksAhead = 2;
constexpr int64_t kLag = kTurn;  // how far encoding is behind updating: scales are known late

// A step's factors, in vectors.
struct Factors {
  float gradient_factor, decay, rate1, rate2, step_size, max_ratio;
  Pair betas, in_scales;  // the factors of the moments, and of the codes' scales
  // If true, denom and eps are already divided by step_size, so that 1 / (root denom + eps) is the
  // step.
  bool divided;
  float denom, eps;
  bool small;  // whether the gradients' factor and its square can go into rate1 and rate2

  Factors(const AdamWFactors& f, float gradient_factor)
      : gradient_factor(gradient_factor),
        decay(f.decay),
        rate1(f.rate1),
        rate2(f.rate2),
        step_size(f.step_size),
        max_ratio(f.max_ratio),
        betas{Vec(f.beta1), Vec(f.beta2)},
        in_scales{Vec(f.beta1), Vec(std::sqrt(std::sqrt(f.beta2)))} {
    const float small_denom = f.denom / f.step_size, small_eps = f.eps / f.step_size;
    divided = small_eps > 1e-30f && small_eps < 1e30f && small_denom < 1e15f;  // of normal size
    denom = divided ? small_denom : f.denom;
    eps = divided ? small_eps : f.eps;
    const float size = std::abs(gradient_factor);
    small = size > 1e-15f && size <= 1;
  }
};

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

// The vectors of new moments from element i on.
struct New {
  Vec m, v;
  Lanes finite;  // g^2 is finite; not set if kRegular
};

// Computes them. kRegular: every g^2 is finite. Otherwise an element whose g^2 is not finite keeps
// its moments and its value.
template <class T, Moments kMoments, bool kRegular>
class NewMoments {
 public:
  FUSEDOPS_INLINE NewMoments(const Block<T>& block, const Factors& f)
      : block_(block),
        kept_(moment_factors<kMoments>(block, {1.f, 1.f})),
        decayed_(moment_factors<kMoments>(block, kCodes ? f.in_scales : f.betas)),
        factor_(f.gradient_factor),
        rate1_(kRegular ? f.rate1 * f.gradient_factor : f.rate1),
        rate2_(kRegular ? f.rate2 * f.gradient_factor * f.gradient_factor : f.rate2) {}

  FUSEDOPS_INLINE New operator()(int64_t i) const {
    Vec g = load_floats(block_.grad + i);
    if constexpr (!kRegular) g = g * factor_;
    const Vec square = g * g;
    const auto old = load_moments<kMoments>(block_, i, decayed_);
    New next{at::vec::fmadd(rate1_, g, old.m), at::vec::fmadd(rate2_, square, old.v), {}};
    if constexpr (!kRegular) {
      const auto kept = load_moments<kMoments>(block_, i, kept_);
      next.finite = below(square, Vec(INFINITY));
      next.m = choose(next.finite, next.m, kept.m);
      next.v = choose(next.finite, next.v, kept.v);
    }
    return next;
  }

 private:
  static constexpr bool kCodes = kMoments == Moments::int8;
  const Block<T>& block_;
  const Pair kept_, decayed_;
  const Vec factor_, rate1_, rate2_;
};

// Returns the square root of v, or of its maximum with amsgrad, which it updates.
template <class T, bool kUpdate>
FUSEDOPS_INLINE Vec root_under(const Block<T>& block, int64_t i, const Vec& v) {
  if (block.max_exp_avg_sq == nullptr) return v.sqrt();
  Vec most = Vec::loadu(block.max_exp_avg_sq + i);
  if constexpr (kUpdate) {
    most = larger(most, v);
    most.store(block.max_exp_avg_sq + i);
  }
  return most.sqrt();
}

// Returns the parameter after a step with moments m and root = sqrt(v).
template <bool kRegular>
FUSEDOPS_INLINE Vec stepped(const Factors& f, const Vec& p, const Vec& m, const Vec& root) {
  const Vec line = at::vec::fmadd(root, Vec(f.denom), Vec(f.eps)), decayed = p * Vec(f.decay);
  return f.divided ? at::vec::fnmadd(inverse<kRegular>(line), m, decayed)
                   : at::vec::fnmadd(Vec(f.step_size), m / line, decayed);
}

// Updates a block whose moments have no codes.
template <class T, Moments kMoments, Rounding kRounding>
FUSEDOPS_INLINE void update(const Block<T>& block, const Factors& f) {
  const NewMoments<T, kMoments, false> moments(block, f);
  for (int64_t turn = 0; turn < block.count; turn += kTurn) {
    ask_ahead<T, kMoments, kRounding>(block, turn);
    New next[4];
    Vec root[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      next[k] = moments(turn + k * kLanes);
      root[k] = root_under<T, true>(block, turn + k * kLanes, next[k].v);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Vec p = load_param<T, kRounding>(block, turn + k * kLanes);
      root[k] = choose(next[k].finite, stepped<false>(f, p, next[k].m, root[k]), p);
    }
#pragma GCC unroll 2
    for (int k = 0; k < 4; k += 2) {
      const int64_t i = turn + k * kLanes;
      store_param<T, kRounding, true>(block, i, {root[k], root[k + 1]});
      store_moments<kMoments>(block, i, {next[k].m, next[k + 1].m}, {next[k].v, next[k + 1].v});
    }
  }
}

// Computes a block's new moments and their maxima. Returns whether all are finite.
template <class T, bool kRegular>
FUSEDOPS_INLINE bool fill(const Block<T>& block, const Factors& f, Waiting& waiting) {
  const NewMoments<T, Moments::int8, kRegular> moments(block, f);
  Vec most_m(0.f);
  Ints most_root{};  // of bits: a NaN's are larger than an infinity's
  for (int64_t turn = 0; turn < block.count; turn += kTurn) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int64_t i = turn + k * kLanes;
      const New next = moments(i);
      const Vec root = next.v.sqrt(), most = root * Vec(f.max_ratio);
      Vec m = limited(next.m, most);
      if constexpr (!kRegular) m = choose(below(most, next.m.abs()), m, next.m);  // keeps a NaN
      m.store(waiting.m + i);
      root.store(waiting.root + i);
      most_m = larger_size(most_m, m);
      most_root = larger_bits(most_root, bits(root));
      if (!kRegular && block.max_exp_avg_sq != nullptr) root_under<T, true>(block, i, next.v);
    }
  }
  const auto largest = [](const Vec& v) {
    return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return larger(a, b); }, v);
  };
  waiting.most_m = largest(most_m);
  waiting.most_root = largest(floats(most_root));
  return all_below(floats(most_root), Vec(INFINITY));
}

// Updates a block's parameter, and encodes its moments a little later.
template <class T, Rounding kRounding, bool kRegular>
FUSEDOPS_INLINE void finish(const Block<T>& block, const Factors& f, const Waiting& waiting) {
  const Encoding<T> encoding(block, waiting);
  for (int64_t turn = 0; turn < block.count; turn += kTurn) {
    ask_ahead<T, Moments::int8, kRounding>(block, turn);
    Vec next[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int64_t i = turn + k * kLanes;
      const Vec p = load_param<T, kRounding>(block, i);
      Vec root = Vec::loadu(waiting.root + i);
      if (!kRegular && block.max_exp_avg_sq != nullptr) root = root_under<T, false>(block, i, root);
      next[k] = stepped<kRegular>(f, p, Vec::loadu(waiting.m + i), root);
      if constexpr (!kRegular) {
        const Vec g = load_floats(block.grad + i) * Vec(f.gradient_factor);
        next[k] = choose(below(g * g, Vec(INFINITY)), next[k], p);
      }
    }
    encoding.turn(turn - kLag);
#pragma GCC unroll 2
    for (int k = 0; k < 4; k += 2) {
      store_param<T, kRounding, !kRegular>(block, turn + k * kLanes, {next[k], next[k + 1]});
    }
  }
  encoding.rest(std::max<int64_t>(0, block.count - kLag));
}

template <class T>
T* shifted(T* p, int64_t elements) {
  return p == nullptr ? nullptr : p + elements;
}

// Updates a block.
template <class T, Moments kMoments, Rounding kRounding>
FUSEDOPS_INLINE void step(const Block<T>& block, const Factors& f) {
  if constexpr (kMoments != Moments::int8) {
    update<T, kMoments, kRounding>(block, f);
  } else {
    Waiting waiting;
    const bool scaled = *block.exp_avg_scale < INFINITY && *block.exp_avg_sq_scale < 1e9f;
    if (f.small && scaled && block.max_exp_avg_sq == nullptr && fill<T, true>(block, f, waiting)) {
      return finish<T, kRounding, true>(block, f, waiting);
    }
    fill<T, false>(block, f, waiting);
    finish<T, kRounding, false>(block, f, waiting);
  }
}

template <class T, Moments kMoments, Rounding kRounding>
void blocks(const AdamWTensor& t, uint64_t key, const AdamWFactors& factors, float gradient_factor,
            int64_t begin, int64_t end) {
  constexpr int kBytes = kMomentBytes<kMoments>;
  // Without scales and random keys, the whole range is one long block.
  constexpr bool kOneByOne = kMoments != Moments::float32 || kRounding == Rounding::stochastic;
  const Factors f(factors, gradient_factor);
  for (int64_t b = begin, taken = 1; b < end; b += taken) {
    auto [first, count] = place_of(t, b);
    if (!kOneByOne && count == kAdamWBlock && t.row == t.numel) {
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
                         first_threshold(factors.step, t.first_key + b),
                         count,
                         b + taken + kBlocksAhead <= end ? kBlocksAhead * kAdamWBlock : 0};
    if (count % kTurn == 0) {
      step<T, kMoments, kRounding>(block, f);
      continue;
    }
    Staged<T, kMoments> staged;
    staged.run(block, count, [&](const Block<T>& copy) { step<T, kMoments, kRounding>(copy, f); });
  }
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
  with_type(t.dtype,
            [&]<class T>(T) { with_moments<T>(t)(t, key, factors, gradient_factor, begin, end); });
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::adamw
