// CUDA kernels and launches with one bug each, which the emulator in csrc/simt or AddressSanitizer
// must report. Comments mark the lines that the error must name: `bug:` the faulty line, `with:`
// the second place. tests/tools/test_simt.py has the messages.
#include "tests/simt/toys.h"

using namespace fusedops::cuda;

__global__ void barrier_after_exit(float* out) {
  if (threadIdx.x == 5) return;
  __syncthreads();  // bug: barrier_after_exit
  out[threadIdx.x] = 1;
}

__global__ void barrier_in_both_branches(float* out) {
  if (threadIdx.x < 40) {
    out[threadIdx.x] = 1;
    __syncthreads();  // bug: barrier_in_both_branches
  } else {
    out[threadIdx.x] = 2;
    __syncthreads();  // with: barrier_in_both_branches
  }
}

__global__ void barrier_in_one_branch(float* out) {
  if (threadIdx.x < 32) {
    out[threadIdx.x] = __shfl_xor_sync(~0u, out[threadIdx.x], 1);
    __syncthreads();
  } else if (threadIdx.x < 40) {
    __syncwarp(0x1ff);  // with: barrier_in_one_branch
  } else {
    __syncthreads();  // bug: barrier_in_one_branch
  }
}

__device__ __forceinline__ float sum_of_pair(float x) {
  return x + __shfl_xor_sync(~0u, x, 1);  // with: shuffle_without_a_lane
}

__global__ void shuffle_without_a_lane(float* out) {
  if (threadIdx.x != 50) {
    out[threadIdx.x] = sum_of_pair(out[threadIdx.x]);  // bug: shuffle_without_a_lane
  }
}

__global__ void shuffle_after_exit(float* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = __shfl_down_sync(~0u, out[threadIdx.x], 1);  // bug: shuffle_after_exit
}

__global__ void shuffle_in_a_short_warp(float* out) {
  out[threadIdx.x] = __shfl_sync(~0u, out[threadIdx.x], 0);  // bug: shuffle_in_a_short_warp
}

__global__ void shuffle_of_a_stranger(float* out) {
  out[threadIdx.x] = __shfl_sync(0xffff, out[threadIdx.x], 0);  // bug: shuffle_of_a_stranger
}

__global__ void shuffle_from_outside(float* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = __shfl_down_sync(0xfffff, out[threadIdx.x], 4);  // bug: shuffle_from_outside
}

__global__ void vote_with_two_masks(int* out) {
  const unsigned mask = threadIdx.x < 16 ? 0xffffffff : 0xffff0000;
  out[threadIdx.x] = __any_sync(mask, threadIdx.x == 3);  // bug: vote_with_two_masks
  if (threadIdx.x >= 16) __syncwarp();                    // with: vote_with_two_masks
}

__global__ void vote_with_unlike_masks(int* out) {
  const unsigned mask = threadIdx.x < 16 ? 0xffffffff : 0xfffffffe;
  out[threadIdx.x] = __all_sync(mask, threadIdx.x < 40);  // bug: vote_with_unlike_masks
}

__global__ void syncwarp_in_one_branch(int* out) {
  if (threadIdx.x % 32 < 7) {
    __syncwarp();  // bug: syncwarp_in_one_branch
    out[threadIdx.x] = 1;
  }
}

__global__ void atomic_that_waits_for_nobody(int* flag) {
  int value = 0;
  while (value == 0) value = atomicAdd(flag, 0);  // bug: atomic_that_waits_for_nobody
}

__global__ void read_of_unwritten(float* out) {
  float* row = dynamic_shared<float>();
  if (threadIdx.x != 9) row[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x];  // bug: read_of_unwritten
}

__global__ void read_before_a_copy_arrives(float* out) {
  uint4* words = dynamic_shared<uint4>();
  const uint4 from{1, 2, 3, 4};
  copy_to_shared(words + threadIdx.x, &from);
  end_copies();
  copy_to_shared(words + 8 + threadIdx.x, &from);
  end_copies();
  wait_for_copies<1>();
  out[threadIdx.x] = words[threadIdx.x].x;
  out[threadIdx.x] = words[8 + threadIdx.x].x;  // bug: read_before_a_copy_arrives
}

__global__ void misaligned_copy(float* out) {
  copy_to_shared(dynamic_shared<uint4>(), out + threadIdx.x);  // bug: misaligned_copy
}

__global__ void read_of_another_block(float* out) {
  FUSEDOPS_SHARED(float, kept, 64);
  if (blockIdx.x == 0) kept[threadIdx.x] = 1;
  out[threadIdx.x] = kept[threadIdx.x];  // bug: read_of_another_block
}

