"""A mixture's experts on sharded tensors: over the tokens and over the experts.

A rank with a part of the experts runs all tokens' choices of them; its result is a term of the sum
over the ranks. Other weights' placements are gathered.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from fusedops.integrations.dtensor.local import arguments, local, mesh_of, offset_of, whole
from fusedops.integrations.dtensor.rule import ALL, SUM

__all__ = ["HANDLERS"]

FIRST = Shard(0)
OF_TOKENS = "hidden", "top_k_index", "top_k_weights", "dy"
WEIGHTS = "gate_up", "down", "gate_up_bias", "down_bias"
GRADIENTS = "hidden", "top_k_weights", *WEIGHTS


class Call:
    """A call of a kernel operator: which of the mesh's dimensions cut tokens and experts."""

    def __init__(self, op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
        self.op, self.given = op, arguments(op, args, kwargs)
        self.mesh: DeviceMesh = mesh_of(self.given.values())
        self.experts = _cut(self.given["gate_up"])
        self.tokens = [i for i in _cut(self.given["hidden"]) if i not in self.experts]

    def placed(self, of_tokens: Placement, of_experts: Placement) -> list[Placement]:
        named = dict.fromkeys(self.tokens, of_tokens) | dict.fromkeys(self.experts, of_experts)
        return [named.get(dim, ALL) for dim in range(self.mesh.ndim)]

    def run(self) -> Any:
        """The operator's results for this rank's tokens and experts."""
        tokens, experts = self.placed(FIRST, ALL), self.placed(ALL, FIRST)
        parts: dict[str, Any] = dict(self.given)
        parts |= {n: local(v, self.mesh, tokens) for n, v in parts.items() if n in OF_TOKENS}
        parts |= {n: local(v, self.mesh, experts) for n, v in parts.items() if n in WEIGHTS}
        if isinstance(self.given.get("z"), DTensor):  # this rank's, in the order of its experts
            parts["z"] = self.given["z"].to_local()
        if self.experts:
            parts["top_k_index"] = self._local_index(parts, experts)
        return self.op(**parts)

    def _local_index(self, parts: dict[str, Any], experts: list[Placement]) -> Tensor:
        """Indices of this rank's experts; their number for the others, which add nothing."""
        count = parts["gate_up"].shape[0]
        offset = offset_of(self.given["gate_up"].redistribute(self.mesh, experts), 0)
        index = parts["top_k_index"] - offset
        return index.where((index >= 0) & (index < count), count)


def _cut(t: Any) -> list[int]:
    held = t.placements if isinstance(t, DTensor) else ()
    return [i for i, p in enumerate(held) if type(p) is Shard and p.dim == 0]


def _forward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    call = Call(op, args, kwargs)
    y, z = call.run()
    tokens, choices = call.given["top_k_index"].shape
    wide = None if z is None else (tokens * choices, z.shape[-1])
    # z belongs to this rank. No placement says so, and only the backward reads it, on the rank.
    place_of_z = call.placed(FIRST, FIRST)
    return (
        whole(y, call.mesh, call.placed(FIRST, SUM), call.given["hidden"].shape),
        None if wide is None else whole(z, call.mesh, place_of_z, wide),
    )


def _backward(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple:
    call = Call(op, args, kwargs)
    of_tokens, of_weights = call.placed(FIRST, SUM), call.placed(SUM, FIRST)
    return tuple(
        None
        if t is None
        else whole(t, call.mesh, of_weights if n in WEIGHTS else of_tokens, call.given[n].shape)
        for n, t in zip(GRADIENTS, call.run(), strict=True)
    )


HANDLERS = {"experts_forward": _forward, "experts_backward": _backward}
