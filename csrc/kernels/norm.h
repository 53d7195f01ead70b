// Arguments of the CPU and CUDA kernels of LayerNorm and RMSNorm: pointers, strides and dtypes.
// Formulas: fusedops/functional/norm.py. Plain C++ for any device.
#pragma once

#include "csrc/kernels/dtype.h"
#include "csrc/kernels/philox.h"

namespace fusedops::norm {

struct NormForwardRows {
  const void *x, *residual;  // residual: null if there is none
  void *y, *h;               // h: null without a residual
  double *mean, *rstd;       // [rows]; mean: null for RMSNorm
  int64_t rows, x_stride, residual_stride;
  double eps;
  Dtype x_dtype, h_dtype, base_dtype, y_dtype;  // residual has h_dtype
  bool round_first;                             // round to base_dtype before the weight
  Dropout dropout;
};

struct NormBackwardRows {
  const void *dy, *dh, *h;  // dh: null if there is none
  const double *mean, *rstd;
  void *dresidual, *dx;  // null if not requested
  int64_t rows, dy_stride, dh_stride, h_stride;
  Dtype dy_dtype, h_dtype;  // dh, dresidual and dx have h_dtype
  Dropout dropout;
};

}  // namespace fusedops::norm
