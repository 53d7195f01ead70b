// The inner loops of float32 matrix products, and the packing of their operands. A tile of c, kRows
// by two vectors, stays in registers over the depth: each step takes kRows broadcasts and two loads
// for 2 kRows multiply-adds. The operands are packed into panels in the order in which tiles read
// them, so strides and 16-bit dtypes matter only to packing.

#include "csrc/cpu/isa/linear/product.h"

#include <algorithm>
#include <utility>

#include "csrc/cpu/isa/tile_product.h"
#include "csrc/cpu/isa/vec.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

namespace {

constexpr int kRows = kRowsInRegisters;
constexpr int kLanes = Vec::size(), kColumns = 2 * kLanes;
static_assert(kPanel % kColumns == 0 && kRows <= kStrip && kLanes <= kPanel);

using Order = int32_t __attribute__((vector_size(sizeof(Vec))));

// c = a b, or c += a b, for kLive rows of the panels a [depth, kRows] and b [depth, kColumns].
template <int kLive>
void tile(const float* a, const float* b, const ProductBlock& block, float* c, int columns) {
  const int64_t depth = block.depth, stride = block.c_stride;
  if (block.add) {
#pragma GCC unroll 16
    for (int r = 0; r < kLive; ++r) prefetch(c + r * stride);
  }
  Lanes sum[kLive][2] = {};
  for (int64_t p = 0; p < depth; ++p, a += kRows, b += kColumns) {
    const Lanes low = lanes(b), high = lanes(b + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kLive; ++r) {
      sum[r][0] += a[r] * low;
      sum[r][1] += a[r] * high;
    }
  }
  const auto finish = [&](float* row, int r, auto part) {
    Floats v{static_cast<Register>(sum[r][0]), static_cast<Register>(sum[r][1])};
    if (block.add) v = v + load(row, part);
    store(row, v, part);
  };
#pragma GCC unroll 16
  for (int r = 0; r < kLive; ++r) {
    columns == kColumns ? finish(c + r * stride, r, Full{})
                        : finish(c + r * stride, r, Tail{columns});
  }
}

using Tile = decltype(&tile<1>);

template <int... kFewer>
Tile tile_of(int rows, std::integer_sequence<int, kFewer...>) {
  constexpr Tile tiles[] = {tile<kFewer + 1>...};
  return tiles[rows - 1];
}

// One step of a transpose: in each pair of rows kHalf apart, swaps the off-diagonal blocks of
// kHalf elements.
template <int kHalf>
FUSEDOPS_INLINE void exchange(Lanes (&rows)[kLanes]) {
  Order low, high;
  for (int j = 0; j < kLanes; ++j) {
    low[j] = j & kHalf ? kLanes + j - kHalf : j;
    high[j] = j & kHalf ? kLanes + j : j + kHalf;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kHalf) continue;
    const Lanes a = rows[i], b = rows[i + kHalf];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + kHalf] = __builtin_shuffle(a, b, high);
  }
}

FUSEDOPS_INLINE void transpose(Lanes (&rows)[kLanes]) {
  if constexpr (kLanes == 16) exchange<8>(rows);
  exchange<4>(rows);
  exchange<2>(rows);
  exchange<1>(rows);
}

template <class T>
FUSEDOPS_INLINE Lanes widened_part(const T* x, int count) {
  return static_cast<Lanes>(static_cast<Register>(load(x, Tail{count}).lo));
}

// Packs `live` lines of x, `stride` apart, into a panel [depth, kWide], padded with zeros. A store
// may run into the elements that the next store writes.
template <int kWide, class T>
void pack_across(const T* x, int64_t stride, int live, int64_t depth, float* panel) {
  for (int64_t p = 0; p < depth; p += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, depth - p));
    for (int first = 0; first < kWide; first += kLanes) {
      Lanes rows[kLanes] = {};
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const int line = first + i;
        if (line >= kWide || line >= live) continue;
        const T* const from = x + line * stride + p;
        rows[i] = count == kLanes ? static_cast<Lanes>(widened(from)) : widened_part(from, count);
      }
      transpose(rows);
      float* const to = panel + p * kWide + first;
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        if (j < count) lanes(to + j * kWide) = rows[j];
      }
    }
  }
}

// Packs the first elements of a line of `rest`, padded with zeros. `over`: the next kStep elements
// of `to` may be written.
template <int kWide, class T>
FUSEDOPS_INLINE void pack_step(const T* from, int64_t rest, bool over, float* to) {
  if constexpr (!std::is_same_v<T, float>) {
    if (over && rest >= kStep) {
      store(to, load(from, Full{}), Full{});
      return;
    }
  }
  if (rest >= kWide) {
    for (int i = 0; i < kWide; ++i) to[i] = static_cast<float>(from[i]);
  } else {
    for (int i = 0; i < kWide; ++i) to[i] = i < rest ? static_cast<float>(from[i]) : 0.f;
  }
}

// Packs adjacent lines into panels, kDeep steps of depth at a time. With more, the lines of x and
// of the panels, which are far apart, would evict each other from the cache.
template <int kWide, class T>
void pack_along(const T* x, int64_t stride, int64_t lines, int64_t depth, float* panels) {
  constexpr int64_t kDeep = 16;
  for (int64_t first = 0; first < depth; first += kDeep) {
    const int64_t last = std::min(first + kDeep, depth);
    for (int64_t line = 0; line < lines; line += kWide) {
      for (int64_t p = first; p < last; ++p) {
        const bool over = p * kWide + kStep <= depth * kWide;  // what follows is packed later
        pack_step<kWide>(x + p * stride + line, lines - line, over,
                         panels + line * depth + p * kWide);
      }
    }
  }
}

// Packs `lines` lines of x, line_stride apart, each with `depth` elements, depth_stride apart.
template <int kWide, class T>
void pack(const T* x, int64_t line_stride, int64_t depth_stride, int64_t lines, int64_t depth,
          float* panels) {
  if (line_stride == 1) return pack_along<kWide>(x, depth_stride, lines, depth, panels);
  for (int64_t line = 0; line < lines; line += kWide) {
    const int live = static_cast<int>(std::min<int64_t>(kWide, lines - line));
    pack_across<kWide>(x + line * line_stride, line_stride, live, depth, panels + line * depth);
  }
}

}  // namespace

void pack_columns(const Matrix& b, int64_t depth, int64_t begin, int64_t end, float* packed) {
  with_type(b.dtype, [&]<class T>(T) {
    pack<kColumns>(static_cast<const T*>(b.data) + begin * b.column_stride, b.column_stride,
                   b.row_stride, end - begin, depth, packed + begin * depth);
  });
}

void product_rows(const ProductBlock& block, int64_t begin, int64_t end, float* packed) {
  const auto& a = block.a;
  const int64_t depth = block.depth;
  with_type(a.dtype, [&]<class T>(T) {
    pack<kRows>(static_cast<const T*>(a.data) + begin * a.row_stride, a.row_stride, a.column_stride,
                end - begin, depth, packed);
  });
  for (int64_t j = 0; j < block.columns; j += kColumns) {
    const int columns = static_cast<int>(std::min<int64_t>(kColumns, block.columns - j));
    for (int64_t i = begin; i < end; i += kRows) {
      const int rows = static_cast<int>(std::min<int64_t>(kRows, end - i));
      tile_of(rows, std::make_integer_sequence<int, kRows>())(packed + (i - begin) * depth,
                                                              block.b + j * depth, block,
                                                              block.c + i * block.c_stride + j,
                                                              columns);
    }
  }
}

}  // namespace fusedops::cpu::linear::CPU_CAPABILITY
