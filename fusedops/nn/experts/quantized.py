"""QuantizedExperts: the MLPs of a mixture of experts, with 4- or 8-bit weights."""

from typing import Any

import torch
from torch import Tensor

from fusedops.functional.experts import experts
from fusedops.nn.experts.weight import QuantizedStack
from fusedops.references.experts import ACTIVATIONS

__all__ = ["QuantizedExperts"]


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
        if activation not in ACTIVATIONS:
            allowed = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(
                f"QuantizedExperts: activation must be one of {allowed}, got {activation!r}"
            )
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
