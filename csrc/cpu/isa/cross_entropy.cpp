// The loops of cross entropy, which sum in one pass. Exponentials are relative to a base near the
// largest z: the first block's largest, until a block has one so much larger that float32 cannot
// hold its exponential. Then the sum is rescaled to the new base and the block is repeated.

#include "csrc/cpu/isa/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "csrc/cpu/isa/exp.h"

namespace fusedops::cpu::cross_entropy::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

constexpr int64_t kBlock = 1024;
constexpr float kRoom = 32;  // maximum of z - base

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
  float most, exponentials;
};

// Computes the largest z, and the sum of exp(z - base).
template <class T, MapKind kMap>
Block sums_of(const T* x, int64_t n, const Map<kMap>& map, float base) {
  Floats most = all(-kInfinity), total;
  const Vec under(base);
  each_z(x, n, map, [&](int64_t, const Floats& z, auto) {
    most = largest(most, z);
    total = total + Floats{exp_of_many(z.lo - under), exp_of_many(z.hi - under)};
  });
  return {largest(most), sum(total)};
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

template <class T, MapKind kMap, bool kWeighted>
void add(const Logits& logits, LogitSums& sums) {
  const auto* const x = static_cast<const T*>(logits.x);
  const Map<kMap> map(logits.map);
  for (int64_t i = 0; i < logits.n; i += kBlock) {
    const int64_t n = std::min(kBlock, logits.n - i);
    if (sums.base == -kInfinity) sums.base = largest_of(x + i, n, map);
    if constexpr (kWeighted) {
      if (std::isnan(sums.origin)) sums.origin = std::isinf(sums.base) ? 0 : sums.base;
      const float* const weight = logits.weight == nullptr ? nullptr : logits.weight + i;
      sums.weighted += weighted_sum(x + i, n, map, weight, sums.origin);
    }
    if (sums.base == -kInfinity) continue;
    auto block = sums_of(x + i, n, map, sums.base);
    if (!(block.most <= sums.base + kRoom)) {
      sums.exponentials *= std::exp(static_cast<double>(sums.base) - block.most);
      sums.base = block.most;
      block = sums_of(x + i, n, map, sums.base);
    }
    sums.exponentials += block.exponentials;
  }
  if (0 <= logits.target && logits.target < logits.n) {
    sums.target = value_of(static_cast<float>(x[logits.target]), map);
  }
}

template <class T, MapKind kMap, bool kSmooth>
void write(const Logits& logits, const LogitGradient& of, T* dx) {
  const auto* const x = static_cast<const T*>(logits.x);
  const Map<kMap> map(logits.map);
  const float high = static_cast<float>(of.lse);
  const Vec lse(high), rest(static_cast<float>(of.lse - high));
  const Vec softmax(static_cast<float>(of.target + of.smooth * of.all + of.square));
  const Vec smooth(static_cast<float>(of.smooth));
  const auto gradient = [&](Vec v, Vec weight) __attribute__((always_inline)) {
    const auto at = map.at(v);
    Vec d = softmax * exp_of<T>(at.value - lse - rest, Vec(1.f));
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
  const double p = std::exp(value_of(t, map) - of.lse);
  const double dz = of.target * (p - 1) + of.smooth * (of.all * p - w) + of.square * p;
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
  switch (logits.dtype) {
    case Dtype::float32: return with_map<float>(logits.map, f);
    case Dtype::bfloat16: return with_map<BFloat16>(logits.map, f);
    case Dtype::float16: return with_map<Half>(logits.map, f);
  }
}

}  // namespace

void add_logits(const Logits& logits, bool weighted, LogitSums& sums) {
  with_types(logits, [&]<class T, MapKind kMap>() {
    weighted ? add<T, kMap, true>(logits, sums) : add<T, kMap, false>(logits, sums);
  });
}

void logit_gradients(const Logits& logits, const LogitGradient& of, void* dx) {
  with_types(logits, [&]<class T, MapKind kMap>() {
    auto* const out = static_cast<T*>(dx);
    of.smooth != 0 ? write<T, kMap, true>(logits, of, out) : write<T, kMap, false>(logits, of, out);
  });
}

}  // namespace fusedops::cpu::cross_entropy::CPU_CAPABILITY
