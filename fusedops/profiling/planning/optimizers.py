"""Computes the bytes of an optimizer's state and temporary tensors on the meta device."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fusedops.measuring.memory.allocations import TEMPORARIES, largest
from fusedops.measuring.memory.watch import static_tensors
from fusedops.optim import AdamW8bit
from fusedops.optim.adamw.shard import LEAST_ROW
from fusedops.optim.adamw.state import empty_state
from fusedops.profiling.planning.meta import Tracker
from fusedops.profiling.planning.ranks import Sharding

__all__ = ["optimizer_bytes"]

Kind = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, whether 8-bit moments fit
Step = Callable[[Kind | None, Kind], tuple[int, int]]  # bytes of its state, temporaries


def optimizer_bytes(
    name: str | None, parameters: Iterable[Tensor], sharding: Sharding
) -> tuple[int, int]:
    """Bytes of a rank's state, and the most bytes of temporaries in a step.

    Parameters are stepped one after another, as on a CPU: while torch's AdamW steps one, it still
    holds a temporary of the one before.
    """
    state = temporaries = 0
    computed: dict[tuple, tuple[int, int]] = {}
    least = AdamW8bit([nn.Parameter(torch.empty(0, dtype=torch.float32, device="meta"))]).defaults[
        "min_8bit_size"
    ]
    before: Kind | None = None
    for p in parameters:
        takes_codes = p.numel() >= least and (not sharding.rows or _rows_fit(p))
        this = sharding.part_of_state(p), p.dtype, takes_codes
        if (before, this) not in computed:
            computed[before, this] = _OPTIMIZERS[name](before, this)
        state += computed[before, this][0]
        temporaries = max(temporaries, computed[before, this][1])
        before = this
    return state, temporaries


def _rows_fit(p: Tensor) -> bool:
    """Whether AdamW8bit has 8-bit moments for a parameter that is cut into rows."""
    return p.dim() > 1 and p.shape[1:].numel() >= LEAST_ROW


def _torchs(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Step:
    def step(before: Kind | None, this: Kind) -> tuple[int, int]:
        params = [_parameter(*kind) for kind in (before, this) if kind is not None]
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer, tracker = make(params), Tracker()
        for p in params:
            tracker.add(p, "parameters")
        with tracker:
            optimizer.step()
        for t, category, module in static_tensors(None, optimizer):
            tracker.see(t, category, module)
        held = sum(_storage(t) for t in optimizer.state[params[-1]].values())
        return held, largest(tracker.allocations, TEMPORARIES)

    return step


def _adamw8bit(before: Kind | None, this: Kind) -> tuple[int, int]:
    """Our kernels step in place, without temporaries."""
    p = _parameter(*this)
    group: dict[str, Any] = AdamW8bit([p]).param_groups[0]
    group = group | {"min_8bit_size": 0 if this[2] else p.numel() + 1}
    return sum(_storage(t) for t in empty_state(p, group).values()), 0


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, _: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def _storage(t: Tensor) -> int:
    return t.untyped_storage().nbytes()


_OPTIMIZERS: dict[str | None, Step] = {
    None: lambda *_: (0, 0),
    "adamw": _torchs(torch.optim.AdamW),
    "adamw8bit": _adamw8bit,
    "sgd": _torchs(torch.optim.SGD),
}
