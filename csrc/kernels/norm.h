// The norm family's kernel arguments, shared by the CPU and CUDA kernels. Formulas:
// fusedops/functional/norm.py. Plain C++ for any device.
#pragma once

#include "csrc/kernels/dtype.h"
#include "csrc/kernels/philox.h"

namespace fusedops::norm {

struct NormForwardRows {
  const void *x, *residual;  // residual: null when there is nothing to add
  void *y, *h;               // h: null without a residual
  double *mean, *rstd;       // [rows]; mean: null for RMSNorm
  int64_t rows, x_stride, residual_stride;
  double eps;
  Dtype x_dtype, h_dtype, base_dtype, y_dtype;  // residual has h's
  bool round_first;                             // to base_dtype, before the weight
  Dropout dropout;
};

struct NormBackwardRows {
  const void *dy, *dh, *h;  // dh: null when there is none
  const double *mean, *rstd;
  void *dresidual, *dx;  // null when not asked for
  int64_t rows, dy_stride, dh_stride, h_stride;
  Dtype dy_dtype, h_dtype;  // dh, dresidual and dx have h's
  Dropout dropout;
};

}  // namespace fusedops::norm
