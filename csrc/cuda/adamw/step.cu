// AdamW's step on GPUs, for many tensors in a launch. Formulas: csrc/kernels/adamw.h and
// fusedops/functional/adamw.py; the split: blocks.cuh.
//
// A warp chooses its code by the formats of a tensor, and then steps all its blocks of that tensor
// without asking again. Roots and quotients are exact where the parameter has the 24 bits of a
// float32; elsewhere, and for 8-bit codes, they are the special function unit's, whose error is a
// ten-thousandth of a bfloat16's step.
//
// An 8-bit scale is a maximum over the warp that has its block in registers. Global traffic is the
// minimum: the parameters and their moments are read and written once, the gradients read. The last
// block of threads to finish counts the steps.

#include <cmath>

#include "csrc/cuda/adamw/blocks.cuh"

namespace fusedops::cuda::adamw {
namespace {

constexpr float kLeastNormal = 1.17549435e-38f;

// How a parameter is stored; a master is a bfloat16 with a remainder.
enum class Param : uint8_t { float32, bfloat16, master, float16 };

constexpr Dtype dtype_of(Param param) {
  if (param == Param::float32) return Dtype::float32;
  return param == Param::float16 ? Dtype::float16 : Dtype::bfloat16;
}

constexpr bool quick(Param param) { return param == Param::bfloat16 || param == Param::float16; }

// The random words of a block. Indices have less than 16 bits, so that most of the mixing can be
// done with the key.
struct Random {
  uint32_t low, high;

  __device__ __forceinline__ explicit Random(BlockKey key)
      : low(key.low ^ key.low >> 16), high(key.high ^ key.high >> 15) {}

  // As random_word.
  __device__ __forceinline__ uint32_t word(uint32_t index) const {
    uint32_t x = (index ^ low) * 0x7FEB352Du;
    x = (x ^ x >> 15 ^ high) * 0x846CA68Bu;
    return x ^ x >> 16;
  }
  // 16 bits of an element.
  __device__ __forceinline__ uint32_t half(uint32_t first, uint32_t element) const {
    return word(first + element / 2) >> (16 * (element % 2)) & 0xffff;
  }
};

// Two bfloat16 from the upper halves of floats.
__device__ __forceinline__ uint32_t upper_halves(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x7632);
}

// A lane's elements of 16 or 8 bits.
using Halves = Vec<uint32_t, kEach / 2>;
using Bytes = Vec<uint32_t, kEach / 4>;

// Byte kByte of each word.
template <int kByte>
__device__ __forceinline__ Bytes bytes_of(const uint32_t (&words)[kEach]) {
  constexpr uint32_t kPair = kByte | (4 + kByte) << 4;
  Bytes bytes;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) {
    const uint32_t* w = words + 4 * i;
    bytes.at[i] =
        __byte_perm(__byte_perm(w[0], w[1], kPair), __byte_perm(w[2], w[3], kPair), 0x5410);
  }
  return bytes;
}

template <Dtype kDtype, bool kWide>
__device__ __forceinline__ Lane load_lane(const void* p, int64_t first, Elements<kWide> elements) {
  if constexpr (kDtype != Dtype::bfloat16) return elements.load(p, kDtype, first);
  const Halves pairs = elements.load_words(static_cast<const uint16_t*>(p) + first);
  Lane x;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const uint32_t pair = pairs.at[k / 2];
    x.at[k] = float_of(k % 2 == 0 ? pair << 16 : pair & 0xffff0000);
  }
  return x;
}

template <bool kWide>
__device__ __forceinline__ Halves bfloat16_by_chance(const Lane& x, Random random, uint32_t first,
                                                     Elements<kWide> elements) {
  Halves pairs;
  uint32_t sums[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    sums[k] = bits_plus(x.at[k], random.half(first, elements.at(k)));
  }
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) pairs.at[i] = upper_halves(sums[2 * i], sums[2 * i + 1]);
  return pairs;
}

__device__ __forceinline__ Halves nearest_bfloat16(const Lane& x) {
  Halves pairs;
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) pairs.at[i] = bfloat16_pair(x.at[2 * i], x.at[2 * i + 1]);
  return pairs;
}

// Returns the bits of a stochastically rounded float16.
__device__ __forceinline__ uint16_t float16_bits(float x, uint32_t random) {
  const uint32_t size = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (size < 0x38800000) {  // in units of the smallest denormal
    return static_cast<uint16_t>(
        sign | static_cast<uint32_t>(float_of(size) * 0x1p24f + random * 0x1p-16f));
  }
  const uint32_t magnitude = ((size + (random >> 3)) >> 13) - (112 << 10);
  return static_cast<uint16_t>(sign | (magnitude < 0x7c00 ? magnitude : 0x7c00));
}

template <Param kParam, bool kWide>
__device__ __forceinline__ Lane load_param(const AdamWTensor& t, int64_t first,
                                           Elements<kWide> elements) {
  Lane p = load_lane<dtype_of(kParam)>(t.param, first, elements);
  if constexpr (kParam == Param::master) {
    const auto rest = elements.load(t.remainder + first);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      p.at[k] = float_of(bits_of(p.at[k]) + static_cast<uint32_t>(int32_t{rest.at[k]}));
    }
  }
  return p;
}

template <Param kParam, bool kWide>
__device__ __forceinline__ void store_param(const AdamWTensor& t, int64_t first, Random random,
                                            const Lane& p, Elements<kWide> elements) {
  if constexpr (kParam == Param::float32) {
    return elements.store(static_cast<float*>(t.param) + first, p);
  }
  Vec<uint16_t, kEach> bits;
  const bool chance = t.rounding == Rounding::stochastic;
  auto* const param = static_cast<uint16_t*>(t.param) + first;
  if constexpr (kParam == Param::bfloat16) {
    const Halves pairs =
        chance ? bfloat16_by_chance(p, random, kRandomParam, elements) : nearest_bfloat16(p);
    return elements.store_words(param, pairs);
  } else if constexpr (kParam == Param::master) {
    Vec<int16_t, kEach> rest;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32_t x = p.at[k] == p.at[k] ? bits_of(p.at[k]) : 0x7fc00000;  // its sum might be -0
      bits.at[k] = static_cast<uint16_t>((x + 0x8000) >> 16);
      rest.at[k] = static_cast<int16_t>(x);
    }
    elements.store(t.remainder + first, rest);
  } else {
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float x = p.at[k];
      if (chance) {
        bits.at[k] = float16_bits(x, random.half(kRandomParam, elements.at(k)));
      } else {
        bits.at[k] = static_cast<Half>(x).x;
      }
    }
  }
  elements.store(param, bits);
}

struct MomentsOfLane {
  Lane m, v;
};

template <Moments kMoments, bool kWide>
__device__ __forceinline__ MomentsOfLane load_moments(const AdamWTensor& t, uint32_t block,
                                                      int64_t first, Elements<kWide> elements) {
  if constexpr (kMoments != Moments::int8) {
    constexpr auto kDtype = kMoments == Moments::float32 ? Dtype::float32 : Dtype::bfloat16;
    return {load_lane<kDtype>(t.exp_avg, first, elements),
            load_lane<kDtype>(t.exp_avg_sq, first, elements)};
  }
  Bytes c = elements.load_words(static_cast<const int8_t*>(t.exp_avg) + first);
  const Bytes d = elements.load_words(static_cast<const uint8_t*>(t.exp_avg_sq) + first);
  const float m_scale = global_memory(t.exp_avg_scale)[block] * (1 / (kMomentCodes * kMomentCodes));
  const float v_scale = global_memory(t.exp_avg_sq_scale)[block] * (1 / kSquareCodes);
  MomentsOfLane moments;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) c.at[i] ^= 0x80808080;  // plus 128, to 1 .. 255
  const uint32_t units = bits_of(0x1p23f);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    // Bits in place of an addition: a byte beside 2^23 is in units.
    const uint32_t bytes = 0x7650 | k % 4;
    const float code = float_of(__byte_perm(c.at[k / 4], units, bytes)) - (0x1p23f + 128);
    const float number =
        float_of(__byte_perm(d.at[k / 4], units, bytes)) - (0x1p23f - 1);  // from 1
    const float root = number * v_scale, square = root * root;
    moments.m.at[k] = code * m_scale * fabsf(code);
    moments.v.at[k] = square * square;
  }
  return moments;
}

// The largest of the warp; none is negative. Such floats are ordered as their bits.
__device__ __forceinline__ float largest_of_warp(float x) {
  return float_of(__reduce_max_sync(kAllLanes, bits_of(x)));
}

