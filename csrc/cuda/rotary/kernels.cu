// The rotary embedding on GPUs: rotates q's and k's heads by position. Formulas:
// csrc/kernels/rotary.h.
//
// A thread has a lane of a position: two vectors of N elements of a head, which are N pairs, or one
// vector of copied elements. It loads their cosines and sines once and processes kHeads heads of q
// or k, whose loads are all issued before the first is used. Lanes are threadIdx.x and blockIdx.x,
// groups of heads blockIdx.y. Global traffic is the minimum: q and k are read and written once, and
// cos and sin are read once per group, from the cache. If heads do not start at multiples of 16
// bytes, a vector is one element.

#include "csrc/cuda/device.cuh"
#include "csrc/cuda/rotary/launch.h"

namespace fusedops::cuda::rotary {
namespace {

constexpr int kThreads = 256;
constexpr int kMostGroups = 65535;  // a grid's maximum size in y

// Heads that a thread loads at a time: 32 registers.
template <class T>
constexpr int kHeads = sizeof(T) == 2 ? 4 : 2;

// Maps pair i to its elements among a lane's 2 N, and a lane to its vectors' positions in the head.
template <bool kInterleaved, int N>
struct Layout {
  static constexpr int a(int i) { return kInterleaved ? 2 * i : i; }
  static constexpr int b(int i) { return kInterleaved ? 2 * i + 1 : N + i; }

  int64_t at[2];

  __device__ __forceinline__ Layout(int64_t lane, int64_t rotary)
      : at{kInterleaved ? 2 * N * lane : N * lane,
           kInterleaved ? 2 * N * lane + N : rotary / 2 + N * lane} {}
};

// A lane's two vectors.
template <int N>
__device__ __forceinline__ Vec<float, 2 * N> joined(const Vec<float, N>& lo,
                                                    const Vec<float, N>& hi) {
  Vec<float, 2 * N> v;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v.at[i] = lo.at[i];
    v.at[N + i] = hi.at[i];
  }
  return v;
}

template <int N>
__device__ __forceinline__ Vec<float, N> half_of(const Vec<float, 2 * N>& v, int which) {
  Vec<float, N> half;
#pragma unroll
  for (int i = 0; i < N; ++i) half.at[i] = v.at[which * N + i];
  return half;
}

// The cosines and sines of a lane's pairs. A transposed rotation has other sines.
template <bool kInterleaved, int N>
struct Angles {
  using Pairs = Layout<kInterleaved, N>;

  Vec<float, 2 * N> c, s;

  __device__ __forceinline__ Angles(const RotaryArguments& args, const Pairs& pairs, int64_t cos,
                                    int64_t sin)
      : c(both(args.cos, args.table, cos, pairs)), s(both(args.sin, args.table, sin, pairs)) {
    if (!args.transposed) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s_a = s.at[Pairs::a(i)];
      s.at[Pairs::a(i)] = -s.at[Pairs::b(i)];
      s.at[Pairs::b(i)] = -s_a;
    }
  }

  __device__ __forceinline__ Vec<float, 2 * N> rotated(const Vec<float, 2 * N>& x) const {
    Vec<float, 2 * N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int a = Pairs::a(i), b = Pairs::b(i);
      y.at[a] = fmaf(x.at[a], c.at[a], -(x.at[b] * s.at[a]));
      y.at[b] = fmaf(x.at[b], c.at[b], x.at[a] * s.at[b]);
    }
    return y;
  }

 private:
  __device__ __forceinline__ static Vec<float, 2 * N> both(const void* table, Dtype dtype,
                                                           int64_t row, const Pairs& pairs) {
    return joined(load_floats<N>(table, dtype, row + pairs.at[0]),
                  load_floats<N>(table, dtype, row + pairs.at[1]));
  }
};

// A group of heads of q or k.
struct Group {
  RotaryHeads tensor;
  int64_t first;
};

__device__ __forceinline__ int64_t groups_of(const RotaryHeads& tensor, int heads) {
  return (tensor.heads + heads - 1) / heads;
}

__device__ __forceinline__ Group group_of(const RotaryArguments& a, int64_t group, int heads) {
  const int64_t first_groups = groups_of(a.tensors[0], heads);
  if (group < first_groups) return {a.tensors[0], group * heads};
  return {a.tensors[1], (group - first_groups) * heads};
}

// Calls body(i, x, y) for each head of the group. x, y: the addresses of its first elements.
template <int kCount, class Body>
__device__ __forceinline__ void each_head(const Group& group, int64_t batch, int64_t seq,
                                          const Body& body) {
  const auto& t = group.tensor;
  const int64_t x = batch * t.x_at.batch + seq * t.x_at.seq;
  const int64_t y = batch * t.y_at.batch + seq * t.y_at.seq;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t head = group.first + i;
    if (head < t.heads) body(i, x + head * t.x_at.head, y + head * t.y_at.head);
  }
}

template <class T, int N>
__device__ __forceinline__ Packed<sizeof(T) * N> load(const void* p, int64_t i) {
  return Packed<sizeof(T) * N>::load(static_cast<const T*>(p) + i);
}

template <class T, int N>
__device__ __forceinline__ Vec<float, N> floats(const Packed<sizeof(T) * N>& packed) {
  return converted<float>(Vec<T, N>::of(packed));
}

