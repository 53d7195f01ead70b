// A row goes through its cache three times at most: sum, variance, normalise. Sums are float32
// over blocks of kBlock elements or kGroup rows and float64 beyond, so long rows and many rows
// lose nothing.

#include "csrc/cpu/isa/norm.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "csrc/cpu/dropout.h"

namespace fusedops::cpu::CPU_CAPABILITY {
namespace {

constexpr int64_t kBlock = 1024;  // a multiple of kStep and of Philox's four words
constexpr int64_t kGroup = 16;    // rows of dweight and dbias that are added in float32

struct Block {
  int64_t begin, size;
};

template <class Body>
inline __attribute__((always_inline)) void each_block(int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += kBlock) body(Block{i, std::min(kBlock, n - i)});
}

// The sum over a row of what `term(i, part)` gives for every step of it.
template <class Term>
inline __attribute__((always_inline)) double sum_over(int64_t n, const Term& term) {
  double total = 0;
  each_block(n, [&](Block block) {
    Floats acc;
    each_step(block.size, [&](int64_t j, auto part) { acc = acc + term(block.begin + j, part); });
    total += sum(acc);
  });
  return total;
}

// What a step of x is multiplied by: the dropout's scales, made a block at a time.
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

// Without dropout. A type of its own: asked at each step, a loop kept its vectors on the stack.
struct WholeRow {
  template <class Part>
  Floats apply(const Floats& x, int64_t, Part) const {
    return x;
  }
};

template <class T>
inline T* at_row(T* p, int64_t offset) {
  return p == nullptr ? nullptr : p + offset;
}

// A float64 as two float32. Where rows are float32, a statistic keeps its second word: its
// rounding alone would move the whole row by up to half an ulp.
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

// h = residual + dropout(x), stored. Returns the sum over the row of moment(h).
template <class X, class H, class Dropped, class Moment>
double add_row(const X* x, const H* residual, H* h, int64_t n, Dropped dropout,
               const Moment& moment) {
  return sum_over(n, [&](int64_t i, auto part) {
    const auto a = dropout.apply(load(x + i, part), i, part);
    return moment(store(h + i, a + load(residual + i, part), part));
  });
}

// The mean and the variance, from a first mean that is as exact as a float32 sum: in float32 the
// mean of what is left after subtracting it corrects both.
template <class H>
std::pair<double, double> moments(const H* h, int64_t n, double mean) {
  const Split first(mean);
  double sum_c = 0, sum_cc = 0;
  each_block(n, [&](Block block) {
    Floats c_acc, cc_acc;
    each_step(block.size, [&](int64_t j, auto part) {
      const auto c = live(centred<true, H>(load(h + block.begin + j, part), first), part);
      if constexpr (std::is_same_v<H, float>) c_acc = c_acc + c;
      cc_acc = fma(c, c, cc_acc);
    });
    sum_c += sum(c_acc);
    sum_cc += sum(cc_acc);
  });
  const double rest = sum_c / n, variance = sum_cc / n - rest * rest;
  return {mean + rest, variance < 0 ? 0 : variance};  // equal elements; a NaN stays
}

// y = (h - mean) * rstd * weight + bias. With round_first it is rounded to Base before the weight.
template <bool kLayer, class Base, class H, class Y, class Ahead>
void normalise_row(const NormForwardArgs& args, const H* h, double mean, double rstd, Y* y,
                   const Ahead& ahead) {
  const float *const weight = args.weight, *const bias = args.bias;
  const bool round_first = args.round_first;
  const Split mu(mean), r(rstd);
  each_step(args.n, [=](int64_t i, auto part) {
    ahead(i);
    auto v = scaled<Y>(centred<kLayer, Y>(load(h + i, part), mu), r);
    if (round_first) v = rounded<Base>(v);
    if (weight != nullptr) v = v * load(weight + i, part);
    if (bias != nullptr) v = v + load(bias + i, part);
    store(y + i, v, part);
  });
}

template <bool kLayer, class X, class H, class Base, class Y>
void forward_rows(const NormForwardArgs& args, int64_t begin, int64_t end) {
  const auto n = args.n;
  const auto moment = [](const Floats& v) { return kLayer ? v : v * v; };
  for (int64_t row = begin; row < end; ++row) {
    const X* const x = static_cast<const X*>(args.x) + row * args.x_stride;
    const H* h = reinterpret_cast<const H*>(x);  // without a residual X is H
    double total;
    if (args.residual != nullptr) {
      const H* const residual = static_cast<const H*>(args.residual) + row * args.residual_stride;
      H* const out = static_cast<H*>(args.h) + row * n;
      total = args.dropout.seed == nullptr
                  ? add_row(x, residual, out, n, WholeRow{}, moment)
                  : add_row(x, residual, out, n, DropoutRow(args.dropout, row, n), moment);
      h = out;
    } else {
      total = sum_over(n, [=](int64_t i, auto part) { return moment(load(h + i, part)); });
    }

    double mean = 0, variance = total / n;
    if constexpr (kLayer) {
      std::tie(mean, variance) = moments(h, n, total / n);
      args.mean[row] = mean;
    }
    const double rstd = args.rstd[row] = 1 / std::sqrt(variance + args.eps);
    // The next row comes from memory while this one is computed from cache.
    const X* const next_x = x + args.x_stride;
    const H* const next = args.residual == nullptr ? nullptr
                                                   : static_cast<const H*>(args.residual) +
                                                         (row + 1) * args.residual_stride;
    normalise_row<kLayer, Base>(args, h, mean, rstd, static_cast<Y*>(args.y) + row * n,
                                [=](int64_t i) {
                                  prefetch(next_x + i);
                                  if (next != nullptr) prefetch(next + i);
                                });
  }
}

using Forward = void (*)(const NormForwardArgs&, int64_t, int64_t);

template <class X, class H, class Base, class Y>
Forward forward_case(const NormForwardArgs& a) {
  const bool fits = a.x_dtype == dtype_of<X> && a.h_dtype == dtype_of<H> &&
                    a.base_dtype == dtype_of<Base> && a.y_dtype == dtype_of<Y>;
  if (!fits) return nullptr;
  return a.mean != nullptr ? forward_rows<true, X, H, Base, Y> : forward_rows<false, X, H, Base, Y>;
}

// 16-bit T: y is in T or, after a float32 weight, in float32; h is in T or a float32 stream.
template <class T>
Forward forward_narrow(const NormForwardArgs& a) {
  if (auto f = forward_case<T, T, T, T>(a)) return f;
  if (auto f = forward_case<T, T, T, float>(a)) return f;
  if (auto f = forward_case<T, float, T, T>(a)) return f;
  if (auto f = forward_case<T, float, T, float>(a)) return f;
  return forward_case<T, float, float, float>(a);
}

// The gradient of h in two passes over the row: the sums (and dweight, dbias), then the gradient.
template <bool kLayer, class D, class H>
void backward_rows(const NormBackwardArgs& args, int64_t begin, int64_t end, float* dweight,
                   float* dbias) {
  const int64_t n = args.n;
  const float* const weight = args.weight;
  for (int64_t row = begin; row < end; ++row) {
    const D* const dy = static_cast<const D*>(args.dy) + row * args.dy_stride;
    const H* const h = static_cast<const H*>(args.h) + row * args.h_stride;
    const double r = args.rstd[row];
    const Split mean(kLayer ? args.mean[row] : 0), rstd(r);
    const auto weighted = [=](Floats d, int64_t i, auto part) {
      if (weight != nullptr) d = d * load(weight + i, part);
      return d;
    };

    double sum_g = 0, sum_gn = 0;
    each_block(n, [&](Block block) {
      Floats g_acc, gn_acc;
      each_step(block.size, [&](int64_t j, auto part) {
        const int64_t i = block.begin + j;
        const auto d = load(dy + i, part), g = weighted(d, i, part);
        const auto v = scaled<H>(centred<kLayer, H>(load(h + i, part), mean), rstd);
        if constexpr (kLayer) g_acc = g_acc + g;
        gn_acc = fma(g, v, gn_acc);
        if (dweight != nullptr) store(dweight + i, fma(d, v, load(dweight + i, part)), part);
        if (dbias != nullptr) store(dbias + i, d + load(dbias + i, part), part);
      });
      if constexpr (kLayer) sum_g += sum(g_acc);
      sum_gn += sum(gn_acc);
    });
    if (args.dresidual == nullptr && args.dx == nullptr) continue;

    const Split mean_g(sum_g / n);
    // an infinite gradient times a second word must be infinite with the same sign
    Split scale(r);
    if (!std::isfinite(sum_g + sum_gn)) scale.low = scale.high;
    const auto slope = all(-sum_gn / n * r);  // of h - mean
    const H* const dh = at_row(static_cast<const H*>(args.dh), row * args.dh_stride);
    H* const dresidual = at_row(static_cast<H*>(args.dresidual), row * n);
    H* const dx = at_row(static_cast<H*>(args.dx), row * n);
    const auto write = [&](auto dropout) {
      each_step(n, [&](int64_t i, auto part) {
        prefetch(dy + args.dy_stride + i);
        prefetch(h + args.h_stride + i);
        if (dh != nullptr) prefetch(dh + args.dh_stride + i);
        const auto g = weighted(load(dy + i, part), i, part);
        const auto c = centred<kLayer, H>(load(h + i, part), mean);
        auto d = scaled<H>(fma(c, slope, centred<kLayer, H>(g, mean_g)), scale);
        if (dh != nullptr) d = d + load(dh + i, part);
        if (dresidual != nullptr) store(dresidual + i, d, part);
        if (dx != nullptr) store(dx + i, dropout.apply(d, i, part), part);
      });
    };
    args.dropout.seed == nullptr ? write(WholeRow{}) : write(DropoutRow(args.dropout, row, n));
  }
}

using Backward = void (*)(const NormBackwardArgs&, int64_t, int64_t, float*, float*);

template <class D, class H>
Backward backward_case(const NormBackwardArgs& a) {
  if (a.dy_dtype != dtype_of<D> || a.h_dtype != dtype_of<H>) return nullptr;
  return a.mean != nullptr ? backward_rows<true, D, H> : backward_rows<false, D, H>;
}

void add_to(double* total, const float* part, int64_t n) {
  if (total == nullptr) return;
  for (int64_t i = 0; i < n; ++i) total[i] += part[i];
}

template <class T>
void scale(const void* in, int64_t n, float offset, float* out) {
  each_step(n, [&](int64_t i, auto part) {
    store(out + i, load(static_cast<const T*>(in) + i, part) + all(offset), part);
  });
}

template <class T>
void sum_chunks(const double* partials, int64_t chunks, int64_t stride, int64_t begin, int64_t end,
                void* out) {
  each_block(end - begin, [&](Block block) {
    const int64_t first = begin + block.begin;
    double totals[kBlock] = {};
    for (int64_t c = 0; c < chunks; ++c) {
      for (int64_t j = 0; j < block.size; ++j) totals[j] += partials[c * stride + first + j];
    }
    for (int64_t j = 0; j < block.size; ++j) {
      static_cast<T*>(out)[first + j] = static_cast<float>(totals[j]);
    }
  });
}

}  // namespace

