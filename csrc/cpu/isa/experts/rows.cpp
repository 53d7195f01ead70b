// The loops over the experts' rows: gate, its gradient, weighted sums and small products. The
// activation is chosen by a branch in each step, which costs a tenth of an exponential, so that
// there is one loop for each dtype.

#include "csrc/cpu/isa/experts/rows.h"

#include <cstring>
#include <tuple>

#include "csrc/cpu/isa/gates.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::experts::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

// An activation's value and derivative. The caller masks the derivative of relu and relu2.
struct Active {
  Vec value, slope;
};

template <class T>
FUSEDOPS_INLINE Active active_of(Vec g, const Gating& args) {
  const auto times = [g](const Gate& s) __attribute__((always_inline)) {  // g S(g)
    return Active{g * s.value, at::vec::fmadd(g, s.slope, s.value)};
  };
  switch (args.activation) {
    case Activation::none: return {g, Vec(1.f)};
    case Activation::relu: return {at::vec::maximum(g, Vec(0.f)), Vec(1.f)};  // keeps a NaN
    case Activation::relu2: {
      const Vec r = at::vec::maximum(g, Vec(0.f));
      return {r * r, r + r};
    }
    case Activation::gelu: return times(normal<T>(g));
    case Activation::gelu_tanh: return times(tanh_gate<T>(g));
    default: {
      const auto s = sigmoid_of_minus<T>(g, Vec(-args.alpha));
      return times({s.value, s.slope * Vec(args.alpha)});
    }
  }
}

struct Pair {
  Floats gate, up;
};

FUSEDOPS_INLINE Pair apart(const Floats& first, const Floats& second) {
  const auto [g_lo, u_lo] = at::vec::deinterleave2<float>(first.lo, first.hi);
  const auto [g_hi, u_hi] = at::vec::deinterleave2<float>(second.lo, second.hi);
  return {{g_lo, g_hi}, {u_lo, u_hi}};
}

template <class T>
FUSEDOPS_INLINE Pair load_interleaved(const T* p, Full) {
  return apart(load(p, Full{}), load(p + kStep, Full{}));
}
template <class T>
FUSEDOPS_INLINE Pair load_interleaved(const T* p, Tail tail) {
  alignas(64) T rest[2 * kStep] = {};
  std::memcpy(rest, p, 2 * tail.count * sizeof(T));
  return load_interleaved<T>(rest, Full{});
}

template <class T>
FUSEDOPS_INLINE void store_interleaved(T* p, const Pair& d, Full) {
  const auto [a, b] = at::vec::interleave2<float>(d.gate.lo, d.up.lo);
  const auto [c, e] = at::vec::interleave2<float>(d.gate.hi, d.up.hi);
  store(p, Floats{a, b}, Full{});
  store(p + kStep, Floats{c, e}, Full{});
}
template <class T>
FUSEDOPS_INLINE void store_interleaved(T* p, const Pair& d, Tail tail) {
  alignas(64) T rest[2 * kStep];
  store_interleaved<T>(rest, d, Full{});
  std::memcpy(p, rest, 2 * tail.count * sizeof(T));
}

// Elements [i, i + step) of a row's gate and up; up is 1 if there is none.
template <class T, class Part>
FUSEDOPS_INLINE Pair load_pair(const T* z, int64_t i, const Gating& args, Part part) {
  if (args.interleaved) return load_interleaved(z + 2 * i, part);
  if (!args.gated) return {load(z + i, part), all(1)};
  return {load(z + i, part), load(z + args.n + i, part)};
}

template <class T, class Part>
FUSEDOPS_INLINE void store_pair(T* dz, int64_t i, const Pair& d, const Gating& args, Part part) {
  if (args.interleaved) return store_interleaved(dz + 2 * i, d, part);
  store(dz + i, d.gate, part);
  if (args.gated) store(dz + args.n + i, d.up, part);
}

struct Operands {
  Vec g, u;
};

FUSEDOPS_INLINE Operands limited(Vec gate, Vec up, const Gating& args) {
  if (args.limited) {
    gate = at::vec::clamp_max(gate, Vec(args.limit));
    up = at::vec::clamp(up, Vec(-args.limit), Vec(args.limit));
  }
  return {gate, up + Vec(args.up_offset)};
}

template <class T>
FUSEDOPS_INLINE Vec activated(Vec gate, Vec up, const Gating& args) {
  const auto [g, u] = limited(gate, up, args);
  return active_of<T>(g, args).value * u;
}

// d if the value is within the limit, else 0; 0 for a NaN too, as in torch's clamp.
FUSEDOPS_INLINE Vec within(Vec d, Vec value, const Gating& args) {
  return args.limited ? Vec::blendv(Vec(0.f), d, value <= Vec(args.limit)) : d;
}

struct Gradients {
  Vec gate, up, h;
};

template <class T>
FUSEDOPS_INLINE Gradients gradients(Vec dh, Vec gate, Vec up, const Gating& args) {
  const auto [g, u] = limited(gate, up, args);
  const auto [value, slope] = active_of<T>(g, args);
  const bool masked = args.activation == Activation::relu || args.activation == Activation::relu2;
  Vec dg = dh * u * slope;
  if (masked) dg = Vec::blendv(dg, Vec(0.f), g <= Vec(0.f));  // where it is infinite, too
  return {within(dg, gate, args), within(dh * value, up.abs(), args), value * u};
}

