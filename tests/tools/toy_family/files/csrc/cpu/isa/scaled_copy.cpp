// scaled_copy's CPU loop, compiled for each instruction set: one pass over the elements.

#include "csrc/cpu/isa/scaled_copy.h"

#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::scaled_copy::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

void scale_elements(Dtype dtype, const void* x, void* y, float scale, int64_t n) {
  with_type(dtype, [&]<class T>(T) {
    each_step(n, [=](int64_t i, auto part) {
      store(static_cast<T*>(y) + i, all(scale) * load(static_cast<const T*>(x) + i, part), part);
    });
  });
}

}  // namespace fusedops::cpu::scaled_copy::CPU_CAPABILITY