template <bool kWide>
__device__ __forceinline__ void store_codes(const AdamWTensor& t, uint32_t block,
                                            uint32_t first_threshold, int64_t first, const Lane& m,
                                            const Lane& root, Elements<kWide> elements) {
  float most_m = 0, most_root = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    most_m = fmaxf(most_m, fabsf(m.at[k]));
    most_root = fmaxf(most_root, root.at[k]);
  }
  most_m = largest_of_warp(most_m);
  most_root = largest_of_warp(most_root);
  const float m_factor =
      most_m >= kLeastMomentScale ? quick_quotient(kMomentCodes * kMomentCodes, most_m) : 0;
  const float root_factor =
      most_root >= kLeastNormal ? quick_quotient(kSquareCodes * kSquareCodes, most_root) : 0;
  const uint32_t units = bits_of(0xbfffp0f);
  // Byte 0 of the thresholds, in codes; the sum below rounds to the nearest 256th.
  const float lowest = (static_cast<float>(first_threshold & 0xff) - 128) * 0x1p-16f;
  uint32_t c[kEach], d[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const uint32_t threshold = (first_threshold + kThresholdElement * elements.at(k)) >> 8 & 0xff;
    // Beside 1.5 * 2^15 a float's last bits are 256ths, to nearest. The threshold carries into byte
    // 1, which is the code.
    const float square = fabsf(m.at[k]) * m_factor;
    const float size =
        fminf(square, quick_normal_sqrt(fmaxf(square, kLeastMoment) - kMomentVariance));
    c[k] = bits_of(copysignf(size, m.at[k]) + 0x1.8p15f) + threshold;
    // The same for c + 1, which has no sign: 49151 = 0xbfff takes the 1 back. What is below the
    // first code is truncated to it.
    const float size_of_v = quick_normal_sqrt(root.at[k] * root_factor) + lowest;
    d[k] = bits_of(fmaxf(size_of_v + float_of(units | threshold), 0xc000p0f));
  }
  elements.store_words(static_cast<int8_t*>(t.exp_avg) + first, bytes_of<1>(c));
  elements.store_words(static_cast<uint8_t*>(t.exp_avg_sq) + first, bytes_of<1>(d));
  if (threadIdx.x % kWarp == 0) {
    global_memory(t.exp_avg_scale)[block] = most_m;
    global_memory(t.exp_avg_sq_scale)[block] = quick_normal_sqrt(most_root);
  }
}

// The values that a tensor's blocks share in a step.
struct Step {
  AdamWFactors factors;
  float gradient_factor;
  uint64_t key;  // plus the number of blocks in the shards before
  uint32_t first_threshold;
};

template <Param kParam, Moments kMoments, bool kWide>
__device__ __forceinline__ void step_block(const AdamWTensor& t, const Step& step, uint32_t block,
                                           int64_t first, Elements<kWide> elements) {
  constexpr bool kQuick = quick(kParam);
  const auto root_of = [](float x) { return kQuick ? quick_sqrt(x) : sqrtf(x); };
  const Random random(block_key(step.key, block));
  const auto& f = step.factors;
  const bool amsgrad = t.max_exp_avg_sq != nullptr;
  const Lane g = load_lane<dtype_of(kParam)>(t.grad, first, elements);
  Lane p = load_param<kParam>(t, first, elements), root;
  auto [m, v] = load_moments<kMoments>(t, block, first, elements);
  Lane most{};
  if (amsgrad) most = elements.load(t.max_exp_avg_sq + first);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const float x = g.at[k] * step.gradient_factor, square = x * x;
    const bool finite = square < INFINITY;  // otherwise the element keeps its moments and value
    if (finite) {
      m.at[k] = fmaf(f.rate1, x, m.at[k] * f.beta1);
      v.at[k] = fmaf(f.rate2, square, v.at[k] * f.beta2);
    }
    root.at[k] = root_of(v.at[k]);
    if constexpr (kMoments == Moments::int8) {
      const float most = f.max_ratio * root.at[k];
      if (fabsf(m.at[k]) > most) m.at[k] = copysignf(most, m.at[k]);
    }
    float most_root = root.at[k];
    if (amsgrad) {
      most.at[k] = fmaxf(most.at[k], v.at[k]);
      most_root = root_of(most.at[k]);
    }
    const float under = fmaf(most_root, f.denom, f.eps);
    const float update = kQuick ? quick_quotient(m.at[k], under) : m.at[k] / under;
    if (finite) p.at[k] = fmaf(-f.step_size, update, p.at[k] * f.decay);
  }
  if (amsgrad) elements.store(t.max_exp_avg_sq + first, most);
  store_param<kParam>(t, first, random, p, elements);
  if constexpr (kMoments == Moments::int8) {
    store_codes(t, block, step.first_threshold + first_threshold(0, block), first, m, root,
                elements);
  } else if constexpr (kMoments == Moments::bfloat16) {
    elements.store_words(static_cast<uint16_t*>(t.exp_avg) + first, nearest_bfloat16(m));
    elements.store_words(static_cast<uint16_t*>(t.exp_avg_sq) + first,
                         bfloat16_by_chance(v, random, kRandomSquare16, elements));
  } else {
    elements.store(static_cast<float*>(t.exp_avg) + first, m);
    elements.store(static_cast<float*>(t.exp_avg_sq) + first, v);
  }
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

