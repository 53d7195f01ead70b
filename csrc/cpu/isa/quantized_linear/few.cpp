// Products of a few rows with a quantized weight, whose codes are decoded in registers.

#include "csrc/cpu/isa/quantized_linear/few.h"

#include <algorithm>
#include <type_traits>

#include "csrc/cpu/isa/quantized_linear/bytes.h"
#include "csrc/cpu/isa/quantized_linear/nibbles.h"

namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

// Prefetches what kWide streams of codes read next; each is one stream from row to row, but the
// processor's own prefetching stops at the end of each page.
constexpr int64_t kAhead = 4096, kGroupsAhead = 64;
template <int kWide = 1>
FUSEDOPS_INLINE void prefetch_codes(const void* p) {
  __builtin_prefetch(static_cast<const char*>(p) + kAhead / kWide);
}

// Rows of w: for each n from `first`, `apart` times, the rows n, n + apart, and so on are
// multiplied side by side. The sums begin with row `begin`.
struct Columns {
  int64_t first, apart, begin;
};

// How many rows of w kRows rows of x are multiplied with, side by side: four streams of codes are
// read faster than one. `registers`: for sums.
template <int kRows>
constexpr int streams(int registers) {
  return kRows * 4 <= registers ? 4 : kRows * 2 <= registers ? 2 : 1;
}

// Code: int8_t, or uint8_t for e4m3. No chain of sums is longer than a block, so that rounding
// errors stay small.
template <int kRows, class Code, int kWide>
void add_bytes(const Codes& w, const FewRows& args, const Columns& columns) {
  constexpr int64_t kBlock = 1024;
  const auto* const x = static_cast<const float*>(args.x);
  for (int64_t n = columns.first; n < columns.first + columns.apart; ++n) {
    const auto* const codes = reinterpret_cast<const Code*>(w.at(n, 0));
    Register totals[kWide][kRows] = {};
    for (int64_t first = 0; first < w.k; first += kBlock) {
      Register sums[kWide][kRows] = {};
      each_step(std::min(kBlock, w.k - first), [&](int64_t i, auto part) {
        const int64_t j = first + i;
#pragma GCC unroll 4
        for (int c = 0; c < kWide; ++c) {
          const Code* const p = codes + c * columns.apart * w.k + j;
          const auto number = load(p, part);
          prefetch_codes<kWide>(p);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const Floats x_numbers = load(x + r * args.ld + j, part);
            const Register some = at::vec::fmadd(x_numbers.lo, number.lo, Vec(sums[c][r]));
            sums[c][r] = at::vec::fmadd(x_numbers.hi, number.hi, Vec(some));
          }
        }
      });
      for (int c = 0; c < kWide; ++c) {
        for (int r = 0; r < kRows; ++r) totals[c][r] += sums[c][r];
      }
    }
    for (int c = 0; c < kWide; ++c) {
      float* const to = args.sums + n + c * columns.apart - columns.begin;
      for (int r = 0; r < kRows; ++r) to[r * args.ld_sums] = sum({Vec(totals[c][r]), Vec(0.f)});
    }
  }
}

#if defined(__AVX512BF16__)
// Rounding nf4's table to bfloat16 gives every code a fixed error, so the errors of a long sum add
// up if x has a nonzero mean. Scaling the table by this factor reduces the mean error over a normal
// distribution's codes from 1.8e-4 to 6e-6, and the RMS error from 5.3e-4 to 3.7e-4.
constexpr float kNf4Factor = 1.24185f;

// Stores the lanes' sums, times `factor`, for row n of w and those beside it.
template <int kRows, int kWide>
FUSEDOPS_INLINE void store_sums(const __m512 (&sums)[kWide][kRows], float factor,
                                const FewRows& args, const Columns& columns, int64_t n) {
#pragma GCC unroll 4
  for (int c = 0; c < kWide; ++c) {
    float* const to = args.sums + n + c * columns.apart - columns.begin;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      to[r * args.ld_sums] = _mm512_reduce_add_ps(sums[c][r]) * factor;
  }
}

