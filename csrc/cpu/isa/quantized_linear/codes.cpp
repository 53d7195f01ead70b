// Decodes rows of quantized weights, and converts or quantizes rows of inputs.

#include "csrc/cpu/isa/quantized_linear/codes.h"

#include <algorithm>
#include <cmath>

#include "csrc/cpu/isa/exp.h"
#include "csrc/cpu/isa/quantized_linear/bytes.h"
#include "csrc/cpu/isa/quantized_linear/nibbles.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

// The values of the 16 codes of an int4 group.
struct Int4Numbers {
  int zero;
  float scale;

  float operator[](int code) const { return static_cast<float>(code - zero) * scale; }
#if defined(CPU_CAPABILITY_AVX512)
  __m512 all() const {
    const __m512i codes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i numbers = _mm512_sub_epi32(codes, _mm512_set1_epi32(zero));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(numbers), _mm512_set1_ps(scale));
  }
#else
  static constexpr bool kInt4 = true;
  Vec scaled(Vec code) const { return (code - Vec(static_cast<float>(zero))) * Vec(scale); }
#endif
};

struct Nf4Numbers {
  float absmax;

  float operator[](int code) const { return kNf4[code] * absmax; }
#if defined(CPU_CAPABILITY_AVX512)
  __m512 all() const { return _mm512_mul_ps(_mm512_loadu_ps(kNf4), _mm512_set1_ps(absmax)); }
#else
  static constexpr bool kInt4 = false;
  Vec scaled(Vec number) const { return number * Vec(absmax); }
#endif
};

#if defined(CPU_CAPABILITY_AVX512)
// A table of 16 numbers as T, which decodes a step of codes at a time, two codes per byte.
template <class T>
struct Table;

template <>
struct Table<float> {
  static constexpr int kCount = 16;
  __m512 numbers;

  explicit Table(const __m512& numbers) : numbers(numbers) {}
  // vpermps uses 4 bits per lane, so the byte's high half needs a shift and its low half none.
  void look_up(const uint8_t* bytes, float* out) const {
    const __m512i wide =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i codes = _mm512_or_si512(_mm512_srli_epi64(wide, 4), _mm512_slli_epi64(wide, 32));
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(codes, numbers));
  }
};

template <>
struct Table<BFloat16> {
  static constexpr int kCount = 32;
  __m512i numbers;  // the table twice, because vpermw uses 5 bits

  explicit Table(const __m512& numbers) : numbers(narrow<BFloat16>({numbers, numbers})) {}
  void look_up(const uint8_t* bytes, BFloat16* out) const {
    const __m512i wide =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i codes = _mm512_or_si512(_mm512_srli_epi32(wide, 4), _mm512_slli_epi32(wide, 16));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes, numbers));
  }
};
#endif

inline int half(const uint8_t* bytes, int64_t i) {
  return i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15;
}

// out [n] = the numbers of codes [first, first + n), two codes per byte.
template <class T, class Numbers>
FUSEDOPS_INLINE void look_up(const uint8_t* bytes, int64_t first, int64_t n, const Numbers& numbers,
                             T* out) {
  int64_t i = 0;
  const auto store_number = [&] { out[i] = T(numbers[half(bytes, first + i)]); };
  for (; i < n && (first + i) % 2 != 0; ++i) store_number();
#if defined(CPU_CAPABILITY_AVX512)
  const Table<T> table(numbers.all());
  for (; i + table.kCount <= n; i += table.kCount) table.look_up(bytes + (first + i) / 2, out + i);
#else
  const NibbleTable<Numbers::kInt4> table;
  for (; i + kNibbles <= n; i += kNibbles) {
    __m256 unscaled[4];
    table.look_up(bytes + (first + i) / 2, unscaled);
    for (int j = 0; j < 4; j += 2) {
      const Floats v{numbers.scaled(unscaled[j]), numbers.scaled(unscaled[j + 1])};
      store(out + i + j * Vec::size(), v, Full{});
    }
  }
#endif
  for (; i < n; ++i) store_number();
}

// Calls f(first, n, group) for each group's share of columns [begin, end).
template <class Function>
void each_group(int64_t begin, int64_t end, int64_t size, const Function& f) {
  for (int64_t j = begin; j < end;) {
    const int64_t group = j / size, last = std::min(end, (group + 1) * size);
    f(j, last - j, group);
    j = last;
  }
}

#if defined(__AVX512BF16__)
// Returns, for each 16-bit lane of four codes, the group's bits in a table's index.
template <int kGroup>
__m512i group_of_lane() {
  uint16_t bits[32];
  for (int i = 0; i < 32; ++i) bits[i] = i * 4 / kGroup << 4;
  return _mm512_loadu_si512(bits);
}