__device__ __forceinline__ Step step_of(const AdamWLaunch& a, const AdamWTensor& t, float factor) {
  const auto& group = a.groups[t.group - a.first_group];
  const float number = *t.step + 1;
  const auto step = static_cast<uint64_t>(number);
  const double lr = group.lr_at == nullptr ? group.lr : *group.lr_at;
  return {factors_of(group, lr, number), group.maximize ? -factor : factor,
          adamw_key(a.seed, step, t.index) + t.first_key, first_threshold(step, t.first_key)};
}

// Calls body(block, first, count) for a run's blocks.
template <class Body>
__device__ __forceinline__ void each_block_of(const AdamWTensor& t, uint32_t block, uint32_t end,
                                              const Body& body) {
  const auto per_row = static_cast<uint32_t>(blocks_of_row(t.row));
  const int last_count = static_cast<int>(t.row - int64_t{per_row - 1} * kAdamWBlock);
  int64_t first = place_of(t, block).first;
  uint32_t in_row = block % per_row;  // the block's index in its row
  for (; block < end; block += kWarps) {
    body(block, first, in_row == per_row - 1 ? last_count : kAdamWBlock);
    first += kWarps * kAdamWBlock;
    for (in_row += kWarps; in_row >= per_row; in_row -= per_row) first -= kAdamWBlock - last_count;
  }
}

// Steps the warp's blocks of a tensor: from `block` every kWarps-th one before `end`. First those
// whose accesses are wide, with the tensor in registers, then the others.
template <Param kParam, Moments kMoments>
__device__ __forceinline__ void step_run(const AdamWTensor& t, Step step, uint32_t block,
                                         uint32_t end) {
  float& eps = step.factors.eps;
  if (quick(kParam) && eps > 0) eps = fmaxf(eps, kLeastNormal);  // a smaller one would be 0
  if (wide(t)) {
    const AdamWTensor read = t;
    each_block_of(read, block, end, [&](uint32_t block, int64_t first, int count) {
      if (count != kAdamWBlock) return;
      step_block<kParam, kMoments, true>(read, step, block, first, {kAdamWBlock});
    });
    if (t.row % kAdamWBlock == 0) return;
  }
  each_block_of(t, block, end, [&](uint32_t block, int64_t first, int count) {
    if (count == kAdamWBlock && wide(t)) return;
    step_block<kParam, kMoments, false>(t, step, block, first, {count});
  });
}

template <Param kParam>
__device__ __forceinline__ void step_run(const AdamWTensor& t, const Step& step, uint32_t block,
                                         uint32_t end) {
  switch (t.moments) {
    case Moments::float32: return step_run<kParam, Moments::float32>(t, step, block, end);
    case Moments::bfloat16: return step_run<kParam, Moments::bfloat16>(t, step, block, end);
    default: return step_run<kParam, Moments::int8>(t, step, block, end);
  }
}

__device__ __forceinline__ void step_run(const AdamWTensor& t, const Step& step, uint32_t block,
                                         uint32_t end) {
  switch (t.dtype) {
    case Dtype::float32: return step_run<Param::float32>(t, step, block, end);
    case Dtype::float16: return step_run<Param::float16>(t, step, block, end);
    default:
      if (t.rounding == Rounding::remainder) return step_run<Param::master>(t, step, block, end);
      return step_run<Param::bfloat16>(t, step, block, end);
  }
}

__global__ void __launch_bounds__(kThreads, 2) adamw_step(const AdamWLaunch a) {
  // Of the gradients. Threads look them up, for they have no register to spare.
  FUSEDOPS_SHARED(float, factor, 1);
  FUSEDOPS_SHARED(bool, skip, 1);
  if (threadIdx.x < kWarp) {
    const Scaling scaling(a);
    if (threadIdx.x == 0) {
      factor[0] = static_cast<float>(scaling.factor);
      skip[0] = scaling.skip;
    }
  }
  __syncthreads();
  if (!skip[0]) {
    for (Runs runs(a); runs.next(a);) {
      if (!here(a, a.tensors[runs.at])) continue;
      const Step step = step_of(a, a.tensors[runs.at], factor[0]);
      step_run(a.tensors[runs.at], step, runs.block, runs.end);
    }
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
  for (int i = threadIdx.x; i < a.count && !skip[0]; i += kThreads) {
    if (here(a, a.tensors[i])) *a.tensors[i].step += 1;
  }
  if (threadIdx.x == 0) *a.finished = 0;
}

}  // namespace

void launch_adamw_step(const AdamWLaunch& a, CUstream_st* stream) {
  launch(adamw_step, grid_of(a), dim3(kThreads), 0, stream, a);
}

}  // namespace fusedops::cuda::adamw