void norm_scale(const void* in, Dtype dtype, int64_t n, float offset, float* out) {
  switch (dtype) {
    case Dtype::float32: return scale<float>(in, n, offset, out);
    case Dtype::bfloat16: return scale<BFloat16>(in, n, offset, out);
    case Dtype::float16: return scale<Half>(in, n, offset, out);
  }
}

void norm_forward_rows(const NormForwardArgs& args, int64_t begin, int64_t end) {
  auto rows = forward_case<float, float, float, float>(args);
  if (rows == nullptr) rows = forward_narrow<BFloat16>(args);
  if (rows == nullptr) rows = forward_narrow<Half>(args);
  rows(args, begin, end);
}

void norm_backward_rows(const NormBackwardArgs& args, int64_t begin, int64_t end, float* scratch,
                        double* dweight, double* dbias) {
  auto rows = backward_case<float, float>(args);
  if (rows == nullptr) rows = backward_case<BFloat16, BFloat16>(args);
  if (rows == nullptr) rows = backward_case<Half, Half>(args);
  if (rows == nullptr) rows = backward_case<BFloat16, float>(args);
  if (rows == nullptr) rows = backward_case<Half, float>(args);
  if (rows == nullptr) rows = backward_case<float, BFloat16>(args);
  if (rows == nullptr) rows = backward_case<float, Half>(args);
  if (dweight == nullptr && dbias == nullptr) return rows(args, begin, end, nullptr, nullptr);

  float* const dw = dweight == nullptr ? nullptr : scratch;
  float* const db = dbias == nullptr ? nullptr : scratch + args.n;
  for (int64_t row = begin; row < end; row += kGroup) {
    std::fill_n(scratch, 2 * args.n, 0.f);
    rows(args, row, std::min(row + kGroup, end), dw, db);
    add_to(dweight, dw, args.n);
    add_to(dbias, db, args.n);
  }
}

void norm_sum_chunks(const double* partials, int64_t chunks, int64_t stride, int64_t begin,
                     int64_t end, void* out, Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return sum_chunks<float>(partials, chunks, stride, begin, end, out);
    case Dtype::bfloat16: return sum_chunks<BFloat16>(partials, chunks, stride, begin, end, out);
    case Dtype::float16: return sum_chunks<Half>(partials, chunks, stride, begin, end, out);
  }
}

}  // namespace fusedops::cpu::CPU_CAPABILITY
