// Attention's products for a few queries, q k^T and p v, on keys and values that are not packed.

#include "csrc/cpu/isa/attention/decode.h"

#include <algorithm>
#include <cstring>

#include "csrc/cpu/isa/lanes.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::attention::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

// The number of queries per loop over keys or values.
constexpr int kRows = 4;

// Whether bfloat16 is multiplied directly: each lane adds two products to a float32 sum.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool kPairs = std::is_same_v<T, BFloat16>;
#else
template <class T>
constexpr bool kPairs = false;
#endif

// Accumulates the dot product of a query and a key, step by step.
struct Dot {
  Register sum;

  void add(const float* query, const Floats& key) {
    const auto x = load(query, Full());
    sum = at::vec::fmadd(x.hi, key.hi, at::vec::fmadd(x.lo, key.lo, Vec(sum)));
  }
#if defined(__AVX512BF16__)
  void add(const BFloat16* query, const at::vec::Vectorized<BFloat16>& key) {
    const auto x = at::vec::Vectorized<BFloat16>::loadu(query);
    sum = _mm512_dpbf16_ps(sum, (__m512bh)(__m512i)x, (__m512bh)(__m512i)key);
  }
#endif
};

// Keys or values at equal distances.
template <class T>
struct Strided {
  static constexpr bool kPaged = false;
  const T* first;
  int64_t stride;

  const T* operator()(int64_t j) const { return first + j * stride; }
  Strided from(int64_t j) const { return {(*this)(j), stride}; }
};

// Keys or values in a paged cache.
template <class T>
struct Paged {
  static constexpr bool kPaged = true;
  const void* const* each;

  const T* operator()(int64_t j) const { return static_cast<const T*>(each[j]); }
  Paged from(int64_t j) const { return {each + j}; }
};

// Calls f with the rows of dtype T.
template <class T, class F>
void with_rows(const KeyRows& of, const F& f) {
  if (of.each != nullptr) return f(Paged<T>{of.each});
  f(Strided<T>{static_cast<const T*>(of.rows.data), of.rows.stride});
}

// The sums that fit in registers.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kDots = 16;
#else
constexpr int kDots = 8;
#endif

// The sums of the lanes of each.
FUSEDOPS_INLINE void store_sums(const Dot (&dots)[kDots], float (&sums)[kDots]) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 x[kDots];
#pragma GCC unroll 16
  for (int i = 0; i < kDots; ++i) x[i] = dots[i].sum;
  _mm512_storeu_ps(sums, sums_of_lanes(x, [](__m512 a, __m512 b) { return a + b; }));
#else
  __m256 x[kDots];
#pragma GCC unroll 8
  for (int i = 0; i < kDots; ++i) x[i] = dots[i].sum;
  _mm256_storeu_ps(sums, sums_of_lanes(x));
#endif
}

template <class T, class Part>
inline auto key_step(const T* key, Part part) {
  if constexpr (kPairs<T>) {
    return at::vec::Vectorized<T>::loadu(key, part.count);
  } else {
    return load(key, part);
  }
}

// Prefetches a key before its turn: the processor does not foresee where a page's rows are.
template <class T>
inline void prefetch_row(const T* row, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t d = 0; d < width; d += kLine) __builtin_prefetch(row + d, 0, 2);
}

// Computes kCount queries' dot products with `count` keys; with kAll, count is the maximum.
template <int kCount, bool kAll, class Q, class Rows>
void some_products(const Q* q, int64_t ld_q, const Rows& k, int count, int64_t width, float* s,
                   int64_t ld) {
  constexpr int kAtOnce = kDots / kCount;
  Dot dots[kDots];
#pragma GCC unroll 16
  for (auto& dot : dots) dot.sum = Vec(0.f);  // a Vec's own zeros are written to memory
  each_step(width, [&](int64_t d, auto part) {
#pragma GCC unroll 16
    for (int i = 0; i < kAtOnce; ++i) {
      const auto key = key_step(k(kAll ? i : std::min(i, count - 1)) + d, part);
#pragma GCC unroll 4
      for (int r = 0; r < kCount; ++r) dots[r * kAtOnce + i].add(q + r * ld_q + d, key);
    }
  });
  float sums[kDots];
  store_sums(dots, sums);
  for (int r = 0; r < kCount; ++r) {
    std::copy_n(sums + r * kAtOnce, kAll ? kAtOnce : count, s + r * ld);
  }
}

