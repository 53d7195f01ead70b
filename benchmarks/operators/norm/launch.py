"""Benchmarks of small-batch calls of the norms, as functions and as modules."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.harness.case import Contender, Operation, Run, Skip
from benchmarks.operators.norm.operations import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    EPS,
    LAYER_NORM,
    RMS_NORM,
    add_module_lines,
    with_parameters,
)
from fusedops import nn


def launch(operation: Operation, twin: type, module: type, **options) -> Operation:
    """Every way to call one operator: eager and its module, torch.ops, the short path, ours."""
    rows = {
        "eager": operation.contenders["eager"],
        "eager module": Contender(through(twin)),
        "fusedops torch.ops": Contender(through_dispatcher(operation, options)),
        "fusedops functional": operation.contenders["fusedops"],
        "fusedops module": Contender(through(module)),
    }
    return replace(operation, contenders=rows)


def through(module: type) -> Callable[..., Run]:
    """A call of the module. torch.nn's modules do not add, so the sum is a line before them."""

    def prepare(*inputs: Tensor) -> Run:
        rows = [t for t in inputs if not isinstance(t, Parameter)]
        layer = with_parameters(module(rows[0].shape[-1], eps=EPS), *inputs[len(rows) :])
        adds_itself = module.__module__.startswith("fusedops")
        return partial(layer, *rows) if adds_itself else plain_module(layer, rows)

    return prepare


def plain_module(layer: torch.nn.Module, rows: list[Tensor]) -> Run:
    return partial(layer, *rows) if len(rows) == 1 else partial(add_module_lines, layer, *rows)


def through_dispatcher(operation: Operation, options: dict) -> Callable[..., Run]:
    def prepare(*inputs: Tensor) -> Run:
        if not hasattr(torch.ops.fusedops, operation.name):
            raise Skip(f"this build has no torch.ops.fusedops.{operation.name}")
        rows = [t for t in inputs if not isinstance(t, Parameter)]
        weights = inputs[len(rows) :]
        shape = [] if len(rows) == 2 else [tuple(weights[0].shape)]
        op = getattr(torch.ops.fusedops, operation.name)
        return partial(op, *rows, *shape, *weights, EPS, **options)

    return prepare


ROUNDED = {"rounding": "llama", "offset": 0.0}
LAUNCH = [
    launch(LAYER_NORM, torch.nn.LayerNorm, nn.LayerNorm),
    launch(RMS_NORM, torch.nn.RMSNorm, nn.RMSNorm, **ROUNDED),
    launch(ADD_LAYER_NORM, torch.nn.LayerNorm, nn.AddLayerNorm, dropout_p=0.0),
    launch(ADD_RMS_NORM, torch.nn.RMSNorm, nn.AddRMSNorm, **ROUNDED, dropout_p=0.0),
]
