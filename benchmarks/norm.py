"""The norm family against eager, the Hugging Face lines and torch.compile.

Memory-bound: the number that matters is the share of copy's bandwidth, over the fewest bytes that
the work can move. On a CPU large outputs are dominated by page faults of fresh memory (a
[4096, 4096] float32 add: 33 ms, of which 5 are the add), for every contender alike: read those
rows under both allocator settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import fusedops
import fusedops.functional as ours
from benchmarks.case import FORWARD, TRAINING, Contender, Operation, Run, Skip, compiled
from benchmarks.must_show import Goal
from fusedops import nn
from fusedops.functional import norm as definitions

SHAPES = [(1, 4096), (16, 4096), (512, 1024), (2048, 1024), (4096, 4096)]  # decode to training
QUICK_SHAPES = [(1, 4096), (512, 1024)]
EPS = 1e-6


def tensors(count: int, bias: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Inputs of an operation: `count` tensors of one shape, a weight and perhaps a bias."""

    def inputs(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        to: dict[str, Any] = {"dtype": dtype, "device": device}
        rows = [torch.randn(*shape, **to, requires_grad=True) for _ in range(count)]
        weight = Parameter(1 + 0.1 * torch.randn(shape[-1], **to))
        return (*rows, weight, Parameter(torch.randn(shape[-1], **to)))[: count + 1 + bias]

    return inputs


def traffic(forward: int, training: int) -> Callable[..., int]:
    """How many tensors of x's size a kernel must read and write; the weights are small."""
    return lambda mode, x, *_: x.nbytes * (forward if mode == FORWARD else training)


# Forward reads x and writes y; backward reads dy and x and writes dx. With the residual, forward
# reads x and residual and writes h and y; backward reads dy, dh and h and writes dx.
PLAIN, ADD = traffic(2, 5), traffic(4, 8)


# The lines that models contain.


def add_layer_norm_lines(x, residual, shape, weight, bias, eps):
    h = residual + x
    return F.layer_norm(h, shape, weight, bias, eps), h


def add_rms_norm_lines(x, residual, shape, weight, eps):
    h = residual + x
    return F.rms_norm(h, shape, weight, eps), h


def add_module_lines(module, x, residual):
    h = residual + x
    return module(h), h


def llama_rms_norm(weight: Tensor) -> torch.nn.Module:
    try:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
    except ModuleNotFoundError as error:
        raise Skip(f"{error}; pip install 'fusedops[hf]'") from error
    return with_parameters(LlamaRMSNorm(weight.numel(), EPS), weight)


def with_parameters(module: torch.nn.Module, weight: Tensor, bias: Tensor | None = None):
    module.weight = weight
    if bias is not None:
        module.bias = bias
    return module


def on_triton(prepare: Callable[..., Run]) -> Contender:
    def checked(*inputs: Tensor) -> Run:
        if inputs[0].device.type == "cpu":
            raise Skip("Triton needs a GPU: x is on cpu")
        return prepare(*inputs)

    return Contender(checked, lambda: fusedops.backend("triton"))


def contenders(eager: Callable[..., Run], fused: Callable[..., Run], huggingface=None):
    """The rows of one operation: peers first, then ours."""
    rows = {"eager": Contender(eager)}
    if huggingface:
        rows["huggingface"] = Contender(huggingface)
        rows["compile(huggingface)"] = compiled(rows["huggingface"])
    else:
        rows["compile(eager)"] = compiled(rows["eager"])
    return rows | {"fusedops": Contender(fused), "fusedops triton": on_triton(fused)}


OPERATIONS = [
    Operation(
        "layer_norm",
        tensors(1, bias=True),
        lambda x, w, b: definitions.layer_norm_reference(x, w.shape, w, b, EPS),
        PLAIN,
        contenders(
            eager=lambda x, w, b: partial(F.layer_norm, x, tuple(w.shape), w, b, EPS),
            fused=lambda x, w, b: partial(ours.layer_norm, x, tuple(w.shape), w, b, EPS),
        ),
    ),
    Operation(
        "rms_norm",
        tensors(1, bias=False),
        lambda x, w: definitions.rms_norm_reference(x, w.shape, w, EPS, rounding="llama"),
        PLAIN,
        contenders(
            eager=lambda x, w: partial(F.rms_norm, x, tuple(w.shape), w, EPS),
            huggingface=lambda x, w: partial(llama_rms_norm(w), x),
            fused=lambda x, w: partial(ours.rms_norm, x, tuple(w.shape), w, EPS, rounding="llama"),
        ),
    ),
    Operation(
        "add_layer_norm",
        tensors(2, bias=True),
        lambda x, r, w, b: definitions.add_layer_norm_reference(x, r, w, b, EPS),
        ADD,
        contenders(
            eager=lambda x, r, w, b: partial(add_layer_norm_lines, x, r, tuple(w.shape), w, b, EPS),
            fused=lambda x, r, w, b: partial(ours.add_layer_norm, x, r, w, b, EPS),
        ),
    ),
    Operation(
        "add_rms_norm",
        tensors(2, bias=False),
        lambda x, r, w: definitions.add_rms_norm_reference(x, r, w, EPS),
        ADD,
        contenders(
            eager=lambda x, r, w: partial(add_rms_norm_lines, x, r, tuple(w.shape), w, EPS),
            huggingface=lambda x, r, w: partial(add_module_lines, llama_rms_norm(w), x, r),
            fused=lambda x, r, w: partial(ours.add_rms_norm, x, r, w, EPS),
        ),
    ),
]
LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM = OPERATIONS


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
    """A call of the module. torch.nn's modules do not add: they get the line before them."""

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

BF16, F32 = torch.bfloat16, torch.float32
MUST_SHOW = [
    Goal(
        ADD_RMS_NORM,
        TRAINING,
        BF16,
        (2048, 1024),
        "huggingface",
        {"default": 6.0, "keep": 5.0},
        0.5,
    ),
    Goal(ADD_RMS_NORM, TRAINING, F32, (2048, 1024), "huggingface", {"default": 4.0, "keep": 4.0}),
    Goal(ADD_LAYER_NORM, TRAINING, BF16, (2048, 1024), "eager", {"default": 2.0, "keep": 2.0}),
    Goal(ADD_RMS_NORM, FORWARD, BF16, (1, 4096), "huggingface", {"default": 3.0}),
    Goal(ADD_LAYER_NORM, FORWARD, F32, (2, 64), "eager", {"default": 1.0}),
    Goal(ADD_LAYER_NORM, TRAINING, F32, (2, 64), "eager", {"default": 1.0}),
]
