"""The gated activations' benchmark contenders: torch, Hugging Face, torch.compile and fusedops."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops.functional as ours
from benchmarks.harness.case import Contender, Operation, Run, compiled, traffic
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
    eager = Contender(lambda *inputs: partial(lines, *inputs))
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
