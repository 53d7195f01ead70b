// Functions for the tile registers of Intel's matrix unit (AMX), each with 16 rows of 64 bytes.
//
// Written as assembly because GCC's intrinsics take no template arguments and do not tell the
// compiler that they access memory. Callers check has_matrix_unit() first.
#pragma once

#include <cstdint>
#include <utility>

#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu {
namespace CPU_CAPABILITY {

#if defined(__AVX512BF16__)

constexpr int kTileRows = 16, kTileBytes = 64, kTiles = 8;

// Makes all tiles usable, at full size, until release_tiles. Not a scope with a destructor:
// unwinding would add a symbol that all instruction sets share.
inline void configure_tiles() {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < kTiles; ++i) config.bytes[i] = kTileBytes, config.rows[i] = kTileRows;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
FUSEDOPS_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"n"(kTile));
}

// stride: bytes from row to row.
template <int kTile>
FUSEDOPS_INLINE void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "n"(kTile) : "memory");
}
template <int kTile>
FUSEDOPS_INLINE void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "n"(kTile) : "memory");
}

// sums [16, 16] += a b, of bfloat16. a: [16, 32]; b: [32, 16], in pairs of rows, [16, 16, 2].
template <int kSums, int kA, int kB>
FUSEDOPS_INLINE void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kSums), "n"(kA), "n"(kB));
}

// Calls f<0>(), ..., f<kCount - 1>().
template <int kCount, class Function>
FUSEDOPS_INLINE void each_tile(const Function& f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (f.template operator()<kIndex>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

#endif

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu
