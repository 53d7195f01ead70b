"""The norms' benchmark contenders: torch, Hugging Face, torch.compile and fusedops."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

import fusedops
import fusedops.functional as ours
from benchmarks.harness.case import (
    Contender,
    Operation,
    Run,
    Skip,
    compiled,
    traffic,
)
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
