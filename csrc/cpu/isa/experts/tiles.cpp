// Products of an expert's rows with its bfloat16 weight, on Intel's matrix unit (AMX).
//
// Two tiles of w are multiplied with two of x, so that four products share four loads.
//
// Along: w's tiles are read in place, as first operands, and the sums are transposed. While
// one block of w is multiplied, the next is prefetched, in equal parts over the block's products:
// the unit would wait for memory in the first pass over x, and memory for the unit in the others.
// Across: w's rows are paired up in a cache, a piece of the depth at a time, as second operands,
// and the next piece is prefetched.

#include "csrc/cpu/isa/experts/tiles.h"

#include <immintrin.h>

#include <algorithm>
#include <array>

#include "csrc/cpu/isa/amx.h"
#include "csrc/cpu/isa/operands.h"

namespace fusedops::cpu::experts::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

#if defined(__AVX512BF16__)

namespace {

constexpr int64_t kLine = 64;         // bytes of a cache line, and of a tile's row
constexpr int64_t kPieceDepth = 128;  // of w's rows that are paired up at once

// Prefetches rows [row, row + rows) of a block of w, its columns [k, k + kTileDepth).
void prefetch(const TileRows& args, int64_t row, int64_t rows, int64_t k) {
  for (int64_t i = row; i < row + rows; ++i) {
    __builtin_prefetch(args.w + i * args.ld_w + k, 0, 2);
  }
}

// kOfW tiles of w from `row` on, with kOfX tiles of x from tile `first` on. Meanwhile it prefetches
// rows [next, next + ahead).
template <int kOfW, int kOfX>
void multiply_along(const TileRows& args, int64_t row, int64_t first, int64_t next, int64_t ahead,
                    float* sums) {
  const auto* const w = args.w + row * args.ld_w;
  const auto* const x = args.x + first * kTile * args.depth;
  each_tile<4>([]<int i>() { zero_tile<i>(); });
  for (int64_t k = 0; k < args.depth; k += kTileDepth) {
    prefetch(args, next, ahead, k);
    each_tile<kOfW>([&]<int i>() {
      load_tile<4 + i>(w + i * kTile * args.ld_w + k, args.ld_w * sizeof(uint16_t));
    });
    each_tile<kOfX>([&]<int j>() {
      load_tile<6 + j>(x + (j * args.depth + k) * kTile, kLine);
      each_tile<kOfW>([&]<int i>() { add_product<2 * i + j, 4 + i, 6 + j>(); });
    });
  }
  each_tile<kOfW>([&]<int i>() {
    each_tile<kOfX>([&]<int j>() {
      alignas(64) float tile[kTile * kTile];
      store_tile<2 * i + j>(tile, kLine);
      transpose(tile, kTile, kTile, kTile, sums + (first + j) * kTile * args.ld_sums + i * kTile,
                args.ld_sums);
    });
  });
}

template <int kOfW>
void multiply_block(const TileRows& args, int64_t row, int64_t end, float* sums) {
  const int64_t tiles = (args.rows + kTile - 1) / kTile, passes = (tiles + 1) / 2;
  const int64_t next = row + kOfW * kTile, left = std::min<int64_t>(2 * kTile, end - next);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t from = left * pass / passes, to = left * (pass + 1) / passes;
    if (tiles - 2 * pass >= 2) {
      multiply_along<kOfW, 2>(args, row, 2 * pass, next + from, to - from, sums);
    } else {
      multiply_along<kOfW, 1>(args, row, 2 * pass, next + from, to - from, sums);
    }
  }
}

// Lines of a piece of w that are still to be prefetched, `some` at a time.
struct Prefetch {
  const uint16_t* w;
  int64_t ld, columns, next, last, some;

  void fetch() {
    const int64_t per_row = (columns * static_cast<int64_t>(sizeof(uint16_t)) + kLine - 1) / kLine;
    for (const int64_t end = std::min(next + some, last); next < end; ++next) {
      const auto* const row = w + next / per_row * ld;
      __builtin_prefetch(row + next % per_row * kLine / static_cast<int64_t>(sizeof(uint16_t)), 0,
                         2);
    }
  }
};

// Pairs up rows [k, k + depth) and `columns` columns of w: out [depth / 2, kAcross, 2].
void pair_piece(const TileColumns& args, int64_t k, int64_t depth, int64_t begin, int64_t columns,
                uint16_t* out, Prefetch& prefetch) {
  alignas(64) static constexpr auto order = [] {  // of the lower and the upper half of two rows
    std::array<uint16_t, 4 * kTile> places{};
    for (int i = 0; i < 4 * kTile; ++i) places[i] = i / 2 + i % 2 * 2 * kTile;
    return places;
  }();
  const __m512i lower = _mm512_load_si512(order.data()),
                upper = _mm512_load_si512(order.data() + 2 * kTile);
  for (int64_t i = 0; i < depth; i += 2) {
    prefetch.fetch();
    const auto* const a = args.w + (k + i) * args.ld_w + begin;
    const auto* const b = a + args.ld_w;
    auto* const to = out + i * kAcross;
    for (int64_t c = 0; c < columns; c += 2 * kTile) {
      const bool whole = c + 2 * kTile <= columns;
      const __mmask32 live = whole ? 0xFFFFFFFF : 0xFFFF;
      const __m512i x = _mm512_maskz_loadu_epi16(live, a + c),
                    y = _mm512_maskz_loadu_epi16(live, b + c);
      _mm512_store_si512(to + 2 * c, _mm512_permutex2var_epi16(x, lower, y));
      if (whole) _mm512_store_si512(to + 2 * c + 2 * kTile, _mm512_permutex2var_epi16(x, upper, y));
    }
  }
}

// kOfX tiles of x from row `row` on, with kOfW tiles of a piece of w.
template <int kOfX, int kOfW>
void multiply_across(const TileColumns& args, int64_t row, int64_t k, int64_t depth,
                     const uint16_t* piece, float* sums, Prefetch& prefetch) {
  const auto* const x = args.x + row * args.ld_x + k;
  each_tile<kOfX>([&]<int i>() {
    each_tile<kOfW>([&]<int j>() {
      if (k == 0) {
        zero_tile<2 * i + j>();
      } else {
        load_tile<2 * i + j>(sums + i * kTile * args.ld_sums + j * kTile,
                             args.ld_sums * sizeof(float));
      }
    });
  });
  for (int64_t d = 0; d < depth; d += kTileDepth) {
    prefetch.fetch();
    each_tile<kOfX>([&]<int i>() {
      load_tile<4 + i>(x + i * kTile * args.ld_x + d, args.ld_x * sizeof(uint16_t));
    });
    each_tile<kOfW>([&]<int j>() {
      load_tile<6 + j>(piece + d * kAcross + j * kTile * 2, 2 * kAcross * sizeof(uint16_t));
      each_tile<kOfX>([&]<int i>() { add_product<2 * i + j, 4 + i, 6 + j>(); });
    });
  }
  each_tile<kOfX>([&]<int i>() {
    each_tile<kOfW>([&]<int j>() {
      store_tile<2 * i + j>(sums + i * kTile * args.ld_sums + j * kTile,
                            args.ld_sums * sizeof(float));
    });
  });
}

template <int kOfX>
void multiply_rows(const TileColumns& args, int64_t row, int64_t k, int64_t depth,
                   const uint16_t* piece, int64_t columns, Prefetch& prefetch) {
  float* const sums = args.sums + row * args.ld_sums;
  int64_t c = 0;
  for (; c + 2 * kTile <= columns; c += 2 * kTile) {
    multiply_across<kOfX, 2>(args, row, k, depth, piece + 2 * c, sums + c, prefetch);
  }
  if (c < columns) multiply_across<kOfX, 1>(args, row, k, depth, piece + 2 * c, sums + c, prefetch);
}

}  // namespace

void multiply_tile_rows(const TileRows& args, int64_t begin, int64_t end) {
  configure_tiles();
  int64_t row = begin;
  for (; row + 2 * kTile <= end; row += 2 * kTile) {
    multiply_block<2>(args, row, end, args.sums + row - begin);
  }
  if (row < end) multiply_block<1>(args, row, end, args.sums + row - begin);
  release_tiles();
}

void multiply_tile_columns(const TileColumns& args, int64_t begin, int64_t end) {
  alignas(64) uint16_t piece[kPieceDepth * kAcross];
  configure_tiles();
  for (int64_t k = 0; k < args.depth; k += kPieceDepth) {
    const int64_t depth = std::min(kPieceDepth, args.depth - k);
    const int64_t columns = end - begin, next = std::min(kPieceDepth, args.depth - k - depth);
    const int64_t lines = next * ((columns + kTileDepth - 1) / kTileDepth),
                  steps = (args.rows + 2 * kTile - 1) / (2 * kTile) *
                          ((columns + 2 * kTile - 1) / (2 * kTile)) * (depth / kTileDepth);
    // With a few rows of x the memory is the limit, so all lines are fetched while w is paired up.
    const int64_t early = args.rows <= kTile ? lines : lines / 2;
    Prefetch prefetch{args.w + (k + depth) * args.ld_w + begin, args.ld_w, columns, 0, early,
                      (2 * early + depth - 1) / depth};
    pair_piece(args, k, depth, begin, columns, piece, prefetch);
    prefetch.last = lines;
    prefetch.some = (lines - early + steps - 1) / steps;
    int64_t row = 0;
    for (; row + kTile < args.rows; row += 2 * kTile) {
      multiply_rows<2>(args, row, k, depth, piece, columns, prefetch);
    }
    if (row < args.rows) multiply_rows<1>(args, row, k, depth, piece, columns, prefetch);
  }
  release_tiles();
}

#else

void multiply_tile_rows(const TileRows&, int64_t, int64_t) {}
void multiply_tile_columns(const TileColumns&, int64_t, int64_t) {}

#endif

}  // namespace fusedops::cpu::experts::CPU_CAPABILITY