// Decodes n codes from the flattened weight's code `first` on, in order_by_lane's order.
// numbers(group): the values of a group's codes. A register has codes of 1, 2 or 4 groups, and a
// table has the numbers of 2.
template <int kGroup, class Numbers>
FUSEDOPS_INLINE void look_up_by_lane(const Codes& w, int64_t first, int64_t n,
                                     const Numbers& numbers, BFloat16* out) {
  constexpr int kGroups = kHalves / kGroup, kNext = kGroups > 1 ? 1 : 0;
  const uint8_t* const bytes = w.codes + first / 2;
  const __m512i low_bits = _mm512_set1_epi16(15), groups = group_of_lane<kGroup>();
  int64_t group = first / kGroup;
  for (int64_t i = 0; i < n; i += kHalves, group += kGroups) {
    const __m512i codes = _mm512_loadu_si512(bytes + i / 2);
    const auto table = [&](int j) {
      return narrow<BFloat16>({numbers(group + j).all(), numbers(group + j + kNext).all()});
    };
    const __m512i low = table(0), high = kGroups > 2 ? __m512i(table(2)) : low;
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      const __m512i shifted = _mm512_srli_epi16(codes, 4 * s);
      constexpr int kAndOr = 0xea;  // (a & b) | c
      const __m512i index = _mm512_ternarylogic_epi32(shifted, low_bits, groups, kAndOr);
      _mm512_storeu_si512(out + i + 32 * s, kGroups > 2
                                                ? _mm512_permutex2var_epi16(low, index, high)
                                                : _mm512_permutexvar_epi16(index, low));
    }
  }
}

void read_by_lane(const Codes& w, const ReadCodes& args, int64_t row, BFloat16* out) {
  const int64_t first = row * w.k + args.begin, n = args.end - args.begin;
  const auto nf4 = [&](int64_t group) { return Nf4Numbers{w.scales[group]}; };
  const auto int4 = [&](int64_t group) { return Int4Numbers{w.zeros[group], w.scales[group]}; };
  if (w.format == WeightFormat::nf4) return look_up_by_lane<kNf4Block>(w, first, n, nf4, out);
  switch (w.group_size) {
    case 32: return look_up_by_lane<32>(w, first, n, int4, out);
    case 64: return look_up_by_lane<64>(w, first, n, int4, out);
    case 128: return look_up_by_lane<128>(w, first, n, int4, out);
  }
}
#endif

template <class T>
void read_int4(const Codes& w, const ReadCodes& args, int64_t row, T* out) {
  const int64_t groups = groups_of(w.k, w.group_size);
  const uint8_t* const bytes = w.codes + row * ((w.k + 1) / 2);
  each_group(args.begin, args.end, w.group_size, [&](int64_t j, int64_t n, int64_t group) {
    const float scale = w.scales[row * groups + group];
    const int zero = w.zeros[row * groups + group];
    look_up(bytes, j, n, Int4Numbers{zero, scale}, out + j - args.begin);
  });
}

template <class T>
void read_nf4(const Codes& w, const ReadCodes& args, int64_t row, T* out) {
  const int64_t at = row * w.k;
  each_group(at + args.begin, at + args.end, kNf4Block, [&](int64_t j, int64_t n, int64_t block) {
    look_up(w.codes, j, n, Nf4Numbers{w.scales[block]}, out + j - at - args.begin);
  });
}

// Converts codes to T, which represents them exactly.
template <class Code, class T, class Part>
FUSEDOPS_INLINE void convert(const Code* codes, T* out, Part part) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<Code, uint8_t> && std::is_same_v<T, BFloat16> &&
                std::is_same_v<Part, Full>) {
    const auto* const bytes = reinterpret_cast<const __m256i*>(codes);
    _mm512_storeu_si512(out, widen_e4m3(_mm256_loadu_si256(bytes)));
    return;
  }
#endif
  store(out, load(codes, part), part);
}

// Code: int8_t, or uint8_t for e4m3.
template <class Code, class T>
void read_bytes(const Codes& w, const ReadCodes& args, int64_t row, T* out) {
  const auto* const codes = reinterpret_cast<const Code*>(w.codes) + row * w.k;
  if (!args.scaled) {
    each_step(args.end - args.begin,
              [&](int64_t j, auto part) { convert(codes + args.begin + j, out + j, part); });
    return;
  }
  const int64_t groups = groups_of(w.k, w.group_size);
  each_group(args.begin, args.end, w.group_size, [&](int64_t j, int64_t n, int64_t group) {
    const auto scale = all(w.scales[row * groups + group]);
    each_step(n, [&](int64_t i, auto part) {
      store(out + j - args.begin + i, load(codes + j + i, part) * scale, part);
    });
  });
}

template <class T>
void read_rows_of(const Codes& w, const ReadCodes& args) {
  const int64_t n = args.end - args.begin;
  auto* out = static_cast<T*>(args.out);
  for (int64_t row = args.row; row < args.row + args.rows; ++row, out += args.ld) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (args.by_lane) {
        read_by_lane(w, args, row, out);
        continue;
      }
    }
