// Gradient clipping: the sum of squares, and the scaling.

#include "csrc/cpu/isa/adamw/adamw.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::adamw {
namespace CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

constexpr int64_t kPiece = 64 * kStep;  // elements summed in float32, before float64

template <class T>
void squares(const T* g, int64_t n, double* total) {
  for (int64_t first = 0; first < n; first += kPiece) {
    Floats sums[2];  // two independent chains, so that additions overlap
    int turn = 0;
    each_step(n - first < kPiece ? n - first : kPiece, [&](int64_t i, auto part) {
      const auto v = live(load(g + first + i, part), part);
      sums[turn] = fma(v, v, sums[turn]);
      turn ^= 1;
    });
    *total += sum(sums[0] + sums[1]);
  }
}

template <class T>
void scale(T* g, int64_t n, float factor) {
  const auto factors = all(factor);
  each_step(n, [&](int64_t i, auto part) { store(g + i, load(g + i, part) * factors, part); });
}

}  // namespace

void sum_of_squares(const void* grad, Dtype dtype, int64_t n, double* total) {
  with_type(dtype, [&]<class T>(T) { squares(static_cast<const T*>(grad), n, total); });
}

void scale_in_place(void* grad, Dtype dtype, int64_t n, float factor) {
  with_type(dtype, [&]<class T>(T) { scale(static_cast<T*>(grad), n, factor); });
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::adamw
