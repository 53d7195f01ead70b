// Gated activations on GPUs, forward and backward: y = g S(g) (u + up_offset). Formulas:
// csrc/kernels/gated_activation.h.
//
// A thread takes kVectors vectors of 16 bytes at a time and starts all their loads before it uses
// the first. The grid strides over the tensors. Global traffic is the minimum: forward reads gate
// and up and writes y, backward reads dy, gate and up and writes their gradients. If rows do not
// start at multiples of 16 bytes, a vector is one element.
//
// If y is rows of codes, a block has a row. It reads gate and up twice, the second time from the
// L1 cache: for the row's largest number, and for its codes. y itself is never stored.

#include <cmath>

#include "csrc/cuda/codes.cuh"
#include "csrc/cuda/device.cuh"
#include "csrc/cuda/gated_activation/launch.h"

namespace fusedops::cuda::gated_activation {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 2;       // vectors per tensor that a thread loads at a time
constexpr int kBlocks = 8;        // blocks per multiprocessor
constexpr int kRowThreads = 512;  // of a row that becomes codes, at most

// a + x (b + x (c + ...))
struct Horner {
  constexpr float operator()(float, float a) const { return a; }

  template <class... Rest>
  constexpr float operator()(float x, float a, Rest... rest) const {
    return x * (*this)(x, rest...) + a;
  }
};

// S and S' of csrc/kernels/gated_activation.h.
struct Gate {
  float value, slope;
};

// Whether faster instructions, with a relative error of about 2^-20, are accurate enough for T.
template <class T>
constexpr bool kQuick = sizeof(T) == 2;

template <class T>
__device__ __forceinline__ float exp_of(float x) {
  return kQuick<T> ? __expf(x) : expf(x);
}

template <class T>
__device__ __forceinline__ float quotient(float a, float b) {
  return kQuick<T> ? __fdividef(a, b) : a / b;
}

// From e = exp(-z). 1 - S is e S, which keeps its digits if S is nearly 1; at an infinite e, S = 0
// makes the slope 0. Unless it is quick, a Newton step corrects the rounding of the sum and the
// quotient.
template <class T>
__device__ __forceinline__ Gate sigmoid(float z) {
  const float e = exp_of<T>(-z), finite = fminf(e, 1.7e38f);
  float s = quotient<T>(1.f, 1.f + e);
  if constexpr (!kQuick<T>) s = fmaf(s, fmaf(-s, finite, 1.f - s), s);
  return {s, s * (s * finite)};
}

template <class T>
__device__ __forceinline__ Gate normal(float g) {
  const float x = fminf(fabsf(g) * kTailScale, kTailEnd), s = quotient<T>(x, 1.f + x);
  const float density = exp_of<T>(-0.5f * g * g);
  const float tail = density * scaled_normal_tail(s, Horner());
  return {g < 0.f ? tail : 1.f - tail, density * static_cast<float>(kDensity)};
}

template <class T>
__device__ __forceinline__ Gate tanh_gate(float g) {
  constexpr float slope = kTanhSlope, cubic = kTanhCubic;
  const float x = fminf(fmaxf(g, -kTanhEnd), kTanhEnd), xx = x * x;
  const auto s = sigmoid<T>(x * fmaf(xx, slope * cubic, slope));
  return {s.value, s.slope * fmaf(xx, 3 * slope * cubic, slope)};
}

template <class T, GatedKind kKind>
__device__ __forceinline__ Gate gate_of(float g, float alpha) {
  if constexpr (kKind == GatedKind::geglu) {
    return normal<T>(g);
  } else if constexpr (kKind == GatedKind::geglu_tanh) {
    return tanh_gate<T>(g);
  } else {
    const auto s = sigmoid<T>(alpha * g);
    return {s.value, s.slope * alpha};
  }
}

// gate and up after the limit and the offset: g and u + offset. A NaN stays.
template <GatedKind kKind>
struct Operands {
  static constexpr bool kLimited = kKind == GatedKind::swiglu_limited;

  float g, u;

  __device__ __forceinline__ Operands(float gate, float up, const GatedInput& a) : g(gate), u(up) {
    if constexpr (kLimited) {
      if (g > a.limit) g = a.limit;
      if (u > a.limit) u = a.limit;
      if (u < -a.limit) u = -a.limit;
    }
    u += a.up_offset;
  }
};

template <class T, GatedKind kKind>
__device__ __forceinline__ float product(float gate, float up, const GatedInput& a) {
  const Operands<kKind> at(gate, up, a);
  return at.g * gate_of<T, kKind>(at.g, a.alpha).value * at.u;
}

struct Gradients {
  float gate, up;
};

// Values past the limit get 0, and so does a NaN, as from torch's clamp.
template <class T, GatedKind kKind>
__device__ __forceinline__ Gradients gradients(float dy, float gate, float up,
                                               const GatedInput& a) {
  const Operands<kKind> at(gate, up, a);
  const auto [value, slope] = gate_of<T, kKind>(at.g, a.alpha);
  Gradients d{dy * at.u * fmaf(at.g, slope, value), dy * (at.g * value)};
  if constexpr (Operands<kKind>::kLimited) {
    if (!(gate <= a.limit)) d.gate = 0;
    if (!(fabsf(up) <= a.limit)) d.up = 0;
  }
  return d;
}

// The position of a vector.
struct Place {
  int64_t row, col;