// Returns the table of the 4-bit codes' numbers, as bfloat16, twice, because vpermw uses 5 bits.
__m512i table_of(WeightFormat format) {
  __m512 numbers = _mm512_mul_ps(_mm512_loadu_ps(kNf4), _mm512_set1_ps(kNf4Factor));
  if (format == WeightFormat::int4) {
    numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  }
  return narrow<BFloat16>({numbers, numbers});
}

// Spreads the scales of kHalves codes' groups over the lanes of their sums, 8 codes per lane.
struct Spread {
  int groups;
  __mmask16 some;
  __m512i lanes;

  explicit Spread(int64_t group_size)
      : groups(static_cast<int>(kHalves / group_size)), some((1u << groups) - 1) {
    int32_t group_of_lane[16];
    for (int i = 0; i < 16; ++i) group_of_lane[i] = i * groups / 16;
    lanes = _mm512_loadu_si512(group_of_lane);
  }
  __m512 of(const float* p) const {
    return _mm512_permutexvar_ps(lanes, _mm512_maskz_loadu_ps(some, p));
  }
  __m512 of(const uint8_t* p) const {
    const __m128i bytes = _mm_maskz_loadu_epi8(some, p);
    return _mm512_permutexvar_ps(lanes, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
  }
};

// A 16-bit lane has four codes, read with shifts of 0, 4, 8 and 12; order_by_lane orders x the same
// way. Bits above a code are ignored.
template <int kRows, bool kZeros, int kWide>
void add_halves(const Codes& w, const FewRows& args, const Columns& columns) {
  const __m512i table = table_of(w.format);
  const Spread spread(w.group_size);
  const int64_t blocks = w.k / kHalves, row_bytes = w.k / 2, row_groups = blocks * spread.groups;
  const auto* const x = static_cast<const uint16_t*>(args.x);
  for (int64_t n = columns.first; n < columns.first + columns.apart; ++n) {
    const uint8_t* const bytes = w.at(n, 0);
    __m512 sums[kWide][kRows] = {};
    for (int64_t i = 0; i < blocks; ++i) {
#pragma GCC unroll 4
      for (int c = 0; c < kWide; ++c) {
        const uint8_t* const p = bytes + c * columns.apart * row_bytes + i * kHalves / 2;
        const int64_t group = (n + c * columns.apart) * row_groups + i * spread.groups;
        const __m512i codes = _mm512_loadu_si512(p);
        prefetch_codes<kWide>(p);
        const __m512i shifted[4] = {codes, _mm512_srli_epi16(codes, 4), _mm512_srli_epi16(codes, 8),
                                    _mm512_srli_epi16(codes, 12)};
        __m512i numbers[4];
#pragma GCC unroll 4
        for (int s = 0; s < 4; ++s) numbers[s] = _mm512_permutexvar_epi16(shifted[s], table);
        __builtin_prefetch(w.scales + group + kGroupsAhead);
        const __m512 scales = spread.of(w.scales + group);
        __m512 zeros = {};
        if (kZeros) {
          __builtin_prefetch(w.zeros + group + kGroupsAhead);
          zeros = spread.of(w.zeros + group);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const uint16_t* const x_halves = x + r * args.ld + i * kHalves;
          __m512 products = {};
#pragma GCC unroll 4
          for (int s = 0; s < 4; ++s) {
            products = _mm512_dpbf16_ps(products, (__m512bh)_mm512_loadu_si512(x_halves + 32 * s),
                                        (__m512bh)numbers[s]);
          }
          if (kZeros) {
            const __m512 lanes = _mm512_loadu_ps(args.lanes + r * args.ld / kCodesOfLane + i * 16);
            products = _mm512_fnmadd_ps(zeros, lanes, products);
          }
          sums[c][r] = _mm512_fmadd_ps(products, scales, sums[c][r]);
        }
      }
    }
    store_sums<kRows, kWide>(sums, kZeros ? 1 : 1 / kNf4Factor, args, columns, n);
  }
}

#endif

#if defined(__AVX512BF16__)
// e4m3; int8 is faster as float32.
template <int kRows, int kWide>
void add_narrow_bytes(const Codes& w, const FewRows& args, const Columns& columns) {
  const auto* const x = static_cast<const uint16_t*>(args.x);
  for (int64_t n = columns.first; n < columns.first + columns.apart; ++n) {
    const uint8_t* const codes = w.at(n, 0);
    __m512 sums[kWide][kRows] = {};
    const auto add = [&](int64_t j, __m256i some, __m512* to) {
      const __m512i numbers = widen_e4m3(some);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512i row = _mm512_loadu_si512(x + r * args.ld + j);
        to[r] = _mm512_dpbf16_ps(to[r], (__m512bh)row, (__m512bh)numbers);
      }
    };
    int64_t j = 0;
    for (; j + 32 <= w.k; j += 32) {
#pragma GCC unroll 4
      for (int c = 0; c < kWide; ++c) {
        const uint8_t* const p = codes + c * columns.apart * w.k + j;
        prefetch_codes<kWide>(p);
        add(j, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), sums[c]);
      }
    }
    for (int c = 0; c < kWide && j < w.k; ++c) {
      const auto rest = (1u << (w.k - j)) - 1;
      add(j, _mm256_maskz_loadu_epi8(rest, codes + c * columns.apart * w.k + j), sums[c]);
    }
    store_sums<kRows, kWide>(sums, 1, args, columns, n);
  }
}
#endif

