// How AdamW's kernels visit the blocks of 256 elements of many tensors.
//
// A warp takes a block at a time, with 8 elements per lane in registers; the sum of squares loads
// several before it adds. A block of threads has a run of adjacent blocks, and its warps search for
// their tensor only where one ends.
#pragma once

#include "csrc/cuda/adamw/launch.h"
#include "csrc/cuda/device.cuh"

namespace fusedops::cuda::adamw {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 4;                  // blocks of threads per multiprocessor
constexpr int kEach = kAdamWBlock / kWarp;  // elements per lane

using Lane = Vec<float, kEach>;

// A lane's elements of a block: eight adjacent ones if every access can be 16 bytes, else every
// 32nd.
template <bool kWide>
struct Elements {
  int count;  // the block's number of elements

  __device__ __forceinline__ int at(int k) const {
    const int lane = threadIdx.x % kWarp;
    return kWide ? lane * kEach + k : k * kWarp + lane;
  }
  __device__ __forceinline__ bool live(int k) const { return kWide || at(k) < count; }

  __device__ __forceinline__ Lane load(const void* p, Dtype dtype, int64_t first) const {
    p = global_memory(p);
    if constexpr (kWide) {
      return load_floats<kEach>(p, dtype, first + at(0));
    } else {
      Lane v{};
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (live(k)) v.at[k] = load_floats<1>(p, dtype, first + at(k)).at[0];
      }
      return v;
    }
  }

  __device__ __forceinline__ void store(void* p, Dtype dtype, int64_t first, const Lane& v) const {
    switch (dtype) {
      case Dtype::float32: return store(static_cast<float*>(p) + first, v);
      case Dtype::bfloat16: return store(static_cast<BFloat16*>(p) + first, converted<BFloat16>(v));
      default: return store(static_cast<Half*>(p) + first, converted<Half>(v));
    }
  }

  template <class T>
  __device__ __forceinline__ Vec<T, kEach> load(const T* p) const {
    p = global_memory(p);
    if constexpr (kWide) {
      return Vec<T, kEach>::load(p + at(0));
    } else {
      Vec<T, kEach> v{};
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (live(k)) v.at[k] = p[at(k)];
      }
      return v;
    }
  }

  template <class T>
  __device__ __forceinline__ void store(T* p, const Vec<T, kEach>& v) const {
    if constexpr (kWide) {
      const auto packed = v.packed();
#pragma unroll
      for (int i = 0; i < packed.kWords; ++i) {
        store_global(reinterpret_cast<char*>(p + at(0)) + i * sizeof(packed.words[0]),
                     packed.words[i]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (live(k)) p[at(k)] = v.at[k];
      }
    }
  }
};

// Returns a block's tensor: the last one that does not begin after the block.
__device__ __forceinline__ int tensor_of(const AdamWRows& rows, int64_t block) {
  int low = 0, high = rows.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (rows.tensors[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

// Calls one(tensor, begins, block) for each of the warp's blocks. block: its index in the tensor;
// begins: whether it is the warp's first block of that tensor. If the warp's next kMany blocks,
// kWarps apart, are all whole blocks of one tensor, it calls many(tensor, block) once instead.
template <int kMany, class One, class Many>
__device__ __forceinline__ void each_blocks(const AdamWRows& rows, const One& one,
                                            const Many& many) {
  const int64_t run = (rows.blocks + gridDim.x - 1) / gridDim.x, first = blockIdx.x * run;
  const int64_t end = first + run < rows.blocks ? first + run : rows.blocks;
  int at = -1;
  int64_t last = -1;  // the tensor's last block, which may be a short one
  int taken = 1;
  for (int64_t block = first + threadIdx.x / kWarp; block < end; block += taken * kWarps) {
    const bool begins = block > last;
    if (begins) {
      at = tensor_of(rows, block);
      last = rows.tensors[at].first_block + blocks_of(rows.tensors[at]) - 1;
    }
    const int64_t furthest = block + (kMany - 1) * kWarps;
    taken = kMany > 1 && furthest < end && furthest < last ? kMany : 1;
    if (taken == 1) {
      one(at, begins, block - rows.tensors[at].first_block);
    } else {
      many(at, block - rows.tensors[at].first_block);
    }
  }
}

template <class Body>
__device__ __forceinline__ void each_block(const AdamWRows& rows, const Body& body) {
  each_blocks<1>(rows, body, [](int, int64_t) {});
}

// Returns the sum of the parts, with the same bits in every warp.
__device__ __forceinline__ double sum_of_parts(const double* squares) {
  double sum = 0;
  for (int i = threadIdx.x % kWarp; i < kSquareParts; i += kWarp) sum += squares[i];
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) sum += __shfl_xor_sync(kAllLanes, sum, o);
  return sum;
}

inline dim3 grid_of(const AdamWRows& rows) {
  const int64_t most = int64_t{kBlocks} * multiprocessors();
  const int64_t wanted = (rows.blocks + kWarps - 1) / kWarps;
  return dim3(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

}  // namespace fusedops::cuda::adamw
