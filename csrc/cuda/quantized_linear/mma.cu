// quantized_linear on GPUs for up to sixteen rows of float16 or bfloat16, on tensor cores. Formats:
// fusedops/functional/quantized_linear.py.
//
// A warp has kTall tiles of 16 rows of the weight, and walks over their depth in chunks: of each
// row four lanes (a quad) take 64 bytes, 16 each. A product m16n8k16 adds 4 codes of each lane's
// two rows. It may take any 16 columns, as long as x's are the same, so codes stay where they were
// loaded: two become 16-bit numbers in one LOP3, and x's pairs are put in their order.
//
// A product sums over a quad. If groups are shorter than a chunk, a quad's lanes have codes of
// several groups. Then each group has its own columns of the product, in which x is zero for the
// other groups' lanes. So 8 columns are 8 rows of x, or 4 and 2 groups, or 2 and 4 groups.
//
// int4 codes are multiplied with an offset, and another product, with a weight of ones, gives the
// sum of x that the offset and the zero are multiplied by. A byte of nf4 codes is looked up in a
// table in shared memory; each lane has its own copy. Sums of a group are float32; they are scaled
// in float32. The depth is split among `depth_warps` of a block, and among blocks; sums are
// added in order.

#include <algorithm>
#include <type_traits>

#include "csrc/cuda/quantized_linear/finish.cuh"
#include "csrc/cuda/quantized_linear/gemv.h"

namespace fusedops::cuda::quantized_linear {
namespace {

constexpr int kQuad = 4;            // lanes that share a row
constexpr int kMmaWarps = 8;        // of a block
constexpr int kMmaWarpsOfRow = 16;  // at most, if x is one row
constexpr int kTile = 16;           // rows of the weight in a product
constexpr int kResident = 16;       // warps per multiprocessor that a launch aims for

// nf4's table: for each byte a row of one pair per lane, so that lanes have different banks.
constexpr uint32_t kBytes = 256, kTableRow = kWarp * sizeof(uint32_t);

// Zeros in place of a chunk of x, for lanes of other groups and rows that x lacks.
__device__ const uint4 kNoRow[16] = {};

// Returns how many groups a quad's codes of one load belong to: 1, 2 or 4.
__host__ __device__ __forceinline__ int groups_of_load(const GemvArgs& a, int loads) {
  if (a.format == WeightFormat::int8) return 1;
  const int codes = 128 / loads, size = static_cast<int>(a.group_size);
  return size < codes ? codes / size : 1;
}

// How codes become pairs of T. Eight codes are one unit: one word of 4 bits each, or two of 8.
// number() gives four pairs, in_order() the same pairs of x. A product takes pairs j and j + 2.
// What is summed is in units of 1 / kUnit; kNoOffset is 128 less what a code is greater than it
// should be. kOffset: whether codes have an offset and zeros. kMemory: bytes of dynamic shared
// memory.
template <class T, WeightFormat kFormat>
struct Decoder;

struct FourBits {
  static constexpr int kWords = 1, kCodes = 32;          // words of a unit; codes in 16 bytes
  static constexpr bool kScaled = true, kOffset = true;  // groups have scales and zeros
  static constexpr size_t kMemory = 0;

  // Byte 0 has codes 1 and 0, from its low bits on, and byte 2 has 5 and 4.
  __device__ __forceinline__ static void in_order(const uint4& x, uint32_t (&pairs)[4]) {
    pairs[0] = __byte_perm(x.x, x.z, 0x7632);  // codes 1 and 5
    pairs[1] = __byte_perm(x.x, x.z, 0x5410);  // 0 and 4
    pairs[2] = __byte_perm(x.y, x.w, 0x7632);  // 3 and 7
    pairs[3] = __byte_perm(x.y, x.w, 0x5410);  // 2 and 6
  }
};

// A code in the low bits of a float16 is a denormal number, q 2^-24, which tensor cores multiply
// exactly. Four bits higher it is q 2^-20: with two sets of sums, pairs 1 and 3 have their own.
template <>
struct Decoder<Half, WeightFormat::int4> : FourBits {
  static constexpr int kMostSets = 2;
  static constexpr uint32_t kOnes = 0x00010001;  // 2^-24
  static constexpr float kNoOffset = 128, kUnit = 0x1p24f;

