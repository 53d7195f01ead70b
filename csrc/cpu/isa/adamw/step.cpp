// A step of AdamW on CPUs, in blocks of 256 elements. 8-bit moments have a scale for each block.
//
// A block of 8-bit moments is read once: the new moments stay in 2 KiB of stack until the largest,
// and so the new scale, is known. They are encoded while the next block is updated, so that the CPU
// does not wait for a maximum. Other moments are written immediately. A block that is not a whole
// number of the loop's turns is updated in a copy.
//
// Almost every block has only finite gradients. With 8-bit moments, that is checked once per block,
// and then not per element. Data is prefetched two blocks ahead, because the CPU's own prefetching
// stops at every page, and a loop with so much arithmetic keeps few loads in flight.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "csrc/cpu/isa/adamw/adamw.h"
#include "csrc/cpu/isa/adamw/moments.h"

namespace fusedops::cpu::adamw {
namespace CPU_CAPABILITY {
namespace {

constexpr int64_t kBlocksAhead = 2;
constexpr int64_t kLag = 2 * kTurn;  // how far encoding is behind updating: scales are known late

// A step's factors, in vectors.
struct Factors {
  float gradient_factor, decay, rate1, rate2, step_size;
  Pair betas, in_scales;  // the factors of the moments, and of the codes' scales
  // If true, denom and eps are already divided by step_size, so that 1 / (root denom + eps) is the
  // step.
  bool divided;
  float denom, eps;
  float limit;  // of a regular block's gradients; 0: no block is regular

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

// Whether all gradients are within the limit. May return false if they are only just within.
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
  Ints most{};  // larger numbers have larger bits, and a NaN's are the largest
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

// Updates a block and encodes the previous one in the same loop. Each has long dependency chains,
// so the CPU overlaps the two.
// kRegular: whether Run::is_regular. In other blocks, an element whose g^2 is not finite keeps its
// moments and its value.
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
      if (!kRegular && block.max_exp_avg_sq != nullptr) {
        const Vec most = larger(Vec::loadu(block.max_exp_avg_sq + i), v[k]);
        most.store(block.max_exp_avg_sq + i);
        root[k] = most.sqrt();
      }
    }
    if constexpr (kCodes) encoding.turn(turn - kLag);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Vec line = at::vec::fmadd(root[k], Vec(f.denom), Vec(f.eps));
      const Vec p = load_param<T, kRounding>(block, turn + k * kLanes);
      root[k] = f.divided ? at::vec::fnmadd(inverse<kRegular>(line), m[k], p * decay)
                          : at::vec::fnmadd(Vec(f.step_size), m[k] / line, p * decay);
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

template <class T>
T* shifted(T* p, int64_t elements) {
  return p == nullptr ? nullptr : p + elements;
}

// Blocks of a tensor, in order.
template <class T, Moments kMoments, Rounding kRounding>
struct Run {
  static constexpr bool kCodes = kMoments == Moments::int8;
  // Without scales and random keys, the whole range is one long block.
  static constexpr bool kOneByOne =
      kMoments != Moments::float32 || kRounding == Rounding::stochastic;

  const Factors factors;
  Waiting waiting[2];
  Block<T> last = {};  // updated but not yet encoded; empty if there is none
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

  // Whether all values are finite and stay finite in the step, so no element needs a check.
  FUSEDOPS_INLINE bool is_regular(const Block<T>& block) const {
    if constexpr (!kCodes) return false;
    return factors.limit > 0 && block.max_exp_avg_sq == nullptr &&
           *block.exp_avg_scale < INFINITY && *block.exp_avg_sq_scale < 1e9f &&
           all_within(block, factors.limit);
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
    Staged<T, kMoments> staged;
    staged.run(block, count, [&](const Block<T>& copy) {
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
}  // namespace fusedops::cpu::adamw
