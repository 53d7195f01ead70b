"""Functions of rows on jagged nested tensors: they run on the values of all rows.

torch.nested keeps a batch of sequences of different lengths as one tensor of values and the
offsets of the sequences. A function that takes each row by itself needs the values alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["operator"]


def operator(name: str, *tensors: Tensor | None) -> Callable:
    """The operator as torch.ops has it; on jagged tensors, the same on their values."""
    found = getattr(torch.ops.fusedops, name)
    jagged = any(isinstance(t, Tensor) and _is_jagged(t) for t in tensors)
    return partial(_on_values, found) if jagged else found


def _is_jagged(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged


def _on_values(run: Any, *args: Any, **kwargs: Any) -> Any:
    named = dict(zip((a.name for a in run.default._schema.arguments), args, strict=False)) | kwargs
    first = next(value for value in named.values() if _is_jagged(value))
    values = {name: _values(run, name, value, first) for name, value in named.items()}
    result = run(**values)
    wrapped = (_like(first, t) for t in (result if isinstance(result, tuple) else (result,)))
    return tuple(wrapped) if isinstance(result, tuple) else next(wrapped)


def _values(run: Any, name: str, value: Any, first: Any) -> Any:
    if not _is_jagged(value):
        return value
    if value.shape[: value._ragged_idx + 1] != first.shape[: first._ragged_idx + 1]:
        raise RuntimeError(
            f"{run._qualified_op_name.partition('::')[2]}: {name} must have the sequences of the "
            f"other nested arguments, {list(first.shape)}, got {list(value.shape)}"
        )
    return value.values()


def _like(first: Any, values: Tensor) -> Tensor:
    """The values in the sequences of another jagged tensor."""
    return torch.nested.nested_tensor_from_jagged(
        values, first.offsets(), first.lengths(), jagged_dim=first._ragged_idx
    )