  template <int kSets>
  __device__ __forceinline__ static void number(const uint32_t* words, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int set = i % kSets;
      pairs[i] = words[0] >> 4 * (i - set) & (set == 0 ? 0x000f000f : 0x00f000f0);
    }
  }
};

// A code in the low bits of 128 is 128 + q.
template <>
struct Decoder<BFloat16, WeightFormat::int4> : FourBits {
  static constexpr int kMostSets = 1;
  static constexpr uint32_t kOnes = 0x3f803f80;
  static constexpr float kNoOffset = 0, kUnit = 1;

  template <int>
  __device__ __forceinline__ static void number(const uint32_t* words, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = masked_or(words[0] >> 4 * i, 0x000f000f, 0x43004300);
  }
};

struct EightBits {
  static constexpr int kWords = 2, kCodes = 16;
  static constexpr int kMostSets = 1;
  static constexpr bool kScaled = false, kOffset = false;
  static constexpr size_t kMemory = 0;
  static constexpr float kUnit = 1;

  __device__ __forceinline__ static void in_order(const uint4& x, uint32_t (&pairs)[4]) {
    pairs[0] = __byte_perm(x.x, x.y, 0x5410);  // codes 0 and 2
    pairs[1] = __byte_perm(x.x, x.y, 0x7632);  // 1 and 3
    pairs[2] = __byte_perm(x.z, x.w, 0x5410);
    pairs[3] = __byte_perm(x.z, x.w, 0x7632);
  }
};

// With its sign bit turned, a code in the low bits of 1024 is 1024 + 128 + q.
template <>
struct Decoder<Half, WeightFormat::int8> : EightBits {
  template <int>
  __device__ __forceinline__ static void number(const uint32_t* words, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = masked_xor(words[i / 2] >> 8 * (i % 2), 0x00ff00ff, 0x64806480);
      pairs[i] = exact_difference<Half>(bits, 0x64806480);
    }
  }
};

// Seven bits of a code in the low bits of 128, less 128, or 256 if the sign bit is set.
template <>
struct Decoder<BFloat16, WeightFormat::int8> : EightBits {
  template <int>
  __device__ __forceinline__ static void number(const uint32_t* words, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i / 2] >> 8 * (i % 2);
      pairs[i] = exact_difference<BFloat16>(masked_or(word, 0x007f007f, 0x43004300),
                                            masked_or(word, 0x00800080, 0x43004300));
    }
  }
};

// The table has nf4's numbers times kSize, rounded to T. This factor makes rounding errors small,
// and they nearly cancel in the sum of a weight of normal distribution: for bfloat16, their mean is
// 1.7e-6 of the absmax and their RMS 4.0e-4, without the factor 1.9e-4 and 5.5e-4.
template <class T>
struct Decoder<T, WeightFormat::nf4> {
  static constexpr int kWords = 1, kCodes = 32;
  static constexpr int kMostSets = 1;
  static constexpr bool kScaled = true, kOffset = false;
  static constexpr size_t kMemory = kBytes * kTableRow;
  static constexpr float kSize = std::is_same_v<T, BFloat16> ? 0.628566f : 0.838789f;
  static constexpr float kUnit = 1 / kSize;

  __device__ __forceinline__ static void in_order(const uint4& x, uint32_t (&pairs)[4]) {
    pairs[0] = x.x;
    pairs[2] = x.y;  // a product takes neighbouring registers
    pairs[1] = x.z;
    pairs[3] = x.w;
  }

  // The first of two codes in a byte is the high half, and the low half of a pair.
  __device__ __forceinline__ static void fill(const float (&nf4)[16]) {
    const uint32_t lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    for (uint32_t byte = threadIdx.x / kWarp; byte < kBytes; byte += warps) {
      const T pair[2] = {static_cast<T>(nf4[byte / 16] * kSize),
                         static_cast<T>(nf4[byte % 16] * kSize)};
      std::memcpy(dynamic_shared<char>() + byte * kTableRow + lane * sizeof(pair), pair,
                  sizeof(pair));
    }
  }

