// Correct CUDA kernels that the emulator in csrc/simt must run right, and one that it must stop.
// Each correct one has a pattern that a checker could take for a bug, or results that an emulator
// could get wrong.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "tests/simt/toys.h"

using namespace fusedops::cuda;

// Runs the kernel on newly allocated memory and returns that.
template <class T>
std::vector<T> run(void (*kernel)(T*), dim3 grid, dim3 block, int size, size_t smem = 0) {
  std::vector<T> out(size);
  launch(kernel, grid, block, smem, Stream{}, out.data());
  return out;
}

template <class T, class Expected>
bool all(const std::vector<T>& found, Expected expected) {
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] != expected(static_cast<int>(i))) return false;
  }
  return true;
}

// Sums over a block of up to 1024 threads, by shuffles and then through shared memory.
__global__ void block_sum(int* out) {
  FUSEDOPS_SHARED(int, of_warps, 32);
  const int warps = (blockDim.x + 31) / 32, warp = threadIdx.x / 32;
  const unsigned left = blockDim.x - warp * 32, mask = left < 32 ? (1u << left) - 1 : ~0u;
  for (int round = 0; round < 3; ++round) {
    int sum = threadIdx.x + round;
    for (int d = 16; d > 0; d /= 2) {
      const int other = __shfl_down_sync(mask, sum, left < 32 ? 0 : d);
      sum += left < 32 ? 0 : other;
    }
    if (left < 32) {
      for (int i = 1; i < int(left); ++i) {
        const int other = __shfl_sync(mask, int(threadIdx.x) + round, i);
        sum += threadIdx.x % 32 == 0 ? other : 0;
      }
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[warp] = sum;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < warps; ++w) total += of_warps[w];
    if (threadIdx.x == 0) out[3 * blockIdx.x + round] = total;
  }
}

bool block_sums() {
  for (const int n : {1, 20, 32, 33, 64, 77, 100, 1024}) {
    const auto sum = [n](int i) { return n * (n - 1) / 2 + n * (i % 3); };
    if (!all(run(block_sum, 2, n, 6), sum)) return false;
  }
  return true;
}

__global__ void broadcast_then_write(int* out) {
  FUSEDOPS_SHARED(int, word, 1);
  if (threadIdx.x == 0) *word = 0;
  for (int i = 0; i < 5; ++i) {
    __syncwarp();
    out[threadIdx.x] += *word;
    __syncwarp();
    if (threadIdx.x == 0) *word = i;
  }
}

__global__ void warps_then_barrier(int* out) {
  FUSEDOPS_SHARED(int, word, 1);
  out += blockIdx.x * blockDim.x;
  if (threadIdx.x == 0) *word = 3;
  __syncthreads();
  out[threadIdx.x] = *word;
  __syncthreads();
  if (threadIdx.x == 70) *word = 4;
  __syncthreads();
  out[threadIdx.x] += *word;
}

// Accesses whole words, then their halves from different threads, then the words again.
__global__ void neighbouring_halves(int* out) {
  int* words = dynamic_shared<int>();
  int16_t* halves = dynamic_shared<int16_t>();
  if (threadIdx.x % 2 == 0) words[threadIdx.x / 2] = -1;
  __syncthreads();
  halves[threadIdx.x ^ 33] += 1 + (threadIdx.x ^ 33);
  __syncthreads();
  out[threadIdx.x] = words[threadIdx.x / 2] >> (threadIdx.x % 2 * 16) & 0xffff;
}

// A thread reads its own copies after it has waited, its neighbours' after a barrier.
__global__ void copies_arrive(int* out) {
  uint4* words = dynamic_shared<uint4>();
  const unsigned i = threadIdx.x;
  const uint4 from{i, i + 1, i + 2, i + 3};
  copy_to_shared(words + i, &from);
  end_copies();
  wait_for_copies<0>();
  const unsigned mine = words[i].w;
  __syncthreads();
  out[i] = mine + words[i ^ 1].x;
}

__global__ void handed_over_in_halves(int* out) {
  int* row = dynamic_shared<int>();
  const int lane = threadIdx.x % 16;
  const unsigned half = threadIdx.x < 16 ? 0xffffu : 0xffff0000u;
  row[threadIdx.x] = lane;
  __syncwarp(half);
  const int sum = row[threadIdx.x ^ 1] + row[threadIdx.x ^ 15];
  __syncwarp(half);
  row[threadIdx.x ^ 1] = sum;
  __syncwarp(threadIdx.x % 2 ? 0xaaaaaaaau : 0x55555555u);
  out[threadIdx.x] = sum;
}

