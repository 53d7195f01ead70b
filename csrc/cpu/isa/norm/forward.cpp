// RMSNorm's and LayerNorm's forward loops: a row's sum, its variance, and the normalised row.

#include <tuple>
#include <utility>

#include "csrc/cpu/isa/norm/norm.h"
#include "csrc/cpu/isa/norm/row.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::norm::CPU_CAPABILITY {
namespace {

// Stores h = residual + dropout(x). Returns the row's sum of moment(h).
template <class X, class H, class Dropped, class Moment>
double add_row(const X* x, const H* residual, H* h, int64_t n, Dropped dropout,
               const Moment& moment) {
  return sum_over(n, [&](int64_t i, auto part) {
    const auto a = dropout.apply(load(x + i, part), i, part);
    return moment(store(h + i, a + load(residual + i, part), part));
  });
}

// The mean and the variance. The first mean is only as exact as a float32 sum; in float32 the mean
// of the differences from it corrects both.
template <class H>
std::pair<double, double> moments(const H* h, int64_t n, double mean) {
  const Split first(mean);
  double sum_c = 0, sum_cc = 0;
  each_block(n, [&](Span block) {
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
  return {mean + rest, variance < 0 ? 0 : variance};  // 0 for equal elements; keeps NaN
}

// y = (h - mean) * rstd * weight + bias. With round_first, rounds to Base before the weight.
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
    // Prefetches the next row while this one is computed from the cache.
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

// For a 16-bit T, y is T, or float32 if the weight is; h is T, or float32 if the residual is.
template <class T>
Forward forward_narrow(const NormForwardArgs& a) {
  if (auto f = forward_case<T, T, T, T>(a)) return f;
  if (auto f = forward_case<T, T, T, float>(a)) return f;
  if (auto f = forward_case<T, float, T, T>(a)) return f;
  if (auto f = forward_case<T, float, T, float>(a)) return f;
  return forward_case<T, float, float, float>(a);
}

template <class T>
void scale(const void* in, int64_t n, float offset, float* out) {
  each_step(n, [&](int64_t i, auto part) {
    store(out + i, load(static_cast<const T*>(in) + i, part) + all(offset), part);
  });
}

}  // namespace

void norm_scale(const void* in, Dtype dtype, int64_t n, float offset, float* out) {
  with_type(dtype, [&]<class T>(T) { scale<T>(in, n, offset, out); });
}

void norm_forward_rows(const NormForwardArgs& args, int64_t begin, int64_t end) {
  auto rows = forward_case<float, float, float, float>(args);
  if (rows == nullptr) rows = forward_narrow<BFloat16>(args);
  if (rows == nullptr) rows = forward_narrow<Half>(args);
  rows(args, begin, end);
}

}  // namespace fusedops::cpu::norm::CPU_CAPABILITY