  template <int>
  __device__ __forceinline__ static void number(const uint32_t* words, uint32_t (&pairs)[4]) {
    const uint32_t lane =
        shared_address(dynamic_shared<char>()) + threadIdx.x % kWarp * sizeof(uint32_t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int byte = i / 2 + i % 2 * 2;  // as in in_order()
      pairs[i] = load_shared(dot_of_bytes(words[0], kTableRow << 8 * byte, lane));
    }
  }
};

// Where a lane reads the weight's rows r + 8 i, for its r: indices of loads of codes, and of scales
// and zeros. An address from a 32-bit index is one instruction.
template <int kRows>
struct Place {
  int codes[kRows], group[kRows];
  int groups_of_load;  // from one load's groups to the next one's

  __device__ __forceinline__ void advance(int loads, int groups) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      codes[i] += loads;
      group[i] += groups;
    }
  }
};

// What a lane has of a chunk: 16 bytes of each row, in kLoads loads.
template <class Decode, int kRows, int kLoads>
struct Chunk {
  uint32_t words[kRows][4];
  float scales[kRows][kLoads];
  uint32_t zeros[kRows][kLoads];

  __device__ __forceinline__ void load(const GemvArgs& a, const Place<kRows>& at) {
    constexpr int kSize = 16 / kLoads;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int64_t index = at.codes[i] + l * kQuad;
        const auto packed = Packed<kSize>::load(a.codes + index * kSize);
        std::memcpy(words[i] + l * kSize / 4, &packed, sizeof(packed));
        if constexpr (Decode::kScaled) {
          const int group = at.group[i] + l * at.groups_of_load;
          scales[i][l] = a.scales[group];
          if constexpr (Decode::kOffset) zeros[i][l] = a.zeros[group];
        }
      }
    }
  }
};

// kTall tiles of 16 rows of the weight, kWide tiles of 8 columns. kLoads: how many loads a lane
// makes for 16 bytes of a row; each has its own groups. One row of x needs only the first of each
// two columns.
template <class T, WeightFormat kFormat, int kTall, int kWide, int kLoads, bool kOneRow>
__global__ void __launch_bounds__((kOneRow ? kMmaWarpsOfRow : kMmaWarps) * kWarp, kOneRow ? 1 : 2)
    multiply(const GemvArgs a) {
  using Decode = Decoder<T, kFormat>;
  constexpr int kCodes = Decode::kCodes, kUnits = kCodes / 8 / kLoads, kRows = 2 * kTall;
  constexpr int kWarps = kOneRow ? kMmaWarpsOfRow : kMmaWarps, kOutputs = kOneRow ? 1 : kTensorRows;
  constexpr int kColumns = kOneRow ? 1 : 2, kSets = kLoads == 1 ? Decode::kMostSets : 1;
  FUSEDOPS_SHARED(float, warp_sums, kWarps * kTall * kTile * kOutputs);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / kQuad, t = lane % kQuad;
  const int groups = groups_of_load(a, kLoads), per_group = 8 / groups;
  const int own_group = t * groups / kQuad;

  const int high = warp / a.depth_warps;  // which of the block's warps along the weight's rows
  const int rows_of_block = blockDim.x / kWarp / a.depth_warps * kTall * kTile;
  const int64_t first_row = int64_t{blockIdx.x} * rows_of_block + high * kTall * kTile;
  const int chunks = static_cast<int>(a.k) / (kQuad * kCodes);
  const int first = blockIdx.y * a.depth_warps + warp % a.depth_warps;
  const int step = gridDim.y * a.depth_warps;
  const int groups_of_chunk = Decode::kScaled ? kQuad * kCodes / static_cast<int>(a.group_size) : 0;

  Place<kRows> place;
  place.groups_of_load = groups_of_chunk / kLoads;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = static_cast<int>(min(first_row + g + 8 * i, a.n - 1));
    place.codes[i] = (row * chunks + first) * kQuad * kLoads + t;
    place.group[i] = row * static_cast<int>(a.groups) + first * groups_of_chunk + own_group;
  }
  const T* x[kWide];
  int x_step[kWide];