__global__ void lanes_count_then_one_reads(int* out) {
  FUSEDOPS_SHARED(int, count, 1);
  if (threadIdx.x == 0) *count = 0;
  __syncwarp();
  atomicAdd(count, 2);
  __syncwarp();
  out[threadIdx.x] = *count;
}

__global__ void waits_for_a_later_warp(int* out) {
  FUSEDOPS_SHARED(int, flag, 1);
  if (threadIdx.x == 0) *flag = 0;
  __syncthreads();
  if (threadIdx.x == 60) atomicExch(flag, 5);
  int seen = 0;
  while (seen == 0) seen = atomicCAS(flag, 0, 0);
  out[threadIdx.x] = seen;
}

// The compiler may copy the barrier into both paths of what surrounds it.
__global__ void barrier_between_branches(int* out) {
  int* row = dynamic_shared<int>();
  row[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 16) row[threadIdx.x] *= 2;
  __syncthreads();
  if (threadIdx.x < 16) {
    out[threadIdx.x] = row[threadIdx.x + 1];
  } else {
    out[threadIdx.x] = row[threadIdx.x - 16];
  }
}

__global__ void halves_go_their_own_way(int* out) {
  const int lane = threadIdx.x;
  if (lane < 16) {
    int sum = lane;
    for (int d = 8; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffu, sum, d);
    out[lane] = sum;
  } else {
    out[lane] = __shfl_up_sync(0xffff0000u, lane, 2, 16);
  }
}

template <int N>
__device__ int* own_array() {
  FUSEDOPS_SHARED(int, own, N);
  return own;
}

__global__ void arrays_of_templates(int* out) {
  own_array<64>()[threadIdx.x] = threadIdx.x;
  own_array<65>()[threadIdx.x] = 100 + threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = own_array<64>()[63 - threadIdx.x] + own_array<65>()[63 - threadIdx.x];
}

__global__ void shuffles_by_width(int* out) {
  const int lane = threadIdx.x;
  const int64_t wide = (int64_t{1} << 40) + lane;
  int right = __shfl_sync(~0u, lane, 3, 8) == lane / 8 * 8 + 3;
  right &= __shfl_sync(~0u, lane, 11, 8) == lane / 8 * 8 + 3;
  right &= __shfl_up_sync(~0u, lane, 3, 8) == (lane % 8 < 3 ? lane : lane - 3);
  right &= __shfl_down_sync(~0u, wide, 3, 8) == wide + (lane % 8 + 3 < 8 ? 3 : 0);
  right &= __shfl_xor_sync(~0u, lane * 0.5, 16) == (lane ^ 16) * 0.5;
  right &= __shfl_xor_sync(~0u, lane * 0.5f, 8, 8) ==
           (lane < 8 || lane / 8 == 2 ? lane : lane ^ 8) * 0.5f;
  right &= __shfl_down_sync(~0u, uint64_t{7} << lane, 1) == uint64_t{7}
                                                                << (lane < 31 ? lane + 1 : 31);
  out[lane] = right;
}

__global__ void votes(int* out) {
  const int lane = threadIdx.x % 32;
  int right = __ballot_sync(~0u, lane % 3 == 0) == 0x49249249u;
  right &= __any_sync(~0u, lane == 31) && !__any_sync(~0u, lane == 32);
  right &= __all_sync(~0u, lane < 32) && !__all_sync(~0u, lane < 31);
  right &= __activemask() == ~0u;
  if (lane >= 8) right &= __ballot_sync(0xffffff00u, 4) == 0xffffff00u;
  right &= __reduce_max_sync(~0u, lane ^ 5u) == 31;
  if (lane < 8) right &= __reduce_max_sync(0xffu, ~lane) == ~0u;
  right &= __byte_perm(0x03020100, 0x07060504, 0x7250) == 0x07020500;
  right &= __syncthreads_count(threadIdx.x < 40) == 40;
  right &= __syncthreads_or(threadIdx.x == 63) && !__syncthreads_or(0);
  right &= __syncthreads_and(8) && !__syncthreads_and(threadIdx.x != 63);
  out[threadIdx.x] = right;
}

