"""QuantizedStack: the quantized weights of all experts, as a module with buffers."""

from typing import Any

import torch
from torch import Tensor

from fusedops.functional import QuantizedWeight, quantize_experts
from fusedops.functional.quantized_linear import check_format, scales_name
from fusedops.nn.quantized_linear.scales import warn_of_scales

__all__ = ["QuantizedStack"]


class QuantizedStack(torch.nn.Module):
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
        made = quantize_experts(empty, format, group_size=group_size, scale="absmax")
        self.experts, self.out_features, self.in_features = experts, out_features, in_features
        self.group_size = made.group_size
        for name, t in made.tensors().items():
            shape = (experts, *t.shape[1:])
            self.register_buffer(name, torch.zeros(shape, dtype=t.dtype, device=device))

    @property
    def quantized_weight(self) -> QuantizedWeight:
        """The codes and scales, without a copy."""
        held = self._buffers
        layout = self.format, self.out_features, self.in_features, self.group_size
        tensors = held["qweight"], held[scales_name(self.format)], held.get("zeros")
        return QuantizedWeight(*layout, *tensors, experts=self.experts)  # type: ignore[arg-type]

    def quantized(self, weight: Tensor) -> QuantizedWeight:
        """A float weight's codes. Raises ValueError for another shape."""
        upright = weight.transpose(1, 2) if self.transposed and weight.dim() == 3 else weight
        wanted = self.experts, self.out_features, self.in_features
        if upright.shape != wanted:
            raise ValueError(f"QuantizedStack: weight must be {wanted}, got {tuple(upright.shape)}")
        size, scale = self.group_size, self.scale
        return quantize_experts(upright, self.format, group_size=size, scale=scale)

    def take(self, weight: QuantizedWeight) -> None:
        """Replaces the codes and scales."""
        for name, tensor in weight.tensors().items():
            setattr(self, name, tensor)

    def extra_repr(self) -> str:
        sizes = f"{self.experts}, {self.out_features}, {self.in_features}"
        return f"{sizes}, format={self.format!r}, group_size={self.group_size}"

    def _apply(self, fn, recurse=True):
        """Like torch's, but passes codes and scales as bytes, which float casts leave alone."""
        held: dict[str, Any] = self._buffers
        own = dict(held)
        as_bytes = {name: t.reshape(-1).view(torch.uint8) for name, t in own.items()}
        held.update(as_bytes)
        try:
            super()._apply(fn, recurse)
        finally:
            for name, t in own.items():
                if held[name].dtype != torch.uint8:  # Module.type casts integers too
                    held[name] = as_bytes[name].to(held[name].device)
                held[name] = held[name].view(t.dtype).view(t.shape)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        *_, errors = args
        name, codes = f"{prefix}{scales_name(self.format)}", state_dict.get(f"{prefix}qweight")
        warn_of_scales(name, state_dict.get(name))
        if codes is not None and codes.dtype != (own := self.quantized_weight.qweight.dtype):
            wanted, got = (str(dtype).removeprefix("torch.") for dtype in (own, codes.dtype))
            errors.append(f"QuantizedStack: {prefix}qweight must be {wanted}, got {got}")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