  __device__ __forceinline__ int64_t at(int64_t stride) const { return row * stride + col; }
};

// Returns a vector's position. Avoids 64-bit divisions, which take a hundred instructions.
__device__ __forceinline__ Place place_of(int64_t vector, const GatedInput& a, int size) {
  if (a.rows == 1) return {0, vector * size};
  const int64_t row_vectors = a.n / size;
  const int64_t row = vector <= 0xffffffff && row_vectors <= 0xffffffff
                          ? static_cast<uint32_t>(vector) / static_cast<uint32_t>(row_vectors)
                          : vector / row_vectors;
  return {row, (vector - row * row_vectors) * size};
}

// Calls body(i, place) for a thread's vectors, which start at `first`.
template <int N, class Body>
__device__ __forceinline__ void each_vector(int64_t first, const GatedInput& a, const Body& body) {
  const int64_t count = a.rows * (a.n / N);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector < count) body(i, place_of(vector, a, N));
  }
}

// Calls body(first) until the grid has covered all vectors.
template <int N, class Body>
__device__ __forceinline__ void each_tile(const GatedInput& a, const Body& body) {
  constexpr int64_t tile = kThreads * kVectors;
  const int64_t count = a.rows * (a.n / N);
  for (int64_t i = blockIdx.x * tile + threadIdx.x; i < count; i += gridDim.x * tile) body(i);
}

template <class T, int N>
__device__ __forceinline__ Packed<sizeof(T) * N> load(const void* p, int64_t i) {
  return Packed<sizeof(T) * N>::load(static_cast<const T*>(p) + i);
}

template <class T, int N>
__device__ __forceinline__ Vec<float, N> floats(const Packed<sizeof(T) * N>& packed) {
  return converted<float>(Vec<T, N>::of(packed));
}

template <class T, int N>
__device__ __forceinline__ void store(void* p, int64_t i, const Vec<float, N>& v) {
  if (p != nullptr) converted<T>(v).store(static_cast<T*>(p) + i);
}

template <class T, GatedKind kKind, int N>
__global__ void __launch_bounds__(kThreads) gated_forward(const GatedForward a) {
  each_tile<N>(a, [&](int64_t first) {
    Packed<sizeof(T) * N> gate[kVectors], up[kVectors];
    each_vector<N>(first, a, [&](int i, const Place& place) {
      gate[i] = load<T, N>(a.gate, place.at(a.gate_stride));
      up[i] = load<T, N>(a.up, place.at(a.up_stride));
    });
    each_vector<N>(first, a, [&](int i, const Place& place) {
      const auto g = floats<T, N>(gate[i]), u = floats<T, N>(up[i]);
      Vec<float, N> y;
#pragma unroll
      for (int k = 0; k < N; ++k) y.at[k] = product<T, kKind>(g.at[k], u.at[k], a);
      store<T>(a.y, place.at(a.n), y);
    });
  });
}

template <class T, GatedKind kKind, int N>
__global__ void __launch_bounds__(kRowThreads)
    gated_codes(const GatedForward a, RowFormat format, float* scale) {
  const int64_t row = blockIdx.x;
  const auto each = [&](const auto& body) {
    for (int64_t col = threadIdx.x * N; col < a.n; col += blockDim.x * N) {
      const auto g = floats<T, N>(load<T, N>(a.gate, row * a.gate_stride + col));
      const auto u = floats<T, N>(load<T, N>(a.up, row * a.up_stride + col));
      Vec<float, N> y;
#pragma unroll
      for (int k = 0; k < N; ++k) y.at[k] = product<T, kKind>(g.at[k], u.at[k], a);
      body(col, y);
    }
  };
  float largest = 0;
  each([&](int64_t, const Vec<float, N>& y) {
#pragma unroll
    for (int k = 0; k < N; ++k) largest = larger_size(largest, y.at[k]);
  });
  const RowCodes codes(format, row_max(largest));
  each([&](int64_t col, const Vec<float, N>& y) { codes.store(a.y, row * a.n + col, y); });
  if (threadIdx.x == 0) scale[row] = codes.scale();
}

