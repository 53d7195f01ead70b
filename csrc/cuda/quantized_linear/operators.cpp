// quantized_linear's forward on GPUs: chooses CUDA, Triton or the definition by dtype, formats and
// number of rows. A few rows of x go to the kernels of gemv.cu and mma.cu, more to
// fusedops/triton's operator, or to the definition if Triton is missing. The backward is Triton's,
// or the definition's if Triton is missing or the dtype is float64.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>

#include "csrc/cuda/quantized_linear/gemv.h"
#include "csrc/cuda/stream.h"
#include "csrc/ops/linear/operators.h"
#include "csrc/ops/quantized_linear/gpu_kernel.h"

namespace fusedops::cuda::quantized_linear {
namespace {

int64_t rows_of(const Tensor& x) {
  return x.dim() == 0 ? 0 : c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

// Returns x [rows, k] as codes in float32, and their steps.
std::pair<Tensor, Tensor> quantized(const Rows& x, int64_t rows, int64_t k, InputFormat format,
                                    CUstream_st* stream) {
  const auto options = x.tensor.options().dtype(at::kFloat);
  const auto codes = at::empty({rows, k}, options), steps = at::empty({rows}, options);
  launch_quantize_rows({x.data(), x.stride, dtype_of(x.tensor), rows, k, format,
                        codes.mutable_data_ptr<float>(), steps.mutable_data_ptr<float>()},
                       stream);
  return {codes, steps};
}

void multiply(const QuantizedArguments& a, const QuantizedForward& outputs) {
  const auto& [y, z] = outputs;
  const auto& x = a.x;
  const auto w = a.weight();
  const OnDeviceOf device(x);
  const int64_t n = w.n.expect_int(), k = w.k.expect_int(), rows = y.numel() / n;
  const Rows x_rows(x, k);
  const bool as_codes = a.input_format != InputFormat::none;
  Tensor codes, steps;
  if (a.x_is_codes()) {
    codes = x.to(at::kFloat).contiguous();
    steps = a.x_scale->contiguous();
  } else if (as_codes) {
    std::tie(codes, steps) = quantized(x_rows, rows, k, a.input_format, device.stream());
  }
  const auto shift = is_defined(a.bias) ? a.bias->contiguous() : Tensor();
  GemvArgs args{};
  args.x = as_codes ? codes.const_data_ptr() : x_rows.data();
  args.x_stride = as_codes ? k : x_rows.stride;
  args.x_dtype = as_codes ? Dtype::float32 : dtype_of(x);
  args.rows = static_cast<int>(rows);
  args.steps = as_codes ? steps.const_data_ptr<float>() : nullptr;
  args.codes = static_cast<const uint8_t*>(w.qweight.const_data_ptr());
  args.scales = w.scales.const_data_ptr<float>();
  args.zeros = is_defined(w.zeros) ? w.zeros->const_data_ptr<uint8_t>() : nullptr;
  args.format = w.format;
  args.n = n;
  args.k = k;
  args.group_size = w.group_size;
  args.groups = groups_of(k, w.group_size);
  std::copy(std::begin(kNf4), std::end(kNf4), args.nf4);
  args.bias = data_or_null(shift);
  args.y = y.mutable_data_ptr();
  args.z = mutable_data_or_null(z);
  args.dtype = dtype_of(y);
  args.activation = a.activation;
  args.exact = !may_round(a.compute);
  plan_gemv(args);
  TORCH_INTERNAL_ASSERT(args.tensor_cores || rows <= kGemvRows);
  const auto partials =
      args.parts > 1 ? at::empty({args.parts, rows, n}, w.scales.options()) : Tensor();
  args.partials = static_cast<float*>(mutable_data_or_null(partials));
  launch_gemv(args, device.stream());
}

// Whether mma.cu can read all rows of x, whatever their number.
bool is_narrow(const Tensor& x, const Tensor& codes) {
  const auto at_vectors = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  return (x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) && x.is_contiguous() &&
         at_vectors(x) && at_vectors(codes);
}

QuantizedForward quantized_linear_forward(const QuantizedArguments& a) {
  if (a.dtype() == at::kDouble) return quantized_linear_forward_reference(a);
  const auto few = few_rows(a.layout, a.input_format, a.compute, is_narrow(a.x, a.codes.qweight));
  if (gpu_kernel(rows_of(a.x), a.input_format, a.compute, few) != GpuKernel::gemv) {
    return quantized_linear_tiles(a);
  }
  const auto outputs = quantized_linear_outputs(a);
  if (std::get<0>(outputs).numel() == 0) return outputs;
  multiply(a, outputs);
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(fusedops, FUSEDOPS_CUDA_KEY, m) {
  m.impl("quantized_linear_forward", flat<quantized_linear_forward>);
}

}  // namespace fusedops::cuda::quantized_linear
