// One launch steps AdamW for many tensors. Formulas: csrc/kernels/adamw.h and
// fusedops/functional/adamw.py; the split: blocks.cuh.
//
// An 8-bit scale is a maximum over the warp that has its block in registers. Global traffic is the
// minimum: the parameters and their moments are read and written once, the gradients read. The last
// block of threads to finish counts the steps.

#include <cmath>

#include "csrc/cuda/adamw/blocks.cuh"

namespace fusedops::cuda::adamw {
namespace {

constexpr float kLeastNormal = 1.17549435e-38f;

// 16 and 8 random bits of an element.
__device__ __forceinline__ uint32_t random_half(BlockKey key, uint32_t first, int element) {
  return random_word(key, first + element / 2) >> (16 * (element % 2)) & 0xffff;
}
__device__ __forceinline__ uint32_t random_byte(BlockKey key, uint32_t first, int element) {
  return random_word(key, first + element / 4) >> (8 * (element % 4)) & 0xff;
}

// Returns the bits of a bfloat16 after adding `offset` to the bits that are cut off. Keeps NaN.
__device__ __forceinline__ uint16_t bfloat16_bits(float x, uint32_t offset) {
  return x == x ? static_cast<uint16_t>((bits_of(x) + offset) >> 16) : 0x7fc0;
}

__device__ __forceinline__ uint16_t nearest_bfloat16(float x) {
  return bfloat16_bits(x, 0x7fff + (bits_of(x) >> 16 & 1));
}

// Returns the bits of a stochastically rounded float16.
__device__ __forceinline__ uint16_t float16_bits(float x, uint32_t random) {
  const uint32_t size = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size < 0x38800000) {  // in units of the smallest denormal
    return static_cast<uint16_t>(
        sign | static_cast<uint32_t>(float_of(size) * 0x1p24f + random * 0x1p-16f));
  }
  const uint32_t found = ((size + (random >> 3)) >> 13) - (112 << 10);
  return static_cast<uint16_t>(sign | (found < 0x7c00 ? found : 0x7c00));
}

template <bool kWide>
__device__ __forceinline__ Lane load_param(const AdamWTensor& t, int64_t first,
                                           Elements<kWide> elements) {
  Lane p = elements.load(t.param, t.dtype, first);
  if (t.rounding == Rounding::remainder) {
    const auto rest = elements.load(t.remainder + first);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      p.at[k] = float_of(bits_of(p.at[k]) + static_cast<uint32_t>(int32_t{rest.at[k]}));
    }
  }
  return p;
}

template <bool kWide>
__device__ __forceinline__ void store_param(const AdamWTensor& t, int64_t first, BlockKey key,
                                            const Lane& p, Elements<kWide> elements) {
  if (t.dtype == Dtype::float32) return elements.store(static_cast<float*>(t.param) + first, p);
  Vec<uint16_t, kEach> found;
  if (t.rounding == Rounding::remainder) {
    Vec<int16_t, kEach> rest;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32_t x = p.at[k] == p.at[k] ? bits_of(p.at[k]) : 0x7fc00000;  // its sum might be -0
      found.at[k] = static_cast<uint16_t>((x + 0x8000) >> 16);
      rest.at[k] = static_cast<int16_t>(x);
    }
    elements.store(t.remainder + first, rest);
  } else {
    const bool chance = t.rounding == Rounding::stochastic, half = t.dtype == Dtype::float16;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float x = p.at[k];
      const uint32_t random = chance ? random_half(key, kRandomParam, elements.at(k)) : 0;
      if (half) {
        const Half nearest = static_cast<Half>(x);
        found.at[k] = chance ? float16_bits(x, random) : nearest.x;
      } else {
        found.at[k] = chance ? bfloat16_bits(x, random) : nearest_bfloat16(x);
      }
    }
  }
  elements.store(static_cast<uint16_t*>(t.param) + first, found);
}

struct MomentsOfLane {
  Lane m, v;
};

