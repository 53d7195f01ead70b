#include "csrc/cpu/isa/attention.h"

#include <algorithm>
#include <cmath>

#include "csrc/cpu/dropout.h"
#include "csrc/cpu/exp.h"

namespace fusedops::cpu::CPU_CAPABILITY {
namespace {

template <class Function>
inline void with_type(Dtype dtype, const Function& f) {
  switch (dtype) {
    case Dtype::float32: return f(float());
    case Dtype::bfloat16: return f(BFloat16());
    case Dtype::float16: return f(Half());
  }
}

// What is added to scores [begin, end) of a row, at the same places of `to`.
void read_bias(const ScoreRow& row, float* to) {
  const auto& [data, stride, dtype] = row.bias;
  if (row.kind == BiasKind::boolean) {
    const auto* const seen = static_cast<const bool*>(data);
    for (int64_t j = row.begin; j < row.end; ++j) to[j] = seen[j * stride] ? 0 : -kInfinity;
    return;
  }
  with_type(dtype, [&]<class T>(T) {
    const auto* const bias = static_cast<const T*>(data);
    if (stride != 1) {
      for (int64_t j = row.begin; j < row.end; ++j) to[j] = static_cast<float>(bias[j * stride]);
      return;
    }
    each_step(row.end - row.begin, [&](int64_t j, auto part) {
      store(to + row.begin + j, load(bias + row.begin + j, part), part);
    });
  });
}

// What probabilities [begin, end) of a row are multiplied by. They begin at to + begin.
const float* dropout_of(const ScoreRow& row, float* to) {
  const int64_t first = row.key + row.begin, ahead = first % 4;
  dropout_scales(row.dropout, row.row, first - ahead, row.end - row.begin + ahead, to);
  return to + ahead - row.begin;
}

struct Score {
  Floats score, slope;  // slope: over scale q k
};

template <bool kCapped>
inline __attribute__((always_inline)) Score score_of(const Floats& product, const ScoreMap& map) {
  const Vec scale(map.scale);
  if constexpr (!kCapped)
    return {{as_rounded(product.lo * scale), as_rounded(product.hi * scale)}, all(1)};
  const Vec inner(map.scale / map.softcap), cap(map.softcap), one(1.f);
  const Vec lo = exact_tanh(product.lo * inner), hi = exact_tanh(product.hi * inner);
  return {{as_rounded(lo * cap), as_rounded(hi * cap)}, {one - lo * lo, one - hi * hi}};
}

inline Floats exp_under(const Floats& score, float most) {
  const Vec under(most);
  return {exact_exp(score.lo - under), exact_exp(score.hi - under)};
}

// Zeros beside [begin, end), to the end of the padding.
inline void clear_unseen(const ScoreRow& row, float* x) {
  const int64_t padded = (row.n + kEdge - 1) / kEdge * kEdge;
  std::fill(x, x + row.begin, 0.f);
  std::fill(x + row.end, x + padded, 0.f);
}

// Writes the scores of [begin, end) over their products, and returns the largest.
template <bool kCapped>
float make_scores(const ScoreRow& row, const ScoreMap& map) {
  alignas(64) float more[kKeys + kStep];
  if (row.kind != BiasKind::none) read_bias(row, more);
  Floats most = all(-kInfinity);
  each_step(row.end - row.begin, [&](int64_t j, auto part) {
    float* const s = row.s + row.begin + j;
    auto score = score_of<kCapped>(load(s, part), map).score;
    if (row.kind != BiasKind::none) score = score + load(more + row.begin + j, part);
    store(s, score, part);
    most = largest(most, padded(score, part));
  });
  return largest(most);
}

template <bool kCapped>
void gradients(const ScoreRow& row, const ScoreMap& map, float most, float share, float delta,
               float* dp, float* ds) {
  alignas(64) float more[kKeys + kStep], scales[kKeys + kStep];
  if (row.kind != BiasKind::none) read_bias(row, more);
  const bool drops = row.dropout.seed != nullptr;
  const float* const kept = drops ? dropout_of(row, scales) : nullptr;
  each_step(row.end - row.begin, [&](int64_t i, auto part) {
    const int64_t j = row.begin + i;
    auto [score, slope] = score_of<kCapped>(load(row.s + j, part), map);
    if (row.kind != BiasKind::none) score = score + load(more + j, part);
    const auto p = exp_under(score, most) * all(share);
    const auto scale = drops ? load(kept + j, part) : all(1);
    const auto d = p * (load(dp + j, part) * scale - all(delta));
    store(row.s + j, p * scale, part);
    if (ds != nullptr) store(ds + j, d, part);
    store(dp + j, (kCapped ? d * slope : d) * all(map.scale), part);
  });
}

// Makes the row's scores and moves the softmax to the largest so far. False: it has seen none.
bool move_to_largest(const ScoreRow& row, const ScoreMap& map, Softmax& softmax) {
  softmax.factor = 1;
  if (row.begin >= row.end) return false;
  const float most = map.softcap != 0 ? make_scores<true>(row, map) : make_scores<false>(row, map);
  const float before = softmax.most;
  softmax.most = most <= before ? before : most;  // a NaN stays
  if (softmax.most == -kInfinity) return false;
  if (before != softmax.most) softmax.factor = std::exp(before - softmax.most);
  return true;
}

// Dot products of so many queries and keys.
template <int kRows, int kCount, class T>
void products(const float* q, int64_t ld_q, const T* k, int64_t stride, int64_t width, float* s,
              int64_t ld) {
  Floats sums[kRows][kCount];
  each_step(width, [&](int64_t d, auto part) {
    Floats keys[kCount];
    for (int j = 0; j < kCount; ++j) keys[j] = load(k + j * stride + d, part);
    for (int r = 0; r < kRows; ++r) {
      const auto query = load(q + r * ld_q + d, Full());
      for (int j = 0; j < kCount; ++j) sums[r][j] = fma(query, keys[j], sums[r][j]);
    }
  });
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kCount; ++j) s[r * ld + j] = sum(sums[r][j]);
  }
}

