// Attention's loops over a row of scores: bias, softcap, softmax, dropout and their gradients.

#include "csrc/cpu/isa/attention/scores.h"

#include <algorithm>
#include <cmath>

#include "csrc/cpu/isa/dropout.h"
#include "csrc/cpu/isa/exp.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::attention::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

// The bias of scores [begin, end) of a row, at the same places of `to`.
void read_bias(const ScoreRow& row, float* to) {
  const auto& [data, stride, dtype] = row.bias;
  if (row.kind == BiasKind::boolean) {
    const auto* const seen = static_cast<const bool*>(data);
    for (int64_t j = row.begin; j < row.end; ++j) to[j] = seen[j * stride] ? 0 : -kInfinity;
    return;
  }
  with_type(dtype, [&]<class T>(T) {
    const auto* const bias = static_cast<const T*>(data);
    if (stride != 1) {
      for (int64_t j = row.begin; j < row.end; ++j) to[j] = static_cast<float>(bias[j * stride]);
      return;
    }
    each_step(row.end - row.begin, [&](int64_t j, auto part) {
      store(to + row.begin + j, load(bias + row.begin + j, part), part);
    });
  });
}

// Scores with a bias. A boolean bias hides a score even if it is NaN.
FUSEDOPS_INLINE Floats biased_by(const Floats& bias, BiasKind kind, const Floats& x) {
  if (kind != BiasKind::boolean) return x + bias;
  const Vec hidden(-kInfinity);
  return {Vec::blendv(x.lo, hidden, bias.lo == hidden),
          Vec::blendv(x.hi, hidden, bias.hi == hidden)};
}

// The dropout factors of probabilities [begin, end) of a row, from to + begin on.
const float* dropout_of(const ScoreRow& row, float* to) {
  const int64_t first = row.key + row.begin, ahead = first % 4;
  dropout_scales(row.dropout, row.row, first - ahead, row.end - row.begin + ahead, to);
  return to + ahead - row.begin;
}

struct Score {
  Floats score, slope;  // slope: the derivative by scale q k
};

template <bool kCapped>
FUSEDOPS_INLINE Score score_of(const Floats& product, const ScoreMap& map) {
  const Vec scale(map.scale);
  if constexpr (!kCapped)
    return {{as_rounded(product.lo * scale), as_rounded(product.hi * scale)}, all(1)};
  const Vec inner(map.scale / map.softcap), cap(map.softcap), ones(1.f);
  const Vec lo = exact_tanh(product.lo * inner), hi = exact_tanh(product.hi * inner);
  return {{as_rounded(lo * cap), as_rounded(hi * cap)}, {ones - lo * lo, ones - hi * hi}};
}

// Writes zeros outside [begin, end), to the end of the padding.
template <class T>
inline void clear_unseen(const ScoreRow& row, T* x) {
  const int64_t padded = (row.n + kEdge - 1) / kEdge * kEdge;
  std::fill(x, x + row.begin, T(0));
  std::fill(x + row.end, x + padded, T(0));
}

// A row's scores, as x times a factor: q k and the scale, or finished scores and 1.
struct Scores {
  const float* x;
  float factor, most;
};

// exp(score - most), as accurate as T needs.
template <class T>
FUSEDOPS_INLINE Floats exp_under(const Floats& x, float factor, float most) {
  const Vec times(factor), under(most);
  const Vec lo = as_rounded(x.lo * times) - under, hi = as_rounded(x.hi * times) - under;
  if constexpr (kQuick<T>) return {exp_of<T>(lo, Vec(1.f)), exp_of<T>(hi, Vec(1.f))};
  return {exp_of_many(lo), exp_of_many(hi)};
}

// The largest of x [0, n). It skips NaN, which then appears in the sum.
inline float largest_number(const float* x, int64_t n) {
  Floats most = all(-kInfinity);
  each_step(n, [&](int64_t j, auto part) {
    const auto numbers = padded(load(x + j, part), part);
#if defined(CPU_CAPABILITY_AVX512)
    most = {_mm512_max_ps(numbers.lo, most.lo), _mm512_max_ps(numbers.hi, most.hi)};
#else
    most = {_mm256_max_ps(numbers.lo, most.lo), _mm256_max_ps(numbers.hi, most.hi)};
#endif
  });
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_max_ps(_mm512_max_ps(most.lo, most.hi));
#else
  return largest(most);
#endif
}

// Returns scores [begin, end). Written to `finished` if they are more than q k times the scale.
template <bool kCapped>
Scores make_scores(const ScoreRow& row, const ScoreMap& map, float* finished) {
  const bool biased = row.kind != BiasKind::none, makes = kCapped || biased;
  if (!makes && map.scale > 0) {
    const float most = largest_number(row.s + row.begin, row.end - row.begin);
    if (most > -kInfinity) return {row.s, map.scale, most * map.scale};
  }
  if (biased) read_bias(row, finished);
  Floats most = all(-kInfinity);
  each_step(row.end - row.begin, [&](int64_t i, auto part) {
    const int64_t j = row.begin + i;
    auto score = score_of<kCapped>(load(row.s + j, part), map).score;
    if (biased) score = biased_by(load(finished + j, part), row.kind, score);
    if (makes) store(finished + j, score, part);
    most = largest(most, padded(score, part));
  });
  return {makes ? finished : row.s, makes ? 1 : map.scale, largest(most)};
}

