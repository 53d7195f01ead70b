// Attention's loops over a row of scores, on CPUs. Formulas: csrc/kernels/attention.h.
#pragma once

#include <limits>

#include "csrc/kernels/attention.h"
#include "csrc/cpu/isa.h"
#include "csrc/cpu/isa/operands.h"
#include "csrc/kernels/philox.h"

namespace fusedops::cpu::attention {

using namespace fusedops::attention;

constexpr int64_t kKeys = 512;  // of a tile of scores, at most

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

}  // namespace fusedops::cpu::attention
