// Products of a few rows with a weight, limited by the reading of the weight.
//
// A block is up to 4 rows of x by 4 of w (1 or 2 by 8; half as many of w on AVX2, which has half
// the registers): each register of w is loaded once for all rows of x, and sums run along the
// depth. The depth is cut into pieces, so that a piece of x stays in the first cache for 8 rows of
// w, and so that no chain of sums is long. The rows of w that come next are prefetched: in pages of
// 4 KiB, where the processor's own prefetching ends with each page, one row after the other is read
// at 16 GB/s on a Zen 4, and 8 with prefetching at 25.

#include "csrc/cpu/isa/linear/few.h"

#include <algorithm>
#include <cstring>

#include "csrc/cpu/isa/lanes.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

constexpr int64_t kPiece = 2048;  // bytes of a row of w per piece of the depth
constexpr int64_t kTogether = 8;  // rows of w that read the same piece of x
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kColumns = 4;  // rows of w per block; twice as many if x has 1 or 2
#else
constexpr int kColumns = 2;
#endif

// A dot product in float32. W: the weight's type; x is packed as Number.
template <class W>
struct OfFloats {
  using Weight = W;
  using Number = float;
  using Lanes = Vec;
  static constexpr int kLanes = Vec::size();

  static Lanes load(const float* p) { return Vec::loadu(p); }
  static Lanes load_w(const W* p) {
    if constexpr (std::is_same_v<W, float>) return Vec::loadu(p);
    Vec numbers;
    if constexpr (!std::is_same_v<W, float>) at::vec::load_to_float(p, numbers);
    return numbers;
  }
  static Vec add(Vec sums, Lanes x, Lanes w) { return at::vec::fmadd(x, w, sums); }
};

#if defined(__AVX512BF16__)
struct OfBfloat16 {
  using Weight = BFloat16;
  using Number = BFloat16;
  using Lanes = __m512i;
  static constexpr int kLanes = 32;

  static Lanes load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static Lanes load_w(const BFloat16* p) { return load(p); }
  static Vec add(Vec sums, Lanes x, Lanes w) {
    return _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)w);
  }
};
#endif

// Calls f with the dot product for a weight's dtype.
template <class Function>
void with_dot(Dtype dtype, const Function& f) {
  switch (dtype) {
#if defined(__AVX512BF16__)
    case Dtype::bfloat16: return f(OfBfloat16());
#else
    case Dtype::bfloat16: return f(OfFloats<BFloat16>());
#endif
    case Dtype::float16: return f(OfFloats<Half>());
    default: return f(OfFloats<float>());
  }
}

template <class Dot>
constexpr int64_t padded(int64_t k) {
  return (k + Dot::kLanes - 1) / Dot::kLanes * Dot::kLanes;
}

// Loads the last `count` elements of a row of w, and zeros.
template <class Dot>
FUSEDOPS_INLINE typename Dot::Lanes load_rest(const typename Dot::Weight* p, int64_t count) {
  alignas(64) typename Dot::Weight rest[Dot::kLanes] = {};
  std::memcpy(rest, p, count * sizeof(*p));
  return Dot::load_w(rest);
}

// to [kRows, ld] = the sums of all lanes, or += if add.
template <int kRows, int kWide>
FUSEDOPS_INLINE void store_sums(const Vec (&sums)[kRows * kWide], float* to, int64_t ld, bool add) {
  float found[16] = {};
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kRows * kWide > 4) {
    __m512 all[16] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kWide; ++i) all[i] = sums[i];
    _mm512_storeu_ps(found, sums_of_lanes(all, [](__m512 a, __m512 b) { return a + b; }));
  } else
#endif
  {
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kWide; ++i) found[i] = sum({sums[i], Vec(0.f)});
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kWide; ++c) {
      float& sum = to[r * ld + c];
      sum = found[r * kWide + c] + (add ? sum : 0.f);
    }
  }
}

// A piece of the depth: kRows packed rows of x by kWide rows of w. fetch: whether to prefetch the
// rows of w that come next.
template <class Dot, int kRows, int kWide>
void add_piece(const typename Dot::Number* x, const typename Dot::Weight* w, int64_t ld,
               int64_t depth, bool fetch, float* to, int64_t ld_to, bool add) {
  constexpr int kLanes = Dot::kLanes;
  Vec sums[kRows * kWide];
#pragma GCC unroll 16
  for (auto& sum : sums) sum = Vec(0.f);
  const auto step = [&](int64_t j, const auto& load_w) __attribute__((always_inline)) {
    typename Dot::Lanes columns[kWide];
#pragma GCC unroll 8
    for (int c = 0; c < kWide; ++c) columns[c] = load_w(w + c * ld + j);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const auto row = Dot::load(x + j * kRows + r * kLanes);
#pragma GCC unroll 8
      for (int c = 0; c < kWide; ++c) {
        sums[r * kWide + c] = Dot::add(sums[r * kWide + c], row, columns[c]);
      }
    }
  };
  int64_t j = 0;
  if (fetch) {
    for (; j + kLanes <= depth; j += kLanes) {
      step(j, [&](const auto* p) __attribute__((always_inline)) {
        __builtin_prefetch(p + kWide * ld, 0, 2);
        return Dot::load_w(p);
      });
    }
  } else {
    for (; j + kLanes <= depth; j += kLanes) step(j, Dot::load_w);
  }
  if (j < depth) step(j, [&](const auto* p) { return load_rest<Dot>(p, depth - j); });
  store_sums<kRows, kWide>(sums, to, ld_to, add);
}

