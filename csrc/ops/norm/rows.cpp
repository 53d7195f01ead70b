// From tensors to what the kernels are told of them.

#include "csrc/ops/norm/operators.h"

namespace fusedops {

NormForwardTensors::NormForwardTensors(const Tensor& x_, const OptionalTensor& residual_,
                                       const NormForward& outputs_)
    : outputs(outputs_),
      rows(std::get<2>(outputs).size(1)),
      n(x_.numel() / rows),
      x(x_, n),
      residual(given(residual_) ? residual_->to(std::get<1>(outputs).scalar_type()) : x_, n) {}

void NormForwardTensors::describe(NormForwardRows& args, const OptionalTensor& weight, double eps,
                                  std::string_view kind, double dropout_p,
                                  const OptionalTensor& seed) const {
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
  args.eps = eps;
  args.x_dtype = dtype_of(x.tensor);
  args.h_dtype = dtype_of(residual.tensor);
  args.y_dtype = dtype_of(y);
  const auto base = norm_base_dtype(x.tensor, residual.tensor.scalar_type(), weight);
  args.base_dtype = base == x.tensor.scalar_type() ? args.x_dtype : args.h_dtype;
  args.round_first = kind == "rms_llama";
  args.dropout = dropout_of(dropout_p, seed);
}

NormBackwardTensors::NormBackwardTensors(const Tensor& dy_, const OptionalTensor& dh_,
                                         const Tensor& h_, const Tensor& stats_,
                                         const NormBackward& outputs_)
    : outputs(outputs_),
      stats(stats_),
      rows(stats.size(1)),
      n(h_.numel() / rows),
      dy(dy_, n),
      dh(given(dh_) ? dh_->to(h_.scalar_type()) : h_, n),
      h(h_, n),
      adds(given(dh_)) {}

void NormBackwardTensors::describe(NormBackwardRows& args, double dropout_p,
                                   const OptionalTensor& seed) const {
  const auto& [dresidual, dx, dweight, dbias] = outputs;
  args.dy = dy.data();
  args.dy_stride = dy.stride;
  args.dh = adds ? dh.data() : nullptr;
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
  args.dropout = dropout_of(dropout_p, seed);
}

}  // namespace fusedops
