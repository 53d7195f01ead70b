// A mixture of experts on CPUs, forward and backward: each chosen expert multiplies its tokens'
// rows, gates them and multiplies them again, and each token gets a weighted sum of the results.
//
// The sums of the second product stay float32 until the weighted sum, which adds a token's results
// in their order: no bit depends on the number of threads, nor on the values of other tokens. The
// backward needs z alone: h is recomputed, and the routing weight's gradient is h times dh, the
// gradient before that weight.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "csrc/cpu/experts/quantized.h"
#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/experts/rows.h"
#include "csrc/ops/experts/operators.h"

namespace fusedops::cpu::experts {
namespace {

using namespace fusedops::experts;

// Whether the kernels take the arguments. The definition handles empty tensors.
bool has_kernel(const Routed& a) {
  return isa() != Isa::none && a.hidden.scalar_type() != at::kDouble && a.hidden.numel() > 0 &&
         a.top_k_index.numel() > 0 && a.experts > 0 && a.inner > 0;
}

// [E, outputs, inputs]
Tensor upright(const Tensor& weight, const Options& o) {
  return o.transposed ? weight.transpose(1, 2) : weight;
}

Tensor contiguous_or_none(const OptionalTensor& t) {
  return is_defined(t) ? t->contiguous() : Tensor();
}

Gating gating_of(const Routed& a, int64_t n) {
  const auto& o = a.options;
  return {n,
          o.gated,
          o.interleaved,
          o.limit.has_value(),
          static_cast<float>(o.limit.value_or(0)),
          static_cast<float>(o.alpha),
          static_cast<float>(o.up_offset),
          o.activation,
          dtype_of(a.hidden)};
}

// Asks for a new tensor's memory in pages of 2 MiB. The weights' gradients are the largest tensors
// of a step, and the first write to each page of 4 KiB costs as much as the numbers in it: 55 of
// 200 ms for [64, 1024, 1024] in bfloat16.
void ask_for_huge_pages([[maybe_unused]] const Tensor& t) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 2 << 20;
  if (!t.defined()) return;
  const auto first = reinterpret_cast<uintptr_t>(t.data_ptr());
  const auto begin = (first + kPage - 1) / kPage * kPage,
             end = (first + t.nbytes()) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <class Function>
void each_row(int64_t rows, int64_t n, const Function& f) {
  at::parallel_for(0, rows, kGrain / n + 1, f);
}

// y [tokens, n] = the sums of a token's rows, weighted if weights are given.
void add_slots(const Routing& routing, const Tensor& rows, const Tensor& weights,
               const Tensor& bias, const Tensor& y) {
  const int64_t n = y.size(1);
  const SumSlots args{rows.const_data_ptr<float>(),
                      routing.places.data(),
                      routing.chosen(),
                      weights.defined() ? weights.const_data_ptr<float>() : nullptr,
                      data_or_null(bias),
                      y.mutable_data_ptr(),
                      routing.k,
                      n,
                      dtype_of(y)};
  each_row(routing.tokens, n * routing.k,
           [&](int64_t begin, int64_t end) { sum_slots_for_isa()(args, begin, end); });
}

// Rows of the experts that go through both products before the next ones do. What is between the
// products then stays in the cache, and takes memory for these rows alone.
constexpr int64_t kPart = 1024;

void forward(const Routed& a, const Weight& gate_up, const Weight& down, const Tensor& y,
             const Tensor& kept) {
  const Routing routing(a.top_k_index, a.experts.expect_int());
  const int64_t rows = routing.rows(), n = a.inner.expect_int();
  const auto options = a.hidden.options();
  const auto hidden = a.hidden.contiguous(), bias = contiguous_or_none(a.gate_up_bias);

  if (kept.defined()) kept.narrow(0, rows, kept.size(0) - rows).zero_();
  const auto sums = at::empty({rows, a.hidden.size(1)}, options.dtype(at::kFloat));
  ask_for_huge_pages(sums);
  int64_t first = 0;
  for (const auto& part : routing.parts(kPart)) {
    const int64_t count = part.rows();
    const auto z = kept.defined() ? kept.narrow(0, first, count)
                                  : at::empty({count, gate_up.outputs()}, options);
    gate_up.multiply(part, part.gather(hidden), bias, z);
    const auto h = at::empty({count, n}, options);
    const GateRows gate{gating_of(a, n), z.const_data_ptr(), h.mutable_data_ptr()};
    each_row(count, n, [&](int64_t begin, int64_t end) { gate_rows_for_isa()(gate, begin, end); });
    down.multiply(part, h, Tensor(), sums.narrow(0, first, count));
    first += count;
  }
  const auto weights = a.top_k_weights.to(at::kFloat).contiguous();
  add_slots(routing, sums, weights, contiguous_or_none(a.down_bias), y);
}

// gate_up and down.
std::pair<FloatWeight, FloatWeight> weights_of(const Inputs& a) {
  return {FloatWeight(upright(a.gate_up, a.options)), FloatWeight(upright(a.down, a.options))};
}
std::pair<QuantizedWeight, QuantizedWeight> weights_of(const QuantizedInputs& a) {
  const auto compute = a.weights.compute;
  return {QuantizedWeight(gate_up_of(a), compute), QuantizedWeight(down_of(a), compute)};
}

template <class AnyInputs>
ExpertsForward experts_forward(const ForwardOf<AnyInputs>& arguments) {
  const auto& a = arguments.inputs;
  if (!has_kernel(a)) return experts_forward_reference(arguments);
  const auto outputs = experts_outputs(arguments);
  const auto& [y, z] = outputs;
  const auto [gate_up, down] = weights_of(a);
  forward(a, gate_up, down, y, z);
  return outputs;
}

// The routing weights of all rows.
std::vector<float> row_weights_of(const Routing& routing, const Tensor& slots) {
  const auto weights = slots.to(at::kFloat).contiguous();
  const auto* const of = weights.const_data_ptr<float>();
  std::vector<float> row_weights(routing.rows());
  for (size_t row = 0; row < row_weights.size(); ++row) row_weights[row] = of[routing.slots[row]];
  return row_weights;
}

// dweights [tokens, k]: a row's dot, plus dy times the expert's bias; 0 for a slot without expert.
Tensor gradient_of_weights(const Routing& routing, std::vector<float>& dots, const Tensor& dy,
                           const Tensor& bias) {
  auto dweights = at::zeros({routing.tokens, routing.k}, dy.options().dtype(at::kFloat));
  auto* const to = dweights.mutable_data_ptr<float>();
  const int64_t n = dy.size(1), size = dy.element_size();
  const auto* const rows = static_cast<const char*>(dy.const_data_ptr());
  each_row(routing.rows(), n, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const int64_t slot = routing.slots[row];
      if (bias.defined()) {
        const auto* const of =
            static_cast<const char*>(bias.const_data_ptr()) + routing.chosen()[slot] * n * size;
        add_dot_for_isa()(rows + row * n * size, of, n, dtype_of(dy), &dots[row]);
      }
      to[slot] = dots[row];
    }
  });
  return dweights;
}

