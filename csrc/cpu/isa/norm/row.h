// Row sums, dropout and statistics for RMSNorm's and LayerNorm's CPU loops. A row is read from
// the cache three times at most: sum, variance, normalise. Sums are float32 over blocks of kBlock
// elements or kGroup rows and float64 beyond, so long rows and many rows lose nothing.
#pragma once

#include <algorithm>
#include <cmath>

#include "csrc/cpu/isa/dropout.h"
#include "csrc/cpu/isa/vec.h"

namespace fusedops::cpu::norm {
namespace CPU_CAPABILITY {

using namespace cpu::CPU_CAPABILITY;

constexpr int64_t kBlock = 1024;  // a multiple of kStep and of Philox's four words

struct Span {
  int64_t begin, size;
};

template <class Body>
FUSEDOPS_INLINE void each_block(int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += kBlock) body(Span{i, std::min(kBlock, n - i)});
}

// The sum of `term(i, part)` over the steps of a row.
template <class Term>
FUSEDOPS_INLINE double sum_over(int64_t n, const Term& term) {
  double total = 0;
  each_block(n, [&](Span block) {
    Floats acc;
    each_step(block.size, [&](int64_t j, auto part) { acc = acc + term(block.begin + j, part); });
    total += sum(acc);
  });
  return total;
}

// Multiplies steps of x by the dropout's scales, which are computed a block at a time.
class DropoutRow {
 public:
  DropoutRow(const Dropout& dropout, int64_t row, int64_t n)
      : dropout_(dropout), row_(row), n_(n) {}

  template <class Part>
  Floats apply(const Floats& x, int64_t i, Part part) {
    const int64_t j = i % kBlock;
    if (j == 0) dropout_scales(dropout_, row_, i, std::min(kBlock, n_ - i), scales_);
    return x * load(scales_ + j, part);
  }

 private:
  const Dropout& dropout_;
  const int64_t row_, n_;
  float scales_[kBlock];
};

// A row without dropout. It is a type, because a branch at each step kept a loop's vectors on the
// stack.
struct WholeRow {
  template <class Part>
  Floats apply(const Floats& x, int64_t, Part) const {
    return x;
  }
};

// A float64 as two float32. If rows are float32, a statistic keeps its second word: its rounding
// alone would shift the whole row by up to half an ulp.
struct Split {
  Floats high, low;

  explicit Split(double x)
      : high(all(static_cast<float>(x))), low(all(std::isfinite(x) ? x - float(x) : 0)) {}
};

// h - mean for LayerNorm, h for RMSNorm
template <bool kLayer, class T>
inline Floats centred(const Floats& h, const Split& mean) {
  if constexpr (!kLayer) return h;
  const auto c = h - mean.high;
  if constexpr (std::is_same_v<T, float>) return c - mean.low;
  return c;
}

template <class T>
inline Floats scaled(const Floats& c, const Split& rstd) {
  if constexpr (std::is_same_v<T, float>) return fma(c, rstd.high, c * rstd.low);
  return c * rstd.high;
}

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::norm
