// The loops of gated activations: one pass over a row, without intermediate stores.

#include "csrc/cpu/isa/gated_activation.h"

#include "csrc/cpu/isa/gates.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::gated_activation::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

template <class T, GatedKind kKind>
FUSEDOPS_INLINE Gate gate_of(Vec g, const GatedInput& args) {
  if constexpr (kKind == GatedKind::geglu) return normal<T>(g);
  if constexpr (kKind == GatedKind::geglu_tanh) return tanh_gate<T>(g);
  const auto s = sigmoid_of_minus<T>(g, Vec(-args.alpha));
  return {s.value, s.slope * Vec(args.alpha)};
}

// gate and up after the limit and the offset: g and u + offset.
template <GatedKind kKind>
struct Operands {
  static constexpr bool kLimited = kKind == GatedKind::swiglu_limited;

  Vec g, u;

  Operands(Vec gate, Vec up, const GatedInput& args) : g(gate), u(up) {
    if constexpr (kLimited) {
      g = at::vec::clamp_max(gate, Vec(args.limit));
      u = at::vec::clamp(up, Vec(-args.limit), Vec(args.limit));
    }
    u = u + Vec(args.up_offset);
  }
};

// d if the value is within the limit, else 0; 0 for a NaN too, as in torch's clamp.
inline Vec within(Vec d, Vec value, float limit) {
  return Vec::blendv(Vec(0.f), d, value <= Vec(limit));
}

template <class T, GatedKind kKind>
inline Vec product(Vec gate, Vec up, const GatedInput& args) {
  const Operands<kKind> at(gate, up, args);
  return at.g * gate_of<T, kKind>(at.g, args).value * at.u;
}

struct Gradients {
  Vec gate, up;
};

template <class T, GatedKind kKind>
inline Gradients gradients(Vec dy, Vec gate, Vec up, const GatedInput& args) {
  const Operands<kKind> at(gate, up, args);
  const auto [value, slope] = gate_of<T, kKind>(at.g, args);
  Gradients d{dy * at.u * at::vec::fmadd(at.g, slope, value), dy * (at.g * value)};
  if constexpr (Operands<kKind>::kLimited) {
    d = {within(d.gate, gate, args.limit), within(d.up, up.abs(), args.limit)};
  }
  return d;
}

template <class T>
const T* row_of(const void* p, int64_t offset) {
  return static_cast<const T*>(p) + offset;
}

template <class T, GatedKind kKind, class Y>
void forward_rows(const GatedForward& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* const gate = row_of<T>(args.gate, row * args.gate_stride);
    const T* const up = row_of<T>(args.up, row * args.up_stride);
    Y* const y = static_cast<Y*>(args.y) + row * args.y_stride;
    each_step(args.n, [=](int64_t i, auto part) {
      const auto g = load(gate + i, part), u = load(up + i, part);
      store(y + i, {product<T, kKind>(g.lo, u.lo, args), product<T, kKind>(g.hi, u.hi, args)},
            part);
    });
  }
}

template <class T, GatedKind kKind>
void backward_rows(const GatedBackward& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* const dy = row_of<T>(args.dy, row * args.dy_stride);
    const T* const gate = row_of<T>(args.gate, row * args.gate_stride);
    const T* const up = row_of<T>(args.up, row * args.up_stride);
    T* const dgate = row_or_null<T>(args.dgate, row * args.d_stride);
    T* const dup = row_or_null<T>(args.dup, row * args.d_stride);
    each_step(args.n, [=](int64_t i, auto part) {
      const auto d = load(dy + i, part), g = load(gate + i, part), u = load(up + i, part);
      const auto lo = gradients<T, kKind>(d.lo, g.lo, u.lo, args);
      const auto hi = gradients<T, kKind>(d.hi, g.hi, u.hi, args);
      if (dgate != nullptr) store(dgate + i, {lo.gate, hi.gate}, part);
      if (dup != nullptr) store(dup + i, {lo.up, hi.up}, part);
    });
  }
}

// Calls f<T, kKind>() for args' dtype and kind.
template <class T, class Function>
void with_kind(const GatedInput& args, const Function& f) {
  switch (args.kind) {
    case GatedKind::swiglu: return f.template operator()<T, GatedKind::swiglu>();
    case GatedKind::swiglu_limited: return f.template operator()<T, GatedKind::swiglu_limited>();
    case GatedKind::geglu: return f.template operator()<T, GatedKind::geglu>();
    case GatedKind::geglu_tanh: return f.template operator()<T, GatedKind::geglu_tanh>();
  }
}

template <class Function>
void with_types(const GatedInput& args, const Function& f) {
  with_type(args.dtype, [&]<class T>(T) { with_kind<T>(args, f); });
}

}  // namespace

void gated_forward_rows(const GatedForward& args, int64_t begin, int64_t end) {
  with_types(args, [&]<class T, GatedKind kKind>() {
    args.y_dtype == args.dtype ? forward_rows<T, kKind, T>(args, begin, end)
                               : forward_rows<T, kKind, float>(args, begin, end);
  });
}

void gated_backward_rows(const GatedBackward& args, int64_t begin, int64_t end) {
  with_types(args, [&]<class T, GatedKind kKind>() { backward_rows<T, kKind>(args, begin, end); });
}

}  // namespace fusedops::cpu::gated_activation::CPU_CAPABILITY
