// The rotary embedding on CPUs: threads take positions, with all heads of q and k.
//
// Memory traffic is the minimum: q and k are read once, with any strides, and written once. cos and
// sin are read from memory once, and from the cache for the other heads.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/cpu/isa/rotary.h"
#include "csrc/ops/rotary/operators.h"

namespace fusedops::cpu::rotary {
namespace {

constexpr int64_t kGrain = 32768;  // approximate number of elements per task

bool has_kernel(Arguments arguments) { return isa() != Isa::none && !any_float64(arguments); }

void spread(const RotaryArguments& args) {
  if (args.count == 0) return;
  int64_t elements = 0;  // per position
  for (int i = 0; i < args.count; ++i) elements += args.tensors[i].heads * args.tensors[i].width;
  const int64_t grain = std::max<int64_t>(1, kGrain / elements);
  at::parallel_for(0, args.batch * args.seq, grain, [&](int64_t begin, int64_t end) {
    rotary_positions_for_isa()(args, begin, end);
  });
}

RotaryPair rotary_forward(const RotaryForward& a) {
  if (!has_kernel({a.q, a.k, a.table.cos, a.table.sin})) return rotary_forward_reference(a);
  const auto outputs = rotary_outputs(a);
  const RotaryRows rows(a.q, a.k, a.table, outputs, false);
  spread(rows.arguments);
  return outputs;
}

RotaryPair rotary_backward(const RotaryBackward& a) {
  if (!has_kernel({a.dq, a.dk, a.table.cos, a.table.sin})) return rotary_backward_reference(a);
  const auto outputs = rotary_backward_outputs(a);
  const RotaryRows rows(a.dq, a.dk, a.table, outputs, true);
  spread(rows.arguments);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) {
  m.impl("rotary_forward", flat<rotary_forward>);
  m.impl("rotary_backward", flat<rotary_backward>);
}

}  // namespace fusedops::cpu::rotary
