"""Gated-activation benchmarks against eager, Hugging Face, torch.compile and, on GPUs, Liger.

Memory-bound: the figure that matters is the fraction of copy bandwidth, for the fewest bytes that
must move. Compare large rows under both allocator settings, as for the norms.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import (
    FORWARD,
    TRAINING,
    Contender,
    Operation,
    Run,
    calling,
    compiled,
    find,
    gpu_rows,
    through_dispatcher,
    traffic,
    with_peers,
)
from benchmarks.harness.goals import Goal
from fusedops import nn
from fusedops.references import gated_activation as definitions

GPT_OSS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


def tensors(packed: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """gate and up of a shape, or both in one tensor."""

    def inputs(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        *rows, n = shape
        wide = (*rows, 2 * n) if packed else tuple(shape)
        return tuple(
            torch.randn(wide, dtype=dtype, device=device, requires_grad=True)
            for _ in range(1 if packed else 2)
        )

    return inputs


# Forward reads gate and up and writes y; backward reads dy, gate and up and writes two gradients.
SEPARATE = traffic(3, 5)


def packed_traffic(mode: str, packed: Tensor) -> int:
    return SEPARATE(mode, packed) // 2


# Code as it is in models.


def swiglu_lines(gate, up):
    return F.silu(gate) * up


def geglu_lines(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def phi3_lines(packed):
    gate, up = packed.chunk(2, dim=-1)
    return up * F.silu(gate)


def gpt_oss_lines(gate, up, limit, alpha, up_offset):
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + up_offset) * (gate * torch.sigmoid(gate * alpha))


def contenders(lines: Callable[..., Tensor], fused: Callable[..., Run], name: str = "eager"):
    """Returns one operation's contenders: models' code, the same compiled, then ours."""
    eager = calling(lines)
    return {name: eager, f"compile({name})": compiled(eager), "fusedops": Contender(fused)}


SWIGLU = Operation(
    "swiglu",
    tensors(),
    definitions.swiglu_reference,
    SEPARATE,
    contenders(swiglu_lines, lambda gate, up: partial(ours.swiglu, gate, up)),
)
GEGLU = Operation(
    "geglu",
    tensors(),
    partial(definitions.geglu_reference, approximate="tanh"),
    SEPARATE,
    contenders(geglu_lines, lambda gate, up: partial(ours.geglu, gate, up, approximate="tanh")),
)
PACKED = Operation(
    "swiglu packed",
    tensors(packed=True),
    definitions.swiglu_reference,
    packed_traffic,
    contenders(phi3_lines, lambda packed: partial(ours.swiglu, packed), "huggingface"),
)
LIMITED = Operation(
    "swiglu gpt-oss",
    tensors(),
    partial(definitions.swiglu_reference, **GPT_OSS),
    SEPARATE,
    contenders(
        partial(gpt_oss_lines, **GPT_OSS),
        lambda gate, up: partial(ours.swiglu, gate, up, **GPT_OSS),
        "huggingface",
    ),
)
OPERATIONS = [SWIGLU, GEGLU, PACKED, LIMITED]

SHAPES = [(1, 5632), (16, 5632), (512, 2816), (2048, 5632)]  # decode to training
QUICK_SHAPES = [(1, 5632), (512, 2816)]

BF16, F32 = torch.bfloat16, torch.float32
MUST_SHOW = [
    Goal(SWIGLU, TRAINING, BF16, (2048, 5632), "eager", {"default": 2.5, "keep": 2.5}, 0.6),
    Goal(SWIGLU, FORWARD, BF16, (1, 5632), "eager", {"default": 1.0}),
    Goal(SWIGLU, FORWARD, F32, (2, 64), "eager", {"default": 1.0}),
    Goal(SWIGLU, TRAINING, F32, (2, 64), "eager", {"default": 1.0}),
]


# Small-batch calls.


def launch(operation: Operation, module: torch.nn.Module, **options) -> Operation:
    """Returns every way to call one operator: eager, torch.ops, the short path, the module."""
    rows = {
        "eager": operation.contenders["eager"],
        "fusedops torch.ops": through_dispatcher(operation.name, **options),
        "fusedops functional": operation.contenders["fusedops"],
        "fusedops module": calling(module),
    }
    return replace(operation, contenders=rows)


LAUNCH = [
    launch(SWIGLU, nn.SwiGLU()),
    launch(GEGLU, nn.GEGLU("tanh"), approximate="tanh"),
]


# Rows on a GPU.
#
# Liger writes the gradients over gate and up. For a backward it gets copies, made before the
# timing. A whole step would count the copies, so it has no such row.


def on_copies(apply: Callable[..., Tensor], gate: Tensor, up: Tensor) -> Tensor:
    copies = (t.clone() if torch.is_grad_enabled() else t for t in (gate, up))
    return apply(*copies)


def liger(path: str, name: str) -> dict[str, Contender]:
    def prepare(gate: Tensor, up: Tensor) -> Run:
        return partial(on_copies, find(f"liger_kernel.ops.{path}", name).apply, gate, up)

    return {"liger": Contender(prepare)}


MANY_ROWS, WIDTHS = 8192, (2816, 5632, 11008, 14336)
TOKENS, WIDTH = (1, 16, 64), 11008
EVERY = [
    with_peers(SWIGLU, liger("swiglu", "LigerSiLUMulFunction")),
    with_peers(GEGLU, liger("geglu", "LigerGELUMulFunction")),
    PACKED,
    LIMITED,
]
PLAIN = {operation.name: operation for operation in OPERATIONS}  # without Liger
LARGE, SMALL = [(MANY_ROWS, n) for n in WIDTHS], [(tokens, WIDTH) for tokens in TOKENS]
GPU_ROWS = [
    replace(case, operation=PLAIN[case.operation.name]) if case.mode == TRAINING else case
    for case in gpu_rows(EVERY, LARGE, SMALL)
]