// Every index of a three-dimensional grid of three-dimensional blocks, once.
__global__ void indices(int* out) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  const int z = blockIdx.z * blockDim.z + threadIdx.z;
  const int width = gridDim.x * blockDim.x, height = gridDim.y * blockDim.y;
  out[(z * height + y) * width + x] += 1 + threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z;
}

bool three_dimensions() {
  const auto expected = [](int i) {
    return 1 + i % 10 % 5 + i / 10 % 9 % 3 * 10 + i / 90 % 2 * 100;
  };
  return all(run(indices, dim3(2, 3, 4), dim3(5, 3, 2), 10 * 9 * 8), expected);
}

__global__ void atomics_of_blocks(unsigned long long* out) {
  auto* numbers = reinterpret_cast<double*>(out);
  auto* floats = reinterpret_cast<float*>(out);
  auto* words = reinterpret_cast<int*>(out);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(out, i);
  atomicAdd(numbers + 1, 0.5);
  atomicAdd(floats + 4, 0.25f);
  atomicAdd(words + 6, -1);
  atomicMax(words + 8, i);
  atomicMin(words + 10, -i);
  __threadfence();
  if (atomicAdd(reinterpret_cast<unsigned*>(out + 6), 1) == gridDim.x * blockDim.x - 1) {
    out[7] = atomicAdd(out, 0);  // the last thread of all sees the others' sums
  }
}

bool atomics() {
  const auto out = run(atomics_of_blocks, 300, 64, 8);
  const auto* words = reinterpret_cast<const int*>(out.data());
  const int n = 300 * 64;
  const auto sum = static_cast<unsigned long long>(n) * (n - 1) / 2;
  return out[0] == sum && reinterpret_cast<const double*>(words)[1] == n * 0.5 &&
         reinterpret_cast<const float*>(words)[4] == n * 0.25f && words[6] == -n &&
         words[8] == n - 1 && words[10] == 1 - n && words[12] == n && out[7] == sum;
}

__global__ void stride(int* out) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < 1000; i += gridDim.x * blockDim.x) {
    out[i] += i;
  }
}

bool persistent() {
  const int grid = 2 * multiprocessors();
  return grid > 1 && all(run(stride, grid, 96, 1000), [](int i) { return i; });
}

__global__ void arithmetic(int* out) {
  int right = min(3, -4) == -4 && max(3u, 4u) == 4 && min(1.5f, 2.f) == 1.5f;
  right &= max(NAN, 1.f) == 1 && min(int64_t{1} << 40, int64_t{5}) == 5 && max(1., 2.) == 2;
  right &=
      __popc(0xf0fu) == 8 && __ffs(8) == 4 && __ffs(0) == 0 && __clz(1) == 31 && __clz(0) == 32;
  right &= rsqrtf(4) == 0.5f && __fdividef(1, 4) == 0.25f && __expf(0) == 1 && __ldg(out) == 0;
  const uint4 words = load_word<uint4>(out);
  store_word(out, make_uint4(words.x + right, 1, 1, 1));
}

// A product of 16 x 16 and 16 x 8 small integers, whose sums are exact; one term of 2^24 swallows
// what is smaller than its last bit.
template <class T>
__global__ void product(float* out) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto a = [](int row, int k) { return static_cast<float>((row * 5 + k * 3) % 7 - 3); };
  const auto b = [](int k, int column) { return static_cast<float>((k * k + column) % 5 - 2); };
  const auto pair = [](float low, float high) {
    return static_cast<uint32_t>(T(high).x) << 16 | T(low).x;
  };
  const int k = 2 * t;
  const uint32_t rows[4] = {pair(a(g, k), a(g, k + 1)), pair(a(g + 8, k), a(g + 8, k + 1)),
                            pair(a(g, k + 8), a(g, k + 9)), pair(a(g + 8, k + 8), a(g + 8, k + 9))};
  float c[4] = {0, 1, 2, 0x1p26f};
  mma<T>(c, rows, pair(b(k, g), b(k + 1, g)), pair(b(k + 8, g), b(k + 9, g)));
  int right = 1;
  for (int i = 0; i < 4; ++i) {
    float sum = i < 3 ? i : 0x1p26f;
    for (int k = 0; k < 16; ++k) {
      const float term = a(g + i / 2 * 8, k) * b(k, 2 * t + i % 2);
      sum += i < 3 ? term : truncf(term / 8) * 8;
    }
    right &= c[i] == sum;
  }
  right &= masked_or(0xff, 0x3c, 1) == 0x3d && masked_xor(0xff, 0x3c, 4) == 0x38;
  right &= exact_difference<T>(pair(5, -3), pair(7, 4)) == pair(-2, -7);
  out[threadIdx.x] = right;
}

