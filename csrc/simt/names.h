// Defines CUDA's qualifiers, index types, variables and arithmetic for a C++ compiler.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

// A thread-local variable that is accessed without a call.
#define FUSEDOPS_SIMT_PER_CPU \
  inline thread_local constinit __attribute__((tls_model("initial-exec")))
// A function whose memory accesses do not call the hooks of -fsanitize=thread.
#define FUSEDOPS_SIMT_UNSEEN __attribute__((no_sanitize("thread")))
#define FUSEDOPS_SIMT_INLINE __attribute__((always_inline)) FUSEDOPS_SIMT_UNSEEN
// A function that finds its caller's line from its return address.
#define FUSEDOPS_SIMT_CALLED __attribute__((noinline)) FUSEDOPS_SIMT_UNSEEN

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;

  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

__forceinline__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

// Set for each thread before it is resumed.
FUSEDOPS_SIMT_PER_CPU uint3 threadIdx{}, blockIdx{};
FUSEDOPS_SIMT_PER_CPU dim3 blockDim{}, gridDim{};
inline constexpr int warpSize = 32;

template <class T>
__forceinline__ T __ldg(const T* p) {
  return *p;
}

__forceinline__ float __fdividef(float a, float b) { return a / b; }
__forceinline__ float __expf(float x) { return expf(x); }
#if !defined(__GLIBC_PREREQ) || !__GLIBC_PREREQ(2, 42)  // which has rsqrtf
__forceinline__ float rsqrtf(float x) { return 1 / sqrtf(x); }
#endif

__forceinline__ double rsqrt(double x) { return 1 / sqrt(x); }

// Four of the eight bytes of y and x; selector has an index of them in every four bits.
__forceinline__ unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned selected = 0;
  for (int i = 0; i < 4; ++i) {
    selected |= static_cast<unsigned>(bytes >> (8 * (selector >> 4 * i & 7)) & 0xff) << 8 * i;
  }
  return selected;
}

__forceinline__ int __popc(unsigned x) { return __builtin_popcount(x); }
__forceinline__ int __ffs(int x) { return __builtin_ffs(x); }
__forceinline__ int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }

template <std::integral T>
__forceinline__ T min(T a, T b) {
  return b < a ? b : a;
}
template <std::integral T>
__forceinline__ T max(T a, T b) {
  return a < b ? b : a;
}
// If one operand is NaN, returns the other, as on a GPU.
__forceinline__ float min(float a, float b) { return fminf(a, b); }
__forceinline__ float max(float a, float b) { return fmaxf(a, b); }
__forceinline__ double min(double a, double b) { return fmin(a, b); }
__forceinline__ double max(double a, double b) { return fmax(a, b); }
