"""The Experts module: the gated MLPs of a mixture of experts, stored as in transformers."""

import torch
from torch import Tensor

from fusedops.functional.experts import experts
from fusedops.references.experts import ACTIVATIONS

__all__ = ["Experts"]


class Experts(torch.nn.Module):
    """Gated MLPs of which each token uses a few, such as transformers' Qwen3MoeExperts.

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
        if activation not in ACTIVATIONS:
            allowed = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"Experts: activation must be one of {allowed}, got {activation!r}")
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
