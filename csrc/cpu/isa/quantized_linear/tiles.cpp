// Products with a quantized weight that is decoded to bfloat16, on Intel's matrix unit (AMX).
//
// Decoded codes are the first operand, whose tiles are row-major, so only x is packed. 16 rows of w
// are multiplied with up to 96 rows of x, whose sums stay in tile registers over the whole depth.
// The unit slows down if it gets no products for 0.3 us, and then takes 0.5 us to recover (Xeon,
// Sapphire Rapids). So the products of one piece of the depth alternate with the decoding of the
// next: after each row that is decoded, one tile of the last piece is multiplied.

#include "csrc/cpu/isa/quantized_linear/tiles.h"

#include <algorithm>

#include "csrc/cpu/isa/amx.h"
#include "csrc/cpu/isa/operands.h"

namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

#if defined(__AVX512BF16__)

namespace {

constexpr int kTileDepth = kTileBytes / sizeof(BFloat16);
constexpr int64_t kPiece = kTileRows * kTileDepth;  // as many tiles as rows
constexpr int kTilesOfX = kTiles - 2;               // one tile is for w and one for x
using Pieces = uint16_t[2][kTileRows * kPiece];     // of w, decoded

// Decodes columns [k, k + kPiece) of a row of w, and prefetches them kTileRows rows further on.
void decode(const Codes& w, const TileProducts& args, int64_t row, int64_t k, uint16_t* out) {
  const int64_t end = std::min(k + kPiece, w.k), depth = std::min(kPiece, args.depth - k);
  const auto* const last = w.at(row + kTileRows, end);
  for (const auto* p = w.at(row + kTileRows, k); p < last; p += 64) __builtin_prefetch(p, 0, 2);
  read_codes(w, {row, 1, k, end, out, depth, args.scaled, Operand::bfloat16, args.by_lane});
}

// kCount tiles of x, with rows [row, row + rows) of w.
template <int kCount>
void multiply(const Codes& w, const TileProducts& args, const uint16_t* x, int64_t row,
              int64_t rows, Pieces& pieces, float* sums) {
  each_tile<kCount>([]<int i>() { zero_tile<i>(); });
  for (int64_t k = 0; k < args.depth + kPiece; k += kPiece) {
    uint16_t* const to = pieces[k / kPiece % 2];
    const uint16_t* const from = pieces[1 - k / kPiece % 2];
    const int64_t depth = std::min(kPiece, args.depth - k);  // of the piece that is decoded
    const int64_t last = std::max<int64_t>(k - kPiece, 0),
                  last_depth = std::min(args.depth, k) - last;
    for (int64_t i = 0; i < kTileRows; ++i) {
      if (i < rows && depth > 0) decode(w, args, row + i, k, to + i * depth);
      if (i * kTileDepth >= last_depth) continue;
      load_tile<kTiles - 1>(from + i * kTileDepth, last_depth * sizeof(BFloat16));
      each_tile<kCount>([&]<int j>() {
        load_tile<kTiles - 2>(x + (j * args.depth + last + i * kTileDepth) * kTileRows, kTileBytes);
        add_product<j, kTiles - 1, kTiles - 2>();
      });
    }
  }
  each_tile<kCount>([&]<int j>() {
    alignas(64) float tile[kTileRows * kTileRows];
    store_tile<j>(tile, kTileBytes);
    transpose(tile, kTileRows, kTileRows, kTileRows, sums + j * kTileRows * args.ld_sums,
              args.ld_sums);
  });
}

template <class... Args>
void multiply_count(int64_t count, Args&&... args) {
  switch (count) {
    case 1: return multiply<1>(args...);
    case 2: return multiply<2>(args...);
    case 3: return multiply<3>(args...);
    case 4: return multiply<4>(args...);
    case 5: return multiply<5>(args...);
    default: return multiply<kTilesOfX>(args...);
  }
}

}  // namespace

void multiply_tiles(const Codes& w, const TileProducts& args, int64_t begin, int64_t end) {
  alignas(64) Pieces pieces;  // not filled: rows past the end of w give sums that nobody reads
  const int64_t tiles = (args.rows + kTileRows - 1) / kTileRows;
  const int64_t passes = (tiles + kTilesOfX - 1) / kTilesOfX,
                at_once = (tiles + passes - 1) / passes;
  configure_tiles();
  for (int64_t first = 0; first < tiles; first += at_once) {
    const auto* const x = args.x + first * kTileRows * args.depth;
    float* const sums = args.sums + first * kTileRows * args.ld_sums;
    for (int64_t row = begin; row < end; row += kTileRows) {
      multiply_count(std::min(at_once, tiles - first), w, args, x, row,
                     std::min<int64_t>(kTileRows, end - row), pieces, sums + row - begin);
    }
  }
  release_tiles();
}

#else

void multiply_tiles(const Codes&, const TileProducts&, int64_t, int64_t) {}

#endif

}  // namespace fusedops::cpu::quantized_linear::CPU_CAPABILITY
