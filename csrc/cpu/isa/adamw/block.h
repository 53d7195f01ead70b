// A block of a parameter, its gradient and its moments, in place or in a copy.
#pragma once

#include <cstring>

#include "csrc/cpu/isa/adamw/lanes.h"

namespace fusedops::cpu::adamw {
namespace CPU_CAPABILITY {

constexpr int kTurn = 4 * kLanes;  // elements per loop turn: a vector of bytes

template <Moments kMoments>
constexpr int kMomentBytes = kMoments == Moments::float32    ? 4
                             : kMoments == Moments::bfloat16 ? 2
                                                             : 1;

// A block's addresses and size.
template <class T>
struct Block {
  T* param;
  const T* grad;
  void *exp_avg, *exp_avg_sq;
  float* max_exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;
  int16_t* remainder;
  BlockKey key;
  uint32_t first_threshold;  // of the codes
  int64_t count;             // a multiple of kTurn; at most kAdamWBlock with codes or keys
  int64_t ahead;             // prefetch distance in elements; 0: none
};

// A copy of a block, padded with zeros to whole turns.
template <class T, Moments kMoments>
struct Staged {
  static constexpr int kBytes = kMomentBytes<kMoments>;
  alignas(64) T param[kAdamWBlock], grad[kAdamWBlock];
  alignas(64) char exp_avg[kAdamWBlock * kBytes], exp_avg_sq[kAdamWBlock * kBytes];
  alignas(64) float max_exp_avg_sq[kAdamWBlock];
  alignas(64) int16_t remainder[kAdamWBlock];

  template <class Step>
  void run(Block<T> block, int64_t count, const Step& step) {
    std::memset(static_cast<void*>(this), 0, sizeof(*this));
    const Block<T> at = block;
    copy(param, at.param, count * sizeof(T));
    copy(grad, at.grad, count * sizeof(T));
    copy(exp_avg, at.exp_avg, count * kBytes);
    copy(exp_avg_sq, at.exp_avg_sq, count * kBytes);
    copy(max_exp_avg_sq, at.max_exp_avg_sq, count * sizeof(float));
    copy(remainder, at.remainder, count * sizeof(int16_t));
    block.param = param;
    block.grad = grad;
    block.exp_avg = exp_avg;
    block.exp_avg_sq = exp_avg_sq;
    block.max_exp_avg_sq = at.max_exp_avg_sq == nullptr ? nullptr : max_exp_avg_sq;
    block.remainder = remainder;
    block.ahead = 0;
    block.count = (count + kTurn - 1) / kTurn * kTurn;
    step(block);
    copy(at.param, param, count * sizeof(T));
    copy(at.exp_avg, exp_avg, count * kBytes);
    copy(at.exp_avg_sq, exp_avg_sq, count * kBytes);
    copy(at.max_exp_avg_sq, max_exp_avg_sq, count * sizeof(float));
    copy(at.remainder, remainder, count * sizeof(int16_t));
  }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (to != nullptr && from != nullptr) std::memcpy(to, from, bytes);
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace fusedops::cpu::adamw
