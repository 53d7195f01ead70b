// The CPU features that decide between our kernels and torch's.
#pragma once

#include <optional>

namespace fusedops {

// Whether the CPU is AMD's and has these instructions.
bool amd_avx2();
bool amd_avx512_bf16();

// Whether bfloat16 matmuls are faster than float32. By default true with AMX and on AMD CPUs (four
// times as fast on a Zen 5). On an Intel Xeon without AMX torch's bfloat16 matmuls have half the
// speed of float32.
bool fast_bfloat16_products();
void bfloat16_products(std::optional<bool> asked);

}  // namespace fusedops
