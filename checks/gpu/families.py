"""Every operator family's calls for the smoke test."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checks.gpu import ROOT
from fusedops import backends

sys.path.append(str(ROOT / "tests"))

ON_GPUS = tuple(name for name in backends.FAMILIES if name != "experts")  # that is ATen calls

Named = tuple[str, Callable[[], object]]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the most important one first
MOMENTS = ("float32", "int8")  # AdamW's


def accuracy(name: str, backend: str, dtypes: Sequence[torch.dtype]) -> Iterator[Named]:
    """Forward and backward of each function in some dtypes, against float64."""
    if name == "adamw":
        yield from _steps(backend, dtypes)
        return
    from fusedops.testing import check

    for dtype in dtypes:
        for title, call in _calls(name).items():
            args = call.args(*_batch(name), dtype=dtype)
            function, reference, leaves = call.both(args)
            draws = [call.on_leaves(draw, args)[0] for draw in call.draws()]
            run = partial(check, function, reference, leaves, backend, draws)
            yield f"{title} {str(dtype).removeprefix('torch.')}", run


def _steps(backend: str, dtypes: Sequence[torch.dtype]) -> Iterator[Named]:
    """AdamW's step in each format of moments, against float64."""
    from adamw.cases import check, step_of

    for dtype in dtypes:
        for moments in MOMENTS:
            step = step_of([(33, 70), (4096,)], dtype, moments, backend=backend)
            title = f"step {moments} {str(dtype).removeprefix('torch.')}"
            yield title, partial(check, step, backend)


def steps(
    name: str, device: torch.device
) -> Iterator[tuple[str, Callable[[], tuple], list[Tensor]]]:
    """Forward and backward in bfloat16 as one call, and the tensors that it reads."""
    if name == "adamw":
        yield from (_optimizer_step(device, moments) for moments in MOMENTS)
        return
    for title, call in _calls(name).items():
        yield title, *_step_of(call, _batch(name), device)


def _step_of(call: Any, batch: tuple[int, ...], device: torch.device) -> tuple[Callable, list]:
    args = call.args(*batch, dtype=torch.bfloat16)
    moved = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
    function, leaves = call.on_leaves(call.function, moved)
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    return partial(_both_ways, function, leaves), [*leaves]


def _both_ways(function: Callable, leaves: tuple[Tensor, ...]) -> tuple:
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    live = [o for o in outputs if o.requires_grad]
    grads = torch.autograd.grad(live, leaves, list(map(torch.ones_like, live)), allow_unused=True)
    return *(o.detach() for o in outputs), *(g for g in grads if g is not None)


def _optimizer_step(
    device: torch.device, moments: str
) -> tuple[str, Callable[[], tuple], list[Tensor]]:
    """A clipped step. Each call starts from the same numbers, so that two can be compared.

    Half the gradients are not clipped. A first step, or one that is clipped like another, would
    give the same parameters for other gradients.
    """
    import fusedops

    params = [torch.ones(70, 33, dtype=torch.bfloat16, device=device) for _ in range(3)]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    options = {"lr": 0.1, "max_grad_norm": 30.0, "state_dtype": moments}  # their norm is 42
    if device.type == "cuda":
        options["capturable"] = True
    optimizer = fusedops.optim.AdamW(params, **options)
    optimizer.step()
    state = [t for p in params for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    kept = [t.clone() for t in state]

    @torch.no_grad()
    def step() -> tuple:
        for p in params:
            p.fill_(1.0)
        for t, value in zip(state, kept, strict=True):
            t.copy_(value)
        optimizer.step()
        return tuple(p.detach().clone() for p in params)

    return f"clipped step {moments}", step, [p.grad for p in params]


def _calls(name: str) -> dict:
    from contract.family import FAMILIES

    return FAMILIES[name].calls


def _batch(name: str) -> tuple[int, ...]:
    from contract.family import FAMILIES

    return FAMILIES[name].batches[0]


def backend_of(name: str, device: torch.device) -> str:
    """The backend that runs a family's tensors on a device by default."""
    if device.type == "cpu":
        return "cpu"
    return "cuda" if name in backends._WITH_CUDA else "triton"
