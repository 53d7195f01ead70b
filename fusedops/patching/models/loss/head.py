"""Patches a model's output head to return lazy logits, whose values are computed when read.

The loss comes from a second call to the head itself, and so do values that are read after FSDP or
ZeRO has freed the weight: their hooks then gather it. That call carries a question, which the
head's forward answers instead of returning lazy logits.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.autograd import forward_ad

from fusedops.functional import cross_entropy, linear_cross_entropy
from fusedops.patching.core.probing import is_transformed
from fusedops.patching.core.swap import (
    Unswappable,
    active_state,
    has_global_hooks,
    is_observer,
    overlay,
    stacked,
)
from fusedops.patching.core.thresholds import logits_pay
from fusedops.patching.models.loss.logits import (
    CHANGED,
    SCOPE,
    LazyLogits,
    Origin,
    State,
    added,
    formula,
    is_there,
    rows_of,
    version,
)
from fusedops.patching.modules.linear import LinearForm, form_of

__all__ = ["FLOATS", "LATER", "heads_of", "is_watched", "loss_of", "patch_head", "untraceable"]

FLOATS = torch.float32, torch.float16, torch.bfloat16
BITS = {4: torch.int32, 2: torch.int16}
# Names of autograd's nodes for the operations that lazy logits record.
NODES = {
    *("AddBackward0", "AliasBackward0", "CloneBackward0", "DivBackward0", "MulBackward0"),
    *("SliceBackward0", "TanhBackward0", "ToCopyBackward0", "UnsafeViewBackward0"),
    "ViewBackward0",
}
SAMPLES = 8  # rows and columns of the weight that are compared to detect changes


@dataclass(eq=False)
class Question:
    """What a called head computes instead of logits: `answer(weight, bias, input)`."""

    head: nn.Module
    answer: Callable[[Tensor, Tensor | None, Tensor], Tensor | None]
    answered: bool = False


ASKED: ContextVar[Question | None] = ContextVar("what the head is called for", default=None)
# Whether the loss, which knows the labels, decides if it pays to compute the logits.
LATER: ContextVar[bool] = ContextVar("whether logits wait, few or not", default=False)


def _ask(question: Question, hidden: Tensor) -> Tensor:
    before = ASKED.set(question)
    try:
        return question.head(hidden)
    finally:
        ASKED.reset(before)


def heads_of(model: Any, name: str = "") -> tuple[nn.Module, ...]:
    """The model's head; if PEFT trains it in full, the copies that PEFT may call.

    name: the head's in the model; empty if the model has a method for it.
    """
    head = model.get_submodule(name) if name else model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        return tuple(copies.values())
    return () if head is None else (head,)


def patch_head(head: nn.Module) -> str:
    """Makes the head return lazy logits. Returns why it cannot; empty on success."""
    form = form_of(head)
    if form is None or form.transposed:
        library = type(head).__module__.partition(".")[0]
        return f"the head, a {type(head).__name__} of {library}, is not a plain linear"
    if "forward" in vars(head):
        return "the head has its own forward"
    try:
        overlay(head, functools.partial(_head_class, form=form))
    except Unswappable as why:
        return str(why)
    return "" if active_state(head).head else "another library has wrapped the head's class"


def _head_class(original: type[nn.Module], below: type[Any] | None, form: LinearForm) -> type:
    run: Any = (below or original).forward

    @functools.wraps(run)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return run(self, *args, **kwargs)
        question = ASKED.get()
        if question is not None and question.head is self:
            output = _answer(question, self, args[0])
        else:
            output = _defer(self, args[0]) if self in SCOPE.get() else None
        return run(self, *args) if output is None else output

    return stacked(original, below, ("head", form), {"forward": forward}, head=form)


def untraceable() -> bool:
    """Whether a mode or transform must see the logits."""
    return bool(torch.compiler.is_compiling() or is_transformed() or forward_ad._current_level >= 0)


def _answer(question: Question, head: nn.Module, x: Tensor) -> Tensor | None:
    held = head._parameters
    answer = question.answer(held.get("weight"), held.get("bias"), x)  # type: ignore[arg-type]
    question.answered = True
    return answer


def _defer(head: nn.Module, x: Any) -> LazyLogits | None:
    """Lazy logits of x; None if they must be computed."""
    form = active_state(head).head
    operands = form and not untraceable() and not is_watched(head) and form.operands(head, x)
    if not operands:
        return None
    weight, bias = operands
    cast = _autocast(x)
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if not dtypes <= set(FLOATS) or (cast is None and len(dtypes) > 1):
        return None
    if x.dim() < 2 or not x.numel() or not weight.numel():
        return None
    if x.shape[-1] != weight.shape[-1] or x.device != weight.device:
        return None
    if not LATER.get() and logits_pay(x, weight, cast or x.dtype):
        return None
    if x.is_inference():  # no version counter: writes to x must not change the logits
        x = x.clone()
    values = _Values(head, x, weight, bias, cast)
    versions = tuple((t, version(t)) for t in (x, weight, bias) if t is not None)
    origin = Origin(head, x, values, cast or x.dtype, versions)
    return _Linear.apply(x, weight, bias, origin)


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if not is_autocast_available(kind):  # meta: torch raises when asked
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def is_watched(head: nn.Module) -> bool:
    """Whether a hook needs the logits; observers and hooks that only gather weights do not."""
    hooks = [*head._forward_hooks.values(), *head._forward_pre_hooks.values()]
    return (
        type(head).__call__ is not nn.Module.__call__
        or "forward" in vars(head)  # accelerate's hooks
        or bool(head._backward_hooks or head._backward_pre_hooks)
        or has_global_hooks()
        or not all(_gathers(hook) or is_observer(hook) for hook in hooks)
    )


def _gathers(hook: Any) -> bool:
    """Whether a hook is FSDP2's or ZeRO-3's hook for a single module.

    FSDP's hooks for several modules count the calls, so they do not qualify.
    """
    hook = hook.func if isinstance(hook, functools.partial) else hook
    owner = type(getattr(hook, "__self__", None)).__module__
    if owner.startswith("torch.distributed.fsdp._fully_shard."):
        return True
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")


class _Linear(torch.autograd.Function):
    """The autograd node of a linear whose output has no values yet."""

    @staticmethod
    def forward(ctx, x, weight, bias, origin):
        ctx.save_for_backward(x, weight, bias)
        return LazyLogits.of(State(origin), torch.Size((*x.shape[:-1], len(weight))), origin.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ weight.to(grad.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = (rows.T @ x.flatten(0, -2).to(grad.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0).to(bias.dtype)
        return dx, dweight, dbias, None


def _leads_to_the_head(node: Any) -> bool:
    """Whether the logits' gradient is the head output's, times the noted operations.

    False behind another autograd function (except those that gather the head's weight), and for
    logits that were detached and have their own gradient.
    """
    while type(node).__name__ in NODES or _gathers(getattr(type(node), "_forward_cls", None)):
        node = node.next_functions[0][0]
    return isinstance(node, _Linear._backward_cls)  # type: ignore[attr-defined]


class _Values:
    """Computes the logits of an earlier call, with the weight of that call.

    FSDP and ZeRO may have freed the weight; then the head is called again. A weight stepped in
    between would give other logits. Shards and `weight.data` have no version counter, so some
    elements are kept for comparison.
    """

    def __init__(
        self,
        head: nn.Module,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: torch.dtype | None,
    ) -> None:
        self.head, self.x, self.weight, self.bias, self.cast = head, x, weight, bias, cast
        self.sample = _sample(weight, bias)

    def __call__(self) -> Tensor:
        x = self.x.detach()
        with torch.autocast(x.device.type, self.cast, enabled=self.cast is not None):
            if is_there(self.weight):
                return self._from(self.weight, self.bias, x)
            question = Question(self.head, self._from)
            logits = _ask(question, x)
        if not question.answered:
            raise RuntimeError(CHANGED)
        return logits

    def _from(self, weight: Any, bias: Any, x: Tensor) -> Tensor:
        weight, bias = _unsharded(weight, bias)
        self.compare(weight, bias)
        return F.linear(x, weight, bias).contiguous()

    def compare(self, weight: Tensor, bias: Tensor | None) -> None:
        if not _same_bits(_sample(weight, bias), self.sample):
            raise RuntimeError(CHANGED)


def _unsharded(weight: Any, bias: Any) -> tuple[Tensor, Tensor | None]:
    """The full weight and bias of a head that is sharded with its model but called alone."""
    if hasattr(weight, "full_tensor"):
        return weight.full_tensor(), None if bias is None else bias.full_tensor()
    return weight, bias


def _sample(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Copies of some elements of each."""
    held = [weight] if bias is None else [weight, bias]
    steps = [tuple(slice(None, None, max(1, n // SAMPLES)) for n in t.shape) for t in held]
    return tuple(t.detach()[step].clone() for t, step in zip(held, steps, strict=True))


def _same_bits(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    """Bitwise equality, so NaN equals NaN."""
    return len(some) == len(others) and all(
        a.dtype == b.dtype
        and a.device == b.device
        and torch.equal(a.view(BITS[a.itemsize]), b.view(BITS[b.itemsize]))
        for a, b in zip(some, others, strict=True)
    )


def loss_of(logits: LazyLogits, targets: Tensor, options: dict) -> Tensor | None:
    """`cross_entropy(logits, targets)` from the head's input; None if impossible.

    targets: [...], one per row of logits. options: linear_cross_entropy's arguments, with its
    result's dtype.
    """
    scale_and_softcap = formula(logits)
    if scale_and_softcap is None:
        return None
    if logits.requires_grad and not _leads_to_the_head(logits.grad_fn):
        return None
    scale, softcap = scale_and_softcap
    options = options | {"scale": scale, "softcap": softcap}
    origin, row, chooses = logits.state.origin, added(logits), LATER.get()
    origin.check()

    def answer(weight: Any, bias: Any, x: Tensor) -> Tensor:
        weight, bias = _unsharded(weight, bias)
        if not SCOPE.get():  # within a forward, nothing was stepped in between
            origin.values.compare(weight, bias)
        if len(weight) > (classes := logits.shape[-1]):
            weight, bias = weight[:classes], None if bias is None else bias[:classes]
        if row is not None:
            bias = row.to(weight.dtype) if bias is None else bias + row.to(bias.dtype)
        rows = rows_of(logits, x)
        if chooses:
            return _smaller_loss(rows, weight, bias, targets, options)
        return linear_cross_entropy(
            rows, weight, targets.view(rows.shape[:-1]), linear_bias=bias, **options
        )

    question = Question(origin.head, answer)
    gradients = logits.requires_grad and torch.is_grad_enabled()
    with torch.set_grad_enabled(gradients), _cast_as(origin.hidden, origin.values.cast):
        loss = _ask(question, origin.hidden)
    # FSDP's mixed precision may round the result of the head's call.
    return loss if question.answered and loss.dtype == options["dtype"] else None


def _cast_as(x: Tensor, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast for x as it was in an earlier call."""
    if _autocast(x) == dtype:
        return nullcontext()
    return torch.autocast(x.device.type, dtype, enabled=dtype is not None)


def _smaller_loss(
    rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: dict
) -> Tensor:
    """The loss with the logits of the rows that count where they pay, else without logits."""
    dtype = _autocast(rows) or rows.dtype
    on_cpu = rows.device.type == "cpu"  # elsewhere, counting would wait for the device
    if on_cpu and options["reduction"] != "none" and logits_pay(rows[:1], weight, dtype):
        counted = (targets != options["ignore_index"]).nonzero().squeeze(1)
        if len(counted) and logits_pay(rows[: len(counted)], weight, dtype):
            if len(counted) < len(targets):
                rows, targets = rows[counted], targets[counted]
            return cross_entropy(F.linear(rows, weight, bias), targets, **options)
    return linear_cross_entropy(rows, weight, targets, linear_bias=bias, **options)
