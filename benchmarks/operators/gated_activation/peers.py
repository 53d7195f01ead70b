"""Liger's gated activations as GPU benchmark contenders; skipped if Liger is missing.

Liger writes the gradients over gate and up. For a backward it gets copies, made before the timing.
A whole step would count the copies, so it has no such row.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.case import Contender, Run, find


def on_copies(apply: Callable[..., Tensor], gate: Tensor, up: Tensor) -> Tensor:
    own = (t.clone() if torch.is_grad_enabled() else t for t in (gate, up))
    return apply(*own)


def liger(path: str, name: str) -> Contender:
    def prepare(gate: Tensor, up: Tensor) -> Run:
        return partial(on_copies, find(f"liger_kernel.ops.{path}", name).apply, gate, up)

    return Contender(prepare)


PEERS: dict[str, dict[str, Contender]] = {
    "swiglu": {"liger": liger("swiglu", "LigerSiLUMulFunction")},
    "geglu": {"liger": liger("geglu", "LigerGELUMulFunction")},
}
