"""Times the user's AdamW step against AdamW8bit and fused AdamW.

The steps run on random tensors with the shapes, dtypes and settings of the user's parameters, so
that nothing of the user's changes.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from fusedops.measuring.changes import REPLACEMENTS, Groups, with_settings
from fusedops.measuring.clock import running_seconds
from fusedops.optim import AdamW
from fusedops.profiling.collect.pieces import Timing, time_pieces
from fusedops.profiling.evidence import OptimizerTime

__all__ = ["OTHERS", "time_optimizers"]

MOST = 2**28 // (4 + 4 + 8 + 8)  # elements: 256 MiB of parameters, gradients and two states
LARGEST = 2**22  # elements of one tensor that stands for a larger one
WANTED_S = 3.0  # the budget must have so much time left


def _fused_by_torch(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(with_settings(groups), fused=True)


# Optimizers that are timed beside the user's, made from its parameter groups.
OTHERS = {**REPLACEMENTS, "torch_fused": _fused_by_torch}


def time_optimizers(
    optimizer: torch.optim.Optimizer | None, deadline: float
) -> tuple[tuple[OptimizerTime, ...] | None, str]:
    """A step of each optimizer that may replace the user's; or None and the reason.

    deadline: a `perf_counter` time. Empty for other optimizers than AdamW, for 8-bit states, and
    before the first step.
    """
    if optimizer is None or type(optimizer) not in (torch.optim.AdamW, AdamW):
        return (), ""
    if not optimizer.state:
        return (), ""
    if type(optimizer) is AdamW and optimizer.defaults["state_dtype"] != "float32":
        return (), ""
    if any(p.device.type != "cpu" for p in optimizer.state):
        return None, "only steps on CPUs are timed"
    if perf_counter() + WANTED_S > deadline:
        return None, "the budget had no time for it"
    names = list(OTHERS) if _is_plain(optimizer) else ["adamw8bit"]
    try:
        with _without_global_hooks():
            return _timed(optimizer, names, deadline), ""
    except Exception as error:  # noqa: BLE001  settings that another optimizer may not take
        return None, f"its step raised {type(error).__name__}: {error}"


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Hides the program's hooks of all optimizers from the stand-ins' steps.

    The dictionaries are replaced, because such a hook may run now, and torch iterates over them.
    """
    names = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"
    hooks = {name: getattr(torch_optimizer, name) for name in names}
    for name in names:
        setattr(torch_optimizer, name, OrderedDict())
    try:
        yield
    finally:
        for name, kept in hooks.items():
            setattr(torch_optimizer, name, kept)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's and not fused yet."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer) is torch.optim.AdamW and not fused


def _timed(
    optimizer: torch.optim.Optimizer, names: list[str], deadline: float
) -> tuple[OptimizerTime, ...]:
    groups, share = _stand_ins(optimizer, torch.Generator().manual_seed(0))
    mine = _like(optimizer, groups)
    results = []
    for name in names:
        timing = Timing([_Steps(mine, OTHERS[name](groups))])
        timing.warm_up()
        time_pieces([timing], deadline)
        results.append(OptimizerTime(name, share, tuple(timing.before), tuple(timing.after)))
    return tuple(results)


class _Steps:
    """Two optimizers of the same parameters, each with a state of its own."""

    def __init__(self, mine: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
        self.mine, self.other = mine, other
        self.seconds = 0.0

    def warm_up(self, changed: bool) -> None:
        self.timed(changed)  # makes the state
        self.seconds = self.timed(changed)

    def timed(self, changed: bool) -> float:
        return running_seconds((self.other if changed else self.mine).step)


def _like(optimizer: torch.optim.Optimizer, groups: Groups) -> torch.optim.Optimizer:
    ours = dict(getattr(optimizer, "_ours", {}))
    return type(optimizer)(groups, **ours)  # type: ignore[arg-type]


def _stand_ins(optimizer: torch.optim.Optimizer, random: torch.Generator) -> tuple[Groups, float]:
    """Groups of random parameters with gradients, and their share of the user's elements.

    Parameters without state had no gradient. Of many parameters with the same shape, and of large
    ones, a part stands for all.
    """
    stepped = [
        (group, [p for p in group["params"] if p in optimizer.state])
        for group in optimizer.param_groups
    ]
    elements = sum(p.numel() for _, parameters in stepped for p in parameters)
    every = max(1, -(-elements // MOST))
    groups = [
        group | {"params": [*_copies_of(parameters, every, random)]}
        for group, parameters in stepped
        if parameters
    ]
    drawn = sum(p.numel() for group in groups for p in group["params"])
    return groups, drawn / max(1, elements)


def _copies_of(parameters: list[Tensor], every: int, random: torch.Generator) -> Iterator[Tensor]:
    kinds = Counter((tuple(p.shape), p.dtype) for p in parameters)
    for (shape, dtype), count in kinds.items():
        small = shape if every == 1 or torch.Size(shape).numel() <= LARGEST else (LARGEST,)
        for _ in range(-(-count // every)):
            p = _drawn(small, random).to(dtype).requires_grad_()
            p.grad = (1e-3 * _drawn(small, random)).to(dtype)
            yield p


def _drawn(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float32, device=random.device)
