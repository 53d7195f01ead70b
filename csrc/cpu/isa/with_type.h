// Calls a function with the C++ type of a dtype.
#pragma once

#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

// Calls f with a value of that type.
template <class Function>
inline void with_type(Dtype dtype, const Function& f) {
  switch (dtype) {
    case Dtype::float32: return f(float());
    case Dtype::bfloat16: return f(BFloat16());
    case Dtype::float16: return f(Half());
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