__global__ void misaligned_load(float* out) {
  const uint4 words = load_word<uint4>(out + threadIdx.x);  // bug: misaligned_load
  out[threadIdx.x] = words.x;
}

__global__ void misaligned_half_load(float* out) {
  const auto* bytes = reinterpret_cast<const char*>(out);
  out[16 + threadIdx.x] =
      load_word<uint64_t>(bytes + 4 * threadIdx.x);  // bug: misaligned_half_load
}

__global__ void misaligned_store(float* out) {
  float* row = dynamic_shared<float>();
  store_word(row + 4 * threadIdx.x + threadIdx.x / 6, uint4{});  // bug: misaligned_store
  out[threadIdx.x] = row[4 * threadIdx.x];
}

__global__ void race_without_barrier(float* out) {
  FUSEDOPS_SHARED(float, row, 64);
  row[threadIdx.x] = 1;       // with: race_without_barrier
  row[63 - threadIdx.x] = 2;  // bug: race_without_barrier
  out[threadIdx.x] = row[threadIdx.x];
}

__global__ void race_of_read_and_write(float* out) {
  float* row = dynamic_shared<float>();
  for (int i = 0; i < 2; ++i) {
    row[threadIdx.x] = i;  // bug: race_of_read_and_write
    __syncthreads();
    out[threadIdx.x] = row[(threadIdx.x + 33) % 64];  // with: race_of_read_and_write
  }
}

__global__ void race_within_a_warp(float* out) {
  float* row = dynamic_shared<float>();
  row[threadIdx.x] = 1;                           // with: race_within_a_warp
  out[threadIdx.x] = row[threadIdx.x / 32 * 32];  // bug: race_within_a_warp
}

__global__ void race_over_a_shuffle(float* out) {
  float* row = dynamic_shared<float>();
  row[threadIdx.x] = 1;  // with: race_over_a_shuffle
  out[threadIdx.x] = __shfl_xor_sync(~0u, 1.f, 1);
  out[threadIdx.x] += row[threadIdx.x ^ 1];  // bug: race_over_a_shuffle
}

// Every lane reads, then lane 0 writes, after it met the lower half of them.
__global__ void race_with_a_late_lane(int* out) {
  FUSEDOPS_SHARED(int, word, 1);
  if (threadIdx.x == 0) *word = 7;
  __syncwarp();
  out[threadIdx.x] = *word;  // with: race_with_a_late_lane
  __shfl_sync(~0u, 0, 0);
  __syncwarp(threadIdx.x < 16 ? 0xffff : 0xffff0000);
  if (threadIdx.x == 0) *word = 8;  // bug: race_with_a_late_lane
}

// The same after it met the last of them.
__global__ void race_with_an_early_lane(int* out) {
  FUSEDOPS_SHARED(int, word, 1);
  if (threadIdx.x == 0) *word = 7;
  __syncwarp();
  out[threadIdx.x] = *word;  // with: race_with_an_early_lane
  __shfl_sync(~0u, 0, 0);
  if (threadIdx.x % 31 == 0) __syncwarp(0x80000001);
  if (threadIdx.x == 0) *word = 8;  // bug: race_with_an_early_lane
}

__global__ void race_with_another_warp(float* out) {
  FUSEDOPS_SHARED(int, word, 1);
  if (threadIdx.x == 0) *word = 7;
  __syncthreads();
  out[threadIdx.x] = *word;  // with: race_with_another_warp
  __syncwarp();
  if (threadIdx.x == 32) *word = 8;  // bug: race_with_another_warp
}

__global__ void race_of_atomic_and_read(int* out) {
  FUSEDOPS_SHARED(int, count, 1);
  if (threadIdx.x == 0) *count = 0;
  __syncthreads();
  atomicAdd(count, 1);        // with: race_of_atomic_and_read
  out[threadIdx.x] = *count;  // bug: race_of_atomic_and_read
}

__global__ void race_of_atomic_and_late_read(int* out) {
  FUSEDOPS_SHARED(int, count, 1);
  if (threadIdx.x == 0) *count = 0;
  __syncthreads();
  if (threadIdx.x == 0)
    out[0] = atomicAdd(count, 1) + *count;  // with: race_of_atomic_and_late_read
  for (int i = 0; i < 9; ++i) atomicAdd(out + 1, 1);
  if (threadIdx.x == 40) out[2] = *count;  // bug: race_of_atomic_and_late_read
}

__global__ void race_of_vectors(float* out) {
  float* row = dynamic_shared<float>();
  store_word(row + 4 * threadIdx.x, uint4{});  // with: race_of_vectors
  if (threadIdx.x == 4) out[0] = row[13];      // bug: race_of_vectors
}

