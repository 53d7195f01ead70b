// The input of quantized_linear, rounded once to the format in which it is multiplied.
#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "csrc/cpu/gemm.h"
#include "csrc/cpu/isa/quantized_linear/few.h"
#include "csrc/cpu/quantized_linear/kernel_choice.h"

namespace fusedops::cpu::quantized_linear {

constexpr int64_t kProducts = 1 << 18;  // approximate number of multiplications per task

// x [rows, k] in a product's operand format, its rows padded with zeros.
struct Input {
  Operand operand;
  bool by_lane;  // in order_by_lane's order
  int64_t rows, ld;
  Tensor numbers;
  std::vector<float> steps;  // the scale of each row's codes; empty if x is not quantized
  std::vector<int32_t> sums;

  // x: float32, float16 or bfloat16, or with `scale` [rows] codes of the format.
  Input(const Tensor& x, const Tensor& scale, const Plan& plan, InputFormat rounds)
      : operand(plan.operand),
        by_lane(plan.by_lane),
        rows(x.size(0)),
        ld(padded(x.size(1) * size_of(operand), kLanes) / size_of(operand)),
        numbers(at::empty({padded(rows) * ld * size_of(operand)}, x.options().dtype(at::kByte))),
        steps(rounds == InputFormat::none ? 0 : rows),
        sums(steps.size()) {
    const int64_t k = x.size(1);
    if (scale.defined()) {
      std::copy_n(scale.const_data_ptr<float>(), rows, steps.data());
      take_codes(x, rounds);
      return;
    }
    at::parallel_for(0, rows, kProducts / (k + 1) + 1, [&](int64_t begin, int64_t end) {
      const auto* const data = static_cast<const char*>(x.const_data_ptr());
      std::vector<uint16_t> halves(by_lane || plan.widened ? ld : 0);
      for (int64_t i = begin; i < end; ++i) {
        void* const out = halves.empty() ? at(i, 0) : halves.data();
        read_input_for_isa()({data + i * k * x.element_size(), k, ld, dtype_of(x), out,
                              plan.widened ? Operand::bfloat16 : operand, nullptr, rounds,
                              steps.empty() ? nullptr : &steps[i],
                              sums.empty() ? nullptr : &sums[i]});
        if (by_lane) order_by_lane_for_isa()(halves.data(), ld, static_cast<uint16_t*>(at(i, 0)));
        if (plan.widened) {
          std::transform(halves.begin(), halves.end(), static_cast<float*>(at(i, 0)),
                         c10::detail::f32_from_bits);
        }
      }
    });
  }

  // Codes are exact in every operand's format.
  void take_codes(const Tensor& x, InputFormat format) {
    const int64_t k = x.size(1);
    const Codes codes{static_cast<const uint8_t*>(x.const_data_ptr()),
                      nullptr,
                      nullptr,
                      format == InputFormat::int8 ? WeightFormat::int8 : WeightFormat::fp8,
                      rows,
                      k,
                      k};
    at::parallel_for(0, rows, kProducts / (k + 1) + 1, [&](int64_t begin, int64_t end) {
      std::vector<uint16_t> halves(by_lane ? ld : 0);
      for (int64_t i = begin; i < end; ++i) {
        auto* const out = static_cast<uint16_t*>(at(i, 0));
        void* const decoded = by_lane ? halves.data() : out;
        read_codes_for_isa()(codes, {i, 1, 0, k, decoded, ld, /*scaled=*/false, operand});
        if (!halves.empty()) order_by_lane_for_isa()(halves.data(), ld, out);
        const auto* const row = reinterpret_cast<const int8_t*>(codes.codes) + i * k;
        if (operand == Operand::integer) sums[i] = std::accumulate(row, row + k, 0);
      }
    });
  }

  void* at(int64_t row, int64_t column) const {
    return static_cast<char*>(numbers.mutable_data_ptr()) + (row * ld + column) * size_of(operand);
  }
};

// x for the matrix unit, as TileProducts describes it.
struct Packed {
  int64_t depth;
  Tensor numbers;

  explicit Packed(const Input& x) : depth(x.ld), numbers(at::empty_like(x.numbers)) {
    at::parallel_for(0, at::divup(x.rows, kEdge), 1, [&](int64_t tile, int64_t end) {
      for (; tile < end; ++tile) {
        const auto* const from = static_cast<const float*>(x.at(tile * kEdge, 0));
        transpose_for_isa()(from, depth / 2, kEdge, depth / 2,
                            reinterpret_cast<float*>(at(tile * kEdge)), kEdge);
      }
    });
  }
  // The tile that begins with this row of x.
  uint16_t* at(int64_t row) const {
    return static_cast<uint16_t*>(numbers.mutable_data_ptr()) + row * depth;
  }
};

}  // namespace fusedops::cpu::quantized_linear
