"""Experts and QuantizedExperts: the gated MLPs of a mixture of experts, in floats and in codes."""

from typing import Any

import torch
from torch import Tensor

from fusedops.functional.experts import experts, quantize_experts
from fusedops.functional.quantized_linear import QuantizedWeight, check_format, scales_name
from fusedops.nn.linear import check_activation
from fusedops.nn.quantized_linear.codes import Codes
from fusedops.nn.quantized_linear.scales import warn_of_scales
from fusedops.references.experts import ACTIVATIONS

__all__ = ["Experts", "QuantizedExperts", "QuantizedStack"]


class Experts(torch.nn.Module):
    """Gated MLPs. Each token goes through a few of them. The same as transformers' Qwen3MoeExperts.

    Parameters: gate_up_proj [E, 2 I, H] and down_proj [E, H, I]; with a bias also
    gate_up_proj_bias [E, 2 I] and down_proj_bias [E, H]. The names, shapes and state dict are those
    of transformers 5, so that checkpoints load in both directions. Parameters are initialised as
    torch.nn.Linear's. forward(hidden_states [tokens, H], top_k_index [tokens, k], top_k_weights
    [tokens, k]) returns [tokens, H]: see `fusedops.functional.experts`, which has the activations.
    Raises ValueError for an unknown activation.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str | None = "silu",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_activation("Experts", activation, ACTIVATIONS)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        wide = 2 * intermediate_size

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(num_experts, wide, hidden_size)
        self.down_proj = parameter(num_experts, hidden_size, intermediate_size)
        self.gate_up_proj_bias = parameter(num_experts, wide) if bias else None
        self.down_proj_bias = parameter(num_experts, hidden_size) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weights and biases as torch.nn.Linear does: uniform within 1 / sqrt(inputs)."""
        for weight, bias in (
            (self.gate_up_proj, self.gate_up_proj_bias),
            (self.down_proj, self.down_proj_bias),
        ):
            bound = weight.shape[-1] ** -0.5 if weight.shape[-1] else 0.0
            torch.nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                torch.nn.init.uniform_(bias, -bound, bound)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            gate_up_bias=self.gate_up_proj_bias,
            down_bias=self.down_proj_bias,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        bias = self.gate_up_proj_bias is not None
        return f"{sizes}, bias={bias}, activation={self.activation!r}"


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


class QuantizedExperts(torch.nn.Module):
    """`Experts` with quantized weights; see `fusedops.functional.quantize_experts`.

    The weights are modules, gate_up_proj (up_proj if not gated) and down_proj, with the buffers
    qweight, scales (nf4: absmax) and zeros (int4). Biases are parameters, as in `Experts`. Loading
    a checkpoint with float weights quantizes them. hidden_states, the routing weights and biases
    get gradients. The options are those of `fusedops.functional.experts`. transposed: float weights
    that are loaded are [E, H, 2 I] and [E, I, H]. Raises ValueError for an invalid option.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        format: str = "int8",
        group_size: int | None = None,
        scale: str | None = None,
        bias: bool = False,
        activation: str | None = "silu",
        gated: bool = True,
        interleaved: bool = False,
        limit: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
        transposed: bool = False,
        compute: str | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_activation("QuantizedExperts", activation, ACTIVATIONS)
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.format, self.compute = intermediate_size, format, compute
        self.options: dict[str, Any] = {"activation": activation, "gated": gated}
        self.options |= {"interleaved": interleaved, "limit": limit, "alpha": alpha}
        self.options |= {"up_offset": up_offset, "compute": compute}
        wide = 2 * intermediate_size if gated else intermediate_size
        self.first = "gate_up_proj" if gated else "up_proj"
        stored: dict[str, Any] = {"format": format, "group_size": group_size, "scale": scale}
        stored |= {"transposed": transposed, "device": device}
        shapes = {self.first: (wide, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, shape in shapes.items():
            self.add_module(name, QuantizedStack(num_experts, *shape, **stored))
        for name, (columns, _) in shapes.items():
            zeros = torch.zeros(num_experts, columns, device=device, dtype=dtype) if bias else None
            parameter = None if zeros is None else torch.nn.Parameter(zeros)
            self.register_parameter(f"{name}_bias", parameter)
        # A call without tokens, so that the operator checks the options.
        empty = torch.empty(0, hidden_size, dtype=torch.float32, device=device)
        slots = torch.empty(0, 1, dtype=torch.float32, device=device)
        self(empty, slots.long(), slots)

    def stacks(self) -> dict[str, QuantizedStack]:
        """Both weights by their names."""
        return {name: self.get_submodule(name) for name in (self.first, "down_proj")}  # type: ignore[misc]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        first, down = (stack.quantized_weight for stack in self.stacks().values())
        biases = (getattr(self, f"{name}_bias") for name in (self.first, "down_proj"))
        bias, down_bias = (None if b is None else b.to(hidden_states.dtype) for b in biases)
        y = experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            first,
            down,
            gate_up_bias=bias,
            down_bias=down_bias,
            **self.options,
        )
        return y.to(hidden_states.dtype)  # another one under autocast

    def extra_repr(self) -> str:
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        return f"{sizes}, format={self.format!r}, activation={self.options['activation']!r}"

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, *rest) -> None:
        *_, errors = rest
        for name, stack in self.stacks().items():
            weight = state_dict.pop(f"{prefix}{name}", None)
            if weight is None:
                continue
            try:
                tensors = stack.quantized(weight).tensors()
            except (TypeError, ValueError) as error:
                errors.append(f"QuantizedExperts: {prefix}{name}: {error}")
                continue
            state_dict.update({f"{prefix}{name}.{part}": t for part, t in tensors.items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
