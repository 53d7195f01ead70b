"""Recognises transformers' loss functions and builds their replacements.

A loss function is known if it is one of transformers' own and gave our results when both were run.
If it is called with other arguments, it runs itself, on logits. A user's function is skipped: a run
cannot show what it does with other labels, or what it records elsewhere.

`F.cross_entropy` is known. A forward's own call of it gets here if its argument is lazy logits.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import is_autocast_available

from fusedops.functional import cross_entropy
from fusedops.patching.core.calls import Repeat, decides
from fusedops.patching.core.probing import names_used, quiet, reachable_functions, undisturbed
from fusedops.patching.core.sharded import all_sharded
from fusedops.patching.core.swap import one_line
from fusedops.patching.models.loss.head import FLOATS, LATER, loss_of, untraceable
from fusedops.patching.models.loss.logits import FUSED, SCOPE, LazyLogits, read

__all__ = ["Loss", "loss_like"]

OWN = "transformers.loss."  # modules whose functions may be run and replaced


@dataclass(frozen=True)
class Loss:
    """A model's function that computes the cross entropy of logits and labels.

    shifts: whether position n predicts label n + 1. reads: arguments other than ARGUMENTS that its
    code uses; if a call has one of them, the function runs itself. labels: the names of the model's
    arguments that hold the labels.
    """

    theirs: Callable
    shifts: bool
    reads: frozenset[str]
    labels: ClassVar[tuple[str, ...]] = ("labels",)

    @functools.cached_property
    def fused(self) -> Callable:
        """The function that replaces it."""

        @functools.wraps(self.theirs)
        def fused(*args, **kwargs):
            return self.run(*args, **kwargs)

        return fused

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = None if untraceable() else self.of(args, kwargs)
        if loss is None:
            return self.theirs(*map(read, args), **{k: read(v) for k, v in kwargs.items()})
        return loss

    def why(self, *args: Any, **kwargs: Any) -> str:
        """Why a call runs the model's own function; empty if it does not."""
        if untraceable():
            return "a mode or transform must see the logits"
        if given := kwargs.keys() & self.reads:
            return f"{', '.join(sorted(given))} is given"
        try:
            call = CALL.bind(self.shifts, *args, **kwargs)
        except TypeError:
            return "it has other arguments"
        call.apply_defaults()
        return _why_theirs(*(call.arguments[name] for name in DECIDES))

    def of(self, args: tuple, kwargs: dict) -> Tensor | None:
        """The loss for a call; None if the model's own function must run."""
        if kwargs.keys() & self.reads:
            return None
        try:
            call = CALL.bind(self.shifts, *args, **kwargs)
        except TypeError:
            return None
        return _fused_loss(*call.args, **call.kwargs)


def _fused_loss(
    shifts: bool,
    /,
    logits: Any,
    labels: Any,
    vocab_size: Any,
    num_items_in_batch: Any = None,
    ignore_index: Any = -100,
    shift_labels: Any = None,
    **more: Any,
) -> Tensor | None:
    if _why_theirs(shifts, logits, labels, vocab_size, ignore_index, shift_labels):
        return None
    given = shift_labels if shifts and shift_labels is not None else labels
    if shifts and shift_labels is None:
        given = F.pad(given, (0, 1), value=ignore_index)[..., 1:]
    targets = given.reshape(-1).to(logits.device)
    options = {
        "reduction": "mean" if num_items_in_batch is None else "sum",
        "ignore_index": ignore_index,
        "dtype": torch.float32,
    }
    loss = _loss_of_rows(logits, targets, options)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def _why_theirs(
    shifts: bool, logits: Any, labels: Any, vocab_size: Any, ignore_index: Any, shift_labels: Any
) -> str:
    """Why the model's own function runs; empty if it does not."""
    supported = type(logits) in (Tensor, LazyLogits) or all_sharded(logits)
    plain = supported and logits.dtype in FLOATS and logits.dim() > 1
    if not plain or logits.shape[-1] != vocab_size:
        return "the logits are not rows of vocab_size float32, float16 or bfloat16 numbers"
    given = shift_labels if shifts and shift_labels is not None else labels
    if type(given) is not Tensor or given.dtype != torch.int64 or not given.dim():
        return "the labels are not int64 numbers"
    if type(ignore_index) is not int or given.numel() != logits.shape[:-1].numel():
        return "the labels are not one number for each row of logits"
    return ""


