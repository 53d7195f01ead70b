// scaled_add on CPUs: one pass over the elements, nothing stored between.

#include "csrc/cpu/isa/scaled_add.h"

#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::scaled_add::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

template <bool kSum, class T>
void elements(const T* x, const T* residual, T* y, float scale, int64_t n) {
  each_step(n, [=](int64_t i, auto part) {
    const auto r = load(residual + i, part);
    if constexpr (kSum) {
      store(y + i, fma(all(scale), r, load(x + i, part)), part);
    } else {
      store(y + i, all(scale) * r, part);
    }
  });
}

}  // namespace

void scaled_add_elements(Dtype dtype, const void* x, const void* residual, void* y, float scale,
                         int64_t n) {
  with_type(dtype, [&]<class T>(T) {
    const auto *a = static_cast<const T*>(x), *r = static_cast<const T*>(residual);
    auto* const out = static_cast<T*>(y);
    x == nullptr ? elements<false>(a, r, out, scale, n) : elements<true>(a, r, out, scale, n);
  });
}

}  // namespace fusedops::cpu::scaled_add::CPU_CAPABILITY
