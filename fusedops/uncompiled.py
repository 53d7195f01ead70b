"""Substitutes the compiled library: each operator is its reference in plain PyTorch.

`fusedops.extension` loads this module as `fusedops._C` if no compiled part fits. It only checks
what a reference would compute wrongly without an error. Everything else raises PyTorch's errors.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedops import notice, references

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ANY_DTYPE = ("quantized_linear", "dequantize_weight", "adamw_squares", "adamw_scale")
CODES = ("rms_norm_quantized", "add_rms_norm_quantized", "swiglu_quantized")  # they return codes
FLOAT32 = ("quantized_linear", "quantized_experts")  # under autocast too: gradients need it
ARGUMENTS: dict[str, tuple[str, ...]] = {}  # operator: the names of its arguments

# Operators whose arguments come in another order than their definitions'.
LOSS_OPTIONS = ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "scale")
ORDERS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("input", "target", "weight", *LOSS_OPTIONS, "grad_in_forward", "dtype"),
    "linear_log_probs": (
        *("input", "linear_weight", "target", "linear_bias", "ignore_index", "softcap", "scale"),
        *("temperature", "return_entropy", "return_top1", "dtype"),
    ),
}

# Options that a reference would silently misread: what they must be.
OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "approximate": (lambda v: v in ("none", "tanh"), "'none' or 'tanh'"),
    "compute": (lambda v: v in (None, "exact", "bf16", "int8"), "None, 'exact', 'bf16' or 'int8'"),
    "dropout_p": (lambda v: 0 <= v <= 1, "from 0 to 1"),
    "limit": (lambda v: v is None or v >= 0, "None or a number of 0 or more"),
    "rounding": (lambda v: v in ("torch", "llama"), "'torch' or 'llama'"),
    "temperature": (lambda v: v > 0, "above 0"),
    "window": (lambda v: v is None or min(v) >= -1, "(left, right), each -1 or more"),
}


def _require(fits: Any, message: str) -> None:
    if not fits:
        raise RuntimeError(message)


def _check_rows(op: str, x: Tensor, shape: Any, *parameters: Any) -> None:
    """Checks a norm's shapes, which would broadcast."""
    shape = [*shape]
    ends = shape and [*x.shape[-len(shape) :]] == shape
    _require(ends, f"{op}: {[*x.shape]} must end with the normalized shape, got {shape}")
    for t in parameters:
        if isinstance(t, Tensor):
            _require([*t.shape] == shape, f"{op}: a parameter must be {shape}, got {[*t.shape]}")


def _check_norm(op: str, input: Tensor, normalized_shape: Any, weight=None, bias=None, **_) -> None:
    _check_rows(op, input, normalized_shape, weight, bias)


def _check_add_norm(op: str, x: Tensor, residual: Tensor, weight=None, bias=None, **_) -> None:
    _check_rows(op, x, x.shape[-1:] if weight is None else weight.shape, weight, bias)


def _check_swiglu(op: str, gate: Tensor, up: Tensor | None = None, **_) -> None:
    even = up is not None or gate.shape[-1] % 2 == 0
    _require(even, f"{op}: gate without up must have an even width, got {[*gate.shape]}")


def _check_rotary(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_) -> None:
    _require(cos.shape[-1] % 2 == 0, f"{op}: cos must have an even width, got {[*cos.shape]}")


def _check_linear_loss(op: str, input: Tensor, linear_weight: Tensor, target: Tensor, **_) -> None:
    classes = linear_weight.shape[:-1] if target.is_floating_point() else ()
    fits = linear_weight.dim() > 2 or target.shape == (*input.shape[:-1], *classes)
    _require(fits, f"{op}: target does not fit {[*input.shape]}, got {[*target.shape]}")


def _check_quantized_linear(op: str, x: Tensor, x_scale=None, out_dtype=None, **_) -> None:
    fits = x_scale is not None or (x.dtype in FLOATS and out_dtype in (None, x.dtype))
    _require(fits, f"{op}: x must be floating-point of out_dtype, or codes, got {x.dtype}")


def _check_experts(op: str, hidden: Tensor, index: Tensor, weights: Tensor, first: Tensor) -> None:
    _require(index.shape == weights.shape, f"{op}: top_k_index and top_k_weights differ in shape")
    _require(len(index) == len(hidden), f"{op}: top_k_index must have a row for each token")
    if _has_values(index) and not ((index >= 0) & (index <= len(first))).all():
        raise ValueError(f"{op}: top_k_index must be from 0 to {len(first)}, the experts")


def _check_attention(
    op: str, q: Tensor, k: Tensor, v: Tensor, bias=None, cu_seqlens_q=None, cu_seqlens_k=None, **_
) -> None:
    packed = cu_seqlens_q is not None
    _require(packed == (cu_seqlens_k is not None), f"{op}: both cu_seqlens must come together")
    dims = 3 if packed else 4
    _require(q.dim() == k.dim() == v.dim() == dims, f"{op}: q, k and v must have {dims} dimensions")
    heads, kv_heads = q.shape[1], k.shape[1]
    shares = heads == kv_heads or (kv_heads and heads % kv_heads == 0)
    _require(shares, f"{op}: k's heads must divide q's, {heads}, got {kv_heads}")
    _require(k.shape[1] == v.shape[1], f"{op}: v must have k's heads, got {v.shape[1]}")
    numbers = bias is None or bias.dtype == torch.bool or bias.is_floating_point()
    _require(numbers, f"{op}: bias must be bool or floating-point")
    if packed:
        same = len(cu_seqlens_q) == len(cu_seqlens_k)
        _require(same, f"{op}: both cu_seqlens must have the same sequences")
        _check_sequences(op, cu_seqlens_q, len(q))
        _check_sequences(op, cu_seqlens_k, len(k))


def _check_sequences(op: str, cu_seqlens: Tensor, tokens: int) -> None:
    if not _has_values(cu_seqlens):
        return
    fits = cu_seqlens[0] == 0 and cu_seqlens[-1] <= tokens and (cu_seqlens.diff() >= 0).all()
    _require(fits, f"{op}: cu_seqlens must grow from 0 to at most {tokens}, got {cu_seqlens}")


def _check_cache(op, q, k, v, seqused_k, block_table=None, cu_seqlens_q=None, **_) -> None:
    if cu_seqlens_q is not None:
        _check_sequences(op, cu_seqlens_q, len(q))
    if not _has_values(seqused_k):
        return
    size = k.shape[2] if block_table is None else k.shape[1]
    room = size if block_table is None else block_table.shape[1] * size
    fits = ((seqused_k >= 0) & (seqused_k <= room)).all()
    _require(fits, f"{op}: seqused_k must be from 0 to {room}, got {seqused_k}")
    if block_table is not None:
        pages = torch.arange(block_table.shape[1], device=block_table.device)
        used = block_table[pages * size < seqused_k[:, None]]
        fits = ((used >= 0) & (used < len(k))).all()
        _require(fits, f"{op}: block_table must be from 0 to {len(k) - 1}, got {used}")


CHECKS: dict[str, Callable[..., None]] = {
    "layer_norm": _check_norm,
    "rms_norm": _check_norm,
    "add_layer_norm": _check_add_norm,
    "add_rms_norm": _check_add_norm,
    "swiglu": _check_swiglu,
    "geglu": _check_swiglu,
    "quantized_linear": _check_quantized_linear,
    "rotary_embedding": _check_rotary,
    "linear_cross_entropy": _check_linear_loss,
    "linear_log_probs": _check_linear_loss,
    "attention": _check_attention,
    "cached_attention": _check_cache,
}


def _has_values(t: Tensor) -> bool:
    """Whether a tensor's values can be read at once: not on a GPU, nor while tracing."""
    if torch.compiler.is_compiling() or type(t) is not Tensor or not t.is_cpu:
        return False
    traced = torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing()
    return not traced and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def _check(op: str, arguments: dict[str, Any]) -> None:
    x, *others = arguments.values()
    for name in OPTIONS.keys() & arguments.keys():
        fits, what = OPTIONS[name]
        if not fits(arguments[name]):
            raise ValueError(f"{op}: {name} must be {what}, got {arguments[name]!r}")
    if op not in ANY_DTYPE:
        _require(x.dtype in FLOATS, f"{op}: inputs must be floating-point, got {x.dtype}")
    if op in CODES and torch.is_grad_enabled():
        differentiable = any(isinstance(t, Tensor) and t.requires_grad for t in (x, *others))
        _require(not differentiable, f"{op}: codes have no gradient: call it under torch.no_grad()")
    if op.endswith("experts"):
        _check_experts(op, x, *others[:3])
    elif check := CHECKS.get(op.removesuffix("_quantized")):
        check(op, **arguments)


def _operator(op: str, reference: Callable) -> Callable:
    """The operator as a function of positional or named arguments."""

    def run(*positional, **named):
        notice.give()
        arguments = dict(zip(ARGUMENTS[op], positional, strict=False)) | named
        _check(op, arguments)
        x = next(iter(arguments.values()))
        if op not in FLOAT32 or x.is_meta:
            return reference(**arguments)
        with torch.autocast(x.device.type, enabled=False):
            return reference(**arguments)

    return run


def _operators() -> dict[str, Callable]:
    """An operator for each function X_reference of fusedops/references."""
    operators: dict[str, Callable] = {}
    for file in pkgutil.iter_modules(references.__path__):
        module = importlib.import_module(f"{references.__name__}.{file.name}")
        for name, function in vars(module).items():
            if name.endswith("_reference") and function.__module__ == module.__name__:
                op = name.removesuffix("_reference")
                plain = getattr(module, f"{op.removesuffix('_quantized')}_reference", function)
                ARGUMENTS[op] = ORDERS.get(op) or (*inspect.signature(plain).parameters,)
                operators[op] = _operator(op, function)
    return operators


# A compiled library also has these functions.


def cpu_isa() -> str:
    """The instruction set of the CPU kernels."""
    return "none"


def quantized_linear_plan(*layout_and_options) -> str:
    """Describes how a CPU's kernel multiplies; empty without one."""
    return ""


def same_objects(a: list, b: list) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def any_gradient(params: list[Tensor]) -> bool:
    return any(p.grad is not None for p in params)


def _has_no_kernel(*sizes) -> bool:
    return False


def set_timed_calls(kind: str, sizes: list[int], ratios: list[float]) -> None:
    """Does nothing: there are no kernels to choose."""


own_product_pays = few_rows_pay = linear_always = timed_call_pays = _has_no_kernel
globals().update(_operators())