template <bool kWide>
__device__ __forceinline__ MomentsOfLane load_moments(const AdamWTensor& t, int64_t block,
                                                      int64_t first, Elements<kWide> elements) {
  if (t.moments != Moments::int8) {
    const auto dtype = t.moments == Moments::float32 ? Dtype::float32 : Dtype::bfloat16;
    return {elements.load(t.exp_avg, dtype, first), elements.load(t.exp_avg_sq, dtype, first)};
  }
  const auto c = elements.load(static_cast<const int8_t*>(t.exp_avg) + first);
  const auto d = elements.load(static_cast<const uint8_t*>(t.exp_avg_sq) + first);
  const float m_scale = t.exp_avg_scale[block] * (1 / (kMomentCodes * kMomentCodes));
  const float v_scale = t.exp_avg_sq_scale[block] * (1 / kSquareCodes);
  MomentsOfLane found;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const float code = c.at[k], root = fmaf(d.at[k], v_scale, v_scale), square = root * root;
    found.m.at[k] = code * m_scale * fabsf(code);
    found.v.at[k] = square * square;
  }
  return found;
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int o = kWarp / 2; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, o));
  return x;
}

template <bool kWide>
__device__ __forceinline__ void store_moments(const AdamWTensor& t, int64_t block, BlockKey key,
                                              int64_t first, const MomentsOfLane& moments,
                                              Elements<kWide> elements) {
  const auto& [m, v] = moments;
  if (t.moments == Moments::float32) {
    elements.store(static_cast<float*>(t.exp_avg) + first, m);
    elements.store(static_cast<float*>(t.exp_avg_sq) + first, v);
    return;
  }
  if (t.moments == Moments::bfloat16) {
    Vec<uint16_t, kEach> narrow_m, narrow_v;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      narrow_m.at[k] = nearest_bfloat16(m.at[k]);
      narrow_v.at[k] = bfloat16_bits(v.at[k], random_half(key, kRandomSquare16, elements.at(k)));
    }
    elements.store(static_cast<uint16_t*>(t.exp_avg) + first, narrow_m);
    elements.store(static_cast<uint16_t*>(t.exp_avg_sq) + first, narrow_v);
    return;
  }
  Lane root;
  float most_m = 0, most_root = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    root.at[k] = sqrtf(v.at[k]);
    most_m = fmaxf(most_m, fabsf(m.at[k]));
    most_root = fmaxf(most_root, root.at[k]);
  }
  most_m = largest_of_warp(most_m);
  most_root = largest_of_warp(most_root);
  const float m_factor = most_m >= kLeastNormal ? kMomentCodes * kMomentCodes / most_m : 0;
  const float root_factor = most_root >= kLeastNormal ? kSquareCodes * kSquareCodes / most_root : 0;
  Vec<int8_t, kEach> c;
  Vec<uint8_t, kEach> d;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const float size = rintf(sqrtf(fabsf(m.at[k]) * m_factor));
    c.at[k] = static_cast<int8_t>(m.at[k] < 0 ? -size : size);
    // c + 1 by chance down or up. The byte's middle: what a code stands for stays it. What is
    // below the first code is truncated to it.
    const float chance = random_byte(key, kRandomSquare8, elements.at(k)) * (1 / 256.f);
    const float code = sqrtf(root.at[k] * root_factor) + (chance + (1 / 512.f - 1));
    d.at[k] = static_cast<uint8_t>(fminf(fmaxf(code, 0.f), 255.f));
  }
  elements.store(static_cast<int8_t*>(t.exp_avg) + first, c);
  elements.store(static_cast<uint8_t*>(t.exp_avg_sq) + first, d);
  if (threadIdx.x % kWarp == 0) {
    t.exp_avg_scale[block] = most_m;
    t.exp_avg_sq_scale[block] = sqrtf(most_root);
  }
}

// The values that a tensor's blocks share in a step.
struct Step {
  AdamWFactors factors;
  float gradient_factor;
  uint64_t key;
};