template <class T, GatedKind kKind, int N>
__global__ void __launch_bounds__(kThreads) gated_backward(const GatedBackward a) {
  each_tile<N>(a, [&](int64_t first) {
    Packed<sizeof(T) * N> dy[kVectors], gate[kVectors], up[kVectors];
    each_vector<N>(first, a, [&](int i, const Place& place) {
      dy[i] = load<T, N>(a.dy, place.at(a.dy_stride));
      gate[i] = load<T, N>(a.gate, place.at(a.gate_stride));
      up[i] = load<T, N>(a.up, place.at(a.up_stride));
    });
    each_vector<N>(first, a, [&](int i, const Place& place) {
      const auto d = floats<T, N>(dy[i]), g = floats<T, N>(gate[i]), u = floats<T, N>(up[i]);
      Vec<float, N> dgate, dup;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const auto gradient = gradients<T, kKind>(d.at[k], g.at[k], u.at[k], a);
        dgate.at[k] = gradient.gate;
        dup.at[k] = gradient.up;
      }
      store<T>(a.dgate, place.at(a.d_stride), dgate);
      store<T>(a.dup, place.at(a.d_stride), dup);
    });
  });
}

// Whether every access can have 16 bytes.
bool whole_vectors(const GatedInput& a) {
  return a.n * size_of(a.dtype) % 16 == 0 && aligned_rows(a.gate, a.gate_stride, a.dtype) &&
         aligned_rows(a.up, a.up_stride, a.dtype);
}

bool whole_vectors(const GatedForward& a) {
  return whole_vectors(static_cast<const GatedInput&>(a)) && aligned(a.y);
}

bool whole_vectors(const GatedBackward& a) {
  return whole_vectors(static_cast<const GatedInput&>(a)) &&
         aligned_rows(a.dy, a.dy_stride, a.dtype) && aligned(a.dgate) && aligned(a.dup);
}

template <class Args>
void launch_over(void (*kernel)(Args), const Args& a, int size, CUstream_st* stream) {
  constexpr int64_t tile = kThreads * kVectors;
  const int64_t most = int64_t{kBlocks} * multiprocessors();
  const int64_t tiles = (a.rows * (a.n / size) + tile - 1) / tile;
  launch(kernel, dim3(tiles < most ? tiles : most), dim3(kThreads), 0, stream, a);
}

// Calls f<T, kKind>() for args' dtype and kind.
template <class Function>
void with_types(const GatedInput& a, const Function& f) {
  for_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    switch (a.kind) {
      case GatedKind::swiglu: return f.template operator()<T, GatedKind::swiglu>();
      case GatedKind::swiglu_limited: return f.template operator()<T, GatedKind::swiglu_limited>();
      case GatedKind::geglu: return f.template operator()<T, GatedKind::geglu>();
      case GatedKind::geglu_tanh: return f.template operator()<T, GatedKind::geglu_tanh>();
    }
  });
}

}  // namespace

void launch_gated_forward(const GatedForward& a, CUstream_st* stream) {
  with_types(a, [&]<class T, GatedKind kKind>() {
    constexpr int N = 16 / sizeof(T);
    whole_vectors(a) ? launch_over(gated_forward<T, kKind, N>, a, N, stream)
                     : launch_over(gated_forward<T, kKind, 1>, a, 1, stream);
  });
}

void launch_swiglu_codes(const GatedForward& a, RowFormat format, float* scale,
                         CUstream_st* stream) {
  for_dtype(a.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = 16 / sizeof(T);
    const bool vectors = whole_vectors(static_cast<const GatedInput&>(a));
    const bool limited = a.kind == GatedKind::swiglu_limited;
    constexpr auto swiglu = GatedKind::swiglu, swiglu_limited = GatedKind::swiglu_limited;
    const auto kernel =
        vectors   ? limited ? gated_codes<T, swiglu_limited, N> : gated_codes<T, swiglu, N>
        : limited ? gated_codes<T, swiglu_limited, 1>
                  : gated_codes<T, swiglu, 1>;
    unsigned threads = kWarp;
    while (threads < kRowThreads && threads * (vectors ? N : 1) < a.n) threads *= 2;
    launch(kernel, dim3(static_cast<unsigned>(a.rows)), dim3(threads), 0, stream, a, format, scale);
  });
}

void launch_gated_backward(const GatedBackward& a, CUstream_st* stream) {
  with_types(a, [&]<class T, GatedKind kKind>() {
    constexpr int N = 16 / sizeof(T);
    whole_vectors(a) ? launch_over(gated_backward<T, kKind, N>, a, N, stream)
                     : launch_over(gated_backward<T, kKind, 1>, a, 1, stream);
  });
}

}  // namespace fusedops::cuda::gated_activation
