// Sums of dweight and dbias over a block's rows, for backward.cu: in registers or shared memory.
#pragma once

#include "csrc/cuda/norm/row.cuh"
#include "csrc/kernels/host_device.h"

namespace fusedops::cuda::norm {

// 16-byte vectors of a row that a thread keeps, without and with its sums in shared memory
constexpr int kFew = 2, kMany = 4;

// each_held for the latter: such rows are long enough for kMaxThreads threads.
template <int N, class Body>
__device__ __forceinline__ void each_long(int n, const Body& body) {
  each_held<N, kMany>(n, body, kMaxThreads);
}

// A thread's columns of dweight and dbias, in registers.
template <int N>
class RegisterSums {
 public:
  __device__ __forceinline__ RegisterSums(const NormBackwardArgs&, float*) {}

  // Calls body(dweight, dbias), which may change the sums of the thread's vector i.
  template <class Body>
  __device__ __forceinline__ void update(int i, const Body& body) {
    body(dweight_[i], dbias_[i]);
  }

 private:
  Vec<float, N> dweight_[kFew] = {}, dbias_[kFew] = {};
};

// The same in shared memory, the requested sums only, for rows of kMaxThreads threads. A thread's
// 16 bytes lie beside those of its neighbours, so that a warp's access has no bank conflict. No
// other thread reads them.
template <int N>
class SharedSums {
 public:
  // Returns the size in floats of one sum over rows of n columns.
  FUSEDOPS_HOST_DEVICE static int size(int n) {
    constexpr int each = kMaxThreads * N;
    return (n + each - 1) / each * each;
  }

  __device__ __forceinline__ SharedSums(const NormBackwardArgs& a, float* shared)
      : wants_dweight_(a.wants_dweight),
        wants_dbias_(a.wants_dbias),
        dweight_(shared + threadIdx.x * kPart),
        dbias_(dweight_ + (a.wants_dweight ? size(a.n) : 0)) {
    each_long<N>(a.n, [&](int i, int) { store(i, {}, {}); });
  }

  template <class Body>
  __device__ __forceinline__ void update(int i, const Body& body) {
    Vec<float, N> dweight{}, dbias{};
    if (wants_dweight_) dweight = load(dweight_, i);
    if (wants_dbias_) dbias = load(dbias_, i);
    body(dweight, dbias);
    store(i, dweight, dbias);
  }

 private:
  static constexpr int kPart = 4;  // floats in 16 bytes

  __device__ __forceinline__ static Vec<float, N> load(const float* sum, int i) {
    Vec<float, N> v;
#pragma unroll
    for (int k = 0; k < N; k += kPart) {
      const auto part = Vec<float, kPart>::load(sum + (i * N + k) * kMaxThreads);
#pragma unroll
      for (int j = 0; j < kPart; ++j) v.at[k + j] = part.at[j];
    }
    return v;
  }

  __device__ __forceinline__ static void store(float* sum, int i, const Vec<float, N>& v) {
#pragma unroll
    for (int k = 0; k < N; k += kPart) {
      const Vec<float, kPart> part{{v.at[k], v.at[k + 1], v.at[k + 2], v.at[k + 3]}};
      part.store(sum + (i * N + k) * kMaxThreads);
    }
  }

  __device__ __forceinline__ void store(int i, const Vec<float, N>& dweight,
                                        const Vec<float, N>& dbias) const {
    if (wants_dweight_) store(dweight_, i, dweight);
    if (wants_dbias_) store(dbias_, i, dbias);
  }

  const bool wants_dweight_, wants_dbias_;
  float *const dweight_, *const dbias_;
};

// Adds v to p[0..N), unless p is null.
template <int N>
__device__ __forceinline__ void accumulate(float* p, const Vec<float, N>& v) {
  if (p == nullptr) return;
  auto total = Vec<float, N>::load(p);
#pragma unroll
  for (int k = 0; k < N; ++k) total.at[k] += v.at[k];
  total.store(p);
}

// partials[blockIdx.x, s, :] = the sum over y of shared[y, s, :], for each of the sums
__device__ __forceinline__ void write_partials(const NormBackwardArgs& a, const float* shared) {
  const int width = (a.wants_dweight + a.wants_dbias) * a.n;
  float* const out = a.partials + int64_t{blockIdx.x} * width;
  __syncthreads();
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < width; i += blockDim.x * blockDim.y) {
    double total = 0;
    for (unsigned y = 0; y < blockDim.y; ++y) total += shared[y * width + i];
    out[i] = static_cast<float>(total);
  }
}

}  // namespace fusedops::cuda::norm