def _head_of(loss: Loss, *args: Any, **kwargs: Any) -> Any:
    """The head whose logits a loss function gets; None outside of a model's forward."""
    return next(iter(SCOPE.get()), None)


def _repeat(loss: Loss, *args: Any, **kwargs: Any) -> Repeat:
    """How to repeat a call of the loss; with lazy logits, the head's call is repeated too."""
    given = dict(zip(inspect.signature(loss.theirs).parameters, args, strict=False)) | kwargs
    logits = given.pop("logits", None)
    if not isinstance(logits, LazyLogits):
        return Repeat(loss.run, loss.theirs, (logits,), given)
    origin, steps = logits.state.origin, logits.state.steps
    runs = partial(with_head, loss.run, steps), partial(with_head, loss.theirs, steps)
    return Repeat(*runs, (origin.head, origin.hidden), given, (origin.head,))


def with_head(run, steps: tuple, head: nn.Module, hidden: Tensor, **given: Any) -> Tensor:
    """A loss of a head's input. steps: the operations on the head's output."""
    before = SCOPE.set((head,))
    try:
        logits = head(hidden)
        for function, args, kwargs in steps:
            logits = function(logits, *args, **kwargs)
        return run(logits, **given)
    finally:
        SCOPE.reset(before)


decides(Loss.run, "loss", at=_head_of, why=Loss.why, repeat=_repeat)

CALL = inspect.signature(_fused_loss)
DECIDES = tuple(inspect.signature(_why_theirs).parameters)
ARGUMENTS = tuple(CALL.parameters)[1:-1]  # a loss function's: logits, ..., shift_labels


def _loss_of_rows(logits: Tensor, targets: Tensor, options: dict) -> Tensor:
    loss = loss_of(logits, targets, options) if isinstance(logits, LazyLogits) else None
    if loss is None:
        rows = read(logits).flatten(0, -2)
        loss = cross_entropy(rows, targets, **options)
    return loss


def loss_like(theirs: Any) -> Loss | str:
    """The `Loss` that may replace a loss function, or why none may."""
    name = getattr(theirs, "__name__", type(theirs).__name__)
    if not isinstance(theirs, FunctionType) or not _is_own(theirs):
        return f"its loss function {name} is not transformers' own"
    foreign = (f.__name__ for f in reachable_functions(object, [theirs]) if not _is_own(f))
    if called := next(foreign, ""):
        return f"its loss function {name} calls {called}, which is not transformers' own"
    taken = inspect.signature(theirs).parameters
    names = [n for n, p in taken.items() if p.kind is not p.VAR_KEYWORD]
    if tuple(names) not in (ARGUMENTS, ARGUMENTS[:-1]) or len(names) == len(taken):
        return f"its loss function {name} has other arguments: {', '.join(names)}"
    reads = frozenset(names_used(theirs) - {*ARGUMENTS})
    with undisturbed(), quiet("cpu"), torch.device("cpu"):
        try:
            expected = [_results(theirs, *case) for case in _cases()]
        except Exception as error:  # noqa: BLE001  a model's own code raises anything
            return f"running its loss function {name} failed: {one_line(error)}"
        losses = (Loss(theirs, shifts, reads) for shifts in (True, False))
        match = next((loss for loss in losses if _gives(loss, expected)), None)
    return match or f"its loss function {name} differs from the cross entropy of labels"


def _is_own(function: FunctionType) -> bool:
    """Judges by where it was defined, as functools.wraps changes `__module__`."""
    return function.__globals__.get("__name__", "").startswith(OWN)


