// RMSNorm's and LayerNorm's backward loops: the rows' gradients and the sums of dweight and dbias.

#include "csrc/cpu/isa/norm/norm.h"
#include "csrc/cpu/isa/norm/row.h"
#include "csrc/cpu/isa/with_type.h"

namespace fusedops::cpu::norm::CPU_CAPABILITY {
namespace {

constexpr int64_t kGroup = 16;  // rows of dweight and dbias that are summed in float32

template <class T>
inline T* at_row(T* p, int64_t offset) {
  return p == nullptr ? nullptr : p + offset;
}

// Computes h's gradient in two passes over the row: the sums (and dweight, dbias), then the
// gradient.
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
    each_block(n, [&](Span block) {
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
    // an infinite gradient times rstd's second part must not change its sign
    Split scale(r);
    if (!std::isfinite(sum_g + sum_gn)) scale.low = scale.high;
    const auto slope = all(-sum_gn / n * r);  // multiplies h - mean
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
void sum_chunks(const double* partials, int64_t chunks, int64_t stride, int64_t begin, int64_t end,
                void* out) {
  each_block(end - begin, [&](Span block) {
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
  with_type(dtype, [&]<class T>(T) { sum_chunks<T>(partials, chunks, stride, begin, end, out); });
}

}  // namespace fusedops::cpu::norm::CPU_CAPABILITY
