// Features of the CPU by which operators choose kernels and the dtype of matrix products.
#pragma once

#include <optional>

namespace fusedops {

// Whether this is an AMD CPU with AVX-512 BF16.
bool amd_avx512_bf16();

// Whether this process may use an Intel CPU's matrix unit.
bool has_amx();

// Whether bfloat16 products are faster than float32 ones: as set by bfloat16_products, else true
// with AMX and on AMD CPUs (four times as fast on a Zen 5). On an Intel Xeon without AMX torch's
// bfloat16 products are half as fast as its float32 ones.
bool fast_bfloat16_products();
void bfloat16_products(std::optional<bool> asked);

}  // namespace fusedops
