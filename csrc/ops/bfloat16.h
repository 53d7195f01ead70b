// Where a CPU multiplies bfloat16 faster than float32.
#pragma once

#include <optional>

namespace fusedops {

// As asked, or by itself: true with AMX, and on AMD's (four times as fast on a Zen 5). On an Intel
// Xeon without AMX torch's products are half as fast as those of float32.
bool fast_bfloat16_products();
void bfloat16_products(std::optional<bool> asked);

}  // namespace fusedops
