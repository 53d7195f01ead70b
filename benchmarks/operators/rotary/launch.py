"""Benchmarks of small-batch calls of rotary_embedding and of Hugging Face's function."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.case import Contender, Operation, Run
from benchmarks.operators.rotary.operations import ROTARY

WIDTH = 64  # head width


def of_tokens(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """q and k for that many tokens, with that many elements each."""
    tokens, hidden = shape
    heads = hidden // WIDTH
    return ROTARY.inputs((1, heads, heads, tokens, WIDTH), dtype, device)


def launch(operation: Operation) -> Operation:
    """Returns every way to call the operator: Hugging Face, torch.ops, the short path."""
    rows = {
        "huggingface": operation.contenders["huggingface"],
        "fusedops torch.ops": Contender(through_dispatcher(operation.name)),
        "fusedops functional": operation.contenders["fusedops"],
    }
    return replace(operation, inputs=of_tokens, contenders=rows)


def through_dispatcher(name: str) -> Callable[..., Run]:
    return lambda *inputs: partial(getattr(torch.ops.fusedops, name), *inputs)


LAUNCH = [launch(ROTARY)]
