"""Argument checks, with the messages of csrc/common.h and csrc/ops/checks.h."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(t: Tensor) -> str:
    return f"{dtype_name(t.dtype)} {list(t.shape)}"


def check_floating(op: str, name: str, t: Tensor) -> None:
    if t.dtype not in FLOATS:
        wanted = "float32, float16, bfloat16 or float64"
        raise RuntimeError(f"{op}: {name} must be {wanted}, got {describe(t)}")


def check_same_device(op: str, name: str, t: Tensor, like: str, x: Tensor) -> None:
    if t.device != x.device:
        raise RuntimeError(f"{op}: {name} must be on {x.device} like {like}, got {t.device}")


def check_shape(op: str, name: str, t: Tensor, shape: Sequence[int]) -> None:
    if list(t.shape) != list(shape):
        raise RuntimeError(f"{op}: {name} must have shape {list(shape)}, got {describe(t)}")


def check_like(op: str, name: str, t: Tensor, like: str, x: Tensor) -> None:
    check_same_device(op, name, t, like, x)
    if t.dtype != x.dtype:
        wanted = f"{dtype_name(x.dtype)} {list(t.shape)}"
        raise RuntimeError(f"{op}: {name} must be {wanted} like {like}, got {describe(t)}")


def check_activation(op: str, activation: str) -> None:
    if activation not in ("none", *ACTIVATIONS):
        known = ", ".join(map(repr, (None, *ACTIVATIONS[:-1])))
        raise ValueError(
            f"{op}: activation must be {known} or {ACTIVATIONS[-1]!r}, got '{activation}'"
        )


def quantized_rows_outputs(
    like: Tensor, shape: Sequence[int], output_format: str
) -> tuple[Tensor, Tensor]:
    """Uninitialised codes and scales of rows."""
    dtype = torch.int8 if output_format == "int8" else torch.float8_e4m3fn
    scale = like.new_empty((*shape[:-1], 1), dtype=torch.float32)
    return like.new_empty(tuple(shape), dtype=dtype), scale


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient, backward or forward, is wanted of one of them."""
    given = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return True
    dual = forward_ad._current_level >= 0
    return dual and any(forward_ad.unpack_dual(t).tangent is not None for t in given)


def check_output_format(op: str, output_format: str, *inputs: Tensor | None) -> None:
    """Checks the format of a quantized output, and that no gradient of it is wanted."""
    if output_format not in ("int8", "fp8"):
        raise ValueError(
            f"{op}: output_format must be None, 'int8' or 'fp8', got '{output_format}'"
        )
    if wants_gradient(*inputs):
        raise RuntimeError(
            f"{op}: output_format='{output_format}' has no gradient, but an input requires one "
            "(call it under torch.no_grad())"
        )


def has_numbers(t: Tensor) -> bool:
    """Whether a tensor's values can be read at once: not on a GPU, nor while tracing."""
    if type(t) is not Tensor or t.device.type != "cpu" or torch._C._len_torch_dispatch_stack():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(t)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which formulas are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """float64 if one of the tensors is float64, else float32."""
    any_double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if any_double else torch.float32