// Rescales the softmax to the largest score so far. False if there is none yet.
bool move_to_largest(const Scores& scores, Softmax& softmax) {
  const float before = softmax.most;
  softmax.most = scores.most <= before ? before : scores.most;  // keeps NaN
  softmax.factor = 1;
  if (softmax.most == -kInfinity) return false;
  if (before != softmax.most) softmax.factor = std::exp(before - softmax.most);
  return true;
}

// One row of a tile, whose query sees keys [begin, end).
struct Row {
  explicit Row(const ScoreRow& row, const ScoreMap& map)
      : scores(map.softcap != 0 ? make_scores<true>(row, map, finished)
                                : make_scores<false>(row, map, finished)),
        kept(row.dropout.seed != nullptr ? dropout_of(row, scales) : nullptr) {}

  // Returns x after dropout.
  template <class Part>
  Floats dropped(const Floats& x, int64_t j, Part part) const {
    return kept == nullptr ? x : x * load(kept + j, part);
  }

  alignas(64) float finished[kKeys + kStep], scales[kKeys + kStep];
  const Scores scores;
  const float* const kept;
};

template <class T>
void add_row(const ScoreRow& of, const ScoreMap& map, Softmax& softmax, T* p) {
  clear_unseen(of, p);
  softmax.factor = 1;
  if (of.begin >= of.end) return;
  const Row row(of, map);
  if (!move_to_largest(row.scores, softmax)) {
    std::fill(p + of.begin, p + of.end, T(0));
    return;
  }
  Floats total;
  each_step(of.end - of.begin, [&](int64_t i, auto part) {
    const int64_t j = of.begin + i;
    const auto exps = exp_under<T>(load(row.scores.x + j, part), row.scores.factor, softmax.most);
    total = total + live(exps, part);
    store(p + j, row.dropped(exps, j, part), part);
  });
  softmax.sum = softmax.sum * softmax.factor + sum(total);
}

template <class T>
void add_weighted(const ScoreRow& of, const ScoreMap& map, const float* dp, Softmax& softmax,
                  double& products) {
  softmax.factor = 1;
  if (of.begin >= of.end) return;
  const Row row(of, map);
  if (!move_to_largest(row.scores, softmax)) return;
  Floats total, weighted;
  each_step(of.end - of.begin, [&](int64_t i, auto part) {
    const int64_t j = of.begin + i;
    const auto x = load(row.scores.x + j, part);
    const auto p = live(exp_under<T>(x, row.scores.factor, softmax.most), part);
    total = total + p;
    weighted = weighted + live(p * row.dropped(load(dp + j, part), j, part), part);
  });
  softmax.sum = softmax.sum * softmax.factor + sum(total);
  products = products * softmax.factor + sum(weighted);
}

template <bool kCapped, class T>
void add_gradients(const ScoreRow& of, const ScoreMap& map, const GradientRow& to, T* p, T* da) {
  if (of.begin >= of.end) return;
  const Row row(of, map);
  each_step(of.end - of.begin, [&](int64_t i, auto part) {
    const int64_t j = of.begin + i;
    const auto probs =
        exp_under<T>(load(row.scores.x + j, part), row.scores.factor, to.most) * all(to.share);
    // Two steps: if one key has probability 1, dp minus the sum is exactly 0.
    auto d = row.dropped(load(to.dp + j, part), j, part) - all(to.weighted);
    d = probs * (d + all(to.grad_lse));
    if (to.ds != nullptr) store(to.ds + j, d, part);
    if (kCapped) d = d * score_of<true>(load(of.s + j, part), map).slope;
    store(p + j, row.dropped(probs, j, part), part);
    store(da + j, d * all(map.scale), part);
  });
}

}  // namespace

void add_scores(const ScoreRow& row, const ScoreMap& map, Softmax& softmax, void* p,
                Dtype p_dtype) {
  p_dtype == Dtype::bfloat16 ? add_row(row, map, softmax, static_cast<BFloat16*>(p))
                             : add_row(row, map, softmax, static_cast<float*>(p));
}

void add_products(const ScoreRow& row, const ScoreMap& map, const float* dp, Softmax& softmax,
                  double& products, Dtype p_dtype) {
  p_dtype == Dtype::bfloat16 ? add_weighted<BFloat16>(row, map, dp, softmax, products)
                             : add_weighted<float>(row, map, dp, softmax, products);
}

void score_gradients(const ScoreRow& row, const ScoreMap& map, const GradientRow& to) {
  const auto add = [&]<class T>(T) {
    auto *const p = static_cast<T*>(to.p), *const da = static_cast<T*>(to.da);
    clear_unseen(row, p);
    clear_unseen(row, da);
    if (to.share == 0) {  // no key is seen, or the sink has probability 1
      std::fill(p + row.begin, p + row.end, T(0));
      std::fill(da + row.begin, da + row.end, T(0));
      return;
    }
    map.softcap != 0 ? add_gradients<true>(row, map, to, p, da)
                     : add_gradients<false>(row, map, to, p, da);
  };
  to.dtype == Dtype::bfloat16 ? add(BFloat16()) : add(float());
}

}  // namespace fusedops::cpu::attention::CPU_CAPABILITY