// A stopped block leaves nothing behind that breaks the next one, such as AddressSanitizer's guards
// around its arrays.
__global__ void stops(int* out) {
  int few[3], some[5], more[7];
  for (int i = 0; i < 3; ++i) few[i] = out[i];
  for (int i = 0; i < 5; ++i) some[i] = few[out[i] % 3];
  for (int i = 0; i < 7; ++i) more[i] = some[out[i] % 5];
  if (threadIdx.x < 63) __syncthreads();
  out[threadIdx.x] = few[out[0] % 3] + some[out[1] % 5] + more[out[2] % 7];
}

__global__ void uses_its_stack(int* out) {
  int many[200];
  for (int i = 0; i < 200; ++i) many[i] = out[i % 64];
  for (int i = 0; i < 200; ++i) out[i % 64] += many[(i + out[0]) % 200];
}

bool launches_after_errors() {
  int errors = 0;
  for (int i = 0; i < 3; ++i) {
    try {
      run(stops, 4, 64, 64);
    } catch (const std::runtime_error&) {
      ++errors;
    }
    if (!block_sums() || !all(run(uses_its_stack, 1, 64, 64), [](int) { return 0; })) return false;
  }
  return errors == 3;
}

const auto kOnes = [](int) { return 1; };

const Toys kToys = {
    {"block_sums", block_sums},
    {"broadcast_then_write",
     [] { return all(run(broadcast_then_write, 1, 32, 32), [](int) { return 6; }); }},
    {"warps_then_barrier",
     [] { return all(run(warps_then_barrier, 2, 96, 192), [](int) { return 7; }); }},
    {"neighbouring_halves",
     [] { return all(run(neighbouring_halves, 1, 64, 64, 128), [](int i) { return i; }); }},
    {"copies_arrive",
     [] {
       const auto sum = [](int i) { return i + 3 + (i ^ 1); };
       return all(run(copies_arrive, 1, 64, 64, 1024), sum);
     }},
    {"handed_over_in_halves",
     [] {
       const auto sum = [](int i) { return (i % 16 ^ 1) + (i % 16 ^ 15); };
       return all(run(handed_over_in_halves, 1, 32, 32, 128), sum);
     }},
    {"lanes_count_then_one_reads",
     [] { return all(run(lanes_count_then_one_reads, 1, 32, 32), [](int) { return 64; }); }},
    {"waits_for_a_later_warp",
     [] { return all(run(waits_for_a_later_warp, 1, 64, 64), [](int) { return 5; }); }},
    {"barrier_between_branches",
     [] {
       const auto shifted = [](int i) {
         return i < 15 ? 2 * i + 2 : i == 15 ? 16 : i < 32 ? 2 * i - 32 : i - 16;
       };
       return all(run(barrier_between_branches, 1, 64, 64, 256), shifted);
     }},
    {"halves_go_their_own_way",
     [] {
       const auto half = [](int i) { return i < 16 ? 120 : i < 18 ? i : i - 2; };
       return all(run(halves_go_their_own_way, 1, 32, 32), half);
     }},
    {"arrays_of_templates",
     [] { return all(run(arrays_of_templates, 1, 64, 64), [](int i) { return 226 - 2 * i; }); }},
    {"shuffles_by_width", [] { return all(run(shuffles_by_width, 1, 32, 32), kOnes); }},
    {"votes", [] { return all(run(votes, 1, 64, 64), kOnes); }},
    {"three_dimensions", three_dimensions},
    {"atomics", atomics},
    {"persistent", persistent},
    {"arithmetic", [] { return all(run(arithmetic, 1, 1, 4), kOnes); }},
    {"product_of_half", [] { return all(run(product<Half>, 1, 32, 32), kOnes); }},
    {"product_of_bfloat16", [] { return all(run(product<BFloat16>, 1, 32, 32), kOnes); }},
    {"launches_after_errors", launches_after_errors},
};

int main(int, char** argv) { return run_toy(kToys, argv[1]); }