// The same for any number of packed rows: at most kAtOnce, or 2 if kWide is more than kColumns.
template <class Dot, int kWide, class... Args>
FUSEDOPS_INLINE void add_rows(int64_t rows, Args... args) {
  if (rows == 1) return add_piece<Dot, 1, kWide>(args...);
  if (rows == 2) return add_piece<Dot, 2, kWide>(args...);
  if constexpr (kWide <= kColumns) {
    if (rows == 3) return add_piece<Dot, 3, kWide>(args...);
    return add_piece<Dot, 4, kWide>(args...);
  }
}

// Groups of rows that are packed together: as few as possible, of nearly the same size.
struct Groups {
  int64_t count, size, larger;  // the first `larger` groups have one row more than size

  explicit Groups(int64_t rows)
      : count((rows + kAtOnce - 1) / kAtOnce), size(rows / count), larger(rows % count) {}

  // Calls f(first row, number of rows) for each group.
  template <class Function>
  FUSEDOPS_INLINE void each(const Function& f) const {
    for (int64_t g = 0, row = 0; g < count; ++g) {
      const int64_t rows = size + (g < larger);
      f(row, rows);
      row += rows;
    }
  }
};

// Rows [first, last) of w, at most kTogether.
template <class Dot>
void multiply_together(const FewRows& args, const Groups& groups, int64_t first, int64_t last,
                       float* to) {
  using Weight = typename Dot::Weight;
  const auto* const x = static_cast<const typename Dot::Number*>(args.x);
  const int64_t piece = kPiece / sizeof(Weight), k = args.k;
  const int columns = args.rows <= 2 ? 2 * kColumns : kColumns;
  for (int64_t j = 0; j < k; j += piece) {
    const int64_t depth = std::min(piece, k - j);
    for (int64_t n = first; n < last;) {
      const bool whole = n + columns <= last;
      const auto* const w = static_cast<const Weight*>(args.w) + n * args.ld + j;
      groups.each([&](int64_t row, int64_t rows) {
        const auto* const from = x + row * padded<Dot>(k) + j * rows;
        float* const sums = to + row * args.ld_sums + n - first;
        const auto add = [&]<int kWide>() {
          add_rows<Dot, kWide>(rows, from, w, args.ld, depth, row == 0, sums, args.ld_sums, j > 0);
        };
        if (!whole) return add.template operator()<1>();
        if (columns == kColumns) return add.template operator()<kColumns>();
        add.template operator()<2 * kColumns>();
      });
      n += whole ? columns : 1;
    }
  }
}

template <class Dot>
void multiply(const FewRows& args, int64_t begin, int64_t end) {
  const Groups groups(args.rows);
  for (int64_t first = begin; first < end; first += kTogether) {
    multiply_together<Dot>(args, groups, first, std::min(first + kTogether, end),
                           args.sums + first - begin);
  }
}

template <class Dot>
void pack(const typename Dot::Weight* x, int64_t rows, int64_t k, typename Dot::Number* packed) {
  using Number = typename Dot::Number;
  constexpr int64_t kLanes = Dot::kLanes;
  Groups(rows).each([&](int64_t row, int64_t live) {
    for (int64_t r = 0; r < live; ++r) {
      const auto* const from = x + (row + r) * k;
      Number* to = packed + row * padded<Dot>(k) + r * kLanes;
      for (int64_t j = 0; j < k; j += kLanes, to += live * kLanes) {
        const int64_t count = std::min(kLanes, k - j);
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Number>(from[j + i]);
        std::fill(to + count, to + kLanes, Number(0.f));
      }
    }
  });
}

}  // namespace

void pack_few_rows(const void* x, int64_t rows, int64_t k, Dtype dtype, void* packed) {
  with_dot(dtype, [&]<class Dot>(Dot) {
    pack<Dot>(static_cast<const typename Dot::Weight*>(x), rows, k,
              static_cast<typename Dot::Number*>(packed));
  });
}

void multiply_few_rows(const FewRows& args, int64_t begin, int64_t end) {
  with_dot(args.dtype, [&]<class Dot>(Dot) { multiply<Dot>(args, begin, end); });
}

void add_bias(const float* sums, const void* bias, int64_t columns, void* out, Dtype dtype) {
  with_type(dtype, [&]<class T>(T) {
    const auto* const shift = static_cast<const T*>(bias);
    each_step(columns, [&](int64_t j, auto part) {
      auto v = load(sums + j, part);
      if (shift != nullptr) v = v + load(shift + j, part);
      store(static_cast<T*>(out) + j, v, part);
    });
  });
}

}  // namespace fusedops::cpu::linear::CPU_CAPABILITY
