// Cross entropy's loops over logits on CPUs: a row's sums in one pass over memory, and its
// gradients. Exponentials are relative to a base near the largest z: the first block's largest,
// until a block has one so much larger that float32 cannot hold its exponential. Then the sum is
// rescaled to the new base and the block is repeated. A moment has every larger z as its base: its
// terms then have one sign, and the entropy loses no digits.

#include "csrc/cpu/isa/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "csrc/cpu/isa/exp.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::cross_entropy::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

constexpr int64_t kBlock = 1024;
constexpr float kRoom = 32;  // maximum of z - base, except for a moment
// Beyond this difference from the largest z, exp is 0. An infinite difference times 0 would be NaN.
constexpr float kFar = 256;

enum class MapKind { none, scaled, capped };

// z, and its derivative by x.
template <MapKind kMap>
class Map {
 public:
  explicit Map(const LogitMap& map)
      : rate_(static_cast<float>(map.scale)),
        inner_(static_cast<float>(kMap == MapKind::capped ? map.scale / map.softcap : map.scale)),
        softcap_(static_cast<float>(map.softcap)) {}

  FUSEDOPS_INLINE Vec value(Vec x) const {
    if constexpr (kMap == MapKind::none) return x;
    if constexpr (kMap == MapKind::scaled) return as_rounded(x * inner_);
    return as_rounded(exact_tanh(x * inner_) * softcap_);
  }

  struct Point {
    Vec value, slope;
  };
  FUSEDOPS_INLINE Point at(Vec x) const {
    if constexpr (kMap != MapKind::capped) return {value(x), rate_};
    const Vec t = exact_tanh(x * inner_);
    return {as_rounded(t * softcap_), rate_ * (Vec(1.f) - t * t)};
  }

 private:
  Vec rate_, inner_, softcap_;
};

// Calls f with z for each step of n logits.
template <class T, MapKind kMap, class Function>
FUSEDOPS_INLINE void each_z(const T* x, int64_t n, const Map<kMap>& map, const Function& f) {
  each_step(n, [&](int64_t i, auto part) {
    const auto v = load(x + i, part);
    f(i, padded({map.value(v.lo), map.value(v.hi)}, part), part);
  });
}

template <class T, MapKind kMap>
float largest_of(const T* x, int64_t n, const Map<kMap>& map) {
  Floats most = all(-kInfinity);
  each_z(x, n, map, [&](int64_t, const Floats& z, auto) { most = largest(most, z); });
  return largest(most);
}

struct Block {
  float most, exponentials, moment;
};

// Computes the largest z, and the sums of exp(z - base) and exp(z - base) (z - base).
template <bool kMoment, class T, MapKind kMap>
Block sums_of(const T* x, int64_t n, const Map<kMap>& map, float base) {
  Floats most = all(-kInfinity), total, moment;
  const Vec under(base);
  each_z(x, n, map, [&](int64_t, const Floats& z, auto) {
    most = largest(most, z);
    const Floats d{z.lo - under, z.hi - under}, e{exp_of_many(d.lo), exp_of_many(d.hi)};
    total = total + e;
    if constexpr (kMoment) moment = fma(e, largest(d, all(-kFar)), moment);
  });
  return {largest(most), sum(total), kMoment ? sum(moment) : 0};
}

// Rescales a row's sums to a new base.
inline void rebase(LogitSums& sums, float base) {
  const double shift = static_cast<double>(sums.base) - base, rate = std::exp(shift);
  sums.moment = (sums.moment + sums.exponentials * shift) * rate;
  sums.exponentials *= rate;
  sums.base = base;
}

// sum of w_c (z_c - base)
template <class T, MapKind kMap>
float weighted_sum(const T* x, int64_t n, const Map<kMap>& map, const float* weight, float base) {
  Floats products;
  each_z(x, n, map, [&](int64_t i, const Floats& z, auto part) {
    const auto w = weight == nullptr ? all(1) : load(weight + i, part);
    products = products + live(w * (z - all(base)), part);
  });
  return sum(products);
}

template <MapKind kMap>
inline float value_of(float x, const Map<kMap>& map) {
  float z[Vec::size()];
  map.value(Vec(x)).store(z);
  return z[0];
}

// Whether x[target] is the first of the largest among x[0] to x[n - 1].
template <class T, MapKind kMap>
bool is_top(const T* x, int64_t n, int64_t target, const Map<kMap>& map, float most) {
  if (target < 0 || target >= n) return false;
  return value_of(static_cast<float>(x[target]), map) == most && largest_of(x, target, map) < most;
}

