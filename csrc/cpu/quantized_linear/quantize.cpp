// Weights to codes of 4 bits on CPUs: threads take groups, which know nothing of each other.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "csrc/cpu/isa/quantized_linear/quantize.h"
#include "csrc/ops/quantized_linear/quantized_linear.h"

namespace fusedops::cpu {
namespace {

constexpr int64_t kGrain = 512;  // groups of a task

QuantizedGroups quantize_groups(const Tensor& groups, std::string_view format,
                                at::ArrayRef<double> shares) {
  auto outputs = quantize_groups_outputs(groups, format, shares);
  auto* const run = quantize_groups_for_isa();
  TORCH_CHECK(run != nullptr, "quantize_groups: this CPU has no AVX2");
  const auto& [codes, scales, zeros] = outputs;
  const auto w = groups.contiguous();
  const QuantizeGroups args{w.const_data_ptr<float>(),
                            codes.mutable_data_ptr<uint8_t>(),
                            scales.mutable_data_ptr<float>(),
                            static_cast<uint8_t*>(mutable_data_or_null(zeros)),
                            w.size(1),
                            shares.data(),
                            static_cast<int64_t>(shares.size()),
                            weight_format(format) == WeightFormat::nf4};
  at::parallel_for(0, w.size(0), kGrain,
                   [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { m.impl("quantize_groups", quantize_groups); }

}  // namespace fusedops::cpu