#pragma unroll
  for (int w = 0; w < kWide; ++w) {
    const int m = w * per_group + g % per_group;
    const bool active = g / per_group == own_group && m < a.rows;
    const int64_t at = m * a.x_stride + int64_t{first} * kQuad * kCodes + t * (kCodes / kLoads);
    x[w] = active ? static_cast<const T*>(a.x) + at : reinterpret_cast<const T*>(kNoRow);
    x_step[w] = active ? step * kQuad * kCodes : 0;
  }

  float sums[kTall][kWide][4] = {};
  Chunk<Decode, kRows, kLoads> now, next;
  if (first < chunks) now.load(a, place);
  if constexpr (kFormat == WeightFormat::nf4) {
    Decode::fill(a.nf4);
    __syncthreads();
  }
#pragma unroll(kLoads == 1 ? 2 : 1)
  for (int chunk = first; chunk < chunks; chunk += step) {
    const int ahead = chunk + step < chunks ? step : 0;  // the last chunk is loaded twice
    place.advance(ahead * kQuad * kLoads, ahead * groups_of_chunk);
    next.load(a, place);
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      float products[kSets][kTall][kWide][4] = {}, x_sums[kWide][4] = {};
#pragma unroll
      for (int unit = l * kUnits; unit < (l + 1) * kUnits; ++unit) {
        uint32_t codes[kRows][4];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          Decode::template number<kSets>(now.words[i] + unit * Decode::kWords, codes[i]);
        }
#pragma unroll
        for (int w = 0; w < kWide; ++w) {
          // Quads of lanes have kQuad times as many columns of x as a lane.
          const T* from = x[w] + l * kUnits * 8 * (kQuad - 1) + unit * 8;
          uint32_t pairs[4];
          Decode::in_order(Packed<16>::load(from).words[0], pairs);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int i = 0; i < kTall; ++i) {
              const uint32_t rows[4] = {codes[2 * i][j], codes[2 * i + 1][j], codes[2 * i][j + 2],
                                        codes[2 * i + 1][j + 2]};
              auto& into = Decode::kScaled ? products[j % kSets][i][w] : sums[i][w];
              mma<T>(into, rows, pairs[j], pairs[j + 2]);
            }
            if constexpr (Decode::kOffset) {
              const uint32_t ones[4] = {Decode::kOnes, Decode::kOnes, Decode::kOnes, Decode::kOnes};
              mma<T>(x_sums[w], ones, pairs[j], pairs[j + 2]);
            }
          }
        }
      }
      if constexpr (Decode::kScaled) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float zero = 0;
          if constexpr (Decode::kOffset) {
            zero = static_cast<float>(now.zeros[i][l]) + (128 - Decode::kNoOffset);
          }
#pragma unroll
          for (int w = 0; w < kWide; ++w) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              const int at = i % 2 * 2 + c;
              float sum = products[0][i / 2][w][at];
              if constexpr (kSets == 2) sum = fmaf(products[1][i / 2][w][at], 0.0625f, sum);
              if constexpr (Decode::kOffset) sum = fmaf(x_sums[w][at], -zero, sum);
              sums[i / 2][w][at] = fmaf(sum, now.scales[i][l], sums[i / 2][w][at]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int w = 0; w < kWide; ++w) x[w] += x_step[w];
    now = next;
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float sum = sums[i / 2][w][i % 2 * 2 + c];
        if (groups > 1) sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (groups > 2) sum += __shfl_xor_sync(kAllLanes, sum, 1);
        const int m = w * per_group + 2 * t + c;
        if (own_group == 0 && m < a.rows) {
          warp_sums[((warp * kRows + i) * 8 + g) * kOutputs + m] = sum * Decode::kUnit;
        }
      }
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < rows_of_block * a.rows; at += blockDim.x) {
    const int row = at % rows_of_block, m = at / rows_of_block;
    const int64_t column = int64_t{blockIdx.x} * rows_of_block + row;
    if (column >= a.n) continue;
    const int first_warp = row / (kTall * kTile) * a.depth_warps;  // of the warps with this row
    float sum = 0;
    for (int w = 0; w < a.depth_warps; ++w) {
      sum += warp_sums[((first_warp + w) * kTall * kTile + row % (kTall * kTile)) * kOutputs + m];
    }
    if (a.partials == nullptr) {
      finish(a, repaired(a, sum, m, column), m, column);
    } else {
      a.partials[(int64_t{blockIdx.y} * a.rows + m) * a.n + column] = sum;
    }
  }
}