#if !defined(CPU_CAPABILITY_AVX512)
// 4-bit codes. Each group is summed, then scaled.
template <int kRows, bool kInt4, int kWide>
void add_nibbles(const Codes& w, const FewRows& args, const Columns& columns) {
  const NibbleTable<kInt4> table;
  const int64_t row_bytes = w.k / 2, groups = w.k / w.group_size;
  const auto* const x = static_cast<const float*>(args.x);
  for (int64_t n = columns.first; n < columns.first + columns.apart; ++n) {
    Register sums[kWide][kRows] = {};
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t from = group * w.group_size;
#pragma GCC unroll 4
      for (int c = 0; c < kWide; ++c) {
        const int64_t row = n + c * columns.apart, group_index = row * groups + group;
        const uint8_t* const bytes = w.codes + row * row_bytes;
        const Register zero = Vec(kInt4 ? w.zeros[group_index] : 0.f);
        Register products[kRows] = {};
        for (int64_t j = from; j < from + w.group_size; j += kNibbles) {
          __m256 numbers[4];
          table.look_up(bytes + j / 2, numbers);
          prefetch_codes<kWide>(bytes + j / 2);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const Register number = kInt4 ? numbers[i] - zero : numbers[i];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
              const Register x_numbers = Vec::loadu(x + r * args.ld + j + i * Vec::size());
              products[r] = x_numbers * number + products[r];
            }
          }
        }
        const Register scale = Vec(w.scales[group_index]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[c][r] = products[r] * scale + sums[c][r];
        }
      }
    }
    for (int c = 0; c < kWide; ++c) {
      float* const to = args.sums + n + c * columns.apart - columns.begin;
      for (int r = 0; r < kRows; ++r) to[r * args.ld_sums] = sum({Vec(sums[c][r]), Vec(0.f)});
    }
  }
}
#endif

// Rows [begin, end) of w.
template <int kRows>
void add(const Codes& w, const FewRows& args, int64_t begin, int64_t end) {
  const auto all = [&]<int kMost>(std::integral_constant<int, kMost>, const auto& some) {
    const int64_t apart = (end - begin) / kMost, rest = begin + apart * kMost;
    some.template operator()<kMost>(Columns{begin, apart, begin});
    some.template operator()<1>(Columns{rest, end - rest, begin});
  };
  const bool int8_codes = w.format == WeightFormat::int8;
#if defined(__AVX512BF16__)  // callers request bfloat16 only here
  constexpr std::integral_constant<int, streams<kRows>(8)> narrow;
  if (args.narrow && w.in_bytes()) {
    return all(narrow, [&]<int kWide>(const Columns& columns) {
      add_narrow_bytes<kRows, kWide>(w, args, columns);
    });
  }
  if (args.narrow) {
    return all(narrow, [&]<int kWide>(const Columns& columns) {
      if (w.zeros != nullptr) return add_halves<kRows, true, kWide>(w, args, columns);
      add_halves<kRows, false, kWide>(w, args, columns);
    });
  }
#endif
#if !defined(CPU_CAPABILITY_AVX512)
  if (!w.in_bytes()) {
    constexpr std::integral_constant<int, streams<kRows>(8)> nibbles;
    return all(nibbles, [&]<int kWide>(const Columns& columns) {
      if (w.zeros != nullptr) return add_nibbles<kRows, true, kWide>(w, args, columns);
      add_nibbles<kRows, false, kWide>(w, args, columns);
    });
  }
#endif
  constexpr int kSums = Vec::size() == 8 ? 12 : 16;  // of the 16 or 32 registers
  constexpr std::integral_constant<int, streams<kRows>(kSums)> wide;
  all(wide, [&]<int kWide>(const Columns& columns) {
    if (int8_codes) return add_bytes<kRows, int8_t, kWide>(w, args, columns);
    add_bytes<kRows, uint8_t, kWide>(w, args, columns);
  });
}

}  // namespace

void add_few_rows(const Codes& weight, const FewRows& args, int64_t begin, int64_t end) {
  switch (args.rows) {
    case 1: return add<1>(weight, args, begin, end);
    case 2: return add<2>(weight, args, begin, end);
    case 3: return add<3>(weight, args, begin, end);
    case 4: return add<4>(weight, args, begin, end);
    case 5: return add<5>(weight, args, begin, end);
    case 6: return add<6>(weight, args, begin, end);
    case 7: return add<7>(weight, args, begin, end);
    case 8: return add<8>(weight, args, begin, end);
  }
}

void order_by_lane(const uint16_t* x, int64_t k, uint16_t* out) {
  constexpr int kPlace[4] = {1, 0, 3, 2};  // the index of a code in its two bytes, by its shift
#if defined(CPU_CAPABILITY_AVX512)
  uint16_t fourth[32] = {};
  for (int i = 0; i < 16; ++i) fourth[i] = 4 * i;
  const __m512i every_fourth = _mm512_loadu_si512(fourth);
#endif
  for (int64_t i = 0; i < k; i += kHalves, x += kHalves, out += kHalves) {
#if defined(CPU_CAPABILITY_AVX512)
    // Takes one of every 4 elements, by its position.
    const auto quarter = [&](int from, int place) {
      const __m512i index = _mm512_add_epi16(every_fourth, _mm512_set1_epi16(place));
      const __m512i two = _mm512_permutex2var_epi16(_mm512_loadu_si512(x + from), index,
                                                    _mm512_loadu_si512(x + from + 32));
      return _mm512_castsi512_si256(two);
    };
    for (int s = 0; s < 4; ++s) {
      const __m512i low = _mm512_castsi256_si512(quarter(0, kPlace[s]));
      _mm512_storeu_si512(out + 32 * s, _mm512_inserti64x4(low, quarter(64, kPlace[s]), 1));
    }
#else
    for (int j = 0; j < kHalves; ++j) out[j] = x[j % 32 * 4 + kPlace[j / 32]];
#endif
  }
}

void sum_lanes(const uint16_t* x, int64_t k, float* lanes) {
  const auto widened = [&](int64_t i) {
    return std::bit_cast<float>(static_cast<uint32_t>(x[i]) << 16);
  };
  for (int64_t block = 0; block < k; block += kHalves, lanes += kHalves / kCodesOfLane) {
    for (int64_t lane = 0; lane < kHalves / kCodesOfLane; ++lane) {
      lanes[lane] = 0;
      for (int64_t i = block + 2 * lane; i < block + kHalves; i += 32) {
        lanes[lane] += widened(i) + widened(i + 1);
      }
    }
  }
}

}  // namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY
