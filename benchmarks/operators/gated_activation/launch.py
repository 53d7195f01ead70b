"""Benchmarks of small-batch calls of swiglu and geglu, as functions and as modules."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.harness.case import Contender, Operation, Run, Skip
from benchmarks.operators.gated_activation.operations import GEGLU, SWIGLU
from fusedops import nn


def launch(operation: Operation, module: torch.nn.Module, **options) -> Operation:
    """Returns every way to call one operator: eager, torch.ops, the short path, the module."""
    rows = {
        "eager": operation.contenders["eager"],
        "fusedops torch.ops": Contender(through_dispatcher(operation.name, options)),
        "fusedops functional": operation.contenders["fusedops"],
        "fusedops module": Contender(lambda *inputs: partial(module, *inputs)),
    }
    return replace(operation, contenders=rows)


def through_dispatcher(name: str, options: dict) -> Callable[..., Run]:
    def prepare(*inputs: torch.Tensor) -> Run:
        if not hasattr(torch.ops.fusedops, name):
            raise Skip(f"this build has no torch.ops.fusedops.{name}")
        return partial(getattr(torch.ops.fusedops, name), *inputs, **options)

    return prepare


LAUNCH = [
    launch(SWIGLU, nn.SwiGLU()),
    launch(GEGLU, nn.GEGLU("tanh"), approximate="tanh"),
]
