"""DTensor sharding rules of attention, over the batch or over the heads."""

import math
from collections.abc import Iterator

from torch.distributed.tensor import Placement, Shard

from fusedops.integrations.dtensor.rule import SUM, Call, Placements, Rule, Sharding

__all__ = ["RULES"]


def _attention(call: Call) -> Iterator[Sharding]:
    """q: [B, Hq, Sq, D], k and v: [B, Hkv, Sk, D], bias: up to 4-D, sinks: [Hq]."""
    return (((place, place), inputs) for place, inputs in _shardings(call))


def _gradients(call: Call) -> Iterator[Sharding]:
    for place, inputs in _shardings(call):
        bias_place = inputs.get("bias", SUM)  # one that broadcasts gets gradients from all ranks
        sinks_place = inputs.get("sinks", SUM)
        yield (place, place, place, bias_place, sinks_place), inputs


def _shardings(call: Call) -> Iterator[tuple[Placement, dict[str, Placement]]]:
    if call.seed is not None:
        return
    for d in (0, 1):
        names = ("q", "k", "v", "grad", "grad_lse", "out", "lse")
        inputs: dict[str, Placement] = dict.fromkeys(names, Shard(d))
        if call.bias is not None:
            shape = call.bias.shape
            at = d - 4 + len(shape)
            if at >= 0 and shape[at] > 1:
                inputs["bias"] = Shard(at)
        if d == 1:
            inputs["sinks"] = Shard(0)
        yield Shard(d), inputs


def _cached(call: Call) -> Iterator[Sharding]:
    """Over the batch, or over the heads; pages belong to no batch entry."""
    if call.block_table is None and call.cu_seqlens_q is None:
        names = ("q", "k", "v", "seqused_k")
        yield (Shard(0), Shard(0)), dict.fromkeys(names, Shard(0))
    yield (Shard(1), Shard(1)), dict.fromkeys("qkv", Shard(1)) | {"sinks": Shard(0)}


def _heads_divide(call: Call, current: Placements, target: Placements) -> bool:
    """Whether each rank gets whole groups: each key head with all its query heads."""
    mesh = call.k.mesh
    ranks = math.prod(mesh.size(i) for i, p in enumerate(target["k"]) if p == Shard(1))
    return call.k.shape[1] % ranks == 0


def _has_gradients(call: Call) -> tuple[bool, ...]:
    *qkv, bias, sinks = call.output_mask
    return *qkv, bias and call.bias is not None, sinks and call.sinks is not None


RULES = {
    "attention_forward": Rule(lambda call: None, _attention, _heads_divide),
    "attention_backward": Rule(_has_gradients, _gradients, _heads_divide),
    "cached_attention_forward": Rule(lambda call: None, _cached, _heads_divide),
}