// s [kCount, n] = dot products of kCount queries with n keys. Q: the dtype of the multiplication.
template <int kCount, class Q, class Rows>
void dot_products(const Q* q, int64_t ld_q, const Rows& k, int64_t n, int64_t width, float* s,
                  int64_t ld) {
  constexpr int kAtOnce = kDots / kCount;
  int64_t j = 0;
  for (; j + kAtOnce <= n; j += kAtOnce) {
    for (int i = 0; i < kAtOnce; ++i) prefetch_row(k(j + i + kAhead), width);
    some_products<kCount, true>(q, ld_q, k.from(j), kAtOnce, width, s + j, ld);
  }
  if (j < n) {
    some_products<kCount, false>(q, ld_q, k.from(j), static_cast<int>(n - j), width, s + j, ld);
  }
}

constexpr int64_t kChain = 16;
static_assert(kChain <= kAhead);

// Adds a few keys' values to one step of kCount rows' sums.
template <int kCount, bool kPaged, class Rows, class Part>
inline void add_step(const float* p, int64_t ld, const Rows& v, int64_t d, int64_t n, float* out,
                     int64_t width, Part part) {
  Floats sums[kCount];
  for (int64_t j = 0; j < n; ++j) {
    const auto value = load(v(j) + d, part);
    if constexpr (!kPaged) prefetch(v(j + kChain) + d);
    for (int r = 0; r < kCount; ++r) sums[r] = fma(all(p[r * ld + j]), value, sums[r]);
  }
  for (int r = 0; r < kCount; ++r) {
    store(out + r * width, load(out + r * width, part) + sums[r], part);
  }
}

#if defined(__AVX512BF16__)
// Like that, for an even number of keys, with p in pairs of keys.
template <int kCount, bool kPaged, class Rows, class Part>
inline void add_step(const BFloat16* p, int64_t ld, const Rows& v, int64_t d, int64_t n, float* out,
                     int64_t width, Part part) {
  using Values = at::vec::Vectorized<BFloat16>;
  __m512 even[kCount] = {}, odd[kCount] = {};  // alternate groups of four values
  for (int64_t j = 0; j < n; j += 2) {
    const __m512i a = Values::loadu(v(j) + d, part.count),
                  b = Values::loadu(v(j + 1) + d, part.count);
    prefetch(v(j + kChain) + d);
    prefetch(v(j + 1 + kChain) + d);
    const auto low = (__m512bh)_mm512_unpacklo_epi16(a, b),
               high = (__m512bh)_mm512_unpackhi_epi16(a, b);
    for (int r = 0; r < kCount; ++r) {
      int32_t pair;
      std::memcpy(&pair, p + r * ld + j, sizeof pair);
      const auto weights = (__m512bh)_mm512_set1_epi32(pair);
      even[r] = _mm512_dpbf16_ps(even[r], weights, low);
      odd[r] = _mm512_dpbf16_ps(odd[r], weights, high);
    }
  }
  const auto first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
             last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int r = 0; r < kCount; ++r) {
    const Floats sums{_mm512_permutex2var_ps(even[r], first, odd[r]),
                      _mm512_permutex2var_ps(even[r], last, odd[r])};
    store(out + r * width, load(out + r * width, part) + sums, part);
  }
}
#endif

