"""Norm benchmarks against eager, Hugging Face, torch.compile, and Liger and QuACK on GPUs.

Memory-bound: the figure that matters is the fraction of copy bandwidth, for the fewest bytes that
must move. On a CPU, page faults of fresh memory dominate large outputs (a [4096, 4096] float32 add
takes 33 ms, 5 of them for the add), for every contender alike: compare those rows under both
allocator settings.
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
from benchmarks.harness.case import (
    BACKWARD,
    FORWARD,
    TRAINING,
    Case,
    Contender,
    Operation,
    Run,
    Skip,
    compiled,
    find,
    gpu_rows,
    traffic,
    with_peers,
    without_compile,
)
from benchmarks.harness.goals import Goal
from fusedops import nn
from fusedops.references import norm as definitions

EPS = 1e-6


def tensors(count: int, bias: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Returns an operation's inputs: `count` tensors of one shape, a weight and perhaps a bias."""

    def inputs(
        shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        to: dict[str, Any] = {"dtype": dtype, "device": device}
        rows = [torch.randn(*shape, **to, requires_grad=True) for _ in range(count)]
        weight = Parameter(1 + 0.1 * torch.randn(shape[-1], **to))
        return (*rows, weight, Parameter(torch.randn(shape[-1], **to)))[: count + 1 + bias]

    return inputs


# Forward reads x and writes y; backward reads dy and x and writes dx. With the residual, forward
# reads x and residual and writes h and y; backward reads dy, dh and h and writes dx.
PLAIN, ADD = traffic(2, 3), traffic(4, 4)


# Code as it is in models.


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
    """Returns one operation's contenders: peers first, then ours."""
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

SHAPES = [(1, 4096), (16, 4096), (512, 1024), (2048, 1024), (4096, 4096)]  # decode to training
QUICK_SHAPES = [(1, 4096), (512, 1024)]

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


# Small-batch calls.


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


# Rows on a GPU. Other dtypes, and rows too long for registers, are timed without torch.compile,
# which takes long to start. A peer must not write into its output gradient: the next call gets the
# same.


def after_the_sum(norm: Callable[..., Tensor], x: Tensor, residual: Tensor, *rest: Any):
    h = residual + x
    return norm(h, *rest), h


def liger(path: str, name: str) -> Callable[..., Tensor]:
    return find(f"liger_kernel.ops.{path}", name).apply


def liger_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Run:
    return partial(liger("layer_norm", "LigerLayerNormFunction"), x, w, b, EPS)


def liger_rms_norm(x: Tensor, w: Tensor) -> Run:
    apply = liger("rms_norm", "LigerRMSNormFunction")
    return partial(apply, x, w, EPS, 0.0, "llama", False)  # False: not in place


def liger_add_layer_norm(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> Run:
    return partial(after_the_sum, liger("layer_norm", "LigerLayerNormFunction"), x, r, w, b, EPS)


def liger_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Run:
    apply = liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return partial(apply, x, r, w, EPS, 0.0, "llama", False)


def quack_rms_norm(x: Tensor, w: Tensor) -> Run:
    return partial(find("quack.rmsnorm", "rmsnorm"), x, w, eps=EPS)


def quack_add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Run:
    return partial(find("quack.rmsnorm", "rmsnorm"), x, w, residual=r, eps=EPS, prenorm=True)


PEERS: dict[str, dict[str, Contender]] = {
    "layer_norm": {"liger": Contender(liger_layer_norm)},
    "rms_norm": {"liger": Contender(liger_rms_norm), "quack": Contender(quack_rms_norm)},
    "add_layer_norm": {"liger": Contender(liger_add_layer_norm)},
    "add_rms_norm": {
        "liger": Contender(liger_add_rms_norm),
        "quack": Contender(quack_add_rms_norm),
    },
}

MANY_ROWS, WIDTHS = 16384, (1024, 2048, 4096, 8192, 16384)
TOKENS, HIDDEN = (1, 16, 64), 4096
LONG = ((512, 65536), (64, 262144))


EVERY = [with_peers(operation, PEERS[operation.name]) for operation in OPERATIONS]
FURTHER = [
    without_compile(Case(op, mode, dtype, shape, clock="device"))
    for op in (EVERY[0], EVERY[-1])
    for mode in (FORWARD, BACKWARD)
    for dtype, shape in [
        (torch.float32, (MANY_ROWS, 4096)),
        (torch.float16, (MANY_ROWS, 4096)),
        *((torch.bfloat16, shape) for shape in LONG),
    ]
]
LARGE, SMALL = [(MANY_ROWS, n) for n in WIDTHS], [(tokens, HIDDEN) for tokens in TOKENS]
GPU_ROWS = gpu_rows(EVERY, LARGE, SMALL) + FURTHER
