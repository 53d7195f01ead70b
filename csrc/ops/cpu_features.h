// The CPU features that decide between our kernels and torch's.
#pragma once

#include <optional>

namespace fusedops {

// A CPU of AMD's with these instructions.
bool amd_avx2();
bool amd_avx512_bf16();

// Whether bfloat16 is multiplied faster than float32. As asked, or by itself: true with AMX, and on
// AMD's (four times as fast on a Zen 5). On an Intel Xeon without AMX torch's products are half as
// fast as those of float32.
bool fast_bfloat16_products();
void bfloat16_products(std::optional<bool> asked);

}  // namespace fusedops
