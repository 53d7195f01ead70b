"""Every family's calls for the smoke test and the sanitizer."""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from checks.gpu.runner import ROOT
from fusedops import backends

sys.path.append(str(ROOT / "tests"))

Named = tuple[str, Callable[[], object]]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def accuracy(name: str, backend: str) -> Iterator[Named]:
    """Forward and backward of each function in each dtype, against float64."""
    if name == "adamw":
        yield from _steps(backend)
        return
    from fusedops.testing import check

    for title, call in _calls(name).items():
        for dtype in DTYPES:
            args = call.args(*_batch(name), dtype=dtype)
            function, reference, leaves = call.both(args)
            draws = [call.of_leaves(draw, args)[0] for draw in call.draws()]
            run = partial(check, function, reference, leaves, backend, draws)
            yield f"{title} {str(dtype).removeprefix('torch.')}", run


def _steps(backend: str) -> Iterator[Named]:
    """AdamW's step in each format of moments, against float64."""
    from adamw.cases import check, step_of

    for moments in ("float32", "int8"):
        for dtype in (torch.bfloat16, torch.float32):
            step = step_of([(33, 70), (4096,)], dtype, moments, backend=backend)
            title = f"step {moments} {str(dtype).removeprefix('torch.')}"
            yield title, partial(check, step, backend)


def steps(
    name: str, device: torch.device
) -> Iterator[tuple[str, Callable[[], tuple], list[Tensor]]]:
    """Forward and backward in bfloat16 as one call, and the tensors that it reads."""
    if name == "adamw":
        yield _optimizer_step(device)
        return
    for title, call in _calls(name).items():
        args = call.args(*_batch(name), dtype=torch.bfloat16)
        moved = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
        function, leaves = call.of_leaves(call.function, moved)
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        yield title, partial(_both_ways, function, leaves), [*leaves]


def _both_ways(function: Callable, leaves: tuple[Tensor, ...]) -> tuple:
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    live = [o for o in outputs if o.requires_grad]
    grads = torch.autograd.grad(live, leaves, list(map(torch.ones_like, live)), allow_unused=True)
    return *(o.detach() for o in outputs), *(g for g in grads if g is not None)


def _optimizer_step(device: torch.device) -> tuple[str, Callable[[], tuple], list[Tensor]]:
    """A clipped step. Each call starts from the same numbers, so that two can be compared."""
    import fusedops

    params = [torch.ones(70, 33, dtype=torch.bfloat16, device=device) for _ in range(3)]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    options = {"max_grad_norm": 1.0, "state_dtype": "float32"}
    if device.type == "cuda":
        options["capturable"] = True
    optimizer = fusedops.optim.AdamW(params, **options)
    optimizer.step()

    def step() -> tuple:
        with torch.no_grad():
            for p in params:
                p.fill_(1.0)
                optimizer.state[p]["exp_avg"].zero_()
                optimizer.state[p]["exp_avg_sq"].zero_()
                optimizer.state[p]["step"].zero_()
        optimizer.step()
        return tuple(p.detach().clone() for p in params)

    return "clipped step", step, [p.grad for p in params]


def kernels(name: str, device: torch.device) -> Iterator[Named]:
    """One call of each kernel operator, in each variant that the family records."""
    if name == "adamw":
        title, step, _ = _optimizer_step(device)
        yield title, step
        return
    from contract.family import FAMILIES

    for variant, make in FAMILIES[name].kernels.items():
        yield variant, partial(_run_kernels, make, device)


def _run_kernels(make: Callable, device: torch.device) -> None:
    for name, args in make(device):
        getattr(torch.ops.fusedops, name)(*args)


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