// out [E, n] = the sums of each expert's rows.
void sum_rows(const Routing& routing, const Tensor& rows, const Tensor& out) {
  out.zero_();
  for (const auto& share : routing.shares) {
    auto of = out.select(0, share.expert);
    at::sum_out(of, rows.narrow(0, share.first, share.count), at::IntArrayRef{0});
  }
}

// Fills the gradients that are defined.
void backward(const Routed& a, const Tensor& dy_of_tokens, const Tensor& kept,
              const Weight& gate_up, const Weight& down, const ExpertsBackward& outputs) {
  const auto& [dhidden, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias] = outputs;
  const auto& o = a.options;
  const Routing routing(a.top_k_index, a.experts.expect_int());
  const int64_t rows = routing.rows(), n = a.inner.expect_int(), wide = gate_up.outputs();
  const auto options = a.hidden.options(), floats = options.dtype(at::kFloat);

  const auto dy = routing.gather(dy_of_tokens);
  const auto dh = at::empty({rows, n}, floats);  // before the routing weight
  down.multiply_across(routing, dy, dh);
  const auto z = kept.contiguous();
  const auto h = ddown.defined() ? at::empty({rows, n}, options) : Tensor();  // weighted
  const bool through_z = dhidden.defined() || dgate_up.defined() || dgate_up_bias.defined();
  const auto dz = through_z ? at::empty({rows, wide}, options) : Tensor();
  const auto weights = row_weights_of(routing, a.top_k_weights);
  std::vector<float> dots(rows);
  const GateBackwardRows gate{gating_of(a, n), z.const_data_ptr(),      dh.const_data_ptr<float>(),
                              weights.data(),  mutable_data_or_null(h), mutable_data_or_null(dz),
                              dots.data()};
  each_row(rows, n,
           [&](int64_t begin, int64_t end) { gate_backward_rows_for_isa()(gate, begin, end); });

  if (dhidden.defined()) {
    const auto sums = at::empty({rows, a.hidden.size(1)}, floats);
    gate_up.multiply_across(routing, dz, sums);
    add_slots(routing, sums, Tensor(), Tensor(), dhidden);
  }
  if (dweights.defined()) {
    dweights.copy_(gradient_of_weights(routing, dots, dy, contiguous_or_none(a.down_bias)));
  }
  if (dgate_up.defined()) {
    grouped_outer(routing, dz, routing.gather(a.hidden), upright(dgate_up, o));
  }
  if (ddown.defined()) grouped_outer(routing, dy, h, upright(ddown, o));
  if (dgate_up_bias.defined()) sum_rows(routing, dz, dgate_up_bias);
  if (ddown_bias.defined()) {
    const auto weight_column = at::from_blob(const_cast<float*>(weights.data()), {rows, 1}, floats);
    sum_rows(routing, (dy * weight_column).to(dy.scalar_type()), ddown_bias);
  }
}

ExpertsBackward experts_backward(const BackwardArguments& arguments) {
  const auto& a = arguments.inputs;
  if (!has_kernel(a)) return experts_backward_reference(arguments);
  const auto outputs = experts_backward_outputs(arguments);
  ask_for_huge_pages(std::get<2>(outputs));
  ask_for_huge_pages(std::get<3>(outputs));
  const auto [gate_up, down] = weights_of(a);
  backward(a, arguments.dy, arguments.z, gate_up, down, outputs);
  return outputs;
}

QuantizedExpertsBackward quantized_experts_backward(const QuantizedBackwardArguments& arguments) {
  const auto& a = arguments.inputs;
  if (!has_kernel(a)) return quantized_experts_backward_reference(arguments);
  const auto outputs = quantized_experts_backward_outputs(arguments);
  const auto& [dhidden, dweights, dgate_up_bias, ddown_bias] = outputs;
  const auto [gate_up, down] = weights_of(a);
  backward(a, arguments.dy, arguments.z, gate_up, down,
           {dhidden, dweights, Tensor(), Tensor(), dgate_up_bias, ddown_bias});
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("experts_forward", flat<experts_forward<Inputs>>);
  m.impl("experts_backward", flat<experts_backward>);
  m.impl("quantized_experts_forward", flat<experts_forward<QuantizedInputs>>);
  m.impl("quantized_experts_backward", flat<quantized_experts_backward>);
}

}  // namespace fusedops::cpu::experts
