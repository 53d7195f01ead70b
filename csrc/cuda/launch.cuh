// Wraps CUDA's launches, shared memory, loads and stores, tensor-core products and fast arithmetic.
// On a CPU the headers of csrc/simt/simt.h define what kernels use of it.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace fusedops::cuda {

using Stream = cudaStream_t;

// Whether an error is of work that the device did earlier: any call reports it, whoever caused it.
inline bool from_earlier_work(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable: return true;
    default: return false;
  }
}

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next caller gets it again
  const char* const hint =
      from_earlier_work(status)
          ? " (an earlier kernel of this process failed; CUDA_LAUNCH_BLOCKING=1 finds it)"
          : "";
  throw std::runtime_error(std::string("fusedops: ") + what + ": " + cudaGetErrorString(status) +
                           hint);
}

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// Returns an attribute of the current device. Cached, because each query takes a microsecond.
template <cudaDeviceAttr attribute>
int device_attribute() {
  static const std::vector<int> device_values = [] {
    int count = 0;
    check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<int> values(count);
    for (int i = 0; i < count; ++i) {
      check(cudaDeviceGetAttribute(&values[i], attribute, i), "cudaDeviceGetAttribute");
    }
    return values;
  }();
  return device_values.at(current_device());
}

inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }

// Returns how much dynamic shared memory a block of this kernel can have, in bytes: the device's
// limit less the kernel's static arrays. It allows all of it at once, because a launch that allowed
// only its own bytes could lower what another thread has just allowed.
template <class... Parameters>
size_t max_shared_memory(void (*kernel)(Parameters...)) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> limits;
  const std::lock_guard lock(mutex);
  const std::pair key(reinterpret_cast<const void*>(kernel), current_device());
  if (const auto cached = limits.find(key); cached != limits.end()) return cached->second;
  cudaFuncAttributes of{};
  check(cudaFuncGetAttributes(&of, kernel), "cudaFuncGetAttributes");
  const int most = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() -
                   static_cast<int>(of.sharedSizeBytes);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
        "cudaFuncSetAttribute");
  return limits[key] = most;
}

// kernel<<<grid, block, smem, stream>>>(args...), but with this launch's own status:
// cudaGetLastError would also return an error that another library has left.
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t smem, Stream stream,
            Args... args) {
  if (smem > 32 * 1024) max_shared_memory(kernel);  // up to 48 KiB with static arrays need no call
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(args)...), "launch");
}

// Returns the launch's dynamic shared memory.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 fusedops_dynamic_shared[];  // 16-byte aligned
  return reinterpret_cast<T*>(fusedops_dynamic_shared);
}

// Returns p's 32-bit address in shared memory; below, the word at such an address.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// sum + the four products of bytes of a and b.
__device__ __forceinline__ uint32_t dot_of_bytes(uint32_t a, uint32_t b, uint32_t sum) {
  return __dp4a(a, b, sum);
}

// One access of sizeof(Word) bytes: 16 for uint4. The address must be a multiple of that.
template <class Word>
__device__ __forceinline__ Word load_word(const void* p) {
  return *static_cast<const Word*>(p);
}
template <class Word>
__device__ __forceinline__ void store_word(void* p, Word word) {
  *static_cast<Word*>(p) = word;
}

// Copies 16 bytes from global to shared memory, without registers and without waiting. end_copies
// makes a group of a thread's copies since the last group, and wait_for_copies waits for all of its
// groups but the last kLater. Only this thread may then read them without a barrier.
__device__ __forceinline__ void copy_to_shared(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(__cvta_generic_to_shared(to)),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
__device__ __forceinline__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLater>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// Tells the compiler that p, itself read from memory, points to global memory.
template <class T>
__device__ __forceinline__ T* global_memory(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// Square roots and a quotient by the special function unit, to 2^-22. For the last two, numbers
// below 2^-126 are 0; so is a quotient by one above 2^126.
__device__ __forceinline__ float quick_sqrt(float x) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}
__device__ __forceinline__ float quick_normal_sqrt(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}
__device__ __forceinline__ float quick_quotient(float a, float b) {
  float quotient;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}

// Returns x's bits plus `more`; a NaN's as they are.
__device__ __forceinline__ uint32_t bits_plus(float x, uint32_t more) {
  uint32_t bits = __float_as_uint(x);
  asm("{.reg .pred number; setp.eq.f32 number, %1, %1; @number add.u32 %0, %0, %2;}"
      : "+r"(bits)
      : "f"(x), "r"(more));
  return bits;
}

// Two floats rounded to bfloat16, in one word.
__device__ __forceinline__ uint32_t bfloat16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// c += a b on tensor cores, with c in float32: a is 16 rows by 16 columns of T, b 16 by 8. All
// lanes of a warp call it. With g = lane / 4 and t = lane % 4, a lane has these pairs of T and
// sums:
//   a  rows g and g + 8 of columns 2t, 2t + 1; then both rows of columns 2t + 8, 2t + 9
//   b  rows 2t, 2t + 1, then 2t + 8, 2t + 9, of column g
//   c  row g of columns 2t, 2t + 1, then row g + 8
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// (a & mask) | set, and (a & mask) ^ flip, each in one instruction: from two constants the compiler
// makes two.
__device__ __forceinline__ uint32_t masked_or(uint32_t a, uint32_t mask, uint32_t set) {
  uint32_t word;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(word) : "r"(a), "r"(mask), "r"(set));
  return word;
}
__device__ __forceinline__ uint32_t masked_xor(uint32_t a, uint32_t mask, uint32_t flip) {
  uint32_t word;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(word) : "r"(a), "r"(mask), "r"(flip));
  return word;
}

// a - b for two numbers of T in a word; the differences must be numbers of T. sm_80 has no
// subtraction of bfloat16.
template <class T>
__device__ __forceinline__ uint32_t exact_difference(uint32_t a, uint32_t b) {
  uint32_t difference;
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(difference) : "r"(b), "r"(0xbf80bf80), "r"(a));
  } else {
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  }
  return difference;
}

// Always one access to global memory. If branches end with the same stores, the compiler might
// otherwise merge and split them.
__device__ __forceinline__ void store_global(void* p, uint4 word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}
__device__ __forceinline__ void store_global(void* p, uint64_t word) {
  asm volatile("st.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(word) : "memory");
}

}  // namespace fusedops::cuda

// T name[count], one for the block.
#define FUSEDOPS_SHARED(T, name, count) __shared__ T name[count]
