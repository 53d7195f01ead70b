// Attention's loops over a row of scores, on CPUs. Formulas: csrc/kernels/attention.h.
#pragma once

#include <limits>

#include "csrc/kernels/attention.h"
#include "csrc/cpu/isa.h"
#include "csrc/cpu/isa/operands.h"
#include "csrc/kernels/philox.h"

namespace fusedops::cpu::attention {

using namespace fusedops::attention;

constexpr int64_t kKeys = 512;  // maximum keys per tile of scores

// How q k becomes a score.
struct ScoreMap {
  float scale, softcap;  // softcap 0: none
};

enum class BiasKind { none, boolean, number };

// A query's scores with n adjacent keys, n up to kKeys: their products, float32.
struct ScoreRow {
  float* s;
  int64_t n, begin, end;  // the query sees keys [begin, end) of these
  BiasKind kind;
  RowsOf bias;  // stride: from key to key
  Dropout dropout;
  int64_t row, key;  // for dropout's counter: the query's row and the first key
};

// A softmax over the keys read so far.
struct Softmax {
  float most = -std::numeric_limits<float>::infinity(), sum = 0;
  float factor = 1;  // the factor that the last keys applied to all earlier sums
};

// p [kKeys], float32 or bfloat16, becomes exp(score - most) after dropout, and 0 for unseen keys,
// to the end of the padding. p may be s.
FUSEDOPS_ISA_FUNCTION(add_scores, const ScoreRow& row, const ScoreMap& map, Softmax& softmax,
                      void* p, Dtype p_dtype)

// Adds to the softmax, and adds the sum of exp(score - most) * dp, after dropout, to `products`.
// p_dtype: as in score_gradients.
FUSEDOPS_ISA_FUNCTION(add_products, const ScoreRow& row, const ScoreMap& map, const float* dp,
                      Softmax& softmax, double& products, Dtype p_dtype)

// A row's gradients, computed from dp = do v and p = share exp(score - most).
struct GradientRow {
  float most, share, weighted, grad_lse;  // weighted: sum_j p dp after dropout
  const float* dp;
  float* ds;     // for keys [begin, end), or null
  void *p, *da;  // p after dropout, and da times the scale; they may overwrite s and dp
  Dtype dtype;   // of p and da: float32 or bfloat16
};
FUSEDOPS_ISA_FUNCTION(score_gradients, const ScoreRow& row, const ScoreMap& map,
                      const GradientRow& to)

}  // namespace fusedops::cpu::attention
