"""Follows the numbers of small meta tensors that come from no parameter, on the CPU.

Models read a few numbers: is any position masked, does a sequence start in the middle of a row?
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["PLAIN", "Values", "empty_meta", "on_meta", "tensors_in"]

aten: Any = torch.ops.aten
UNWRITTEN = aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default
READS = aten._local_scalar_dense.default, aten.equal.default
INDEXED = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
CONSTANT: dict[Any, Callable[[Any], Any]] = {  # by the shape of a tensor: its numbers
    aten.zeros_like.default: lambda args: 0,
    aten.ones_like.default: lambda args: 1,
    aten.full_like.default: lambda args: args[1],
    aten.new_zeros.default: lambda args: 0,
    aten.new_ones.default: lambda args: 1,
    aten.new_full.default: lambda args: args[2],
}
WITH_LENGTHS = {aten._ctc_loss.Tensor: 2, aten._ctc_loss_backward.Tensor: 3}  # their place
FILLS = aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default
FROM_DATA = torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor
MOST_INTEGERS = 1 << 22  # elements of a tensor whose numbers are followed
MOST_FLOATS = 1 << 16
PLAIN = Tensor, torch.nn.Parameter


class MetaData(TorchFunctionMode):
    """Shows dispatch modes the data of `torch.tensor` and of indices on the meta device.

    torch makes such tensors there without data, and without an operator that a mode could see.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            args = args[0], _index(args[1], args[0].device), *args[2:]
        out = func(*args, **kwargs)
        if func in FROM_DATA and out.is_meta:
            _fill(out, args[1] if func is Tensor.new_tensor else args[0])
        return out