// Calls f with a few rows, which in a page are at equal distances too.
template <class T, class F>
void with_few(const Strided<T>& rows, int64_t, const F& f) {
  f(rows);
}
template <class T, class F>
void with_few(const Paged<T>& rows, int64_t n, const F& f) {
  const auto* const first = static_cast<const char*>(rows.each[0]);
  const int64_t step = n > 1 ? static_cast<const char*>(rows.each[1]) - first : 0;
  bool equal = true;
  for (int64_t j = 0; j < n; ++j) equal &= rows.each[j] == first + j * step;
  if (!equal) return f(rows);
  f(Strided<T>{rows(0), step / static_cast<int64_t>(sizeof(T))});
}

// Adds all rows, a few keys at a time: their values stay in cache for the next step, and a longer
// chain of sums would lose accuracy.
template <class P, class Rows>
void add_all(const P* p, int64_t ld, int64_t rows, const Rows& v, int64_t n, int64_t width,
             float* out) {
  if (width == 0) return;
  const int64_t each = (kChain * kStep + width - 1) / width;  // rows that a step prefetches
  for (int64_t j = 0; j < n; j += kChain) {
    const int64_t count = std::min(kChain, n - j);
    with_few(v.from(j), count, [&](const auto& from) {
      int64_t ahead = kAhead;
      each_step(width, [&](int64_t d, auto part) {
        for (int64_t i = 0; Rows::kPaged && i < each && ahead < kAhead + count; ++i) {
          prefetch_row(v(j + ahead++), width);
        }
        int64_t r = 0;
        for (; r + kRows <= rows; r += kRows) {
          add_step<kRows, Rows::kPaged>(p + r * ld + j, ld, from, d, count, out + r * width + d,
                                        width, part);
        }
        for (; r < rows; ++r) {
          add_step<1, Rows::kPaged>(p + r * ld + j, ld, from, d, count, out + r * width + d, width,
                                    part);
        }
      });
    });
  }
}

template <class T>
void store_all(const float* x, int64_t n, T* out) {
  each_step(n, [&](int64_t j, auto part) { store(out + j, load(x + j, part), part); });
}

}  // namespace

void query_products(const float* q, int64_t ld_q, int64_t rows, const KeyRows& k, int64_t n,
                    int64_t width, float* s, int64_t ld, float* scratch) {
  with_type(k.rows.dtype, [&]<class T>(T) {
    const auto multiply = [&](const auto* queries) {
      with_rows<T>(k, [&](const auto& keys) {
        int64_t r = 0;
        for (; r + kRows <= rows; r += kRows) {
          dot_products<kRows>(queries + r * ld_q, ld_q, keys, n, width, s + r * ld, ld);
        }
        for (; r < rows; ++r) {
          dot_products<1>(queries + r * ld_q, ld_q, keys, n, width, s + r * ld, ld);
        }
      });
    };
    if constexpr (kPairs<T>) {
      auto* const narrow = reinterpret_cast<T*>(scratch);
      store_all(q, rows * ld_q, narrow);
      multiply(narrow);
    } else {
      multiply(q);
    }
  });
}

void add_values(const float* p, int64_t ld, int64_t rows, const KeyRows& v, int64_t n,
                int64_t width, float* out, float* scratch) {
  with_type(v.rows.dtype, [&]<class T>(T) {
    with_rows<T>(v, [&](const auto& values) {
      if constexpr (kPairs<T>) {
        const int64_t even = n / 2 * 2;
        auto* const narrow = reinterpret_cast<T*>(scratch);
        for (int64_t r = 0; r < rows; ++r) store_all(p + r * ld, even, narrow + r * even);
        add_all(narrow, even, rows, values, even, width, out);
        if (even < n) add_all(p + even, ld, rows, values.from(even), 1, width, out);
      } else {
        add_all(p, ld, rows, values, n, width, out);
      }
    });
  });
}

}  // namespace fusedops::cpu::attention::CPU_CAPABILITY