template <class T, bool kInterleaved, int N>
__device__ __forceinline__ void rotate(const RotaryArguments& a, const Group& group, int64_t batch,
                                       int64_t seq, int64_t lane) {
  const Layout<kInterleaved, N> pairs(lane, a.rotary);
  const auto& t = group.tensor;
  Packed<sizeof(T) * N> x[kHeads<T>][2];
  each_head<kHeads<T>>(group, batch, seq, [&](int i, int64_t from, int64_t) {
    x[i][0] = load<T, N>(t.x, from + pairs.at[0]);
    x[i][1] = load<T, N>(t.x, from + pairs.at[1]);
  });
  const Angles<kInterleaved, N> angles(a, pairs, batch * a.cos_at.batch + seq * a.cos_at.seq,
                                       batch * a.sin_at.batch + seq * a.sin_at.seq);
  each_head<kHeads<T>>(group, batch, seq, [&](int i, int64_t, int64_t to) {
    const auto y = angles.rotated(joined(floats<T, N>(x[i][0]), floats<T, N>(x[i][1])));
    store_floats(t.y, a.to, to + pairs.at[0], half_of<N>(y, 0));
    store_floats(t.y, a.to, to + pairs.at[1], half_of<N>(y, 1));
  });
}

template <class T, int N>
__device__ __forceinline__ void copy(const RotaryArguments& a, const Group& group, int64_t batch,
                                     int64_t seq, int64_t at) {
  const auto& t = group.tensor;
  Packed<sizeof(T) * N> x[kHeads<T>];
  each_head<kHeads<T>>(group, batch, seq,
                       [&](int i, int64_t from, int64_t) { x[i] = load<T, N>(t.x, from + at); });
  each_head<kHeads<T>>(group, batch, seq, [&](int i, int64_t, int64_t to) {
    if (a.from == a.to) {
      x[i].store(static_cast<T*>(t.y) + to + at);
    } else {
      store_floats(t.y, a.to, to + at, floats<T, N>(x[i]));
    }
  });
}

// Returns the number of lanes per position: that of the wider of q and k.
__host__ __device__ __forceinline__ int64_t lanes_of(const RotaryArguments& a, int N) {
  const int64_t other = a.count > 1 ? a.tensors[1].width : 0;
  const int64_t width = a.tensors[0].width > other ? a.tensors[0].width : other;
  return a.rotary / 2 / N + (width - a.rotary) / N;
}

// Returns a / b. Avoids 64-bit division, which takes a hundred instructions.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  return a <= 0xffffffff && b <= 0xffffffff ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b)
                                            : a / b;
}

template <class T, bool kInterleaved, int N>
__global__ void __launch_bounds__(kThreads) rotary(const RotaryArguments a, const int64_t groups) {
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x, lanes = lanes_of(a, N);
  const int64_t position = quotient(thread, lanes), lane = thread - position * lanes;
  if (position >= a.batch * a.seq) return;
  const int64_t batch = quotient(position, a.seq), seq = position - batch * a.seq;
  const int64_t turned = a.rotary / 2 / N, at = a.rotary + (lane - turned) * N;
  for (int64_t i = blockIdx.y; i < groups; i += gridDim.y) {
    const auto group = group_of(a, i, kHeads<T>);
    if (lane < turned) {
      rotate<T, kInterleaved, N>(a, group, batch, seq, lane);
    } else if (at < group.tensor.width) {
      copy<T, N>(a, group, batch, seq, at);
    }
  }
}

bool aligned_strides(const void* p, const RotaryStrides& at, Dtype dtype) {
  return aligned_rows(p, at.batch, dtype) && aligned_rows(p, at.head, dtype) &&
         aligned_rows(p, at.seq, dtype);
}

// Whether every access can be a whole vector of N elements, 16 bytes or more.
bool whole_vectors(const RotaryArguments& a, int N) {
  bool whole = a.rotary / 2 % N == 0 && aligned_strides(a.cos, a.cos_at, a.table) &&
               aligned_strides(a.sin, a.sin_at, a.table);
  for (int i = 0; i < a.count; ++i) {
    const auto& t = a.tensors[i];
    whole = whole && t.width % N == 0 && aligned_strides(t.x, t.x_at, a.from) &&
            aligned_strides(t.y, t.y_at, a.to);
  }
  return whole;
}

template <class T, bool kInterleaved, int N>
void launch_vectors(const RotaryArguments& a, CUstream_st* stream) {
  int64_t groups = 0;
  for (int i = 0; i < a.count; ++i) {
    groups += (a.tensors[i].heads + kHeads<T> - 1) / kHeads<T>;
  }
  const int64_t threads = a.batch * a.seq * lanes_of(a, N);
  const dim3 grid((threads + kThreads - 1) / kThreads, groups < kMostGroups ? groups : kMostGroups);
  launch(rotary<T, kInterleaved, N>, grid, dim3(kThreads), 0, stream, a, groups);
}

}  // namespace

void launch_rotary(const RotaryArguments& a, CUstream_st* stream) {
  if (a.count == 0) return;
  constexpr int N = 8;
  for_dtype(a.from, [&](auto zero) {
    using T = decltype(zero);
    if (a.interleaved) {
      whole_vectors(a, N) ? launch_vectors<T, true, N>(a, stream)
                          : launch_vectors<T, true, 1>(a, stream);
    } else {
      whole_vectors(a, N) ? launch_vectors<T, false, N>(a, stream)
                          : launch_vectors<T, false, 1>(a, stream);
    }
  });
}

}  // namespace fusedops::cuda::rotary
