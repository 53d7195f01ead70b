// Products of a few rows with a weight, where reading the weight takes most of the time.
//
// A block is up to 4 rows of x by 4 of w (by 3 of w for 3 or 4 rows of x on AVX2, which has half
// the registers): each register of w is loaded once for all rows of x, and sums run along the
// depth. The depth is cut into pieces, so that a piece of x stays in the first cache for two
// blocks, and so that no chain of sums is long. The four rows of w lie apart, and each is
// prefetched: in pages of 4 KiB, where the processor's own prefetching ends with each page, one row
// after the other is read at 10 GB/s on a Xeon with AMX, and four that are 16 rows apart at 16.

#include "csrc/cpu/isa/linear/few.h"

#include <algorithm>
#include <cstring>

#include "csrc/cpu/isa/lanes.h"

namespace fusedops::cpu::linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

constexpr int64_t kPiece = 2048;      // bytes of a row of w per piece of the depth
constexpr int64_t kChain = 128;       // registers of it, if x stays in the first cache
constexpr int64_t kHeld = 16 * 1024;  // bytes of x that stay in the first cache
constexpr int64_t kTogether = 2;      // blocks that read the same piece of a larger x
constexpr int64_t kAhead = 1024;      // bytes between what is read of w and what is prefetched

// A dot product in float32. W: the weight's type; x is packed as Number.
template <class W>
struct OfFloats {
  using Weight = W;
  using Number = float;
  using Lanes = Register;
  static constexpr int kLanes = Vec::size();

  static Lanes load(const float* p) { return Vec::loadu(p); }
  static Lanes load_w(const W* p) { return widened(p); }
  static Register add(Register sums, Lanes x, Lanes w) { return x * w + sums; }
};

#if defined(__AVX512BF16__)
struct OfBfloat16 {
  using Weight = BFloat16;
  using Number = BFloat16;
  using Lanes = __m512i;
  static constexpr int kLanes = 32;

  static Lanes load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static Lanes load_w(const BFloat16* p) { return load(p); }
  static Register add(Register sums, Lanes x, Lanes w) {
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

// Where a block's sums go: row r and column c to at[r * ld + c * apart], added if `add`.
struct To {
  float* at;
  int64_t ld, apart;
  bool add;
};

// Stores the sums of all lanes.
template <int kRows, int kWide>
FUSEDOPS_INLINE void store_sums(const Register (&sums)[kRows * kWide], const To& to) {
  float totals[16] = {};
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (kRows * kWide > 4) {
    __m512 all[16] = {};
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kWide; ++i) all[i] = sums[i];
    _mm512_storeu_ps(totals, sums_of_lanes(all, [](__m512 a, __m512 b) { return a + b; }));
  } else
#else
  if constexpr (kRows * kWide > 2) {
#pragma GCC unroll 2
    for (int first = 0; first < kRows * kWide; first += 8) {
      __m256 some[8] = {};
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        if (first + i < kRows * kWide) some[i] = sums[first + i];
      }
      _mm256_storeu_ps(totals + first, sums_of_lanes(some));
    }
  } else
#endif
  {
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kWide; ++i) totals[i] = sum({Vec(sums[i]), Vec(0.f)});
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kWide; ++c) {
      float& sum = to.at[r * to.ld + c * to.apart];
      sum = totals[r * kWide + c] + (to.add ? sum : 0.f);
    }
  }
}

// A piece of kWide rows of w: w[c * apart] is the first element of row c. ahead: elements to what
// is prefetched, or 0.
template <class Weight>
struct Piece {
  const Weight* w;
  int64_t apart, depth, ahead;
};

