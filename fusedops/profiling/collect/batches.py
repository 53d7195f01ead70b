"""Describes a batch by bytes, size and tokens; cuts it in half."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fusedops.profiling.evidence import Tokens

__all__ = ["batch_size", "count_tokens", "halve", "mean_tokens", "nbytes"]

IGNORED = -100  # the label of tokens that have no loss


def nbytes(batch: Any) -> int:
    """Bytes of all tensors in a batch, also in nested dictionaries, lists and tuples."""
    return sum(tensor.nbytes for tensor in _tensors(batch))


def batch_size(batch: Any) -> int | None:
    """The size of dimension 0 that most tensors of a batch share; None without one."""
    sizes = Counter(tensor.shape[0] for tensor in _tensors(batch) if tensor.dim())
    common = sizes.most_common(2)
    if not common or (len(common) == 2 and common[0][1] == common[1][1]):
        return None
    return common[0][0]


def halve(batch: Any) -> Any:
    """The first half of a batch: of every tensor and list whose length is the batch's size.

    Raises ValueError if the batch has no size, has a size of 1, or has a type that it does not
    know how to build.
    """
    size = batch_size(batch)
    if size is None:
        raise ValueError("its tensors share no dimension 0")
    if size < 2:
        raise ValueError("it holds one sample")
    return _halved(batch, size)


def count_tokens(batch: Any, tokens: int | Callable[[Any], int] | None) -> Tokens:
    """Real and padded tokens of a batch.

    tokens: what the user said. None counts an `attention_mask`, else `labels`, else `input_ids` of
    a dictionary, or of each dictionary in lists and tuples; other batches only have a size.
    """
    size = batch_size(batch)
    if tokens is not None:
        count = tokens(batch) if callable(tokens) else tokens
        return Tokens(real=float(count), padded=float(count), samples=size)
    counted = [_in_dictionary(part) for part in _dictionaries(batch)]
    if not counted or None in counted:
        return Tokens(samples=size)
    real, padded = (float(sum(counts)) for counts in zip(*counted, strict=True))
    return Tokens(real, padded, size)


def _dictionaries(batch: Any) -> Iterator[Mapping[str, Any]]:
    """A dictionary, or those in lists and tuples at any depth."""
    if isinstance(batch, Mapping):
        yield batch
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _dictionaries(part)


def _in_dictionary(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """Real tokens, and all with padding; None where they are not known."""
    for name in ("attention_mask", "labels", "input_ids"):
        tensor = batch.get(name)
        if isinstance(tensor, Tensor) and tensor.dim() == 2:
            return _real(name, tensor), tensor.numel()
    return None


def mean_tokens(steps: Sequence[Tokens]) -> Tokens:
    """The mean of several steps; None for what is not known of one of them."""

    def mean(name: str) -> float | None:
        values = [getattr(step, name) for step in steps]
        return None if not values or None in values else fmean(values)

    samples = mean("samples")
    return Tokens(mean("real"), mean("padded"), None if samples is None else round(samples))


def _real(name: str, tensor: Tensor) -> int:
    if name == "input_ids":
        return tensor.numel()
    return int(torch.count_nonzero(tensor != (0 if name == "attention_mask" else IGNORED)))


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _halved(batch: Any, size: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[: size // 2] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, Mapping):
        halves = {name: _halved(value, size) for name, value in batch.items()}
        return halves if type(batch) is dict else type(batch)(halves)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        if len(batch) == size and not any(isinstance(value, Tensor) for value in batch):
            return batch[: size // 2]  # a list of texts
        halves_of = [_halved(value, size) for value in batch]
        return type(batch)(*halves_of) if hasattr(batch, "_fields") else type(batch)(halves_of)
    return batch
