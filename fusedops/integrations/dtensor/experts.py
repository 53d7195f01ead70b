"""DTensor handlers of `experts`, for tensors sharded over tokens, experts, or both.

A rank with a part of the experts runs its tokens' choices of them, and the ranks' results are
summed. Weights that are sharded otherwise are gathered, and so are experts too few for the ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fusedops.integrations.dtensor.local import (
    arguments,
    leaves_a_rank_empty,
    local,
    local_range,
    mesh_of,
    placements_over,
    sharded_over,
    to_dtensor,
)
from fusedops.integrations.dtensor.rule import ALL, SUM

__all__ = ["HANDLERS"]

FIRST = Shard(0)
OF_TOKENS = "hidden", "top_k_index", "top_k_weights", "dy"
WEIGHTS = "gate_up", "down", "gate_up_bias", "down_bias"
GRADIENTS = "hidden", "top_k_weights", *WEIGHTS


class ExpertsCall:
    """A kernel operator's call, and the mesh's dimensions that shard its tokens and experts."""

    def __init__(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
        self.op, self.arguments = op, arguments(op, args, kwargs)
        self.mesh: DeviceMesh = mesh_of(self.arguments.values())
        weight = self.arguments["gate_up"]
        self.experts = sharded_over(weight, 0)
        if self.experts and leaves_a_rank_empty(weight, 0, self.experts):
            self.experts = []
        tokens = sharded_over(self.arguments["hidden"], 0)
        self.tokens = [i for i in tokens if i not in self.experts]

    def placements(self, token_place: Placement, expert_place: Placement) -> list[Placement]:
        experts = dict.fromkeys(self.experts, expert_place)
        return placements_over(self.mesh, dict.fromkeys(self.tokens, token_place) | experts)

    def run(self) -> Any:
        """The operator's results for this rank's tokens and experts."""
        tokens, experts = self.placements(FIRST, ALL), self.placements(ALL, FIRST)
        parts: dict[str, Any] = dict(self.arguments)
        parts |= {n: local(v, self.mesh, tokens) for n, v in parts.items() if n in OF_TOKENS}
        parts |= {n: local(v, self.mesh, experts) for n, v in parts.items() if n in WEIGHTS}
        if isinstance(self.arguments.get("z"), DTensor):  # this rank's, in the order of its experts
            parts["z"] = self.arguments["z"].to_local()
        if self.experts:
            parts["top_k_index"] = self._local_index(parts["top_k_index"], experts)
        return self.op(**parts)

    def _local_index(self, index: Tensor, experts: list[Placement]) -> Tensor:
        """Indices of this rank's experts; their number for the others, which add nothing."""
        shape = self.arguments["gate_up"].shape
        offset, count = local_range(shape, 0, self.mesh, experts)
        index = index - offset
        return index.where((index >= 0) & (index < count), count)


def _forward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    call = ExpertsCall(op, args, kwargs)
    y, z = call.run()
    tokens, choices = call.arguments["top_k_index"].shape
    shape_of_z = () if z is None else (tokens * choices, z.shape[-1])
    # z belongs to this rank. No placement says so, and only the backward reads it, on the rank.
    placements_of_z = call.placements(FIRST, FIRST)
    return (
        to_dtensor(y, call.mesh, call.placements(FIRST, SUM), call.arguments["hidden"].shape),
        to_dtensor(z, call.mesh, placements_of_z, shape_of_z),
    )


def _backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    call = ExpertsCall(op, args, kwargs)
    token_placements, weight_placements = call.placements(FIRST, SUM), call.placements(SUM, FIRST)
    gradients = []
    for name, t in zip(GRADIENTS, call.run(), strict=True):
        placements = weight_placements if name in WEIGHTS else token_placements
        shape = call.arguments[name].shape if t is not None else ()
        gradients.append(to_dtensor(t, call.mesh, placements, shape))
    return tuple(gradients)


HANDLERS = {"experts_forward": _forward, "experts_backward": _backward}