template <class T, MapKind kMap, SumKind kSums>
void add(const Logits& logits, LogitSums& sums) {
  constexpr bool kMoment = kSums == SumKind::moment;
  const auto* const x = static_cast<const T*>(logits.x);
  const Map<kMap> map(logits.map);
  for (int64_t i = 0; i < logits.n; i += kBlock) {
    const int64_t n = std::min(kBlock, logits.n - i);
    bool larger = sums.base == -kInfinity;
    if (larger) sums.base = largest_of(x + i, n, map);
    if constexpr (kSums == SumKind::weighted) {
      if (std::isnan(sums.origin)) sums.origin = std::isinf(sums.base) ? 0 : sums.base;
      const float* const weight = logits.weight == nullptr ? nullptr : logits.weight + i;
      sums.weighted += weighted_sum(x + i, n, map, weight, sums.origin);
    }
    if (sums.base == -kInfinity) continue;
    auto block = sums_of<kMoment>(x + i, n, map, sums.base);
    if (!(block.most <= sums.base + (kMoment ? 0 : kRoom))) {
      larger = true;
      rebase(sums, block.most);
      block = sums_of<kMoment>(x + i, n, map, sums.base);
    }
    sums.exponentials += block.exponentials;
    if constexpr (kMoment) {
      sums.moment += block.moment;
      if (larger) sums.top = is_top(x + i, n, logits.target - i, map, sums.base);
    }
  }
  if (0 <= logits.target && logits.target < logits.n) {
    sums.target = value_of(static_cast<float>(x[logits.target]), map);
  }
}

// A term of the gradient beside the softmax's: that of smoothing, or of the entropy.
enum class Term { none, smooth, entropy };

template <class T, MapKind kMap, Term kTerm>
void write(const Logits& logits, const LogitGradient& of, T* dx) {
  constexpr bool kSmooth = kTerm == Term::smooth;
  const auto* const x = static_cast<const T*>(logits.x);
  const Map<kMap> map(logits.map);
  const float high = static_cast<float>(of.lse);
  const Vec lse(high), rest(static_cast<float>(of.lse - high));
  const Vec softmax(static_cast<float>(of.target + of.smooth * of.all + of.square));
  const Vec smooth(static_cast<float>(of.smooth)), entropy(static_cast<float>(of.entropy));
  const float near = static_cast<float>(of.mean);
  const Vec mean(near), rest_of_mean(static_cast<float>(of.mean - near));
  const auto gradient = [&](Vec v, Vec weight) __attribute__((always_inline)) {
    const auto at = map.at(v);
    Vec factor = softmax;
    if constexpr (kTerm == Term::entropy) {
      const Vec below = at::vec::minimum(mean - at.value + rest_of_mean, Vec(kFar));
      factor = at::vec::fmadd(entropy, below, factor);
    }
    Vec d = factor * exp_of<T>(at.value - lse - rest, Vec(1.f));
    if constexpr (kSmooth) d = at::vec::fnmadd(smooth, weight, d);
    return kMap == MapKind::none ? d : d * at.slope;
  };
  // Read the target's logit before it is overwritten.
  const bool here = 0 <= logits.target && logits.target < logits.n;
  const float t = here ? static_cast<float>(x[logits.target]) : 0;
  each_step(logits.n, [&](int64_t i, auto part) {
    const auto v = load(x + i, part);
    const auto w = kSmooth && logits.weight != nullptr ? load(logits.weight + i, part) : all(1);
    store(dx + i, {gradient(v.lo, w.lo), gradient(v.hi, w.hi)}, part);
  });
  if (!here) return;
  const auto& [scale, softcap] = logits.map;
  const double bent = kMap == MapKind::capped ? std::tanh(t * scale / softcap) : 0;
  const double w = logits.weight == nullptr ? 1 : logits.weight[logits.target];
  const double z = value_of(t, map), p = std::exp(z - of.lse);
  double dz = of.target * (p - 1) + of.smooth * (of.all * p - w) + of.square * p;
  if constexpr (kTerm == Term::entropy) dz += of.entropy * p * std::min<double>(of.mean - z, kFar);
  dx[logits.target] = static_cast<T>(static_cast<float>(dz * scale * (1 - bent * bent)));
}

// Calls f<T, kMap>() for the logits' dtype and map.
template <class T, class Function>
void with_map(const LogitMap& map, const Function& f) {
  if (map.softcap != 0) return f.template operator()<T, MapKind::capped>();
  if (map.scale != 1) return f.template operator()<T, MapKind::scaled>();
  f.template operator()<T, MapKind::none>();
}

template <class Function>
void with_types(const Logits& logits, const Function& f) {
  with_type(logits.dtype, [&]<class T>(T) { with_map<T>(logits.map, f); });
}

}  // namespace

void add_logits(const Logits& logits, SumKind kind, LogitSums& sums) {
  with_types(logits, [&]<class T, MapKind kMap>() {
    switch (kind) {
      case SumKind::plain: return add<T, kMap, SumKind::plain>(logits, sums);
      case SumKind::weighted: return add<T, kMap, SumKind::weighted>(logits, sums);
      case SumKind::moment: return add<T, kMap, SumKind::moment>(logits, sums);
    }
  });
}

void logit_gradients(const Logits& logits, const LogitGradient& of, void* dx) {
  with_types(logits, [&]<class T, MapKind kMap>() {
    auto* const out = static_cast<T*>(dx);
    if (of.smooth != 0) return write<T, kMap, Term::smooth>(logits, of, out);
    if (of.entropy != 0) return write<T, kMap, Term::entropy>(logits, of, out);
    write<T, kMap, Term::none>(logits, of, out);
  });
}

}  // namespace fusedops::cpu::cross_entropy::CPU_CAPABILITY