def _gives(loss: Loss, expected: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether loss and gradient match in each case."""
    ours = (_results(lambda **kwargs: loss.of((), kwargs), *case) for case in _cases())
    return all(map(_same_loss, ours, expected))


def _cases() -> Iterator[tuple[Tensor, dict]]:
    """Yields (logits of 2 rows, 5 positions, 7 classes; the other arguments)."""
    for dtype, (logits, call) in product((torch.float32, torch.bfloat16), _calls()):
        yield logits.to(dtype), call


def _calls() -> Iterator[tuple[Tensor, dict]]:
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 5, 7, generator=draw, dtype=torch.float32, device="cpu")
    labels, other = torch.randint(7, (2, 2, 5), generator=draw, device="cpu")
    labels[0, 2] = other[1, 1] = -100
    call = {"labels": labels, "vocab_size": 7}
    yield logits, call
    yield logits, {**call, "labels": torch.full_like(labels, -100)}
    for more in (
        {"num_items_in_batch": 3},
        {"num_items_in_batch": torch.tensor(5, dtype=torch.int64, device="cpu")},
        {"ignore_index": int(labels[1, 3]), "labels": labels.clamp(min=0)},
        {"shift_labels": other},
        {"shift_labels": other, "num_items_in_batch": 4},
    ):
        yield logits, {**call, **more}


def _results(run: Callable, logits: Tensor, kwargs: dict) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the logits)"""
    logits = logits.clone().requires_grad_()
    with torch.enable_grad():
        loss = run(logits=logits, **kwargs)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def _same_loss(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    eps = torch.finfo(ours[1].dtype).eps
    return ours[0].dtype == theirs[0].dtype and all(
        torch.allclose(a, b, rtol=max(4 * eps, 1e-5) if i else 1e-5, atol=1e-6, equal_nan=True)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
    )


# torch's function


def fused_cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> Tensor | None:
    """The loss that torch's function computes of lazy logits; None if torch's must run."""
    if why_torch(input, target, weight, size_average, ignore_index, reduce, reduction):
        return None
    kind = input.device.type
    autocast = is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # then in float32
    options = {
        "weight": weight,
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "dtype": torch.float32 if autocast else input.dtype,
    }
    return loss_of(input, target, options)


def why_torch(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> str:
    """Why a call of `F.cross_entropy` runs torch's function; empty if it does not."""
    if untraceable():
        return "a mode or transform must see the logits"
    if type(input) is not LazyLogits or input.dim() != 2 or input.dtype not in FLOATS:
        return "the logits are not rows of float32, float16 or bfloat16 numbers"
    labels = type(target) is Tensor and target.dtype == torch.int64
    if not labels or target.shape != input.shape[:1] or target.device != input.device:
        return "the labels are not one int64 number for each row of logits"
    if size_average is not None or reduce is not None:
        return "size_average or reduce is given"
    if reduction not in ("mean", "sum", "none") or type(ignore_index) is not int:
        return "its arguments are not cross_entropy's"
    plain = weight is None or (type(weight) is Tensor and not weight.requires_grad)
    if not plain or (weight is not None and weight.shape != input.shape[1:]):
        return "its weight is not one plain number for each class"
    same = weight is None or (weight.dtype, weight.device) == (input.dtype, input.device)
    return "" if same else "its weight has another dtype or device than the logits"


def _head_of_logits(input: Any, *args: Any, **kwargs: Any) -> nn.Module | None:
    return input.state.origin.head if isinstance(input, LazyLogits) else None


def _repeat_torchs(input: Any, *args: Any, **kwargs: Any) -> Repeat:
    origin, steps = input.state.origin, input.state.steps

    def run(logits: Any) -> Tensor:
        return F.cross_entropy(logits, *args, **kwargs)

    def plain(head: nn.Module, hidden: Tensor) -> Tensor:
        return with_head(lambda logits: run(read(logits)), steps, head, hidden)

    def fused(head: nn.Module, hidden: Tensor) -> Tensor:
        before = LATER.set(True)
        try:
            return with_head(run, steps, head, hidden)
        finally:
            LATER.reset(before)

    return Repeat(fused, plain, (origin.head, origin.hidden), {}, (origin.head,))


decides(fused_cross_entropy, "loss", at=_head_of_logits, why=why_torch, repeat=_repeat_torchs)
FUSED[getattr(F.cross_entropy, "__code__", F.cross_entropy)] = fused_cross_entropy
