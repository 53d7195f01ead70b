// Decides when the kernels are faster than torch's functions, from benchmarks/operators/linear.py.
//
// One node for product, bias and activation costs the host less than torch's three nodes, and one
// pass over the product costs less than two: with a gradient or an activation the kernels always
// win. A bare product wins if csrc/cpu's is faster than torch's. torch uses MKL in float32, which
// is best on Intel CPUs; on AMD CPUs ours is faster (Zen 4: by 0 to 30 %) once packing is a small
// part of the work. In 16 bits torch uses oneDNN.

#include <algorithm>
#include <atomic>

#include "csrc/ops/cpu_features.h"
#include "csrc/ops/linear/operators.h"

namespace fusedops::linear {
namespace {

constexpr int64_t kWork = int64_t{1} << 22;  // multiply-adds
constexpr int64_t kRows = 64, kRowsAcross = 192, kDepth = 64;

std::atomic<bool> always{false};

}  // namespace

void linear_always(bool asked) { always = asked; }

bool own_product_pays(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t depth,
                      bool across) {
  if (dtype != at::kFloat) return false;
  return always || (amd_avx2() && rows >= (across ? kRowsAcross : kRows) && depth >= kDepth &&
                    rows * columns * depth >= kWork);
}

bool linear_pays(const Tensor& input, const Tensor& weight, bool activates, bool trains) {
  if (always) return true;
  if (!input.is_cpu()) return activates && !trains;  // cuBLASLt's epilogue
  if (activates || trains) return true;
  if (input.scalar_type() != at::kFloat || weight.dim() != 2) return false;
  if (weight.layout() != at::kStrided) return false;
  const auto elements = input.sym_numel();
  if (elements.is_symbolic() || weight.sym_numel().is_symbolic()) return true;
  const int64_t columns = weight.size(0), depth = weight.size(1);
  const int64_t rows = elements.expect_int() / std::max<int64_t>(depth, 1);
  return own_product_pays(at::kFloat, rows, columns, depth, weight.stride(0) != 1);
}

}  // namespace fusedops::linear
