// A linear layer for a few rows of input. Reading the weight takes most of the time, so it is read
// in place and once. Threads share its rows. Bias and activation follow while the sums are in the
// cache.

#include "csrc/cpu/linear/few.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>

#include "csrc/cpu/isa/linear/few.h"

namespace fusedops::cpu::linear {
namespace {

constexpr int64_t kTaskProducts = 1 << 18;  // approximate number of multiplications per task

// Wide tasks read rows of w that lie farther apart, which is 5 % faster; their sums take more of
// the first cache, and every thread needs a few tasks.
int64_t columns_per_task(int64_t rows, int64_t n) {
  const int64_t least = isa() == Isa::avx2 ? 96 : 64;  // whole blocks of 3 or 4 rows of w
  const int64_t tasks = n / least, each = tasks / (4 * at::get_num_threads());
  return rows > kAtOnce ? least : least * std::clamp<int64_t>(each, 1, 4);
}

}  // namespace

void few_rows(const Tensor& x, const Tensor& weight, const Output& out) {
  const int64_t rows = x.size(0), k = x.size(1), n = weight.size(0);
  const auto dtype = dtype_of(x);
  const std::unique_ptr<char[]> packed(new char[packed_bytes(rows, k)]);
  pack_few_rows_for_isa()(x.contiguous().const_data_ptr(), rows, k, dtype, packed.get());
  auto* const run = multiply_few_rows_for_isa();
  const int64_t columns = columns_per_task(rows, n);
  const int64_t grain = kTaskProducts / (rows * columns * k) + 1;
  at::parallel_for(0, (n + columns - 1) / columns, grain, [&](int64_t i, int64_t last) {
    const std::unique_ptr<float[]> sums(new float[rows * columns]);
    const FewRows args{
        packed.get(), weight.const_data_ptr(), rows, k, weight.stride(0), dtype, sums.get(),
        columns};
    for (; i < last; ++i) {
      const int64_t begin = i * columns, end = std::min(begin + columns, n);
      run(args, begin, end);
      out.write(sums.get(), columns, 0, rows, begin, end - begin);
    }
  });
}

}  // namespace fusedops::cpu::linear
