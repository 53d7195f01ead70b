// The grain of parallel loops: how much work a thread takes at a time.
#pragma once

#include <cstdint>

namespace fusedops::cpu {

constexpr int64_t kGrain = 32768;  // approximate number of elements per task

}  // namespace fusedops::cpu
