// Quantizes weights on CPUs: threads take independent groups. 8-bit groups are rounded like rows of
// inputs.

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "csrc/cpu/grain.h"
#include "csrc/cpu/isa/quantized_linear/codes.h"
#include "csrc/cpu/isa/quantized_linear/quantize.h"
#include "csrc/ops/quantized_linear/operators.h"

namespace fusedops::cpu::quantized_linear {
namespace {

void quantize_bytes(const Tensor& w, const Tensor& codes, const Tensor& scales,
                    InputFormat format) {
  const int64_t size = w.size(1);
  const auto* const from = w.const_data_ptr<float>();
  auto* const to = static_cast<int8_t*>(codes.mutable_data_ptr());
  auto* const steps = scales.mutable_data_ptr<float>();
  at::parallel_for(0, w.size(0), kGrain / size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int32_t sum;
      read_input_for_isa()({from + i * size, size, size, Dtype::float32, to + i * size,
                            Operand::integer, nullptr, format, steps + i, &sum});
    }
  });
}

QuantizedGroups quantize_groups(const Tensor& groups, std::string_view format,
                                at::ArrayRef<double> shares) {
  auto outputs = quantize_groups_outputs(groups, format, shares);
  auto* const run = quantize_groups_for_isa();
  TORCH_CHECK(run != nullptr, "quantize_groups: this CPU has no AVX2");
  const auto& [codes, scales, zeros] = outputs;
  const auto w = groups.contiguous();
  const auto kind = from_name<WeightFormat>("quantize_groups", format);
  if (const auto row_format = format_of(kind).row_format; row_format != RowFormat::none) {
    quantize_bytes(w, codes, scales, row_format);
    return outputs;
  }
  const QuantizeGroups args{w.const_data_ptr<float>(),
                            codes.mutable_data_ptr<uint8_t>(),
                            scales.mutable_data_ptr<float>(),
                            static_cast<uint8_t*>(mutable_data_or_null(zeros)),
                            w.size(1),
                            shares.data(),
                            static_cast<int64_t>(shares.size()),
                            kind == WeightFormat::nf4};
  at::parallel_for(0, w.size(0), kGrain / w.size(1),
                   [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, CPU, m) { m.impl("quantize_groups", quantize_groups); }

}  // namespace fusedops::cpu::quantized_linear