// Of all queries.
template <int kCount, class T>
void all_products(const float* q, int64_t ld_q, int64_t rows, const T* k, int64_t stride,
                  int64_t width, float* s, int64_t ld) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    products<4, kCount>(q + r * ld_q, ld_q, k, stride, width, s + r * ld, ld);
  }
  for (; r < rows; ++r) {
    products<1, kCount>(q + r * ld_q, ld_q, k, stride, width, s + r * ld, ld);
  }
}

// A step of the sums of so many rows, over a few keys at a time: a long chain would lose digits.
template <int kRows, class T, class Part>
void values(const float* p, int64_t ld, const T* v, int64_t stride, int64_t n, float* out,
            int64_t width, Part part) {
  constexpr int64_t kChain = 64;
  for (int64_t from = 0; from < n; from += kChain) {
    Floats sums[kRows];
    for (int64_t j = from; j < std::min(n, from + kChain); ++j) {
      const auto value = load(v + j * stride, part);
      for (int r = 0; r < kRows; ++r) sums[r] = fma(all(p[r * ld + j]), value, sums[r]);
    }
    for (int r = 0; r < kRows; ++r) {
      store(out + r * width, load(out + r * width, part) + sums[r], part);
    }
  }
}

}  // namespace

void add_scores(const ScoreRow& row, const ScoreMap& map, Softmax& softmax) {
  clear_unseen(row, row.s);
  if (!move_to_largest(row, map, softmax)) {
    std::fill(row.s + row.begin, row.s + row.end, 0.f);
    return;
  }
  alignas(64) float scales[kKeys + kStep];
  const bool drops = row.dropout.seed != nullptr;
  const float* const kept = drops ? dropout_of(row, scales) : nullptr;
  Floats total;
  each_step(row.end - row.begin, [&](int64_t i, auto part) {
    const int64_t j = row.begin + i;
    const auto p = exp_under(load(row.s + j, part), softmax.most);
    total = total + live(p, part);
    store(row.s + j, drops ? p * load(kept + j, part) : p, part);
  });
  softmax.sum = softmax.sum * softmax.factor + sum(total);
}