#endif
    switch (w.format) {
      case WeightFormat::int8: read_bytes<int8_t>(w, args, row, out); break;
      case WeightFormat::fp8: read_bytes<uint8_t>(w, args, row, out); break;
      case WeightFormat::int4: read_int4(w, args, row, out); break;
      case WeightFormat::nf4: read_nf4(w, args, row, out); break;
    }
    std::fill(out + n, out + args.ld, T(0));
  }
}

void read_integers(const Codes& w, const ReadCodes& args) {
  const int64_t n = args.end - args.begin;
  auto* out = static_cast<uint8_t*>(args.out);
  for (int64_t row = args.row; row < args.row + args.rows; ++row, out += args.ld) {
    std::fill(std::copy_n(w.at(row, args.begin), n, out), out + args.ld, 0);
  }
}

template <class T>
float largest_of(const T* x, int64_t n) {
  Floats most;
  each_step(n, [&](int64_t j, auto part) {
    const auto v = live(load(x + j, part), part);
    most = largest(most, {v.lo.abs(), v.hi.abs()});
  });
  return largest(most);
}

// Rounds v to the nearest numbers of float8_e4m3fn; v is within its range. Adding 1.5 * 2^20 times
// v's power of two leaves 3 fraction bits of v. The power is at least 2^-6, because smaller numbers
// have steps of 2^-9. A zero keeps v's sign.
inline Vec nearest_e4m3(Vec v) {
  const Ints exponent = at::vec::cast<int32_t>(v) & Ints(0x7f800000);
  const Ints power = at::vec::maximum(exponent, Ints(0x3c800000));
  const Vec large = at::vec::cast<float>(power + Ints(0x0a400000));
  return ((v + large) - large) | (v & Vec(-0.f));
}

template <class T, class Out>
void e4m3_of(const T* x, int64_t n, float inverse, Out* out) {
  const Vec times(inverse);
  each_step(n, [&](int64_t j, auto part) {
    const auto v = load(x + j, part);
    store_codes(out + j,
                {nearest_e4m3(as_rounded(v.lo * times)), nearest_e4m3(as_rounded(v.hi * times))},
                part);
  });
}

// Writes a row's codes and, for integers, returns their sum.
template <class T, class Out>
int32_t codes_of(const T* x, int64_t n, float inverse, Out* out) {
  const Vec times(inverse), most(kLargestInt8), least(-kLargestInt8);
  Ints sums(0);
  each_step(n, [&](int64_t j, auto part) {
    const auto v = load(x + j, part);
    const Floats codes{at::vec::clamp((v.lo * times).round(), least, most),
                       at::vec::clamp((v.hi * times).round(), least, most)};
    store_codes(out + j, codes, part);
    if constexpr (std::is_same_v<Out, int8_t>) {
      sums = sums + at::vec::convert_to_int_of_same_size(codes.lo + codes.hi);
    }
  });
  return at::vec::vec_reduce_all([](Ints a, Ints b) { return a + b; }, sums);
}

template <class T, class Out>
void read_row(const ReadInput& args) {
  const auto* const x = static_cast<const T*>(args.x);
  auto* const out = static_cast<Out*>(args.out);
  std::fill(out + args.k, out + args.padded, Out(0));
  if (args.rounds == InputFormat::none) {
    if constexpr (!std::is_same_v<Out, int8_t>) {
      each_step(args.k, [&](int64_t j, auto part) {
        auto v = load(x + j, part);
        if (args.factors != nullptr) v = v * load(args.factors + j, part);
        store(out + j, v, part);
      });
    }
    return;
  }
  const float most = largest_of(x, args.k);
  const bool finite = std::isfinite(most);
  const float step = most * (1 / largest_code(args.rounds));
  const float inverse = step >= kSmallestScale ? 1 / step : 0;
  *args.step = finite ? step : NAN;
  *args.sum = 0;
  if (!finite) {
    std::fill_n(out, args.k, Out(0));
  } else if (args.rounds == InputFormat::int8) {
    *args.sum = codes_of(x, args.k, inverse, out);
  } else if constexpr (std::is_same_v<Out, int8_t>) {
    e4m3_of(x, args.k, inverse, reinterpret_cast<uint8_t*>(out));
  } else {
    e4m3_of(x, args.k, inverse, out);
  }
}

}  // namespace

void read_codes(const Codes& weight, const ReadCodes& args) {
  switch (args.operand) {
    case Operand::float32: return read_rows_of<float>(weight, args);
    case Operand::bfloat16: return read_rows_of<BFloat16>(weight, args);
    case Operand::integer: return read_integers(weight, args);
  }
}

void read_input(const ReadInput& args) {
  with_type(args.dtype, [&]<class T>(T) {
    switch (args.operand) {
      case Operand::float32: return read_row<T, float>(args);
      case Operand::bfloat16: return read_row<T, BFloat16>(args);
      case Operand::integer: return read_row<T, int8_t>(args);
    }
  });
}

}  // namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY
