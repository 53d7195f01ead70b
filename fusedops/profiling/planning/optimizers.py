"""Computes the bytes of an optimizer's state and temporary tensors on the meta device."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedops.measuring.memory.allocations import TEMPORARIES, largest
from fusedops.measuring.memory.watch import static_tensors
from fusedops.optim import AdamW8bit
from fusedops.optim.adamw.shard import LEAST_ROW
from fusedops.optim.adamw.state import empty_state
from fusedops.profiling.planning.meta import Tracker
from fusedops.profiling.planning.ranks import Sharding

__all__ = ["ParameterStep", "optimizer_steps"]

Kind = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, whether 8-bit moments fit


class ParameterStep(NamedTuple):
    """One parameter's part of an optimizer's step.

    state: bytes of each tensor. blocks: bytes of its temporaries, in order. temporaries: the most
    bytes of them at once, with the one that remains of the parameter before.
    """

    state: list[int]
    blocks: list[int]
    temporaries: int


Step = Callable[[Kind | None, Kind], ParameterStep]


def optimizer_steps(
    name: str | None, parameters: Iterable[Tensor], sharding: Sharding
) -> Iterator[ParameterStep]:
    """The step of each parameter of a rank.

    Parameters are stepped one after another, as on a CPU: while torch's AdamW steps one, it still
    holds a temporary of the one before.
    """
    computed: dict[tuple, ParameterStep] = {}
    least = AdamW8bit([nn.Parameter(torch.empty(0, dtype=torch.float32, device="meta"))]).defaults[
        "min_8bit_size"
    ]
    before: Kind | None = None
    for p in parameters:
        takes_codes = p.numel() >= least and (not sharding.rows or _rows_fit(p))
        this = sharding.part_of_state(p), p.dtype, takes_codes
        if (before, this) not in computed:
            computed[before, this] = _OPTIMIZERS[name](before, this)
        yield computed[before, this]
        before = this


def _rows_fit(p: Tensor) -> bool:
    """Whether AdamW8bit has 8-bit moments for a parameter that is cut into rows."""
    return p.dim() > 1 and p.shape[1:].numel() >= LEAST_ROW


def _torchs(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Step:
    def step(before: Kind | None, this: Kind) -> ParameterStep:
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
        state = [_storage(t) for t in optimizer.state[params[-1]].values()]
        blocks = [a.bytes for a in tracker.allocations if a.category == TEMPORARIES]
        last = blocks[-len(blocks) // len(params) :]
        return ParameterStep(state, last, largest(tracker.allocations, TEMPORARIES))

    return step


def _adamw8bit(before: Kind | None, this: Kind) -> ParameterStep:
    """Our kernels step in place, without temporaries."""
    p = _parameter(*this)
    group: dict[str, Any] = AdamW8bit([p]).param_groups[0]
    group = group | {"min_8bit_size": 0 if this[2] else p.numel() + 1}
    return ParameterStep([_storage(t) for t in empty_state(p, group).values()], [], 0)


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, _: bool) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def _storage(t: Tensor) -> int:
    return t.untyped_storage().nbytes()


_OPTIMIZERS: dict[str | None, Step] = {
    None: lambda *_: ParameterStep([], [], 0),
    "adamw": _torchs(torch.optim.AdamW),
    "adamw8bit": _adamw8bit,
    "sgd": _torchs(torch.optim.SGD),
}