// In how many loads a lane takes 16 bytes of a row. With two, a quad has half as many groups at a
// time, and 8 columns have room for more rows of x.
int loads_of(const GemvArgs& a) {
  return a.format != WeightFormat::int8 && a.rows > 8 / groups_of_load(a, 1) ? 2 : 1;
}

// Returns how many tiles of 8 columns hold x's rows: 1 or 2.
int wide_of(const GemvArgs& a) { return a.rows > 8 / groups_of_load(a, loads_of(a)) ? 2 : 1; }

// Rows of the weight per warp.
int rows_of_warp(const GemvArgs& a) { return (wide_of(a) * loads_of(a) > 1 ? 1 : 2) * kTile; }

int64_t blocks_of(const GemvArgs& a, int depth_warps) {
  const int rows = std::max(1, kMmaWarps / depth_warps) * rows_of_warp(a);
  return (a.n + rows - 1) / rows;
}

template <class T, WeightFormat kFormat>
void launch_format(const GemvArgs& a, CUstream_st* stream) {
  const dim3 grid(static_cast<unsigned>(blocks_of(a, a.depth_warps)), a.parts);
  const dim3 block(std::max(kMmaWarps, a.depth_warps) * kWarp);
  const auto run = [&](auto kernel) {
    launch(kernel, grid, block, Decoder<T, kFormat>::kMemory, stream, a);
  };
  if (a.rows == 1) return run(multiply<T, kFormat, 2, 1, 1, true>);
  if constexpr (Decoder<T, kFormat>::kScaled) {
    if (wide_of(a) == 2) return run(multiply<T, kFormat, 1, 2, 2, false>);
    if (loads_of(a) == 2) return run(multiply<T, kFormat, 1, 1, 2, false>);
  } else {
    if (wide_of(a) == 2) return run(multiply<T, kFormat, 1, 2, 1, false>);
  }
  run(multiply<T, kFormat, 2, 1, 1, false>);
}

template <class T>
void launch_dtype(const GemvArgs& a, CUstream_st* stream) {
  switch (a.format) {
    case WeightFormat::int4: return launch_format<T, WeightFormat::int4>(a, stream);
    case WeightFormat::nf4: return launch_format<T, WeightFormat::nf4>(a, stream);
    default: return launch_format<T, WeightFormat::int8>(a, stream);
  }
}

}  // namespace

bool on_tensor_cores(const GemvArgs& a) {
  if (a.x_dtype == Dtype::float32 || !aligned(a.codes)) return false;
  if (a.exact && a.format == WeightFormat::nf4) return false;  // the table is rounded
  return aligned_rows(a.x, a.x_stride, a.x_dtype) &&
         a.rows <= tensor_rows(a.format, a.n, a.k, a.group_size);
}

// More rows of x share x's numbers among more of a block's warps, which read them from one cache.
// One row is read often without harm; if it has few rows of the weight, more warps share the depth,
// because a second launch, which adds the parts, takes longer.
void split_on_tensor_cores(GemvArgs& a) {
  a.depth_warps = a.rows <= 2 ? 8 : a.rows <= 4 ? 4 : a.rows <= 8 ? 2 : 1;
  const int64_t blocks = blocks_of(a, a.depth_warps), processors = multiprocessors();
  if (a.rows == 1 && blocks <= processors) a.depth_warps = kMmaWarpsOfRow;
  const int64_t warps = blocks * std::max(kMmaWarps, a.depth_warps);
  const int64_t chunks = a.k / (a.format == WeightFormat::int8 ? 64 : 128);
  const int64_t most = chunks / (2 * a.depth_warps);  // so that each warp loads ahead
  a.parts = static_cast<int>(std::max<int64_t>(1, std::min(kResident * processors / warps, most)));
}

void launch_on_tensor_cores(const GemvArgs& a, CUstream_st* stream) {
  a.x_dtype == Dtype::bfloat16 ? launch_dtype<BFloat16>(a, stream) : launch_dtype<Half>(a, stream);
}

}  // namespace fusedops::cuda::quantized_linear
