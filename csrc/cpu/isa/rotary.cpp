// The loops of the rotary embedding: one pass over a head at a time. If a position's heads are
// adjacent, positions are the outer loop. Otherwise heads are, for kBlock positions whose cos and
// sin stay in the cache.

#include "csrc/cpu/isa/rotary.h"

#include <algorithm>
#include <cstring>

#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu::rotary::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

constexpr int64_t kBlock = 16;
constexpr int64_t kPrefetchDistance = 4096;  // bytes

// Swaps a and b in each pair of neighbours (a, b).
inline Vec neighbours(Vec v) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_permute_ps(v, 0b10110001);
#else
  return _mm256_permute_ps(v, 0b10110001);
#endif
}

// For each pair (a, b): x c - s in a's lane, x c + s in b's lane.
inline Vec minus_plus(Vec x, Vec c, Vec s) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_fmaddsub_ps(x, c, s);
#else
  return _mm256_fmaddsub_ps(x, c, s);
#endif
}

// For each pair (a, b): x c + s in a's lane, x c - s in b's lane.
inline Vec plus_minus(Vec x, Vec c, Vec s) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_fmsubadd_ps(x, c, s);
#else
  return _mm256_fmsubadd_ps(x, c, s);
#endif
}

template <bool kTransposed>
inline Vec rotated_pairs(Vec x, Vec c, Vec s) {
  if constexpr (kTransposed) return plus_minus(x, c, neighbours(x * s));
  return minus_plus(x, c, neighbours(x) * s);
}

struct Pair {
  Vec a, b;
};

// Rotates a and b. c and s hold the factors for a and for b.
template <bool kTransposed>
inline Pair rotated(Vec a, Vec b, Pair c, Pair s) {
  if constexpr (kTransposed) {
    return {at::vec::fmadd(a, c.a, b * s.b), at::vec::fmsub(b, c.b, a * s.a)};
  }
  return {at::vec::fmsub(a, c.a, b * s.a), at::vec::fmadd(b, c.b, a * s.b)};
}

template <class T>
const T* moved(const void* p, int64_t offset) {
  return static_cast<const T*>(p) + offset;
}

int64_t offset(const RotaryStrides& at, int64_t batch, int64_t head, int64_t seq) {
  return batch * at.batch + head * at.head + seq * at.seq;
}

template <class From, class Table, class To, bool kTransposed>
inline void interleaved_row(const From* x, const Table* cos, const Table* sin, To* y, int64_t n) {
  each_step(n, [=](int64_t i, auto part) {
    const auto v = load(x + i, part), c = load(cos + i, part), s = load(sin + i, part);
    store(y + i,
          {rotated_pairs<kTransposed>(v.lo, c.lo, s.lo),
           rotated_pairs<kTransposed>(v.hi, c.hi, s.hi)},
          part);
  });
}

template <class From, class Table, class To, bool kTransposed>
inline void halves_row(const From* x, const Table* cos, const Table* sin, To* y, int64_t n) {
  const int64_t half = n / 2;
  each_step(half, [=](int64_t i, auto part) {
    const auto a = load(x + i, part), b = load(x + half + i, part);
    const auto ca = load(cos + i, part), cb = load(cos + half + i, part);
    const auto sa = load(sin + i, part), sb = load(sin + half + i, part);
    const auto lo = rotated<kTransposed>(a.lo, b.lo, {ca.lo, cb.lo}, {sa.lo, sb.lo});
    const auto hi = rotated<kTransposed>(a.hi, b.hi, {ca.hi, cb.hi}, {sa.hi, sb.hi});
    store(y + i, {lo.a, hi.a}, part);
    store(y + half + i, {lo.b, hi.b}, part);
  });
}

template <class From, class To>
inline void copied_row(const From* x, To* y, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(static_cast<void*>(y), x, n * sizeof(To));
  } else {
    each_step(n, [=](int64_t i, auto part) { store(y + i, load(x + i, part), part); });
  }
}

template <class From, class Table, class To, bool kInterleaved, bool kTransposed>
inline void row(const From* x, const Table* cos, const Table* sin, To* y, int64_t n,
                int64_t width) {
  for (int64_t i = 0; i < width; i += kStep) prefetch(x + kPrefetchDistance / sizeof(From) + i);
  if constexpr (kInterleaved) {
    interleaved_row<From, Table, To, kTransposed>(x, cos, sin, y, n);
  } else {
    halves_row<From, Table, To, kTransposed>(x, cos, sin, y, n);
  }
  if (n < width) copied_row(x + n, y + n, width - n);
}

template <class From, class Table, class To, bool kInterleaved, bool kTransposed>
void positions(const RotaryArguments& args, int64_t batch, int64_t begin, int64_t end) {
  for (int i = 0; i < args.count; ++i) {
    const auto& t = args.tensors[i];
    for (int64_t head = 0; head < t.heads; ++head) {
      for (int64_t seq = begin; seq < end; ++seq) {
        row<From, Table, To, kInterleaved, kTransposed>(
            moved<From>(t.x, offset(t.x_at, batch, head, seq)),
            moved<Table>(args.cos, offset(args.cos_at, batch, 0, seq)),
            moved<Table>(args.sin, offset(args.sin_at, batch, 0, seq)),
            static_cast<To*>(t.y) + offset(t.y_at, batch, head, seq), args.rotary, t.width);
      }
    }
  }
}

template <class From, class Table, class To, bool kInterleaved, bool kTransposed>
void blocks(const RotaryArguments& args, int64_t begin, int64_t end) {
  const auto& at = args.tensors[0].x_at;
  const int64_t block = at.head < at.seq ? 1 : kBlock;
  while (begin < end) {
    const int64_t batch = begin / args.seq, seq = begin % args.seq;
    const int64_t count = std::min({block, args.seq - seq, end - begin});
    positions<From, Table, To, kInterleaved, kTransposed>(args, batch, seq, seq + count);
    begin += count;
  }
}

template <class From, class Table, class To, bool kTransposed>
void with_layout(const RotaryArguments& args, int64_t begin, int64_t end) {
  if (args.interleaved) return blocks<From, Table, To, true, kTransposed>(args, begin, end);
  blocks<From, Table, To, false, kTransposed>(args, begin, end);
}

// With a float32 table, a forward's outputs and a backward's inputs are float32.
template <class T>
void with_types(const RotaryArguments& args, int64_t begin, int64_t end) {
  if (args.from == args.to) {
    if (args.transposed) return with_layout<T, T, T, true>(args, begin, end);
    return with_layout<T, T, T, false>(args, begin, end);
  }
  if (args.transposed) return with_layout<float, float, T, true>(args, begin, end);
  with_layout<T, float, float, false>(args, begin, end);
}

}  // namespace

void rotary_positions(const RotaryArguments& args, int64_t begin, int64_t end) {
  switch (args.transposed ? args.to : args.from) {
    case Dtype::float32: return with_types<float>(args, begin, end);
    case Dtype::bfloat16: return with_types<BFloat16>(args, begin, end);
    case Dtype::float16: return with_types<Half>(args, begin, end);
  }
}

}  // namespace fusedops::cpu::rotary::CPU_CAPABILITY
