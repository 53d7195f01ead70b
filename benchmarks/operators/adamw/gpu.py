"""AdamW's benchmark rows and goals on a GPU: `python -m benchmarks gpu adamw`.

To the harness, a step is a forward: it takes parameters and gradients, and returns the parameters.
The harness checks each contender's first step, on its own parameters, and times later ones. Large
steps use the device's clock, next to a copy of the bytes that a step with our state must move. The
host's launches dominate steps over many small tensors, so these are timed on the host and counted.
"""

import gc
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.case import FORWARD, Case, Contender, Operation, Run
from benchmarks.harness.goals import GpuGoal
from benchmarks.harness.run import COPY
from benchmarks.operators.adamw.contenders import (
    MAX_NORM,
    Make,
    bitsandbytes,
    bytes_moved,
    clipped,
    ours,
    torch_fused,
    torchao,
)
from fusedops.references.adamw import stochastic

LARGE = (1, 10**9)  # tensors, elements per tensor
LORA = ((448, 4096), (448, 65536))
F32, BF16 = torch.float32, torch.bfloat16

LR, EPS, WEIGHT_DECAY = 1e-3, 1e-8, 1e-2  # every contender's own defaults
EVERY = 1009  # stride of the checked elements of a large tensor; a prime covers every lane


def inputs(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Parameters, then gradients. For gradients far above eps, a first step shows only the sign."""
    gc.collect()  # optimizers are in cycles; two of the largest rows exceed a GPU's memory
    count, numel = shape
    params = [torch.randn(numel, dtype=dtype, device=device) for _ in range(count)]
    return (*params, *(torch.randn_like(p) * EPS for p in params))


def halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]


def judged(t: Tensor) -> Tensor:
    return t if t.numel() < EVERY**2 else t[::EVERY]


def first_step(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The parameters after a step from zero moments; gradients are too small to be clipped."""
    return tuple(updated(judged(p), judged(g)) for p, g in zip(*halves(tensors), strict=True))


def updated(p: Tensor, g: Tensor) -> Tensor:
    """The stepped parameter, rounded stochastically: to nearest, small steps leave no error."""
    wide, g = (t.to(torch.promote_types(t.dtype, F32)) for t in (p, g))
    chance = torch.randint(1 << 16, p.shape, dtype=torch.int32, device=p.device)
    step = LR * g / (g.abs() + EPS)
    return stochastic(wide * (1 - LR * WEIGHT_DECAY) - step, chance, p.dtype)


def stepping(make: Make) -> Contender:
    """Steps its own parameters, with gradients that all contenders share."""

    def prepare(*tensors: Tensor) -> Run:
        params, grads = halves(tensors)
        own = [p.clone().requires_grad_() for p in params]
        for p, g in zip(own, grads, strict=True):
            p.grad = g
        return partial(stepped, make(own), tuple(judged(p.detach()) for p in own))

    return Contender(prepare)


def stepped(step: Run, params: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    step()
    return params


def operation(state: str, clips: bool = False) -> Operation:
    """Returns a step with our moments in `state`, and with the peers that support it.

    torch's moments have the parameters' dtype. torchao rounds bfloat16 stochastically, as we do.
    """
    peers: dict[str, Make] = {
        "float32": {"bitsandbytes": partial(bitsandbytes, name="AdamW")},
        "int8": {
            "bitsandbytes": bitsandbytes,
            "torchao": partial(torchao, bf16_stochastic_round=True),
        },
    }[state]
    peers = {"torch fused": torch_fused} | peers
    if clips:
        peers = {name: clipped(make) for name, make in peers.items()}
    fused = partial(ours, state_dtype=state, max_grad_norm=MAX_NORM if clips else None)

    def moved(mode: str, *tensors: Tensor) -> int:
        params, _ = halves(tensors)
        elements = sum(p.numel() for p in params)
        return bytes_moved(elements, params[0].itemsize, state, clips)

    return Operation(
        f"adamw {state}{' clipped' * clips}",
        inputs,
        first_step,
        moved,
        {name: stepping(make) for name, make in (peers | {"fusedops": fused}).items()},
    )


def case(step: Operation, dtype: torch.dtype, shape: tuple[int, int], clock: str) -> Case:
    return Case(step, FORWARD, dtype, shape, clock=clock)


FLOAT32, INT8 = PLAIN = [operation("float32"), operation("int8")]
FLOAT32_CLIPPED, INT8_CLIPPED = CLIPPED = [
    operation("float32", clips=True),
    operation("int8", clips=True),
]
BILLION = [
    case(step, dtype, LARGE, "device")
    for step, dtype in [
        (FLOAT32, F32),
        (INT8, F32),
        (INT8, BF16),
        (FLOAT32_CLIPPED, F32),
        (INT8_CLIPPED, BF16),
    ]
]
SMALL = {
    launches: [case(step, F32, shape, "host") for step in steps for shape in LORA]
    for launches, steps in ((1, PLAIN), (2, CLIPPED))
}

GPU_ROWS = BILLION + SMALL[1] + SMALL[2]
GPU_FIRST = [BILLION[2], BILLION[0], SMALL[2][0]]


def rivals(row: Case) -> dict[str, float]:
    return {name: 1.0 for name in row.contenders() if name != "fusedops"}


GPU_MUST_SHOW = [GpuGoal(row, {COPY: 0.9} | rivals(row)) for row in BILLION]
GPU_MUST_SHOW += [
    GpuGoal(row, rivals(row), launches=launches) for launches, rows in SMALL.items() for row in rows
]
