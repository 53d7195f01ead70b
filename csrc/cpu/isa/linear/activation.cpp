// Bias and activation after a linear layer's product, and the activation's gradient, on CPUs.

#include "csrc/cpu/isa/linear/activation.h"

#include "csrc/cpu/isa/gates.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

// Every activation except ReLU is z S(z).
template <class T, Activation kKind>
FUSEDOPS_INLINE Gate gate_of(Vec z) {
  if constexpr (kKind == Activation::gelu) return normal<T>(z);
  if constexpr (kKind == Activation::gelu_tanh) return tanh_gate<T>(z);
  return sigmoid_of_minus<T>(z, Vec(-1.f));
}

template <class T, Activation kKind>
FUSEDOPS_INLINE Vec activated(Vec z) {
  if constexpr (kKind == Activation::none) return z;
  if constexpr (kKind == Activation::relu) return at::vec::maximum(z, Vec(0.f));  // keeps a NaN
  return z * gate_of<T, kKind>(z).value;
}

// Like in torch, ReLU's derivative is 0 at 0 and 1 at NaN.
template <class T, Activation kKind>
FUSEDOPS_INLINE Vec gradient(Vec dy, Vec z) {
  if constexpr (kKind == Activation::none) return dy;
  if constexpr (kKind == Activation::relu) return Vec::blendv(dy, Vec(0.f), z <= Vec(0.f));
  const auto [value, slope] = gate_of<T, kKind>(z);
  return dy * at::vec::fmadd(z, slope, value);
}

// Rounds z to T before the activation, as if z were stored in a tensor. From: the product's type.
template <class From, class T, Activation kKind>
void forward_rows(const ActivateRows& args, int64_t begin, int64_t end) {
  constexpr bool kRounds = !std::is_same_v<From, T>;
  const T* const bias = static_cast<const T*>(args.bias);
  for (int64_t row = begin; row < end; ++row) {
    const From* const product = static_cast<const From*>(args.product) + row * args.product_stride;
    T* const z = row_or_null<T>(args.z, row * args.stride);
    T* const y = static_cast<T*>(args.y) + row * args.stride;
    each_step(args.n, [=](int64_t i, auto part) {
      auto v = load(product + i, part);
      if (bias != nullptr) v = v + load(bias + i, part);
      if (kRounds || bias != nullptr) v = rounded<T>(v);
      if (z != nullptr) store(z + i, v, part);
      store(y + i, {activated<T, kKind>(v.lo), activated<T, kKind>(v.hi)}, part);
    });
  }
}

template <class T, Activation kKind>
void backward_rows(const ActivateBackwardRows& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* const dy = static_cast<const T*>(args.dy) + row * args.dy_stride;
    const T* const z = static_cast<const T*>(args.z) + row * args.n;
    T* const dz = static_cast<T*>(args.dz) + row * args.n;
    each_step(args.n, [=](int64_t i, auto part) {
      const auto d = load(dy + i, part), v = load(z + i, part);
      store(dz + i, {gradient<T, kKind>(d.lo, v.lo), gradient<T, kKind>(d.hi, v.hi)}, part);
    });
  }
}

// Calls f<T, kKind>() for args' dtype and activation.
template <class T, class Args, class Function>
void with_kind(const Args& args, const Function& f) {
  switch (args.activation) {
    case Activation::none: return f.template operator()<T, Activation::none>();
    case Activation::relu: return f.template operator()<T, Activation::relu>();
    case Activation::gelu: return f.template operator()<T, Activation::gelu>();
    case Activation::gelu_tanh: return f.template operator()<T, Activation::gelu_tanh>();
    case Activation::silu: return f.template operator()<T, Activation::silu>();
  }
}

template <class Args, class Function>
void with_types(const Args& args, const Function& f) {
  with_type(args.dtype, [&]<class T>(T) { with_kind<T>(args, f); });
}

}  // namespace

void activate_rows(const ActivateRows& args, int64_t begin, int64_t end) {
  const bool wide = args.product_dtype == Dtype::float32;
  with_types(args, [&]<class T, Activation kKind>() {
    wide ? forward_rows<float, T, kKind>(args, begin, end)
         : forward_rows<T, T, kKind>(args, begin, end);
  });
}

void activate_backward_rows(const ActivateBackwardRows& args, int64_t begin, int64_t end) {
  with_types(args, [&]<class T, Activation kKind>() { backward_rows<T, kKind>(args, begin, end); });
}

}  // namespace fusedops::cpu::linear::CPU_CAPABILITY
