// Dot products of rows, and the outputs made from their sums. Sums in registers run along the rows
// of both operands, so neither is packed: 4 rows of x by 4 of w, or 2 by 8, are loaded for 16 sums.

#include "csrc/cpu/isa/quantized_linear/dots.h"

#include "csrc/cpu/isa/lanes.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

// The operands' type, a register of sums, and how a register of both operands is added to it.
struct OfFloats {
  using Number = float;
  using Sum = float;
  Vec sums{0.f};

  static Vec load(const float* p) { return Vec::loadu(p); }
  static Vec load_w(const float* p) { return load(p); }
  void add(const Vec& x, const Vec& w) { sums = at::vec::fmadd(x, w, sums); }
};

#if defined(__AVX512BF16__)
struct OfBfloat16 {
  using Number = BFloat16;
  using Sum = float;
  __m512 sums = _mm512_setzero_ps();

  static __m512i load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static __m512i load_w(const BFloat16* p) { return load(p); }
  void add(__m512i x, __m512i w) { sums = _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)w); }
};

struct OfIntegers {
  using Number = int8_t;
  using Sum = int32_t;
  __m512i sums = _mm512_setzero_si512();

  static __m512i load(const int8_t* p) { return _mm512_loadu_si512(p); }
  static __m512i load_w(const int8_t* p) {
    return _mm512_xor_si512(load(p), _mm512_set1_epi8(-128));
  }
  // vpdpbusd takes one unsigned operand: w + 128.
  void add(__m512i x, __m512i w) { sums = _mm512_dpbusd_epi32(sums, w, x); }
};
#endif

// Returns each dot product's lane sum.
template <class Dot, int kCount>
FUSEDOPS_INLINE void store_sums(const Dot (&dots)[kCount], typename Dot::Sum (&out)[kCount]) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 x[16] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) x[i] = (__m512)dots[i].sums;
  const __m512 sums = sums_of_lanes(x, [](__m512 a, __m512 b) {
    if constexpr (std::is_same_v<typename Dot::Sum, float>) return a + b;
    return (__m512)_mm512_add_epi32((__m512i)a, (__m512i)b);
  });
  _mm512_mask_storeu_ps(out, (1u << kCount) - 1, sums);
#else
  for (int i = 0; i < kCount; ++i) out[i] = sum({dots[i].sums, Vec(0.f)});
#endif
}

// The sums of kRows rows by kColumns columns.
template <class Dot, int kRows, int kColumns>
void add_block(const Dots& args, const typename Dot::Number* x, const typename Dot::Number* w,
               typename Dot::Sum* to) {
  constexpr int kStepSize = sizeof(Register) / sizeof(*x);
  Dot dots[kRows * kColumns];
  for (int64_t i = 0; i < args.k; i += kStepSize) {
    decltype(Dot::load(w)) columns[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) columns[c] = Dot::load_w(w + c * args.ld_w + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto row = Dot::load(x + r * args.ld_x + i);
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) dots[r * kColumns + c].add(row, columns[c]);
    }
  }
  typename Dot::Sum sums[kRows * kColumns];
  store_sums(dots, sums);
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      auto& sum = to[r * args.ld_out + c];
      sum = sums[r * kColumns + c] + (args.add ? sum : 0);
    }
  }
}

// kColumns columns, in pairs if registers are few.
template <class Dot, int kRows, int kColumns>
void add_rows(const Dots& args, int64_t row) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int kAtOnce = kColumns;
#else
  constexpr int kAtOnce = 2;
#endif
  const auto* const x = static_cast<const typename Dot::Number*>(args.x) + row * args.ld_x;
  const auto* const w = static_cast<const typename Dot::Number*>(args.w);
  auto* const out = static_cast<typename Dot::Sum*>(args.out) + row * args.ld_out;
  for (int c = 0; c < kColumns; c += kAtOnce) {
    add_block<Dot, kRows, kAtOnce>(args, x, w + c * args.ld_w, out + c);
  }
}

template <class Dot>
void add_all(const Dots& args) {
  if (args.rows == 1) return add_rows<Dot, 1, 8>(args, 0);
  if (args.rows == 2) return add_rows<Dot, 2, 8>(args, 0);
  int64_t row = 0;
  for (; row + 4 <= args.rows; row += 4) add_rows<Dot, 4, 4>(args, row);
  switch (args.rows - row) {
    case 3: return add_rows<Dot, 3, 4>(args, row);
    case 2: return add_rows<Dot, 2, 4>(args, row);
    case 1: return add_rows<Dot, 1, 4>(args, row);
  }
}

template <class Part>
Floats sums_of(const FinishRow& args, int64_t j, Part part) {
  if (args.operand != Operand::integer) return load(static_cast<const float*>(args.sums) + j, part);
  const auto* const sums = static_cast<const int32_t*>(args.sums) + j;
  using Ints = at::vec::Vectorized<int32_t>;
  const Ints above(128 * args.sum);
  const auto at = [&](int from, int count) {
    return at::vec::convert_to_fp_of_same_size<float>(Ints::loadu(sums + from, count) - above);
  };
  const int below = low(Tail{part.count});
  return {at(0, below), at(below, part.count - below)};
}

}  // namespace

void dot_rows(const Dots& args) {
  switch (args.operand) {
    case Operand::float32: return add_all<OfFloats>(args);
#if defined(__AVX512BF16__)  // callers never request these on other ISAs
    case Operand::bfloat16: return add_all<OfBfloat16>(args);
    case Operand::integer: return add_all<OfIntegers>(args);
#else
    default: return;
#endif
  }
}

void finish_sums(const FinishRow& args) {
  with_type(args.dtype, [&]<class T>(T) {
    const auto* const bias = static_cast<const T*>(args.bias);
    auto* const y = static_cast<T*>(args.y);
    each_step(args.n, [&](int64_t j, auto part) {
      auto v = sums_of(args, j, part) * all(args.factor);
      if (args.scales != nullptr) v = v * load(args.scales + j, part);
      if (bias != nullptr) v = v + load(bias + j, part);
      store(y + j, v, part);
    });
  });
}

}  // namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY
