// Products of an expert's rows with its bfloat16 weight, on Intel's matrix unit (AMX).
#pragma once

#include "csrc/cpu/isa.h"

#include <cstdint>

namespace fusedops::cpu::experts {

constexpr int64_t kTile = 16, kTileDepth = 32;  // rows and depth of a tile

// sums [rows, ld_sums] = x w^T for rows [begin, end) of w [n, depth], whose depth is contiguous. x:
// for each kTile rows, transposed in pairs of columns, [depth / 2, kTile, 2], with zeros below the
// last row. n and begin are multiples of kTile, depth is one of kTileDepth. sums has space for
// multiples of kTile rows.
struct TileRows {
  const uint16_t *x, *w;
  int64_t rows, depth, ld_w;
  float* sums;
  int64_t ld_sums;
};
FUSEDOPS_ISA_FUNCTION(multiply_tile_rows, const TileRows& args, int64_t begin, int64_t end)

// sums [rows, ld_sums] = x w for columns [begin, end) of w [depth, n], whose rows are contiguous.
// x: [rows, ld_x], with zeros below the last row up to a multiple of kTile. depth is a multiple of
// kTileDepth; begin and end are multiples of kTile, and at most kAcross apart.
constexpr int64_t kAcross = 256;
struct TileColumns {
  const uint16_t *x, *w;
  int64_t rows, depth, ld_x, ld_w;
  float* sums;
  int64_t ld_sums;
};
FUSEDOPS_ISA_FUNCTION(multiply_tile_columns, const TileColumns& args, int64_t begin, int64_t end)

}  // namespace fusedops::cpu::experts