__global__ void race_of_a_half(int* out) {
  int* row = dynamic_shared<int>();
  row[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x == 3) reinterpret_cast<int16_t*>(row)[1] = 1;  // with: race_of_a_half
  if (threadIdx.x == 40) out[0] = row[0];                        // bug: race_of_a_half
}

__global__ void race_in_late_blocks(float* out) {
  float* row = dynamic_shared<float>();
  row[threadIdx.x] = 1;  // with: race_in_late_blocks
  if (blockIdx.x < 3 || blockIdx.y == 0) return;
  out[threadIdx.x] = row[threadIdx.x / 2];  // bug: race_in_late_blocks
}

__global__ void past_a_static_array(float* out) {
  FUSEDOPS_SHARED(float, row, 60);
  row[threadIdx.x] = 1;  // bug: past_a_static_array
  out[threadIdx.x] = row[threadIdx.x];
}

__global__ void past_dynamic_memory(float* out) {
  float* row = dynamic_shared<float>();
  row[threadIdx.x] = 1;  // bug: past_dynamic_memory
  out[threadIdx.x] = row[threadIdx.x];
}

__global__ void past_global_memory(float* out) {
  out[threadIdx.x + 1] = 1;  // bug: past_global_memory
}

__global__ void too_much_static_memory(char* out) {
  FUSEDOPS_SHARED(char, row, 40000);
  FUSEDOPS_SHARED(char, more, 10000);  // bug: too_much_static_memory
  row[0] = more[0] = 1;
  out[0] = row[0];
}

__global__ void nothing() {}

// Two warps, with separate memory for each toy.
template <class T>
bool two_warps(void (*kernel)(T*), dim3 grid = 1, int threads = 64, size_t smem = 64 * 4) {
  T* out = new T[64]();
  try {
    launch(kernel, grid, threads, smem, Stream{}, out);
  } catch (...) {
    delete[] out;
    throw;
  }
  delete[] out;
  return true;
}

bool launch_nothing(dim3 grid, dim3 block, size_t smem) {
  launch(nothing, grid, block, smem, Stream{});
  return true;
}

const Toys kToys = {
#define TOY(kernel, ...) {#kernel, [] { return two_warps(kernel, ##__VA_ARGS__); }}
    TOY(barrier_after_exit, 2),
    TOY(barrier_in_both_branches),
    TOY(barrier_in_one_branch),
    TOY(shuffle_without_a_lane),
    TOY(shuffle_after_exit),
    TOY(shuffle_in_a_short_warp, 1, 52),
    TOY(shuffle_of_a_stranger),
    TOY(shuffle_from_outside),
    TOY(vote_with_two_masks),
    TOY(vote_with_unlike_masks, 1, 32),
    TOY(syncwarp_in_one_branch),
    TOY(atomic_that_waits_for_nobody),
    TOY(read_of_unwritten),
    TOY(read_before_a_copy_arrives, 1, 8),
    TOY(misaligned_copy, 1, 8),
    TOY(read_of_another_block, 2),
    TOY(misaligned_load),
    TOY(misaligned_half_load),
    TOY(misaligned_store, 1, 8),
    TOY(race_without_barrier),
    TOY(race_of_read_and_write),
    TOY(race_within_a_warp),
    TOY(race_over_a_shuffle),
    TOY(race_with_a_late_lane, 1, 32),
    TOY(race_with_an_early_lane, 1, 32),
    TOY(race_with_another_warp),
    TOY(race_of_atomic_and_read),
    TOY(race_of_atomic_and_late_read),
    TOY(race_of_vectors, 1, 16),
    TOY(race_of_a_half),
    TOY(race_in_late_blocks, dim3(5, 3)),
    TOY(past_a_static_array),
    {"past_dynamic_memory",  // also when an earlier launch had more
     [] { return launch_nothing(1, 32, 999) && two_warps(past_dynamic_memory, 1, 64, 250); }},
    TOY(past_global_memory),
    TOY(too_much_static_memory),
    {"too_many_threads", [] { return launch_nothing(1, dim3(32, 33), 0); }},
    {"no_threads", [] { return launch_nothing(1, 0, 0); }},
    {"no_blocks", [] { return launch_nothing(dim3(4, 0), 32, 0); }},
    {"too_many_blocks", [] { return launch_nothing(dim3(1, 65536), 32, 0); }},
    {"too_much_shared_memory", [] { return launch_nothing(1, 32, 232449); }},
};

int main(int, char** argv) { return run_toy(kToys, argv[1]); }