class Values(TorchDispatchMode):
    """The bytes of meta tensors' storages, on the CPU, as far as they are known.

    An operator runs a second time, on the values, if those of all its tensors are known. A tensor
    on the CPU is its own value. Views share a storage, and so the bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[int, tuple[torch.UntypedStorage, Any]] = {}  # the reference calls back

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], call: Callable | None = None):
        """call(func, args, kwargs), or func(*args, **kwargs); known numbers can be read.

        Raises RuntimeError if func needs numbers that are not known.
        """
        if func in READS:
            return self._computed(func, args, kwargs)
        if func in INDEXED:
            args = args[0], [t for index in args[1] for t in self._positions(index)], *args[2:]
        if func in WITH_LENGTHS:
            func, args = self._with_lengths(func, args)
        try:
            out = func(*args, **kwargs) if call is None else call(func, args, kwargs)
        except RuntimeError as error:
            if self._knows(args, kwargs) or isinstance(error, NotImplementedError):
                return self._computed(func, args, kwargs)  # a shape of numbers, or a copy to CPU
            args, kwargs = tree_map(self._moved, (args, kwargs))
            out = func(*args, **kwargs)  # with tensors on the CPU
        self._follow(func, args, kwargs, out)
        return out

    def keep(self, t: Tensor, value: Tensor) -> None:
        """Sets the numbers of a meta tensor's storage, which t covers. Large ones stay unknown."""
        if _is_followed(t):
            self._start(t)
            self._value(t).copy_(value)

    def _start(self, t: Tensor) -> None:
        """Gives a meta tensor's storage bytes, which the caller sets."""
        storage = t.untyped_storage()
        key = storage._cdata
        real = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
        self._bytes[key] = real, weakref.ref(storage, lambda _: self._bytes.pop(key, None))

    def forget(self, t: Tensor) -> None:
        """Makes a tensor's numbers unknown, and those of its views."""
        if type(t) in PLAIN and t.layout == torch.strided:
            self._bytes.pop(_storage(t), None)

    def _knows(self, *values: Any) -> bool:
        return all(
            type(t) in PLAIN
            and t.layout == torch.strided
            and (t.device.type == "cpu" or _storage(t) in self._bytes)
            for t in tensors_in(values)
        )

    def _value(self, x: Any) -> Any:
        """An operator's argument for a run on the CPU."""
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, Tensor) or x.device.type == "cpu":
            return x
        value = torch.empty(0, dtype=x.dtype, device="cpu")
        value.set_(self._bytes[_storage(x)][0], x.storage_offset(), x.shape, x.stride())
        value = value.conj() if x.is_conj() else value
        return value._neg_view() if x.is_neg() else value

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator's results from values, for one that cannot run on meta tensors."""
        if not self._knows(args, kwargs):
            shapes = " and ".join(
                f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
                for t in tensors_in((args, kwargs))
                if not self._knows(t)
            )
            raise RuntimeError(
                f"{func} needs the numbers of {shapes}, which depend on parameters or are too many"
            )
        stays = {id(t) for t in tensors_in(args) if t.device.type == "cpu"}
        to_cpu = str(kwargs.get("device", "")) == "cpu"
        values = tree_map(self._value, (args, kwargs))

        out = func(*values[0], **values[1])
        return tree_map(lambda x: x if to_cpu or id(x) in stays else self._moved(x), out)

    def _moved(self, x: Any) -> Any:
        """An argument on meta, if it is a tensor on the CPU."""
        if not isinstance(x, Tensor) or x.is_meta:
            return x
        t = empty_meta(x.shape, x.stride(), x.dtype)
        self.keep(t, x)
        return t

    def _with_lengths(self, func: Any, args: Any) -> tuple[Any, Any]:
        """CTC's loss or gradient with lengths as ints, if they are known."""
        first = WITH_LENGTHS[func]
        lengths = args[first : first + 2]
        if not self._knows(lengths):
            return func, args
        numbers = (self._value(t).tolist() for t in lengths)
        return func.overloadpacket.default, (*args[:first], *numbers, *args[first + 2 :])

    def _positions(self, index: Tensor | None) -> list[Tensor | None]:
        """An index; the places of a known mask instead of the mask."""
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if not is_mask or not self._knows(index):
            return [index]
        places: list[Tensor | None] = []
        for value in self._value(index).nonzero().unbind(1):
            place = torch.empty_like(value, device="meta")
            self.keep(place, value)
            places.append(place)
        return places

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Computes what an operator wrote, and its results that are no views."""
        if func in CONSTANT:
            if _is_followed(out):
                number = CONSTANT[func](args)
                self.keep(out, torch.full(out.shape, number, dtype=out.dtype, device="cpu"))
            return
        passes = _passes(func, args)
        if passes is not None and not self._knows(args, kwargs):
            self.keep(out, torch.full(out.shape, passes, dtype=torch.bool, device="cpu"))
            return
        written = [*_written(func, args, kwargs)] if func._schema.is_mutable else []
        if func in FILLS and self._knows(args[1:], kwargs) and _is_whole(args[0]):
            self._start(args[0])
        is_computable = func not in UNWRITTEN and self._knows(args, kwargs)
        results = tensors_in(out) if is_computable else []
        if not is_computable or not all(map(_is_followed, (*written, *results))):
            for t in written:
                self.forget(t)
            return
        given = {_storage(t) for t in tensors_in((args, kwargs))}
        is_new = [_storage(t) not in given for t in results]
        if not written and not any(is_new):
            return
        real_args, real_kwargs = tree_map(self._value, (args, kwargs))
        try:
            values = tensors_in(func(*real_args, **real_kwargs))
        except RuntimeError:  # not implemented on CPUs
            for t in written:
                self.forget(t)
            return
        for t, value, new in zip(results, values, is_new, strict=True):
            if new:
                self.keep(t, value)


@contextmanager
def on_meta(mode: TorchDispatchMode) -> Iterator[None]:
    """New tensors are on the meta device, the mode sees them, and random numbers stay."""
    with torch.random.fork_rng([]), torch.device("meta"), MetaData(), mode:
        yield


def _fill(t: Tensor, data: Any) -> None:
    """Writes the data that a tensor on meta was made from, if it is known."""
    try:
        numbers = tree_map(lambda x: x.item() if isinstance(x, Tensor) else x, data)
        t.detach().copy_(torch.tensor(numbers, dtype=t.dtype, device="cpu"))
    except (RuntimeError, TypeError, ValueError):
        return  # of tensors whose numbers are not known


def _index(index: Any, device: torch.device) -> Any:
    """An index whose lists, of ints or of single numbers' tensors, are tensors."""
    if isinstance(index, tuple):
        return tuple(_places(part, device) for part in index)
    return _places(index, device) if isinstance(index, list) else index


def _places(part: Any, device: torch.device) -> Any:
    leaves = tree_leaves(part)
    if not isinstance(part, list | tuple) or not all(map(_is_place, leaves)):
        return part
    places = torch.tensor(part, dtype=None if leaves else torch.int64, device=device)
    _fill(places, part)
    return places


def _is_place(x: Any) -> bool:
    return isinstance(x, int) or (isinstance(x, Tensor) and x.dim() == 0)


def empty_meta(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def tensors_in(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes in place."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _passes(func: Any, args: Any) -> bool | None:
    """What an assertion, or a question for infinities or NaN, gives if all is well; else None."""
    if func in (aten.isinf.default, aten.isnan.default):
        return False
    if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[1]:
        return func is aten.eq.Tensor
    if func in (aten.eq.Scalar, aten.ne.Scalar) and abs(args[1]) == torch.inf:
        return func is aten.ne.Scalar
    return True if func is aten._is_all_true.default else None


def _is_whole(t: Tensor) -> bool:
    """Whether a tensor's numbers are followed, and are all of its storage's."""
    return _is_followed(t) and t.untyped_storage().nbytes() == t.numel() * t.element_size()


def _is_followed(t: Tensor) -> bool:
    is_float = t.is_floating_point() or t.is_complex()
    most = MOST_FLOATS if is_float else MOST_INTEGERS
    return type(t) in PLAIN and t.is_meta and t.layout == torch.strided and t.numel() <= most