template <bool kWide>
__device__ __forceinline__ void step_block(const AdamWTensor& t, const Step& step, int64_t block,
                                           int64_t first, Elements<kWide> elements) {
  const auto key = block_key(step.key, t.first_key + block);
  const auto& f = step.factors;
  const auto g = elements.load(t.grad, t.dtype, first);
  Lane p = load_param(t, first, elements);
  auto moments = load_moments(t, block, first, elements);
  Lane most = moments.v;
  if (t.max_exp_avg_sq != nullptr) most = elements.load(t.max_exp_avg_sq + first);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const float x = g.at[k] * step.gradient_factor, square = x * x;
    float &m = moments.m.at[k], &v = moments.v.at[k];
    const bool finite = square < INFINITY;  // otherwise the element keeps its moments and value
    if (finite) {
      m = fmaf(f.rate1, x, m * f.beta1);
      v = fmaf(f.rate2, square, v * f.beta2);
    }
    most.at[k] = t.max_exp_avg_sq != nullptr ? fmaxf(most.at[k], v) : v;
    const float update = m / fmaf(sqrtf(most.at[k]), f.denom, f.eps);
    if (finite) p.at[k] = fmaf(-f.step_size, update, p.at[k] * f.decay);
  }
  if (t.max_exp_avg_sq != nullptr) elements.store(t.max_exp_avg_sq + first, most);
  store_param(t, first, key, p, elements);
  store_moments(t, block, key, first, moments, elements);
}

// Whether every access to a whole block can have 16 bytes, or 8 for 8-bit codes.
__device__ __forceinline__ bool wide(const AdamWTensor& t) {
  const auto all =
      reinterpret_cast<uintptr_t>(t.param) | reinterpret_cast<uintptr_t>(t.grad) |
      reinterpret_cast<uintptr_t>(t.exp_avg) | reinterpret_cast<uintptr_t>(t.exp_avg_sq) |
      reinterpret_cast<uintptr_t>(t.max_exp_avg_sq) | reinterpret_cast<uintptr_t>(t.remainder);
  return all % 16 == 0 && (t.row == t.numel || t.row % 16 == 0);
}

// The gradients' factor, and whether the step is skipped.
struct Scaling {
  double factor = 1;
  bool skip = false;

  __device__ __forceinline__ explicit Scaling(const AdamWLaunch& a) {
    if (a.grad_scale != nullptr) factor = 1.0 / *a.grad_scale;
    if (a.squares != nullptr) {
      const double norm = sqrt(sum_of_parts(a.squares)) * factor;
      skip = !(norm < INFINITY);
      factor *= min(1.0, a.max_grad_norm / (norm + 1e-6));
    }
    if (a.found_inf != nullptr) skip = skip || *a.found_inf != 0;
  }
};

__device__ __forceinline__ bool here(const AdamWLaunch& a, const AdamWTensor& t) {
  return t.group >= a.first_group && t.group < a.first_group + kGroups;
}

__device__ __forceinline__ Step step_of(const AdamWLaunch& a, const AdamWTensor& t, double factor) {
  const auto& group = a.groups[t.group - a.first_group];
  const float number = *t.step + 1;
  const double lr = group.lr_at == nullptr ? group.lr : *group.lr_at;
  return {factors_of(group, lr, number), static_cast<float>(group.maximize ? -factor : factor),
          adamw_key(a.seed, static_cast<uint64_t>(number), t.index)};
}

__global__ void __launch_bounds__(kThreads) adamw_step(const AdamWLaunch a) {
  const Scaling scaling(a);
  if (!scaling.skip) {
    Step step;
    each_block(a, [&](int at, bool begins, int64_t block) {
      const auto& t = a.tensors[at];
      if (!here(a, t)) return;
      if (begins) step = step_of(a, t, scaling.factor);
      const auto [first, count] = place_of(t, block);
      if (count == kAdamWBlock && wide(t)) {
        step_block<true>(t, step, block, first, {kAdamWBlock});
      } else {
        step_block<false>(t, step, block, first, {static_cast<int>(count)});
      }
    });
  }
  FUSEDOPS_SHARED(unsigned, before, 1);  // number of blocks that finished before this one
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // every block reads `step` before the last one writes it
    before[0] = atomicAdd(a.finished, 1u);
    __threadfence();
  }
  __syncthreads();
  if (before[0] != gridDim.x - 1) return;
  for (int i = threadIdx.x; i < a.count && !scaling.skip; i += kThreads) {
    if (here(a, a.tensors[i])) *a.tensors[i].step += 1;
  }
  if (threadIdx.x == 0) *a.finished = 0;
}

}  // namespace

void launch_adamw_step(const AdamWLaunch& a, CUstream_st* stream) {
  launch(adamw_step, grid_of(a), dim3(kThreads), 0, stream, a);
}

}  // namespace fusedops::cuda::adamw
