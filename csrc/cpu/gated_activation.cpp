// Gated activations on CPUs: spreads the loops of csrc/cpu/isa/gated_activation.cpp over threads.
//
// Memory traffic is the minimum: forward reads gate and up and writes y; backward reads dy, gate
// and up and writes their gradients. Contiguous tensors are split as one long row, others by rows.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>

#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/gated_activation.h"
#include "csrc/cpu/row_codes.h"
#include "csrc/ops/gated_activation/operators.h"

namespace fusedops::cpu::gated_activation {
namespace {

bool has_kernel(Arguments arguments) { return isa() != Isa::none && !any_float64(arguments); }

template <class T>
T* shifted(T* p, int64_t elements, Dtype dtype) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return p == nullptr ? nullptr : static_cast<Byte*>(p) + elements * size_of(dtype);
}

// args for elements [begin, end) of a row.
GatedForward piece(GatedForward args, int64_t begin, int64_t end) {
  args.gate = shifted(args.gate, begin, args.dtype);
  args.up = shifted(args.up, begin, args.dtype);
  args.y = shifted(args.y, begin, args.dtype);
  args.n = end - begin;
  return args;
}

GatedBackward piece(GatedBackward args, int64_t begin, int64_t end) {
  args.dy = shifted(args.dy, begin, args.dtype);
  args.gate = shifted(args.gate, begin, args.dtype);
  args.up = shifted(args.up, begin, args.dtype);
  args.dgate = shifted(args.dgate, begin, args.dtype);
  args.dup = shifted(args.dup, begin, args.dtype);
  args.n = end - begin;
  return args;
}

template <class Args>
void spread(const Args& args, void (*run)(const Args&, int64_t, int64_t)) {
  if (args.rows == 1) {
    at::parallel_for(0, args.n, kGrain,
                     [&](int64_t begin, int64_t end) { run(piece(args, begin, end), 0, 1); });
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kGrain / args.n);
  at::parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) { run(args, begin, end); });
}

Tensor gated_activation_forward(const GatedArguments& a) {
  if (!has_kernel({a.gate, a.up})) return gated_activation_reference(a);
  const auto y = gated_activation_outputs(a);
  if (y.numel() == 0) return y;
  const GatedRows rows(a);
  spread(rows.forward(y), gated_forward_rows_for_isa());
  return y;
}

// A row of y exists only as float32 in a thread's cache, between the product and its codes.
QuantizedRows gated_activation_quantized(const GatedQuantizedArguments& q) {
  const auto& a = q.forward;
  if (!has_kernel({a.gate, a.up})) return gated_activation_quantized_reference(q);
  const auto outputs = gated_activation_quantized_outputs(q);
  const auto& [codes, scale] = outputs;
  if (codes.numel() == 0) {
    scale.zero_();
    return outputs;
  }
  const GatedRows rows(a);
  const auto args = rows.by_row();
  auto* const run = gated_forward_rows_for_isa();
  const QuantizedRowsTo to(codes, scale, q.format);
  const int64_t grain = std::max<int64_t>(1, kGrain / rows.n);
  at::parallel_for(0, rows.rows, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> y(new float[rows.n]);
    auto thread_args = args;
    thread_args.y = y.get();
    for (int64_t row = begin; row < end; ++row) {
      run(thread_args, row, row + 1);
      to.store(row, y.get());
    }
  });
  return outputs;
}

GatedGradients gated_activation_backward(const GatedBackwardArguments& a) {
  if (!has_kernel({a.dy, a.forward.gate, a.forward.up})) {
    return gated_activation_backward_reference(a);
  }
  const auto gradients = gated_activation_backward_outputs(a);
  if (a.dy.numel() == 0) return gradients;
  const GatedRows rows(a.forward);
  const Rows dy_rows(a.dy, rows.n);
  spread(rows.backward(dy_rows, gradients), gated_backward_rows_for_isa());
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("gated_activation_forward", flat<gated_activation_forward>);
  m.impl("gated_activation_backward", flat<gated_activation_backward>);
  m.impl("gated_activation_quantized", flat<gated_activation_quantized>);
}

}  // namespace fusedops::cpu::gated_activation
