"""Records whether calls of a model's fused parts ran a kernel, and if not, why.

A function that decides in each call between a kernel and the model's code registers itself with
`decides`. That costs its calls nothing: while a `CallWatch` is entered, Python's profile function
sees them (a hook would change what a site runs), and a dispatch mode sees the operators in them. A
call counts as a kernel's if a kernel operator of ours ran in it.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedops.backends import FAMILIES, KERNELS, forced, operators, unavailable
from fusedops.patching.core.kinds import SITE_KINDS
from fusedops.patching.core.probing import OBSERVERS

__all__ = ["CallWatch", "Repeat", "SiteCall", "decides"]

Why = Callable[..., str]
At = Callable[..., nn.Module | None]

OPERATORS = {f"fusedops::{op}" for family in FAMILIES for op in operators(family)}
KERNEL_OF = {
    f"fusedops::{name}": family
    for family in FAMILIES
    for name in KERNELS.get(family, (f"{family}_forward", f"{family}_backward"))
}
NODES = {"FusedCrossEntropyBackward", "FusedLinearCrossEntropyBackward"}
FAMILY_OF = {kind.name: kind.family for kind in SITE_KINDS}
BY_SIZE = "torch's code is as fast for this size"
UNMEASURED = "nobody has timed this kernel on a GPU"
FLOAT64 = "there is no float64 kernel"
COMPOSITE = "no kernel takes such tensors"


class Repeat(NamedTuple):
    """How to repeat a call: `fused(*args, **kwargs)`, or by the model's code `plain(...)`.

    fused runs while the model is patched, plain while it is not; they may be the same function,
    which looks at the model. modules: those whose parameters get gradients from the call.
    """

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    modules: tuple[nn.Module, ...] = ()


class Decision(NamedTuple):
    """A registered function. See `decides`."""

    kind: str
    at: At
    why: Why
    repeat: Callable[..., Repeat]


_decisions: dict[CodeType, Decision] = {}


def decides(function: Any, kind: str, *, at: At, why: Why, repeat: Callable[..., Repeat]) -> None:
    """Registers a function that decides, in each call, whether a site runs its kernel.

    at, why and repeat get the function's arguments, and must not hold a model or a class. kind: the
    sites', as in patch's report. at: returns the module that names the site; None if the call
    belongs to no site. why: returns why the call runs the model's code, empty if it does not.
    repeat: returns how to repeat the call, to time it.
    """
    _decisions[function.__code__] = Decision(kind, at, why, repeat)


@dataclass(eq=False)
class SiteCall:
    """One call of a registered function.

    repeat: how to repeat it, until it returns. reason: why the model's code ran; empty if a kernel
    did. inside: the call around it. backward: whether a kernel ran in the backward of its results;
    None if they had none. forward: how many backwards were before it while it was watched.
    """

    kind: str
    module: nn.Module
    repeat: Repeat | None
    reason: str
    inside: "SiteCall | None"
    forward: int
    first_node: int
    kernel: bool = False
    backward: bool | None = None


class CallWatch(TorchDispatchMode):
    """Records every call of a registered function while it is entered, in `calls`.

    began: called with each call before it runs. Only this thread's calls are seen, and none in a
    compiled graph. Operators run as they would without it.
    """

    def __init__(self, began: Callable[[SiteCall], None] = lambda call: None) -> None:
        super().__init__()
        self.calls: list[SiteCall] = []
        self.began = began
        self._running: list[tuple[FrameType, SiteCall]] = []
        self._of_node: dict[
            int, SiteCall
        ] = {}  # an autograd node's number -> the call that made it
        self._in_backward, self._backwards = False, 0
        self._before: Any = None
        self._observers: Any = None

    @property
    def inside(self) -> bool:
        """Whether a registered function runs now."""
        return bool(self._running)

    def __enter__(self) -> "CallWatch":
        self._before = sys.getprofile()
        if self._before is not None and not callable(self._before):  # written in C, as cProfile is
            raise RuntimeError(
                "calls cannot be watched inside of a profiler that uses Python's profile function"
            )
        super().__enter__()
        self._observers = OBSERVERS.set(OBSERVERS.get() + 1)
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._before)
        OBSERVERS.reset(self._observers)
        self._running.clear()
        self._of_node.clear()
        super().__exit__(*error)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._before is not None:
            self._before(frame, event, arg)
        if event == "call" and frame.f_code in _decisions:
            self._begin(frame, _decisions[frame.f_code])
        elif event == "return" and self._running and self._running[-1][0] is frame:
            self._end()

    def _begin(self, frame: FrameType, decision: Decision) -> None:
        args, kwargs = _arguments(frame)
        module = decision.at(*args, **kwargs)
        if module is None:
            return
        inside = self._running[-1][1] if self._running else None
        reason = decision.why(*args, **kwargs)
        number = torch.autograd._get_sequence_nr()
        repeat = decision.repeat(*args, **kwargs)
        if self._in_backward and torch._C._current_autograd_node() is None:
            self._in_backward, self._backwards = False, self._backwards + 1
        call = SiteCall(decision.kind, module, repeat, reason, inside, self._backwards, number)
        self._running.append((frame, call))
        self.began(call)

    def _end(self) -> None:
        _, call = self._running.pop()
        for number in range(call.first_node, torch.autograd._get_sequence_nr()):
            self._of_node.setdefault(number, call)  # a call inside of it came first
        call.reason = "" if call.kernel else call.reason or _operators_reason(call)
        call.repeat = None
        self.calls.append(call)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name in OPERATORS and func._can_decompose():  # under inference_mode
            super().__enter__()  # without the profile function, which is still set
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        self._see(name, args, kwargs)
        return func(*args, **kwargs)

    def _see(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        family = KERNEL_OF.get(name)
        kernel = family is not None and not why_composite(family, _device((args, kwargs)))
        if self._running:
            self._running[-1][1].kernel |= kernel
            return
        node: Any = torch._C._current_autograd_node()
        self._in_backward |= node is not None
        call = None if node is None else self._of_node.get(node._sequence_nr())
        if call is not None:
            # A loss whose forward made the gradient only scales it in its node.
            ours = call.kernel and node.name() in NODES and not torch.is_grad_enabled()
            call.backward = call.backward or kernel or ours


def _arguments(frame: FrameType) -> tuple[tuple, dict[str, Any]]:
    """The arguments with which a frame's function was called."""
    names, rest, keywords, held = inspect.getargvalues(frame)
    count = frame.f_code.co_argcount
    args = [held[name] for name in names[:count]]
    given = {name: held[name] for name in names[count:]}
    return (*args, *(held[rest] if rest else ())), given | (held[keywords] if keywords else {})


def _operators_reason(call: SiteCall) -> str:
    """Why an operator of ours ran its composite, or torch's function."""
    given = call.repeat and (call.repeat.args, call.repeat.kwargs)
    tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    if any(t.dtype == torch.float64 for t in tensors):
        return FLOAT64
    reason = why_composite(FAMILY_OF[call.kind], _device(tensors))
    return reason or (BY_SIZE if call.kind == "linear" else COMPOSITE)


def _device(values: Any) -> str:
    """The first tensor's device; "cpu" without one."""
    tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor))
    return next((t.device.type for t in tensors), "cpu")


def why_composite(family: str, device: str) -> str:
    """Why a family's operators run torch's operations on a device; empty if a kernel runs."""
    name, op = forced(), FAMILIES[family][0]
    if name is not None:
        return "the backend 'reference' is forced" if name == "reference" else ""
    if device not in ("cpu", "cuda"):
        return f"there is no kernel for {device}"
    runs = ("cpu",) if device == "cpu" else ("cuda", "triton")
    reasons = [unavailable(op, backend) for backend in runs]
    return "" if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons)))
