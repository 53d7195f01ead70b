// Visits the blocks of 256 elements of many tensors, for AdamW's kernels.
//
// A warp takes a block at a time, with 8 elements per lane in registers; the sum of squares loads
// several before it adds. A block of threads has a share of adjacent blocks, and its warps search
// for their tensor only where one ends.
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
      store_packed(p, v.packed());
    } else {
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (live(k)) p[at(k)] = v.at[k];
      }
    }
  }

  // The same, where a lane's elements are words of 32 bits: pairs or fours of them.
  template <class T>
  __device__ __forceinline__ Vec<uint32_t, kEach * sizeof(T) / 4> load_words(const T* p) const {
    using Words = Vec<uint32_t, kEach * sizeof(T) / 4>;
    if constexpr (kWide) {
      return Words::of(Packed<sizeof(Words)>::load(global_memory(p) + at(0)));
    } else {
      return Words::of(load(p).packed());
    }
  }
  template <class T>
  __device__ __forceinline__ void store_words(
      T* p, const Vec<uint32_t, kEach * sizeof(T) / 4>& words) const {
    if constexpr (kWide) {
      store_packed(p, words.packed());
    } else {
      store(p, Vec<T, kEach>::of(words.packed()));
    }
  }

 private:
  template <class T>
  __device__ __forceinline__ void store_packed(T* p,
                                               const Packed<sizeof(T) * kEach>& packed) const {
#pragma unroll
    for (int i = 0; i < packed.kWords; ++i) {
      store_global(reinterpret_cast<char*>(p + at(0)) + i * sizeof(packed.words[0]),
                   packed.words[i]);
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

// Returns how many adjacent blocks each block of threads has.
__device__ __forceinline__ int64_t share_of(const AdamWRows& rows) {
  return (rows.blocks + gridDim.x - 1) / gridDim.x;
}

// Calls single(tensor, block) for each of the warp's blocks; block: its index in the tensor. If the
// warp's next kMany blocks, kWarps apart, are all whole blocks of one tensor, it calls
// many(tensor, block) once instead.
template <int kMany, class Single, class Many>
__device__ __forceinline__ void each_blocks(const AdamWRows& rows, const Single& single,
                                            const Many& many) {
  const int64_t run = share_of(rows), first = blockIdx.x * run;
  const int64_t end = first + run < rows.blocks ? first + run : rows.blocks;
  int at = -1;
  int64_t last = -1;  // the tensor's last block, which may be a short one
  int taken = 1;
  for (int64_t block = first + threadIdx.x / kWarp; block < end; block += taken * kWarps) {
    if (block > last) {
      at = tensor_of(rows, block);
      last = rows.tensors[at].first_block + blocks_of(rows.tensors[at]) - 1;
    }
    const int64_t furthest = block + (kMany - 1) * kWarps;
    taken = kMany > 1 && furthest < end && furthest < last ? kMany : 1;
    if (taken == 1) {
      single(at, block - rows.tensors[at].first_block);
    } else {
      many(at, block - rows.tensors[at].first_block);
    }
  }
}

template <class Body>
__device__ __forceinline__ void each_block(const AdamWRows& rows, const Body& body) {
  each_blocks<1>(rows, body, [](int, int64_t) {});
}

// The warp's blocks, one tensor after another: from `block` every kWarps-th one before `end`, which
// are indices in the tensor. 2^32 blocks of the smallest parameters are 2 TiB.
class Runs {
 public:
  int at;  // the tensor
  uint32_t block, end;

  __device__ __forceinline__ explicit Runs(const AdamWRows& rows) {
    next_ = blockIdx.x * static_cast<uint32_t>(share_of(rows)) + threadIdx.x / kWarp;
  }

  // Goes on to the next tensor, if there is one.
  __device__ __forceinline__ bool next(const AdamWRows& rows) {
    // Computed again, because the loops over a tensor's blocks have no register to spare.
    const int64_t share = share_of(rows), first = blockIdx.x * share;
    const auto last = static_cast<uint32_t>(min(first + share, rows.blocks));
    if (next_ >= last) return false;
    at = tensor_of(rows, next_);
    const auto begin = static_cast<uint32_t>(rows.tensors[at].first_block);
    block = next_ - begin;
    end = min(last - begin, static_cast<uint32_t>(blocks_of(rows.tensors[at])));
    next_ += (end - block + kWarps - 1) / kWarps * kWarps;
    return true;
  }

 private:
  uint32_t next_;  // of all tensors' blocks
};

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
  const int64_t blocks = (rows.blocks + kWarps - 1) / kWarps;
  return dim3(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

}  // namespace fusedops::cuda::adamw
