"""QuantizedStack: a module that holds one quantized weight matrix for each expert."""

import torch
from torch import Tensor

from fusedops.functional import QuantizedWeight, quantize_experts
from fusedops.functional.quantized_linear import check_format, scales_name
from fusedops.nn.quantized_linear.codes import Codes
from fusedops.nn.quantized_linear.scales import warn_of_scales

__all__ = ["QuantizedStack"]


class QuantizedStack(Codes):
    """Weights [experts, out_features, in_features], each quantized by itself.

    Buffers: qweight, scales (nf4: absmax) and zeros (int4 only), as QuantizedLinear's, stacked.
    Moving the module moves them; casting it leaves them as they are. Loading a checkpoint with a
    float weight in this module's place quantizes it. transposed: such a weight is [experts,
    in_features, out_features].
    """

    def __init__(
        self,
        experts: int,
        out_features: int,
        in_features: int,
        *,
        format: str,
        group_size: int | None = None,
        scale: str | None = None,
        transposed: bool = False,
        device=None,
    ) -> None:
        super().__init__()
        check_format(format, in_features, group_size, scale)
        self.format, self.scale, self.transposed = format, scale, transposed
        empty = torch.empty(0, out_features, in_features, dtype=torch.float32, device="meta")
        # "absmax" has the same shapes as "mse" and is much faster.
        template = quantize_experts(empty, format, group_size=group_size, scale="absmax")
        self.experts, self.out_features, self.in_features = experts, out_features, in_features
        self.group_size = template.group_size
        for name, t in template.tensors().items():
            shape = (experts, *t.shape[1:])
            self.register_buffer(name, torch.zeros(shape, dtype=t.dtype, device=device))

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """The codes and scales, without a copy."""
        layout = self.format, self.out_features, self.in_features, self.group_size
        scales, zeros = self._codes(scales_name(self.format)), self._codes("zeros")
        return QuantizedWeight(*layout, self._codes("qweight"), scales, zeros, self.experts)

    def _code_rows(self) -> int:
        return self.experts * self.out_features

    def quantized(self, weight: Tensor) -> QuantizedWeight:
        """A float weight's codes. Raises ValueError for another shape."""
        upright = weight.transpose(1, 2) if self.transposed and weight.dim() == 3 else weight
        shape = self.experts, self.out_features, self.in_features
        if upright.shape != shape:
            raise ValueError(f"QuantizedStack: weight must be {shape}, got {tuple(upright.shape)}")
        size, scale = self.group_size, self.scale
        return quantize_experts(upright, self.format, group_size=size, scale=scale)

    def take(self, weight: QuantizedWeight) -> None:
        """Replaces the codes and scales."""
        self._take_codes(weight.tensors())

    def extra_repr(self) -> str:
        sizes = f"{self.experts}, {self.out_features}, {self.in_features}"
        return f"{sizes}, format={self.format!r}, group_size={self.group_size}"

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        *_, errors = args
        self._fit_codes(state_dict, prefix)
        name, codes = f"{prefix}{scales_name(self.format)}", state_dict.get(f"{prefix}qweight")
        warn_of_scales(name, state_dict.get(name))
        if codes is not None and (reason := self._why_not(codes)):
            errors.append(f"QuantizedStack: {prefix}qweight {reason}")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
