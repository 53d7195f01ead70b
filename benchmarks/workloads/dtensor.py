"""Times operators on tiny DTensors, where dispatch dominates: `python -m benchmarks dtensor`.

Forward and backward run over a mesh of one rank, whose placements cost no communication. Our
operator and torch's own operations run on DTensors, and on the plain tensors that they hold.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import report
from benchmarks.harness.timing import interleaved
from fusedops import functional
from fusedops.measuring.ratios import paired_ratio, spread

EAGER, OURS = "eager", "fusedops"
SHARDED = " on DTensors"
AT_LEAST = 1.0
ROWS, WIDTH, HEADS = 8, 64, 4

Call = Callable[..., Tensor]


def measure(args: Namespace) -> int:
    """Times every row and writes `args.json`. Returns the exit status."""
    rows, goals = [], []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        try:
            for name, eager, ours, tensors, dim in list(_operators())[: 2 if args.quick else None]:
                title = f"{name} float32, forward and backward, {args.allocator} allocator"
                calls = dict(_calls(eager, ours, tensors, dim))
                timed = {label: (call, nullcontext) for label, call in calls.items()}
                seconds = interleaved(timed, args.seconds)
                ratio = paired_ratio(seconds[EAGER + SHARDED], seconds[OURS + SHARDED])
                goals.append(report.goal(title, "over eager" + SHARDED, AT_LEAST, ratio))
                medians = {label: spread(times).median for label, times in seconds.items()}
                print(title, f"{ratio} over eager{SHARDED}", sep="\n  ", flush=True)
                print(*(f"  {label}: {1e6 * s:.0f} us" for label, s in medians.items()), sep="\n")
                rows += [
                    {"title": title, "contender": label, "median_s": s}
                    for label, s in medians.items()
                ]
        finally:
            dist.destroy_process_group()
    report.save(args, rows, goals)
    return 0


def _operators() -> Iterator[tuple[str, Call, Call, list[Tensor], int]]:
    """(name, torch's operations, our operator, tensors, the dimension to shard or -1)."""
    x, residual, weight = _tensors((2, ROWS, WIDTH), (2, ROWS, WIDTH), (WIDTH,))
    shape = (WIDTH,)
    yield (
        *("rms_norm", lambda x, w: F.rms_norm(x, shape, w, 1e-6)),
        *(lambda x, w: functional.rms_norm(x, shape, w, 1e-6), [x, weight], 1),
    )
    yield (
        *("add_rms_norm", lambda x, r, w: F.rms_norm(x + r, shape, w, 1e-6)),
        *(lambda x, r, w: functional.add_rms_norm(x, r, w, 1e-6)[0], [x, residual, weight], 1),
    )
    yield "swiglu", lambda g, u: F.silu(g) * u, functional.swiglu, [x, residual], 2
    matrix = torch.randn(WIDTH, WIDTH)
    yield "linear", F.linear, functional.linear, [x, matrix], 1
    yield (
        *("linear with gelu", lambda x, w: F.gelu(F.linear(x, w))),
        *(lambda x, w: functional.linear(x, w, None, "gelu"), [x, matrix], 1),
    )
    heads = _tensors(*[(2, HEADS, ROWS, 16)] * 3)
    yield (
        *("attention", lambda q, k, v: (q @ k.mT / 4).softmax(-1) @ v),  # no rule for sdpa on CPUs
        *(functional.attention, heads, 1),
    )


def _tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def _calls(
    eager: Call, ours: Call, tensors: list[Tensor], dim: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, dims = init_device_mesh("cpu", (1,)), tensors[0].dim()
    sharded = [
        DTensor.from_local(t, mesh, [Shard(dim) if t.dim() == dims else Replicate()])
        for t in tensors
    ]
    for name, function in ((EAGER, eager), (OURS, ours)):
        yield name, _step(function, tensors)
        yield name + SHARDED, _step(function, sharded)


def _step(function: Call, tensors: list[Tensor]) -> Callable[[], object]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    with torch.no_grad():
        down = torch.ones_like(function(*leaves))

    def step() -> object:
        return torch.autograd.grad(function(*leaves), leaves, down)

    return step
