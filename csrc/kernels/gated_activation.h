// Shared by the CPU and CUDA kernels of gated activations: arguments and constants. Formulas:
// fusedops/functional/gated_activation.py. Plain C++ for any device.
//
// Every kind is y = g S(g) (u + up_offset), with dgate = dy (u + up_offset) (S(g) + g S'(g)) and
// dup = dy g S(g):
//   swiglu      S = sigmoid(alpha g)
//   geglu       S = the normal distribution's function, by erf
//   geglu_tanh  S = (1 + tanh(w)) / 2 = sigmoid(2 w), w = sqrt(2 / pi) (g + 0.044715 g^3)
#pragma once

#include <cstdint>

#include "csrc/kernels/dtype.h"

namespace fusedops::gated_activation {

enum class GatedKind : uint8_t { swiglu, swiglu_limited, geglu, geglu_tanh };

struct GatedInput {
  const void *gate, *up;  // rows of n elements, each contiguous
  int64_t rows, n, gate_stride, up_stride;
  float limit, alpha, up_offset;  // limit: for swiglu_limited
  GatedKind kind;
  Dtype dtype;  // of every tensor but y
};

struct GatedForward : GatedInput {
  void* y;  // [rows, n]
  int64_t y_stride;
  Dtype y_dtype;  // dtype or float32
};

struct GatedBackward : GatedInput {
  const void* dy;
  int64_t dy_stride;
  void *dgate, *dup;  // null if not requested
  int64_t d_stride;   // row stride of dgate and dup: 2 n if they are packed in one tensor
};

constexpr double kDensity = 0.398942280401432678;    // 1 / sqrt(2 pi)
constexpr double kTanhSlope = 1.595769121605730712;  // 2 sqrt(2 / pi)
constexpr double kTanhCubic = 0.044715;
constexpr float kTanhEnd = 20;  // g is clamped here: the sigmoid is 0 or 1, and g^3 might overflow

// The normal distribution's tail P(X > x), x >= 0, over its density's exp(-x^2 / 2): a polynomial
// in s = c x / (1 + c x), exactly 1/2 at 0. Fitted here: P is within 5e-8, the tail within 1e-6 of
// itself up to x = 5. horner(s, a, b, c, ...) is a + s (b + s (c + ...)).
constexpr float kTailScale = 0.28f;  // c
constexpr float kTailEnd = 8;        // maximum of c x; the density is 0 in float32 long before

template <class V, class Horner>
constexpr V scaled_normal_tail(const V& s, const Horner& horner) {
  return horner(s, 0.5f, -1.424793f, 1.7639562f, -1.104797f, 0.13567454f, 0.20172594f,
                -0.012165267f, -0.09887435f, 0.039341018f);
}

}  // namespace fusedops::gated_activation
