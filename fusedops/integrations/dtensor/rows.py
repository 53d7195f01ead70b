"""DTensor sharding rules of norms, linears, gated activations and rotary embeddings."""

from collections.abc import Iterator

from torch.distributed.tensor import Placement, Shard

from fusedops.integrations.dtensor.rule import ALL, SUM, Call, Placements, Rule, Sharding

__all__ = ["RULES"]


def _norms(call: Call) -> Iterator[Sharding]:
    """x: [..., *row]. All but the row's dimensions may be sharded."""
    if call.seed is not None:
        return
    for d in range(len(call.x.shape) - call.dims):
        row = Shard(d)
        inputs = {"x": row} if call.residual is None else {"x": row, "residual": row}
        yield (row, row, Shard(1)), inputs


def _norm_keeps(call: Call, current: Placements, target: Placements) -> bool:
    """The backward of a norm without a residual needs x as the kernel saw it."""
    pairs = zip(current["x"], target["x"], strict=True)
    return call.residual is not None or all(p in (before, ALL) for before, p in pairs)


def _norm_gradients(call: Call) -> Iterator[Sharding]:
    """A weight's gradient is summed over the rows of all ranks."""
    if call.seed is not None:
        return
    for d in range(len(call.h.shape) - call.dims):
        row = Shard(d)
        inputs = {"dy": row, "h": row, "stats": Shard(1)}
        yield (row, row, SUM, SUM), inputs | ({} if call.dh is None else {"dh": row})


def _statistics_stay(call: Call, current: Placements, target: Placements) -> bool:
    """Whether neither the statistics nor their rows are redistributed.

    stats: [kept, rows]. Its rows are in the local h's order, which Shard(1) does not describe, so
    DTensor would move the wrong ones.
    """
    places = zip(current["stats"], current["h"], target["h"], strict=True)
    rows_stay = all(p == before for stats, before, p in places if stats != ALL)
    return current["stats"] == target["stats"] and rows_stay


def _linears(call: Call) -> Iterator[Sharding]:
    """input: [..., K], weight: [N, K]: over rows, columns (N), or the depth (K)."""
    last = len(call.input.shape) - 1
    for d in range(last):
        yield (Shard(d), Shard(d)), {"input": Shard(d)}
    yield (Shard(last), Shard(last)), {"weight": Shard(0), "bias": Shard(0)}
    if call.activation == "none":
        yield (SUM, SUM), {"input": Shard(last), "weight": Shard(1), "bias": SUM}


def _linear_gradients(call: Call) -> Iterator[Sharding]:
    last = len(call.dy.shape) - 1
    for d in range(last):
        row = Shard(d)
        yield (row, SUM, SUM), {"dy": row, "input": row, "z": row}
    columns = {"dy": Shard(last), "weight": Shard(0), "z": Shard(last)}
    yield (SUM, Shard(0), Shard(0)), columns
    yield (Shard(last), Shard(1), ALL), {"input": Shard(last), "weight": Shard(1)}


def _gates(call: Call) -> Iterator[Sharding]:
    """Elementwise; a packed gate's last dimension is two halves."""
    dims = len(call.gate.shape) - (call.up is None)
    for place in map(Shard, range(dims)):
        yield (place, place), {"gate": place, "up": place, "dy": place}


def _gates_forward(call: Call) -> Iterator[Sharding]:
    return (((outputs[0],), inputs) for outputs, inputs in _gates(call))


def _rotations(call: Call) -> Iterator[Sharding]:
    """q: [..., width]. The heads, and dimensions that cos has too."""
    x = next(t for t in (_given(call, "q", "dq_embed"), _given(call, "k", "dk_embed")) if t)
    dims, cos = len(x.shape), call.cos.shape
    at = call.unsqueeze_dim
    heads = dims - (-at if at < 0 else len(cos) + 1 - at)
    for d in range(dims - 1):
        place = Shard(d)
        inputs: dict[str, Placement] = dict.fromkeys(("q", "k", "dq_embed", "dk_embed"), place)
        cos_dim = d - dims + len(cos) + (d < heads)
        if d != heads and cos_dim >= 0 and cos[cos_dim] > 1:
            inputs |= dict.fromkeys(("cos", "sin"), Shard(cos_dim))
        yield (place, place), inputs


def _given(call: Call, *names: str):
    return next((getattr(call, name) for name in names if hasattr(call, name)), None)


RULES = {
    "norm_forward": Rule(lambda c: (True, c.residual is not None, True), _norms, _norm_keeps),
    "norm_backward": Rule(lambda c: c.output_mask, _norm_gradients, _statistics_stay),
    "linear_forward": Rule(lambda c: (True, c.keep_z and c.activation != "none"), _linears),
    "linear_backward": Rule(lambda c: c.output_mask, _linear_gradients),
    "gated_activation_forward": Rule(lambda c: None, _gates_forward),
    "gated_activation_backward": Rule(
        lambda c: (c.output_mask[0], c.output_mask[1] and c.up is not None), _gates
    ),
    "rotary_forward": Rule(lambda c: None, _rotations),
    "rotary_backward": Rule(lambda c: (c.dq_embed is not None, c.dk_embed is not None), _rotations),
}