void add_products(const ScoreRow& row, const ScoreMap& map, const float* dp, Softmax& softmax,
                  double& products) {
  if (!move_to_largest(row, map, softmax)) return;
  alignas(64) float scales[kKeys + kStep];
  const bool drops = row.dropout.seed != nullptr;
  const float* const kept = drops ? dropout_of(row, scales) : nullptr;
  Floats total, weighted;
  each_step(row.end - row.begin, [&](int64_t i, auto part) {
    const int64_t j = row.begin + i;
    const auto p = live(exp_under(load(row.s + j, part), softmax.most), part);
    const auto g = drops ? load(dp + j, part) * load(kept + j, part) : load(dp + j, part);
    total = total + p;
    weighted = weighted + live(p * g, part);
  });
  softmax.sum = softmax.sum * softmax.factor + sum(total);
  products = products * softmax.factor + sum(weighted);
}

void score_gradients(const ScoreRow& row, const ScoreMap& map, float most, float share, float delta,
                     float* dp, float* ds) {
  if (share == 0) {  // no key is seen, or a sink has all
    std::fill(row.s, row.s + row.n, 0.f);
    std::fill(dp, dp + row.n, 0.f);
  }
  clear_unseen(row, row.s);
  clear_unseen(row, dp);
  if (share == 0 || row.begin >= row.end) return;
  map.softcap != 0 ? gradients<true>(row, map, most, share, delta, dp, ds)
                   : gradients<false>(row, map, most, share, delta, dp, ds);
}

void read_rows(const RowsOf& rows, int64_t n, int64_t width, int64_t padded, float* out,
               int64_t ld) {
  with_type(rows.dtype, [&]<class T>(T) {
    const auto* x = static_cast<const T*>(rows.data);
    for (int64_t i = 0; i < n; ++i, x += rows.stride) {
      each_step(width,
                [&](int64_t d, auto part) { store(out + i * ld + d, load(x + d, part), part); });
      std::fill(out + i * ld + width, out + (i + 1) * ld, 0.f);
    }
  });
  std::fill(out + n * ld, out + padded * ld, 0.f);
}

void write_row(const float* x, int64_t width, float factor, void* out, Dtype dtype) {
  with_type(dtype, [&]<class T>(T) {
    auto* const to = static_cast<T*>(out);
    each_step(width,
              [&](int64_t d, auto part) { store(to + d, load(x + d, part) * all(factor), part); });
  });
}

void scale_row(float* x, int64_t width, float factor) {
  each_step(width,
            [&](int64_t d, auto part) { store(x + d, load(x + d, part) * all(factor), part); });
}

void add_tile(const float* x, int64_t rows, int64_t columns, float* out, int64_t ld) {
  for (int64_t i = 0; i < rows; ++i, x += columns, out += ld) {
    each_step(columns, [&](int64_t j, auto part) {
      store(out + j, load(out + j, part) + load(x + j, part), part);
    });
  }
}

void transpose(const float* x, int64_t ld, int64_t rows, int64_t columns, float* out,
               int64_t ld_out) {
  for (int64_t i = 0; i < rows; i += kEdge) {
    for (int64_t j = 0; j < columns; j += kEdge) {
      at::vec::transpose_mxn<float, kEdge, kEdge>(x + i * ld + j, ld, out + j * ld_out + i, ld_out);
    }
  }
}

void query_products(const float* q, int64_t ld_q, int64_t rows, const RowsOf& k, int64_t n,
                    int64_t width, float* s, int64_t ld) {
  with_type(k.dtype, [&]<class T>(T) {
    const auto* const keys = static_cast<const T*>(k.data);
    int64_t j = 0;
    for (; j + 2 <= n; j += 2) {
      all_products<2>(q, ld_q, rows, keys + j * k.stride, k.stride, width, s + j, ld);
    }
    if (j < n) all_products<1>(q, ld_q, rows, keys + j * k.stride, k.stride, width, s + j, ld);
  });
}

void add_values(const float* p, int64_t ld, int64_t rows, const RowsOf& v, int64_t n, int64_t width,
                float* out) {
  with_type(v.dtype, [&]<class T>(T) {
    const auto* const from = static_cast<const T*>(v.data);
    each_step(width, [&](int64_t d, auto part) {
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) {
        values<4>(p + r * ld, ld, from + d, v.stride, n, out + r * width + d, width, part);
      }
      for (; r < rows; ++r) {
        values<1>(p + r * ld, ld, from + d, v.stride, n, out + r * width + d, width, part);
      }
    });
  });
}

}  // namespace fusedops::cpu::CPU_CAPABILITY
