// The loops of attention over rows that lie side by side. Formulas: csrc/attention.h.
#pragma once

#include <c10/util/BFloat16.h>

#include <limits>

#include "csrc/attention.h"
#include "csrc/cpu/isa.h"
#include "csrc/philox.h"

namespace fusedops::cpu {

constexpr int64_t kKeys = 512;  // of a tile of scores, at most
constexpr int64_t kEdge = 16;   // tiles are padded to a multiple of it

// Rows of numbers of a dtype; those of a row lie side by side.
struct RowsOf {
  const void* data;
  int64_t stride;
  Dtype dtype;
};

// How a product q k becomes a score.
struct ScoreMap {
  float scale, softcap;  // softcap 0: none
};

enum class BiasKind { none, boolean, number };

// The scores of a query and n keys that lie side by side, n up to kKeys: their products, float32.
struct ScoreRow {
  float* s;
  int64_t n, begin, end;  // it sees keys [begin, end) of them
  BiasKind kind;
  RowsOf bias;  // stride: from key to key
  Dropout dropout;
  int64_t row, key;  // of the dropout's counter; the first key's
};

// A softmax as far as its keys have been read.
struct Softmax {
  float most = -std::numeric_limits<float>::infinity(), sum = 0;
  float factor = 1;  // what the last keys multiplied all before them by
};

// p [kKeys], of float32 or bfloat16, becomes exp(score - most), dropped, and 0 where no key is
// seen, to the end of the padding. It may be s.
FUSEDOPS_ISA_FUNCTION(add_scores, const ScoreRow& row, const ScoreMap& map, Softmax& softmax,
                      void* p, Dtype of_p)

// Adds to the softmax, and to `products` that of exp(score - most) and dp, dropped. of_p: as in
// score_gradients.
FUSEDOPS_ISA_FUNCTION(add_products, const ScoreRow& row, const ScoreMap& map, const float* dp,
                      Softmax& softmax, double& products, Dtype of_p)

// A row's gradients, of dp, the products do v, and of p = share exp(score - most).
struct GradientRow {
  float most, share, weighted, grad_lse;  // weighted: sum_j p dp, dropped. delta is the difference
  const float* dp;
  float* ds;     // of keys [begin, end), or null
  void *p, *da;  // p dropped, and da times the scale; they may be s and dp
  Dtype dtype;   // of both, float32 or bfloat16
};
FUSEDOPS_ISA_FUNCTION(score_gradients, const ScoreRow& row, const ScoreMap& map,
                      const GradientRow& to)

// Rows [n, columns] as pairs, out [padded / 2, columns, 2], with zeros past them.
FUSEDOPS_ISA_FUNCTION(pair_rows, const c10::BFloat16* x, int64_t ld, int64_t n, int64_t padded,
                      int64_t columns, c10::BFloat16* out)

// out [n, ld] = rows, padded with zeros up to `padded` rows and ld columns.
FUSEDOPS_ISA_FUNCTION(read_rows, const RowsOf& rows, int64_t n, int64_t width, int64_t padded,
                      float* out, int64_t ld)

// out = factor x, rounded to its dtype
FUSEDOPS_ISA_FUNCTION(write_row, const float* x, int64_t width, float factor, void* out,
                      Dtype dtype)

FUSEDOPS_ISA_FUNCTION(scale_row, float* x, int64_t width, float factor)

// out [rows, ld] += x [rows, columns]
FUSEDOPS_ISA_FUNCTION(add_tile, const float* x, int64_t rows, int64_t columns, float* out,
                      int64_t ld)

// out [columns, ld_out] = x [rows, ld] transposed; both are multiples of kEdge.
FUSEDOPS_ISA_FUNCTION(transpose, const float* x, int64_t ld, int64_t rows, int64_t columns,
                      float* out, int64_t ld_out)

// s [rows, ld] = q k^T of n keys. q: [rows, width], in rows of ld_q, a multiple of 2 kEdge.
FUSEDOPS_ISA_FUNCTION(query_products, const float* q, int64_t ld_q, int64_t rows, const RowsOf& k,
                      int64_t n, int64_t width, float* s, int64_t ld)

// out [rows, width] += p [rows, ld] v of n keys.
FUSEDOPS_ISA_FUNCTION(add_values, const float* p, int64_t ld, int64_t rows, const RowsOf& v,
                      int64_t n, int64_t width, float* out)

}  // namespace fusedops::cpu
