"""Liger's cross entropies as GPU benchmark contenders; skipped if Liger is missing.

Liger computes the gradient in the forward and writes it over the logits. It gets one copy of them,
made outside the timing. From the second call on it works on its own output, so its results are not
checked. Its linear version only reads its inputs, and computes gradients whenever x requires them,
which evaluation does not.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.case import Contender, Run, find

MODULE = "liger_kernel.transformers.functional"

Copies = dict[int, tuple[Tensor, Tensor]]  # by id of the logits, kept with their copy


def over_copy(copies: Copies, loss: Callable[..., Tensor], x: Tensor, target: Tensor) -> Tensor:
    """x's gradient is the copy's, unchanged, so nothing more is moved."""
    if id(x) not in copies:
        copies[id(x)] = x, x.clone()
    return loss(copies[id(x)][1], target)


def liger(x: Tensor, target: Tensor) -> Run:
    return partial(over_copy, {}, find(MODULE, "liger_cross_entropy"), x, target)


def of_hidden(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return loss(x if torch.is_grad_enabled() else x.detach(), weight, target)


def liger_linear(x: Tensor, weight: Tensor, target: Tensor) -> Run:
    loss = find(MODULE, "liger_fused_linear_cross_entropy")
    return partial(of_hidden, loss, x, weight, target)


PEERS: dict[str, dict[str, Contender]] = {
    "cross_entropy": {"liger": Contender(liger, checked=False)},
    "linear_cross_entropy": {"liger": Contender(liger_linear)},
}