template <class T>
void forward(const GateRows& args, int64_t begin, int64_t end) {
  const auto& gating = args.gating;
  const int64_t n = gating.n, wide = gating.gated ? 2 * n : n;
  for (int64_t row = begin; row < end; ++row) {
    const T* const z = static_cast<const T*>(args.z) + row * wide;
    T* const h = static_cast<T*>(args.h) + row * n;
    each_step(n, [&](int64_t i, auto part) {
      const auto [g, u] = load_pair(z, i, gating, part);
      store(h + i, {activated<T>(g.lo, u.lo, gating), activated<T>(g.hi, u.hi, gating)}, part);
    });
  }
}

template <class T>
void backward(const GateBackwardRows& args, int64_t begin, int64_t end) {
  const auto& gating = args.gating;
  const int64_t n = gating.n, wide = gating.gated ? 2 * n : n;
  for (int64_t row = begin; row < end; ++row) {
    const T* const z = static_cast<const T*>(args.z) + row * wide;
    const float* const dh = args.dh + row * n;
    const auto weight = all(args.weights[row]);
    Floats dots;
    each_step(n, [&](int64_t i, auto part) {
      const auto [g, u] = load_pair(z, i, gating, part);
      const auto d = load(dh + i, part), dw = weight * d;
      const auto lo = gradients<T>(dw.lo, g.lo, u.lo, gating);
      const auto hi = gradients<T>(dw.hi, g.hi, u.hi, gating);
      const auto h = rounded<T>(Floats{lo.h, hi.h});
      dots = dots + live(d * h, part);
      if (args.h != nullptr) store(static_cast<T*>(args.h) + row * n + i, weight * h, part);
      if (args.dz != nullptr) {
        store_pair(static_cast<T*>(args.dz) + row * wide, i,
                   Pair{{lo.gate, hi.gate}, {lo.up, hi.up}}, gating, part);
      }
    });
    if (args.dots != nullptr) args.dots[row] = sum(dots);
  }
}

template <class T>
void sums_of_slots(const SumSlots& args, int64_t begin, int64_t end) {
  const int64_t n = args.n, k = args.k;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t* const places = args.places + token * k;
    T* const out = static_cast<T*>(args.out) + token * n;
    each_step(n, [&](int64_t i, auto part) {
      Floats sum;
      for (int64_t j = 0; j < k; ++j) {
        if (places[j] < 0) continue;
        auto v = load(args.rows + places[j] * n + i, part);
        if (args.bias != nullptr) {
          v = v +
              load(static_cast<const T*>(args.bias) + args.experts[token * k + j] * n + i, part);
        }
        sum = args.weights == nullptr ? sum + v : fma(v, all(args.weights[token * k + j]), sum);
      }
      store(out + i, sum, part);
    });
  }
}

// Adds kDepth rows of w, from row k on, times kRows rows of x.
template <class T, int kRows, int kDepth>
void add_rows_of_w(const FewAcross& args, int64_t k, int64_t begin, int64_t columns) {
  const T* const w = static_cast<const T*>(args.w) + k * args.ld_w + begin;
  Floats x[kRows][kDepth];
  for (int r = 0; r < kRows; ++r) {
    const T* const row = static_cast<const T*>(args.x) + r * args.ld_x + k;
    for (int d = 0; d < kDepth; ++d) x[r][d] = all(static_cast<float>(row[d]));
  }
  each_step(columns, [&](int64_t i, auto part) {
    Floats w_rows[kDepth];
    for (int d = 0; d < kDepth; ++d) w_rows[d] = load(w + d * args.ld_w + i, part);
    for (int r = 0; r < kRows; ++r) {
      float* const to = args.sums + r * args.ld_sums + i;
      Floats sum;
      if (k > 0) sum = load(to, part);
      for (int d = 0; d < kDepth; ++d) sum = fma(w_rows[d], x[r][d], sum);
      store(to, sum, part);
    }
  });
}

template <class T, int kRows>
void few_across(const FewAcross& args, int64_t begin, int64_t columns) {
  constexpr int kDepth = 4;
  int64_t k = 0;
  for (; k + kDepth <= args.depth; k += kDepth) {
    add_rows_of_w<T, kRows, kDepth>(args, k, begin, columns);
  }
  for (; k < args.depth; ++k) add_rows_of_w<T, kRows, 1>(args, k, begin, columns);
}

}  // namespace

void gate_rows(const GateRows& args, int64_t begin, int64_t end) {
  with_type(args.gating.dtype, [&]<class T>(T) { forward<T>(args, begin, end); });
}

void gate_backward_rows(const GateBackwardRows& args, int64_t begin, int64_t end) {
  with_type(args.gating.dtype, [&]<class T>(T) { backward<T>(args, begin, end); });
}

void sum_slots(const SumSlots& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&]<class T>(T) { sums_of_slots<T>(args, begin, end); });
}

void multiply_few_across(const FewAcross& args, int64_t begin, int64_t end) {
  with_type(args.dtype, [&]<class T>(T) {
    switch (args.rows) {
      case 1: return few_across<T, 1>(args, begin, end - begin);
      case 2: return few_across<T, 2>(args, begin, end - begin);
      case 3: return few_across<T, 3>(args, begin, end - begin);
      default: return few_across<T, kFewAcross>(args, begin, end - begin);
    }
  });
}

void add_dot(const void* a, const void* b, int64_t n, Dtype dtype, float* into) {
  with_type(dtype, [&]<class T>(T) {
    Floats dots;
    each_step(n, [&](int64_t i, auto part) {
      const auto x = load(static_cast<const T*>(a) + i, part);
      dots = dots + live(x * load(static_cast<const T*>(b) + i, part), part);
    });
    *into += sum(dots);
  });
}

}  // namespace fusedops::cpu::experts::CPU_CAPABILITY
