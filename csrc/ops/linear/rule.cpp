// Decides when linear's kernels are faster than torch's functions.
//
// On GPUs the kernels run only for an activation without a gradient, by cuBLASLt's epilogue.
//
// On CPUs one node for product, bias and activation costs less than torch's three nodes, and one
// pass over the product costs less than two: with a gradient or an activation the kernels always
// win. A bare product wins if csrc/cpu's is faster than torch's. Calls that `fusedops calibrate`
// timed decide that for float32, where torch uses MKL, and for few rows, where reading the weight
// takes the time. In 16 bits torch uses oneDNN if the CPU has instructions for the dtype; else its
// products reach 11 to 14 GFLOP/s at any size, where ours reach 80 (256 rows, 4096 x 4096, one
// thread of a Zen 3).

#include <algorithm>
#include <atomic>

#include <ATen/core/dispatch/Dispatcher.h>

#include "csrc/ops/calibration.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::linear {
namespace {

constexpr int64_t kFewRows = 32;  // the most that are timed as few
constexpr int64_t kNarrow = 4;    // rows and columns in 16 bits, where torch has only loops

std::atomic<bool> always{false};

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
  static const TimedKind plain("linear float32 product"), transposed("linear float32 across");
  if (dtype == at::kBFloat16 || dtype == at::kHalf) {
    return always || (torch_lacks(dtype) && std::min(rows, columns) >= kNarrow);
  }
  if (dtype != at::kFloat) return false;
  if (always) return true;
  return rows > kFewRows && (across ? transposed : plain).pays({rows, columns, depth});
}

bool few_rows_pay(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t depth,
                  bool across) {
  static const TimedKind float32("linear float32 few"), bfloat16("linear bfloat16 few"),
      float16("linear float16 few");
  const auto* const timed = dtype == at::kFloat      ? &float32
                            : dtype == at::kBFloat16 ? &bfloat16
                            : dtype == at::kHalf     ? &float16
                                                     : nullptr;
  if (timed == nullptr || across || rows > kFewRows) return false;
  return always || timed->pays({rows, columns, depth});
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