// A piece of the depth: kRows packed rows of x by kWide rows of w.
template <class Dot, int kRows, int kWide>
void add_piece(const typename Dot::Number* x, const Piece<typename Dot::Weight>& piece,
               const To& to) {
  constexpr int kLanes = Dot::kLanes;
  const auto [w, apart, depth, ahead] = piece;
  Register sums[kRows * kWide] = {};
  const auto step = [&](int64_t j, const auto& load_w) __attribute__((always_inline)) {
    typename Dot::Lanes columns[kWide];
#pragma GCC unroll 4
    for (int c = 0; c < kWide; ++c) columns[c] = load_w(w + c * apart + j);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      auto row = Dot::load(x + j * kRows + r * kLanes);
#if !defined(CPU_CAPABILITY_AVX512)
      asm("" : "+x"(row));  // else GCC loads it again for each column
#endif
#pragma GCC unroll 4
      for (int c = 0; c < kWide; ++c) {
        sums[r * kWide + c] = Dot::add(sums[r * kWide + c], row, columns[c]);
      }
    }
  };
  int64_t j = 0;
  if (ahead > 0) {
    for (; j + kLanes <= depth; j += kLanes) {
      step(j, [&](const auto* p) __attribute__((always_inline)) {
        __builtin_prefetch(p + ahead);
        return Dot::load_w(p);
      });
    }
  } else {
    for (; j + kLanes <= depth; j += kLanes) step(j, Dot::load_w);
  }
  if (j < depth) step(j, [&](const auto* p) { return load_rest<Dot>(p, depth - j); });
  store_sums<kRows, kWide>(sums, to);
}

// The same for any number of packed rows, at most kAtOnce.
template <class Dot, int kWide, class... Args>
FUSEDOPS_INLINE void add_rows(int64_t rows, Args... args) {
  if (rows == 1) return add_piece<Dot, 1, kWide>(args...);
  if (rows == 2) return add_piece<Dot, 2, kWide>(args...);
  if (rows == 3) return add_piece<Dot, 3, kWide>(args...);
  return add_piece<Dot, 4, kWide>(args...);
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

// `blocks` blocks of kWide columns of y: block n has the columns begin + n, begin + n + blocks, and
// so on.
template <class Dot, int kWide>
void multiply_blocks(const FewRows& args, int64_t begin, int64_t blocks, float* sums) {
  using Weight = typename Dot::Weight;
  const Groups groups(args.rows);
  const auto* const x = static_cast<const typename Dot::Number*>(args.x);
  const int64_t k = args.k, row_bytes = padded<Dot>(k) * sizeof(*x);
  const bool held = args.rows * row_bytes <= kHeld;
  const int64_t most = held ? kChain * Dot::kLanes : kPiece / sizeof(Weight);
  const int64_t together = held ? 1 : kTogether;
  const int64_t ahead = held ? kAhead / sizeof(Weight) : args.ld;
  for (int64_t first = 0; first < blocks; first += together) {
    const int64_t last = std::min(first + together, blocks);
    for (int64_t j = 0; j < k; j += most) {
      for (int64_t n = first; n < last; ++n) {
        const auto* const w = static_cast<const Weight*>(args.w) + (begin + n) * args.ld + j;
        Piece<Weight> piece{w, blocks * args.ld, std::min(most, k - j), ahead};
        groups.each([&](int64_t row, int64_t rows) {
          const auto* const from = x + row * padded<Dot>(k) + j * rows;
          add_rows<Dot, kWide>(rows, from, piece,
                               To{sums + row * args.ld_sums + n, args.ld_sums, blocks, j > 0});
          piece.ahead = 0;  // only the first rows of x wait for w
        });
      }
    }
  }
}

template <class Dot, int kWide>
void multiply(const FewRows& args, int64_t begin, int64_t end) {
  const int64_t blocks = (end - begin) / kWide, whole = blocks * kWide;
  multiply_blocks<Dot, kWide>(args, begin, blocks, args.sums);
  multiply_blocks<Dot, 1>(args, begin + whole, end - begin - whole, args.sums + whole);
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
  with_dot(args.dtype, [&]<class Dot>(Dot) {
#if !defined(CPU_CAPABILITY_AVX512)
    if (args.rows > 2) return multiply<Dot, 3>(args, begin, end);
#endif
    multiply<Dot, 4>(args, begin, end);
  });
}

}  // namespace fusedops::cpu::linear::CPU_CAPABILITY
