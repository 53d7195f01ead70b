"""Runs row-wise operators on jagged nested tensors, through their packed values.

torch.nested stores a batch of sequences of different lengths as one tensor of values plus offsets.
A function that computes each row independently needs only the values. So only the arguments that
contain rows may be jagged, all must have the same sequences, and a row must not span the ragged
dimension. Anything else would silently mix sequences.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedops.extension import _C, UNCOMPILED, ops

__all__ = ["operator"]

# The arguments that contain rows, by their names in the operators' schemas.
ROWS = frozenset({"input", "x", "residual", "gate", "up", "x_scale"})
# Operator: the names of its arguments. Dynamo cannot read schemas inside a function.
ARGUMENTS: dict[str, tuple[str, ...]] = (
    _C.ARGUMENTS
    if UNCOMPILED
    else {
        name: tuple(a.name for a in getattr(ops, name).default._schema.arguments)
        for space, _, name in (op.partition("::") for op in torch._C._dispatch_get_all_op_names())
        if space == "fusedops"
    }
)


def operator(name: str, *tensors: Tensor | None) -> Callable:
    """The operator from torch.ops; for jagged tensors, a function that runs it on their values.

    For jagged tensors it raises TypeError if a parameter is nested or if only some of the row
    arguments are jagged, RuntimeError if their sequences differ, and ValueError if a row would span
    the ragged dimension.
    """
    op = getattr(ops, name)
    return partial(_on_values, op, name) if any(map(_is_jagged, tensors)) else op


def _is_jagged(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged


def _on_values(op: Any, op_name: str, *args: Any, **kwargs: Any) -> Any:
    named = dict(zip(ARGUMENTS[op_name], args, strict=False)) | kwargs
    sequences = _sequences(op_name, named)
    result = op(**{name: t.values() if _is_jagged(t) else t for name, t in named.items()})
    if isinstance(result, tuple):
        return tuple(_like(sequences, t) for t in result)
    return _like(sequences, result)


def _sequences(op_name: str, named: dict[str, Any]) -> Any:
    """The first jagged argument, after checking that the others match it."""
    tensors = {name: t for name, t in named.items() if isinstance(t, Tensor)}
    for name, t in tensors.items():
        if name not in ROWS and t.is_nested:
            raise TypeError(f"{op_name}: {name} must be a dense tensor, got a nested one")
    rows = {name: t for name, t in tensors.items() if name in ROWS}
    reference = next(name for name, t in rows.items() if _is_jagged(t))
    _check_rows(op_name, reference, rows[reference], _row_dims(named))
    for name, t in rows.items():
        if name != reference:
            _check_same_sequences(op_name, name, t, reference, rows[reference])
    return rows[reference]


def _row_dims(named: dict[str, Any]) -> int:
    """How many trailing dimensions make up a row."""
    if "normalized_shape" in named:
        return len(named["normalized_shape"])
    weight = named.get("weight")
    return weight.dim() if "residual" in named and isinstance(weight, Tensor) else 1


def _check_rows(op_name: str, name: str, t: Any, row_dims: int) -> None:
    if t._ragged_idx >= t.dim() - row_dims:
        rows = "the last dimension" if row_dims == 1 else f"the last {row_dims} dimensions"
        raise ValueError(
            f"{op_name}: {name} must have its ragged dimension before {rows}, got {list(t.shape)}"
        )


def _check_same_sequences(op_name: str, name: str, t: Any, reference: str, sequences: Any) -> None:
    if not _is_jagged(t):
        got = "a strided nested tensor" if t.is_nested else f"{_dtype(t)} {list(t.shape)}"
        raise TypeError(f"{op_name}: {name} must be jagged like {reference}, got {got}")
    shape = sequences.shape[: sequences._ragged_idx + 1]
    if t.shape[: t._ragged_idx + 1] != shape:
        raise RuntimeError(
            f"{op_name}: {name} must have the sequences of {reference}, {list(sequences.shape)}, "
            f"got {list(t.shape)}"
        )
    if not _same_offsets(t, sequences):
        raise RuntimeError(
            f"{op_name}: {name} must have the offsets of {reference}, "
            f"{sequences.offsets().tolist()}, got {t.offsets().tolist()}"
        )


def _same_offsets(a: Any, b: Any) -> bool:
    """Whether two jagged tensors of the same ragged size have the same offsets."""
    if a.lengths() is None and b.lengths() is None:
        return True
    return a.offsets() is b.offsets() or torch.equal(a.offsets(), b.offsets())


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _like(sequences: Any, values: Tensor) -> Tensor:
    """The values as a jagged tensor with `sequences`' offsets."""
    return torch.nested.nested_tensor_from_jagged(
        values, sequences.offsets(), sequences.lengths(), jagged_dim=sequences._ragged_idx
    )
