// Decides when linear's kernels are faster than torch's functions. benchmarks/operators/linear.py
// measured the limits.
//
// On GPUs the kernels run only for an activation without a gradient, by cuBLASLt's epilogue.
//
// On CPUs one node for product, bias and activation costs less than torch's three nodes, and one
// pass over the product costs less than two: with a gradient or an activation the kernels always
// win. A bare product wins if csrc/cpu's is faster than torch's. A few rows are limited by the
// reading of the weight: on a Zen 4, with weights in memory, ours is 1.3 to 3.3 times as fast in
// float32, 1.05 to 2.1 times in bfloat16, and 1.1 to 4 times in float16, for 1 to 32 rows. torch
// uses MKL in float32, which is best on Intel CPUs; on AMD CPUs ours is faster (Zen 4: by 0 to 30
// %) once packing is a small part of the work. In 16 bits torch uses oneDNN if the CPU has
// instructions for the dtype; else its products reach 11 to 14 GFLOP/s at any size, where ours
// reach 80 (256 rows, 4096 x 4096, one thread of a Zen 3).

#include <algorithm>
#include <atomic>

#include <ATen/core/dispatch/Dispatcher.h>

#include "csrc/ops/cpu_features.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::linear {
namespace {

constexpr int64_t kWork = int64_t{1} << 22;  // multiply-adds
constexpr int64_t kRows = 64, kRowsAcross = 192, kDepth = 64;
constexpr int64_t kNarrow = 4;  // rows and columns in 16 bits, where torch has only loops

std::atomic<bool> always{false};

// Most rows for which reading the weight in place is faster than torch's product.
int64_t few_rows(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return amd_avx2() ? 32 : 16;
    case at::kBFloat16: return has_amx() ? 4 : 32;
    case at::kHalf: return 32;
    default: return 0;
  }
}

// Whether oneDNN, whose products torch uses, has those of a 16-bit dtype on this CPU.
bool onednn_has(const char* question) {
  const auto handle = c10::Dispatcher::singleton().findSchema({question, ""});
  return handle.has_value() && handle->typed<bool()>().call();
}

// Whether torch has only plain loops for matrix products of this 16-bit dtype on this CPU.
bool torch_lacks(c10::ScalarType dtype) {
  static const bool lacks_bfloat16 = !onednn_has("mkldnn::_is_mkldnn_bf16_supported"),
                    lacks_float16 = !onednn_has("mkldnn::_is_mkldnn_fp16_supported");
  return dtype == at::kHalf ? lacks_float16 : lacks_bfloat16;
}

}  // namespace

void linear_always(bool asked) { always = asked; }

bool own_product_pays(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t depth,
                      bool across) {
  if (dtype == at::kBFloat16 || dtype == at::kHalf) {
    return always || (torch_lacks(dtype) && std::min(rows, columns) >= kNarrow);
  }
  if (dtype != at::kFloat) return false;
  return always || (amd_avx2() && rows >= (across ? kRowsAcross : kRows) && depth >= kDepth &&
                    rows * columns * depth >= kWork);
}

bool few_rows_pay(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t depth,
                  bool across) {
  constexpr int64_t kWeights = int64_t{1} << 14;  // elements of the smallest weight
  return rows <= few_rows(dtype) && !across && (always || columns * depth >= kWeights);
}

bool linear_pays(const Tensor& input, const Tensor& weight, bool activates, bool trains) {
  if (always) return true;
  if (!input.is_cpu()) return activates && !trains;  // cuBLASLt's epilogue
  if (activates || trains) return true;
  if (weight.dim() != 2 || weight.layout() != at::kStrided) return false;
  const auto elements = input.sym_numel();
  if (elements.is_symbolic() || weight.sym_numel().is_symbolic()) return true;
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const int64_t rows = elements.expect_int() / std::max<int64_t>(depth, 1);
  const auto dtype = input.scalar_type();
  return few_rows_pay(dtype, rows, columns, depth, weight.stride(1) != 1) ||
         own_product_pays(dtype, rows, columns, depth, weight.stride(0) != 1);
}

}  // namespace fusedops::linear
