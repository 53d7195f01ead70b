"""Lazy logits, whose values are computed on first read.

A head returns `LazyLogits` instead of logits. Its autograd node is a linear's, and torch builds the
nodes of later operations, so gradients are right whether or not the values are ever read: only the
values are deferred. A few operations are recorded instead of run; all others read the values. A
function of torch in `FUSED` gets the logits themselves.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "CHANGED",
    "FUSED",
    "KEPT",
    "SCOPE",
    "LazyLogits",
    "Origin",
    "State",
    "added",
    "formula",
    "is_there",
    "keep",
    "read",
    "rows_of",
    "version",
]

aten: Any = torch.ops.aten

# The heads whose logits may wait: those of the model currently in a forward with labels.
SCOPE: ContextVar[tuple[nn.Module, ...]] = ContextVar("heads of a forward with labels", default=())

# The states of lazy logits in a forward that keeps them; None in one that does not.
KEPT: ContextVar["WeakSet[State] | None"] = ContextVar("states in a forward", default=None)

# The code of torch's functions that have another form for lazy logits, and that form. In a model's
# forward it gets the function's arguments, and returns None if torch's must run.
FUSED: dict[Any, Callable[..., Tensor | None]] = {}

CHANGED = (
    "logits: the head's weight or input changed after the forward, before outputs.logits was read; "
    'read it earlier, or patch with loss="keep_logits", which computes the logits in the forward, '
    "or with loss=False"
)
SCALED = {aten.mul.Tensor: lambda by: by, aten.div.Tensor: lambda by: 1 / by}
SAME = aten.detach.default, aten.alias.default, aten.view.default  # results share memory
SLICE: tuple = (0, None, None, 1)  # the defaults of dim, start, end and step
VIEWS = aten.view.default, aten.slice.Tensor  # of the rows; results share memory
# Up to torch 2.13, `apply` is a Python function; later it is C and has no frame.
APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


@dataclass(frozen=True, eq=False)
class Origin:
    """The origin of logits: `head(hidden)`. hidden is the input of the head's forward.

    values: computes them without gradients; its `compare` raises if a given weight and bias differ
    from those of the call. dtype: the logits' dtype. versions: of hidden, the weight and the bias.
    """

    head: nn.Module
    hidden: Tensor
    values: Any
    dtype: torch.dtype
    versions: tuple[tuple[Tensor, int], ...]

    def check(self) -> None:
        """Raises if the hidden state, the weight or the bias was written to since the call.

        Weights that FSDP and ZeRO have freed are gathered again, so they are not checked here.
        """
        if any(is_there(t) and version(t) != recorded for t, recorded in self.versions):
            raise RuntimeError(CHANGED)


def version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def is_there(t: Tensor) -> bool:
    """Whether a tensor has memory."""
    return bool(t.numel() and t.untyped_storage().nbytes())


@dataclass(frozen=True, eq=False)
class State:
    """The origin of lazy logits, and the operations recorded since.

    steps: (function, its other arguments, keywords) per operation. cell: the values, once they were
    read. Tensors that share memory share a state; a view has its own, and base is the state of what
    it views.
    """

    origin: Origin
    steps: tuple[tuple[Any, tuple, dict], ...] = ()
    cell: list[Tensor] = field(default_factory=list)
    base: "State | None" = None

    def __post_init__(self) -> None:
        if (kept := KEPT.get()) is not None:
            kept.add(self)

    @property
    def has_values(self) -> bool:
        """Whether the values or the viewed values were read. They may have been written to."""
        return bool(self.cell) or (self.base is not None and self.base.has_values)

    def values(self) -> Tensor:
        if not self.cell:
            self.origin.check()
            with torch.inference_mode(False), torch.no_grad():
                if self.base is not None:
                    function, args, kwargs = self.steps[-1]
                    values = function(self.base.values(), *args, **kwargs)
                else:
                    values = self.origin.values()
                    for function, args, kwargs in self.steps:
                        # After a clone, which is not recorded, a view may need a copy.
                        function = Tensor.reshape if function is aten.view.default else function
                        values = function(values, *args, **kwargs)
            self.cell.append(values)
        return self.cell[0]


class LazyLogits(Tensor):
    """Lazy logits [..., classes]. torch functions accept it and return plain tensors."""

    state: State

    @staticmethod
    def of(
        state: State, shape: torch.Size, dtype: torch.dtype, strides: tuple[int, ...] | None = None
    ) -> "LazyLogits":
        """strides: those of contiguous rows by default."""
        device = state.origin.hidden.device
        logits: Any = Tensor._make_wrapper_subclass(
            LazyLogits, shape, strides=strides, dtype=dtype, device=device
        )
        logits.state = state
        return logits

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(function, FunctionType):
            function = _torchs_own(function)
        fused = FUSED.get(getattr(function, "__code__", None)) if SCOPE.get() else None
        with torch._C.DisableTorchFunctionSubclass():
            result = fused(*args, **kwargs) if fused else None
            return function(*args, **kwargs) if result is None else result

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[override]
        """Runs below autograd."""
        kwargs = kwargs or {}
        noted = _note(function, args, kwargs)
        if noted is not None:
            return noted
        args, kwargs = tree_map_only(LazyLogits, lambda t: t.state.values(), (args, kwargs))
        return function(*args, **kwargs)

    @property
    def data(self):  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, values):
        expected, got = (f"{t.dtype} {list(t.shape)}" for t in (self, values))
        if got != expected:
            raise RuntimeError(f"logits: data must be {expected} like the logits, got {got}")
        self.state = State(self.state.origin, self.state.steps, [read(values).detach()])

    def __deepcopy__(self, memo):
        plain = read(self)
        memo.setdefault(id(memo), []).append(plain)  # like `copy`: keep it alive as long as memo
        return plain.__deepcopy__(memo)


def _torchs_own(function: FunctionType) -> FunctionType:
    """The function of torch that hands its call to lazy logits.

    torch names itself by looking its name up. If somebody has put a wrapper there, which has called
    torch's function, that would run the wrapper a second time.
    """
    frame = inspect.currentframe()
    for _ in range(3):  # this function, __torch_function__, handle_torch_function
        frame = frame.f_back if frame else None
    if frame is None or frame.f_code is function.__code__ or frame.f_code.co_freevars:
        return function
    replaced = frame.f_globals.get(frame.f_code.co_name) is function
    return FunctionType(frame.f_code, frame.f_globals) if replaced else function


def _reading(name: str) -> Callable:
    """A plain tensor's method that accesses memory directly, where no dispatch happens."""

    def method(self, *args, **kwargs):
        return getattr(read(self), name)(*args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    *("__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "numpy", "tolist"),
    *("data_ptr", "const_data_ptr", "mutable_data_ptr", "share_memory_", "is_shared"),
    *("storage", "untyped_storage", "_typed_storage"),
):
    setattr(LazyLogits, _name, _reading(_name))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.state.values().detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def read(logits: Any) -> Any:
    """Lazy logits as a plain tensor in the same graph; anything else unchanged."""
    return _Read.apply(logits) if isinstance(logits, LazyLogits) else logits


def keep(outputs: Any, states: "WeakSet[State]") -> None:
    """Computes the values of the lazy logits in a model's outputs; the graph is unchanged.

    Results computed from them have the same gradients as without. states: those of the forward.
    Outputs may have a class that torch does not look into: if no logits of a head are found in
    them, all of its remaining logits are computed.
    """
    output_states = [t.state for t in tree_leaves(outputs) if isinstance(t, LazyLogits)]
    origins = {state.origin for state in output_states}
    for state in [*output_states, *(s for s in list(states) if s.origin not in origins)]:
        state.values()


def _note(function: Any, args: tuple, kwargs: dict) -> LazyLogits | None:
    """The result of an operation that can wait; None if it must run now."""
    logits = args[0] if args else None
    if not isinstance(logits, LazyLogits) or logits.state.has_values:
        return None
    state, rest = logits.state, args[1:]
    waits = bool(SCOPE.get())
    if not waits and logits.requires_grad and not torch.is_grad_enabled():
        waits = _in_an_autograd_function()
        if not waits:  # a user wants the values
            return None
    if function is aten._to_copy.default:
        dtype: Any = kwargs.get("dtype")
        odd = [k for k, v in kwargs.items() if k != "dtype" and v not in (None, False)]
        floats = dtype is not None and dtype.is_floating_point and not rest and not odd
        return _more(logits, function, rest, {"dtype": dtype}, dtype) if floats else None
    if not waits:
        return None
    if function in SAME and (not rest or tuple(rest[0]) == tuple(logits.shape)):
        return LazyLogits.of(state, logits.shape, logits.dtype, logits.stride())
    if function in VIEWS and not kwargs:
        return _view(logits, function, rest)
    memory_format = kwargs.get("memory_format")
    copies = function is aten.clone.default and not rest and kwargs.keys() <= {"memory_format"}
    if copies and memory_format in (None, torch.contiguous_format):
        return LazyLogits.of(State(state.origin, state.steps), logits.shape, logits.dtype)
    if function is aten._unsafe_view.default and rest[0][-1:] == [logits.shape[-1]]:
        viewed = State(state.origin, (*state.steps, (aten.view.default, rest, {})))
        return LazyLogits.of(viewed, torch.Size(rest[0]), logits.dtype)
    if function is aten.add.Tensor and not kwargs and _is_row(rest[0], logits):
        dtype = torch.promote_types(logits.dtype, rest[0].dtype)
        row: Any = rest[0].detach().clone()
        row.source, row.version = rest[0], version(rest[0])  # for its gradient
        return _more(logits, function, (row,), {}, dtype)
    number = function in SCALED and type(rest[0]) in (int, float)
    if not kwargs and (number or function is aten.tanh.default):
        return _more(logits, function, rest, {}, logits.dtype)
    return None


def _view(logits: LazyLogits, function: Any, args: tuple) -> LazyLogits | None:
    """A view of rows of logits, whole or without the last classes; None for another view."""
    if function is aten.slice.Tensor:
        args = args + SLICE[len(args) :]
        args = (args[0] % logits.dim(), *args[1:])
    meta = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    view = function(meta, *args)
    narrows = function is aten.slice.Tensor and args[0] == logits.dim() - 1
    same = view.shape[-1:] == logits.shape[-1:]
    if not (args[1] in (0, None) and view.stride(-1) == 1 if narrows else same):
        return None
    state = logits.state
    view_state = State(state.origin, (*state.steps, (function, args, {})), base=state)
    return LazyLogits.of(view_state, view.shape, logits.dtype, view.stride())


def _is_row(added: Any, logits: LazyLogits) -> bool:
    """Whether one number for each class is added to every row."""
    return (
        type(added) in (Tensor, nn.Parameter)
        and added.dtype in (logits.dtype, *(() if added.requires_grad else (torch.float32,)))
        and added.device == logits.device
        and logits.dim() >= added.dim() > 0
        and added.shape[-1] == added.numel() == logits.shape[-1]
    )


def _in_an_autograd_function() -> bool:
    """Whether an autograd function is running.

    DDP and ZeRO-3 call theirs on a model's outputs, only to pass the same values on.
    """
    frame = inspect.currentframe()
    while frame is not None and not (frame.f_code is APPLY or _has_context(frame)):
        frame = frame.f_back
    return frame is not None


def _has_context(frame: FrameType) -> bool:
    """Whether the frame is a call whose first argument is an autograd function's context."""
    code = frame.f_code
    name = code.co_varnames[0] if code.co_argcount else ""
    return isinstance(frame.f_locals.get(name), torch.autograd.function.FunctionCtx)


def _more(
    logits: LazyLogits, function: Any, args: tuple, kwargs: dict, dtype: torch.dtype
) -> LazyLogits:
    state = logits.state
    steps = (*state.steps, (function, args, kwargs))
    return LazyLogits.of(State(state.origin, steps), logits.shape, dtype)


def formula(logits: LazyLogits) -> tuple[float | None, float | None] | None:
    """cross_entropy's (scale, softcap) that match the operations on the head's output.

    None if no such numbers exist or if the values have been computed.

        after tanh(before x) = softcap tanh(scale x / softcap)

    What is added to x has to be added first, for which see `added`.
    """
    if logits.state.has_values:
        return None
    factors, size = [1.0], logits.state.origin.dtype.itemsize
    for function, args, kwargs in logits.state.steps:
        if function in VIEWS:
            continue
        if function is aten.add.Tensor:
            if factors != [1.0] or version(args[0].source) != args[0].version:
                return None
        elif function in SCALED:
            if args[0] <= 0 or args[0] == torch.inf:
                return None
            factors[-1] *= SCALED[function](args[0])
        elif function is aten.tanh.default:
            factors.append(1.0)
        elif kwargs["dtype"].itemsize < size:
            return None  # rounds
        else:
            size = kwargs["dtype"].itemsize
    before, *after = factors
    if len(after) > 1:
        return None
    scale = before * after[0] if after else before
    return None if scale == 1 else scale, after[0] if after else None


def added(logits: LazyLogits) -> Tensor | None:
    """The row that was added to each row of the head's output."""
    steps, classes = logits.state.steps, logits.shape[-1]
    rows = [args[0].source.flatten()[:classes] for f, args, _ in steps if f is aten.add.Tensor]
    return sum(rows[1:], rows[0]) if rows else None


def rows_of(logits: LazyLogits, hidden: Tensor) -> Tensor:
    """The rows of the head's input that the logits are of, in their order."""
    for function, args, _ in logits.state.steps:
        if function is aten.slice.Tensor and args[0] < hidden.dim() - 1:
            hidden = function(hidden, *args)
        elif function is aten.view.default:
            hidden = hidden.reshape(*args[0][:-1], hidden.shape[-1])
    return hidden
