// Matrix products of tiles, those of bfloat16 by oneDNN's micro-kernels.

#include "csrc/cpu/gemm.h"

#include <ATen/native/CPUBlas.h>

#include "csrc/cpu/isa/tile_product.h"
#include "csrc/ops/cpu_features.h"

namespace fusedops::cpu {
namespace {

using at::native::cpublas::brgemm;

// Whether oneDNN has bfloat16 products on this CPU.
bool has_brgemm() {
  std::vector<BFloat16> a(kEdge * kEdge), b(a);
  std::vector<float> c(kEdge * kEdge);
  try {
    brgemm(kEdge, kEdge, kEdge, kEdge, kEdge, kEdge, false, a.data(), b.data(), c.data());
    at::native::cpublas::brgemm_release();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

// Whether there is nothing to multiply; c is then a sum of no terms.
bool is_empty(int64_t m, int64_t n, int64_t k, float* c, int64_t ld_c, bool add) {
  for (int64_t i = 0; k == 0 && !add && i < m; ++i) std::fill_n(c + i * ld_c, n, 0.f);
  return m == 0 || n == 0 || k == 0;
}

}  // namespace

void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t ld_a, const float* b,
             int64_t ld_b, float* c, int64_t ld_c, bool add) {
  // Terms summed in one chain. For few rows the chains are shorter, because torch's matmuls are
  // more accurate there too.
  const int64_t chain = m <= 2 * kEdge ? kEdge / 2 : 4 * kEdge;
  if (is_empty(m, n, k, c, ld_c, add)) return;
  multiply_tile_for_isa()({m, n, k, a, ld_a, b, ld_b, c, ld_c, add, chain});
}

void product(int64_t m, int64_t n, int64_t k, const BFloat16* a, int64_t ld_a, const BFloat16* b,
             int64_t ld_b, float* c, int64_t ld_c, bool add) {
  if (!is_empty(m, n, k, c, ld_c, add)) brgemm(m, n, k, ld_a, ld_b, ld_c, add, a, b, c);
}

bool multiplies_bfloat16(c10::ScalarType dtype) {
  static const bool has_bfloat16 = has_brgemm();
  return dtype == at::kBFloat16 && has_bfloat16 && fast_bfloat16_products();
}

BrgemmScope::~BrgemmScope() {
  if (fast_bfloat16_products()) at::native::cpublas::brgemm_release();
}

}  // namespace fusedops::cpu
