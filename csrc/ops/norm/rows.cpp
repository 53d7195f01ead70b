// Builds the LayerNorm and RMSNorm kernels' arguments (pointers, strides, dtypes) from tensors.

#include "csrc/ops/norm/operators.h"

namespace fusedops::norm {

NormForwardTensors::NormForwardTensors(const NormForwardArguments& a_, const NormForward& outputs_)
    : a(a_),
      outputs(outputs_),
      rows(std::get<2>(outputs).size(1)),
      n(a.x.numel() / rows),
      x(a.x, n),
      residual(is_defined(a.residual) ? a.residual->to(std::get<1>(outputs).scalar_type()) : a.x,
               n) {}

void NormForwardTensors::describe(NormForwardRows& args) const {
  const auto& [y, h, stats] = outputs;
  const bool add = h.defined();
  args.x = x.data();
  args.x_stride = x.stride;
  args.residual = add ? residual.data() : nullptr;
  args.residual_stride = residual.stride;
  args.y = y.mutable_data_ptr();
  args.h = mutable_data_or_null(h);
  args.mean = stats.size(0) == 2 ? stats.mutable_data_ptr<double>() : nullptr;
  args.rstd = stats.mutable_data_ptr<double>() + (stats.size(0) - 1) * rows;
  args.rows = rows;
  args.eps = a.eps;
  args.x_dtype = dtype_of(x.tensor);
  args.h_dtype = dtype_of(residual.tensor);
  args.y_dtype = dtype_of(y);
  const auto base = norm_base_dtype(x.tensor, residual.tensor.scalar_type(), a.weight);
  args.base_dtype = base == x.tensor.scalar_type() ? args.x_dtype : args.h_dtype;
  args.round_first = a.kind == NormKind::rms_llama;
  args.dropout = dropout_of(a.dropout_p, a.seed);
}

NormBackwardTensors::NormBackwardTensors(const NormBackwardArguments& a_, const Tensor& dy_,
                                         const NormBackward& outputs_)
    : a(a_),
      outputs(outputs_),
      rows(a.stats.size(1)),
      n(a.h.numel() / rows),
      dy(dy_, n),
      dh(is_defined(a.dh) ? a.dh->to(a.h.scalar_type()) : a.h, n),
      h(a.h, n) {}

void NormBackwardTensors::describe(NormBackwardRows& args) const {
  const auto& stats = a.stats;
  const auto& [dresidual, dx, dweight, dbias] = outputs;
  args.dy = dy.data();
  args.dy_stride = dy.stride;
  args.dh = is_defined(a.dh) ? dh.data() : nullptr;
  args.dh_stride = dh.stride;
  args.h = h.data();
  args.h_stride = h.stride;
  args.mean = stats.size(0) == 2 ? stats.const_data_ptr<double>() : nullptr;
  args.rstd = stats.const_data_ptr<double>() + (stats.size(0) - 1) * rows;
  args.dresidual = mutable_data_or_null(dresidual);
  args.dx = mutable_data_or_null(dx);
  args.rows = rows;
  args.dy_dtype = dtype_of(dy.tensor);
  args.h_dtype = dtype_of(h.tensor);
  args.dropout = dropout_of(a.dropout_p, a.seed);
}

}  // namespace fusedops::norm
